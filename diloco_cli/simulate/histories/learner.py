"""The product's learner with a model of one integer a fragment. Its parameters really move, so a delta that does not
stand for the range that its offer claims shows in a replay."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol import learner as product
from diloco_cli.protocol.learner import PAUSE_S
from diloco_cli.protocol.observer import Observer, Phase
from diloco_cli.protocol.operations import Sleep, Steps
from diloco_cli.protocol.ports import Moments, Progression, Stepped
from diloco_cli.protocol.progress import Draft
from diloco_cli.protocol.records import Mixing, Offer, OfferId, Output, ProcessClaim, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.training import is_over
from diloco_cli.simulate.histories.integers import delta_bytes, gradient, numbers, rounded
from diloco_cli.simulate.histories.ledger import Account
from diloco_cli.simulate.histories.moments import FRESH, MomentsWatch, moments_bytes, read_moments
from diloco_cli.simulate.histories.replayer import expect
from diloco_cli.simulate.lanes import VirtualLanes

DRAIN_S = 10.0  # at most: where a quorum leaves together, each would wait for the others' progress


@dataclass
class Habits:
    """What sets one learner apart: its step's time, when it leaves (drained, for some seconds), what it says in place
    of a delta (None: the truth), whether its payload is other bytes than its offer names, and the share of its batch
    that a step takes (below 1 while a part of the island is gone)."""

    step_s: float = 0.05
    leaves: Callable[[], bool] = lambda: False
    poison: Callable[[], int | str | None] = lambda: None
    corrupts: Callable[[], bool] = lambda: False
    share: Callable[[], float] = lambda: 1.0


@dataclass
class Beliefs:
    """What learners believe: the bytes of every offer whose publication they saw succeed, and what they adopted (who,
    the version, the bytes of its cast). `accounts`: of what each incarnation has processed."""

    offers: dict[OfferId, bytes] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)
    on_adoption: Callable[[str, Output, bytes], None] = lambda learner, output, cast: None
    on_publication: Callable[[OfferId, bytes], None] = lambda offer_id, data: None
    moments: MomentsWatch | None = None

    def published(self, offer_id: OfferId, data: bytes) -> None:
        """Its learner has seen the store take it."""
        self.offers[offer_id] = data
        self.on_publication(offer_id, data)


class IntegerTraining:
    """Implements protocol.ports.Training: a step takes its time and moves every fragment by its data's gradient.
    `optimizer_steps`: what its moments have seen, `saved_at` of them when they were saved last; `restored`: what they
    were made from, None: nothing. `head`: the newest commit that the learner knows."""

    def __init__(self, name: str, num_fragments: int, habits: Habits, head: Callable[[], int]) -> None:
        self.name, self.habits, self.head = name, habits, head
        self.values = [0] * num_fragments
        self.optimizer_steps = self.saved_at = 0
        self.restored: bytes | None = None

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        yield Sleep(self.habits.step_s)
        tokens = max(1, round(batch_tokens * self.habits.share()))
        moved = gradient(self.name, position, position + tokens)
        self.values = [value - moved for value in self.values]
        self.optimizer_steps += 1
        return Stepped(tokens)

    def read(self, fragment: int) -> int:
        return self.values[fragment]

    def write(self, fragment: int, values: int) -> None:
        self.values[fragment] = values

    def save(self) -> Moments | None:
        step, n = self.optimizer_steps, self.head()
        self.saved_at = step
        return Moments(step, lambda: moments_bytes(step, n))

    def restore(self, moments: bytes) -> bool:
        self.optimizer_steps = self.saved_at = read_moments(moments)[0]
        self.restored = moments
        return True

    def reset(self) -> bool:
        self.optimizer_steps = self.saved_at = 0
        self.restored = None
        return True

    @property
    def as_of(self) -> int:
        """The commit as of which the moments were saved that it went on from."""
        return FRESH if self.restored is None else read_moments(self.restored)[1]


class IntegerWire:
    """Implements protocol.ports.Wire. `casts`: the bytes of the versions that were decoded and not adopted yet; `left`:
    what was rounded away of each offer, by fragment and seq."""

    def __init__(self, habits: Habits, feeds_back: bool) -> None:
        self.habits, self.feeds_back = habits, feeds_back
        self.casts: dict[Output, bytes] = {}
        self.left: dict[tuple[int, int | None], int] = {}

    def encode(self, fragment: int, seq: int, applied: int | None, base: int, values: int) -> bytes:
        poison, delta = self.habits.poison(), base - values
        if self.feeds_back:
            wanted = delta + self.left.get((fragment, applied), 0)
            delta = rounded(wanted)
            self.left[fragment, seq] = wanted - delta
        return delta_bytes(delta if poison is None else poison)

    def decode(self, output: Output, data: bytes) -> int:
        self.casts[output] = data
        (value,) = numbers(data, "cast")
        return value

    def mix(self, mixing: Mixing, merged: int, own: int, reference: int | None) -> int:
        """A blend of integers is the merged one: what was trained counts from there in any case."""
        return merged if reference is None else merged + (own - reference)


class Witness(Observer):
    """Keeps the account of one incarnation, apart from the books of the product's code. `stepped_at`: where its steps
    ended, in tokens; `since_news`: how many of them since the log brought a merge, as far as the learner has read it;
    `versions`: what it adopted last, of each fragment; `offered`: its newest offer of each."""

    def __init__(self, learner: Learner, seen: Beliefs) -> None:
        self.learner, self.seen = learner, seen
        self.account: Account | None = None
        self.stepped_at: list[int] = []
        self.since_news = 0
        self.versions: dict[int, Output] = {}
        self.offered: dict[int, Draft] = {}
        self._merges = self._floor = 0
        self._kept_out = self._went_back = False

    def began(self, learner: product.Learner) -> None:
        start, fragments = learner.joined.data_start, learner.run.num_fragments
        self.account = Account(learner.name, learner.joined.incarnation, [start] * fragments, [start] * fragments)
        self.seen.accounts.append(self.account)
        self._kept_out = learner.progress.quarantined is not None
        if self.seen.moments is not None:
            restored = self.learner.integers.restored
            self.seen.moments.restored(learner.name, learner.joined.incarnation, restored)
        self._check_moments(learner.joined.state.n)

    def _check_moments(self, head: int) -> None:
        if self.seen.moments is not None:
            self.seen.moments.fitting(self.learner.name, head, self.learner.integers.as_of)

    def rolled_back(self, learner: product.Learner, to: int) -> None:
        self._went_back = True
        self._check_moments(learner.state.n)

    def took(self, phase: Phase, seconds: float) -> None:
        """Training waits for nothing: not for the store, but for moments after a rollback, and for news only at the
        drift bound."""
        learner, sync = self.learner, self.learner.run.settings.sync
        kept_out, self._kept_out = self._kept_out, learner.progress.quarantined is not None
        went_back, self._went_back = self._went_back, False
        if phase == "step" or seconds <= 0 or sync.adoption == "at_tau":
            return
        bound = phase == "wait" and (self.since_news >= sync.drift_rounds or kept_out or self._kept_out)
        may_wait = bound or (phase == "hear" and went_back)
        expect(may_wait, "pace", f"{learner.name} waits for {seconds:.2f} s, in {phase}, and might step on")

    def stepped(self, position: int, tokens: int) -> None:
        assert self.account is not None
        self.account.stepped(position, position + tokens)
        self.stepped_at.append(position + tokens)
        self._check_drift(self.learner.state)
        self._check_saves()

    def _check_saves(self) -> None:
        """What a restart loses of the moments is bounded."""
        learner, training = self.learner, self.learner.integers
        most = learner.run.settings.train.inner.save_every * learner.progress.island.local_steps
        unsaved = training.optimizer_steps - training.saved_at
        expect(unsaved <= most or not most, "loss", f"{learner.name} has stepped {unsaved} times without saving moments")

    def _check_drift(self, state: RunState) -> None:
        """Nobody trains on without news: no further than the drift bound, of what no version holds."""
        assert self.account is not None
        if (state.merges, state.base_floor) != (self._merges, self._floor):
            self._merges, self._floor, self.since_news = state.merges, state.base_floor, 0
        self.since_news += 1
        drifted = len(self.stepped_at) - bisect_right(self.stepped_at, min(self.account.held))
        sync = self.learner.run.settings.sync
        steps, most = min(self.since_news, drifted), sync.drift_rounds * sync.every
        expect(steps <= most, "drift", f"{self.learner.name} has stepped {steps} times without news, more than {most}")

    def sent(self, draft: Draft) -> None:
        assert self.account is not None
        who, fragment = f"{self.learner.name}, offer {draft.seq}", draft.fragment
        adopted, floor = self.versions[fragment].version, self.learner.state.base_floor
        expect(draft.base.version == adopted, "6", f"{who} is based on {adopted}, and names {draft.base.version}")
        expect(adopted >= floor, "6", f"{who} is based on {adopted}, which is void since commit {floor}")
        self.offered[fragment] = draft
        self.account.sent(draft.fragment, draft.seq, draft.data_start, draft.data_end)

    def published(self, offer: Offer, data: bytes) -> None:
        steps = bisect_right(self.stepped_at, offer.data_end) - bisect_right(self.stepped_at, offer.data_start)
        text = f"{self.learner.name}, offer {offer.seq}, says {offer.steps} steps, and has made {steps}"
        expect(offer.steps == steps, "4", text)
        self.seen.published(offer.id, data)

    def adopted(self, output: Output, since: Draft | None) -> None:
        before = self.versions.get(output.fragment)
        newer = before is None or output.version > before.version
        expect(newer, "6", f"{self.learner.name} adopted version {output.version} where it had a newer one")
        self.versions[output.fragment] = output
        self.seen.on_adoption(self.learner.name, output, self.learner.casts.pop(output))
        if self.account is not None and since is not None:
            self.account.kept(output.fragment, since.data_end)

    def gave_up(self, fragment: int, reason: str) -> None:
        assert self.account is not None
        self.account.gave_up(fragment, reason, self.learner.progress.position)

    def left(self) -> None:
        """Who leaves in order knows what became of its offers, if there was time."""
        state, learner = self.learner.state, self.learner
        if not learner.leaves() or is_over(state, learner.joined.state.n) or not learner.may_drain():
            return
        known = state.learner(learner.name)
        for draft in self.offered.values():
            settled = draft.slot < state.slot or known.floor > learner.joined.incarnation or known.has_fate(draft.seq)
            expect(settled, "loss", f"{learner.name} left, and did not wait for what became of its offer {draft.seq}")


class Learner(product.Learner):
    """One process. `start_threads` starts actors that live and die with it."""

    def __init__(
        self, run: RunFormat, name: str, claim: ProcessClaim, nonce: Callable[[], str], seen: Beliefs, habits: Habits,
        start_threads: Callable[[list[Steps[Any]]], None],
    ) -> None:  # fmt: skip
        self.habits, self._waits = habits, count()
        wire = IntegerWire(habits, run.settings.sync.error_feedback)
        lanes = VirtualLanes(lambda steps: start_threads([steps]))
        self.casts, self.witness = wire.casts, Witness(self, seen)
        self.integers = IntegerTraining(name, run.num_fragments, habits, lambda: self.state.n)
        super().__init__(
            run, name, claim, self.integers, wire, nonce, lanes.start, self.witness, lambda: self.habits.leaves(),  # noqa: PLW0108 (habits change)
            lambda: next(self._waits) < DRAIN_S / PAUSE_S,
        )  # fmt: skip

    def train(self) -> Steps[RunState]:
        state = yield from super().train()
        self.witness.left()
        return state

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        if payload and self.habits.corrupts():
            offer = replace(offer, payload_digest=digest(payload + b"?"))
        return (yield from super()._publish(offer, payload))
