"""Mutants in the syncer, its relay and its arithmetic, each as a mutated one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from msgspec import structs

from diloco_cli.protocol.actors.collection import Collector
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.merging import Candidates, Loader, load_delta, make_resident
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commits import Commit, Membership, Quarantine
from diloco_cli.protocol.log.operations import Operation, Steps
from diloco_cli.protocol.log.records import Offer, Outcome, fragment_of_slot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.regions import Box, Relay
from diloco_cli.protocol.rules.quorum import SlotFacts
from tests.histories.integers import IntegerArithmetic, numbers, state_bytes

# -- merges -------------------------------------------------------------------------------------------------------


class ForAnySlot(Inbox):
    """Takes an offer for whichever slot of its fragment is due, not for the one that it names."""

    def candidates(self, slot: int) -> list[Offer]:
        named = super().candidates(slot)
        here = {offer.learner for offer in named}
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        others: dict[str, Offer] = {}
        for box in self.mailboxes.values():
            for offer in box.pending:
                if offer.fragment == fragment and offer.learner not in here:
                    others.setdefault(offer.learner, offer)
        return sorted([*named, *others.values()], key=lambda offer: offer.learner)


class OneIsEnough(Syncer):
    """Merges whatever is there, without the quorum."""

    def _present(self, now_s: float) -> Steps[tuple[Candidates, SlotFacts]]:
        present, facts = yield from super()._present(now_s)
        return present, replace(facts, quorum=1)


class NoPatience(Syncer):
    """Merges as soon as the quorum is there, and waits for nobody else."""

    def _present(self, now_s: float) -> Steps[tuple[Candidates, SlotFacts]]:
        present, facts = yield from super()._present(now_s)
        return present, replace(facts, alive=min(facts.alive, facts.quorum), passed=0)


class NotReanchored(IntegerArithmetic):
    """Takes every delta for one from the newest version."""

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        return super().read_delta(offer, payload, None)


class NoMomentum(IntegerArithmetic):
    """Begins with no momentum where it takes over from another syncer."""

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None:
        super().restore(fragment, state_digest, state_bytes(numbers(state, "state")[0], 0))

    def holds(self, fragment: int, state_digest: str) -> bool:
        self.settle(fragment, state_digest)
        return fragment in self.current


class DropsOutcomes(Syncer):
    """Forgets the outcomes that a commit was to bring when a floor has taken its number."""

    def _settle(self, draft: Callable[[tuple[Outcome, ...]], Commit]) -> Steps[bool]:
        return (yield from self._commit(draft(self.inbox.take_outcomes())))


# -- blame --------------------------------------------------------------------------------------------------------


def asking_once(steps: Steps[Any]) -> Steps[Any]:
    """The same question gets the answer that it got before."""
    known: dict[Operation, Any] = {}
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if operation not in known:
            known[operation] = yield operation
        answer = known[operation]


class BelievesOneRead(Loader):
    """Takes bytes that were damaged on their way for what the learner has written."""

    def load(self, state: RunState) -> Steps[list[Offer]]:
        for offer in self.inbox.candidates(state.slot):
            if offer.id not in self.loaded:
                yield from make_resident(self.run, self.arithmetic, state.outputs[offer.fragment], self.recover)
                loaded = yield from asking_once(load_delta(self.run, self.arithmetic, state, offer))
                if isinstance(loaded, str):
                    self.inbox.drop(offer, loaded)
                else:
                    self.loaded[offer.id] = loaded
        return [offer for offer in self.inbox.candidates(state.slot) if offer.id in self.loaded]

    def early(self, state: RunState, offer: Offer) -> list[Steps[None]]:
        return []


class KeepsOutTheLate(Syncer):
    """Quarantines a learner whose offers come late again and again."""

    def _turn(self) -> Steps[bool]:
        for name, times in self._late.items():
            if times >= 3 and self.state.learner(name).quarantined is None:
                self._late[name] = 0
                return (yield from self._commit(Quarantine(learner=name, reason="late again and again")))
        return (yield from super()._turn())

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late: Counter[str] = Counter()

    def _commit(self, draft: Commit) -> Steps[bool]:
        self._late.update(outcome.learner for outcome in draft.outcomes if outcome.reason == "late")
        return (yield from super()._commit(draft))


class OfferBeforePayload(Relay):
    """Carries an offer home, and then the payload that it names."""

    def _carry_payload(self, box: Box, data: bytes, key: str) -> Steps[bool]:
        if not (yield from self._carry(box, key, data)):
            return False
        return (yield from super()._carry_payload(box, data, key))


# -- members, garbage ---------------------------------------------------------------------------------------------


class OfTheLaunchOnly(Inbox):
    """Looks for the offers of those that the run began with: islands are admitted, and nothing of theirs is read."""

    def expect(self, learners: Iterable[str]) -> None:
        return

    def look_for_incarnations(self, state: RunState, now_s: float) -> Steps[None]:
        yield from super().look_for_incarnations(structs.replace(state, members=()), now_s)

    def open(self, state: RunState, now_s: float) -> None:
        super().open(structs.replace(state, members=()), now_s)


class AdmitsNobody(Syncer):
    """Passes over those who want to join."""

    def _carry_out(self, answer: Commit) -> Steps[bool]:
        if isinstance(answer, Membership):
            return False
        return (yield from super()._carry_out(answer))


class IdleCollector(Collector):
    """Finds nothing to do: floors are committed, and nothing is deleted."""

    def is_done(self, state: RunState) -> bool:
        return True
