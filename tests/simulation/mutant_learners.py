"""Mutants in the learner, each as a mutated one: the product has no switch for any of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from diloco_cli.digests import digest
from diloco_cli.protocol.actors import joining
from diloco_cli.protocol.actors.joining import Joined
from diloco_cli.protocol.actors.learner import FetchedVersion, Follower, Mail, Moments, Values
from diloco_cli.protocol.actors.progress import OfferDraft, Progress
from diloco_cli.protocol.log.keys import delta_key, inner_key, offer_key, read_version_key
from diloco_cli.protocol.log.operations import Create, Get, List, Now, Sleep, Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, FragmentVersion, Offer, encode
from diloco_cli.protocol.log.state import LearnerRecord, LearnerState, RunState
from diloco_cli.protocol.rules.pacing import StepPermit
from diloco_cli.signing import learner_signer
from tests.histories.learner import SimulatedLearner

PAUSE_S = 0.05


def with_progress(progress: type[Progress]) -> type[SimulatedLearner]:
    """A learner whose books are these."""

    class MutantLearner(SimulatedLearner):
        progress_type = progress

    return MutantLearner


def changed(steps: Steps[Any], module: Any, name: str, value: Any) -> Steps[Any]:
    """The same steps, which see another value of a module's name. Other processes see the usual one."""
    answer: Any = None
    error: Exception | None = None
    while True:
        with patch.object(module, name, value):
            try:
                operation = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
        answer = error = None
        try:
            answer = yield operation
        except Exception as raised:
            error = raised


class ReadsDirectPredecessor(SimulatedLearner):
    """Reads, when it is restarted, the offers of the incarnation before it alone."""

    def train(self) -> Steps[RunState]:
        return changed(super().train(), joining, "MAX_PREDECESSORS", 1)


class NeverStepsAside(Progress):
    """Goes on where a predecessor's late offer holds the same data."""

    def _step_aside(self, known: LearnerRecord) -> bool:
        return False


# -- stepping -----------------------------------------------------------------------------------------------------


class Boundless(Progress):
    """Steps on and on without news from the log."""

    def may_step(self) -> StepPermit:
        return StepPermit(True)


class WaitsForItsOutcome(SimulatedLearner):
    """Makes no step while the outcome of an offer of its own is not known."""

    def adopt(self) -> Steps[None]:
        yield from super().adopt()
        while self.progress.awaits_outcomes() and not self.is_leaving and self.progress.quarantined is None:
            yield Sleep(PAUSE_S)
            yield from self.hear()


class TrainsOnAfterLeaving(SimulatedLearner):
    """Goes back to training once it has drained."""

    def drain(self) -> Steps[None]:
        yield from super().drain()
        self.go(LearnerState.TRAINING)


class WaitsForTheStore(SimulatedLearner):
    """Uploads in the training's own time."""

    def offer(self) -> Steps[None]:
        now_s: float = yield Now()
        self.progress.unreadable = self.follower.unreadable
        for draft in self.progress.due(now_s, self.watch.step_s):
            base, values = self.fragments.bases[draft.fragment], self.training.read(draft.fragment)
            self.background, background = lambda lane, steps: None, self.background
            self._send(draft)
            self.background = background
            yield from self._upload(draft, base, values, self.loss, self.saves.newest)


class FullBatches(Progress):
    """Takes every batch for a full one."""

    def stepped(self, tokens: int) -> None:
        super().stepped(self.island.batch_tokens)


class MoreSteps(Progress):
    """Says that it has made one step more than it has."""

    def offer(self, draft: OfferDraft, *arguments: Any) -> Offer:
        return super().offer(replace(draft, steps=draft.steps + 1), *arguments)


class Unlimited(Progress):
    """Goes on with a fragment that nobody merges, beyond what an offer may claim."""

    def full(self) -> list[int]:
        return []


# -- offering -----------------------------------------------------------------------------------------------------


class LeavesOneOut(Progress):
    """Never offers its last fragment."""

    def _draft(self, slot: int) -> OfferDraft | None:
        last = self.run.num_fragments - 1
        return None if slot % self.run.num_fragments == last else super()._draft(slot)


class LateEveryTime(Progress):
    """Names the last slot of the fragment that has been passed by."""

    def _draft(self, slot: int) -> OfferDraft | None:
        draft, fragments = super()._draft(slot), self.run.num_fragments
        rounds = (slot - self.aim.head) // fragments + 1
        return draft if draft is None or slot < rounds * fragments else replace(draft, slot=slot - rounds * fragments)


class NeverTriesAgain(Progress):
    """Offers for no slot that it takes for out of reach."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aim._probe = lambda reachable, is_ready: []  # type: ignore[method-assign]


class FeedsBackTheNewest(Progress):
    """Adds what was rounded away of its newest offer, whether a merge took that or not."""

    def _draft(self, slot: int) -> OfferDraft | None:
        draft = super()._draft(slot)
        if draft is not None:
            self._newest_seq = getattr(self, "_newest_seq", {})
            before = self._newest_seq.get(draft.fragment)
            self._newest_seq[draft.fragment] = draft.seq
            draft = self.books[draft.fragment].waits = self.books[draft.fragment].sent = replace(draft, applied=before)
        return draft


class NamesTheNewestBase(Progress):
    """Names the newest version that it has heard of as its base, not the one that it has adopted."""

    def _draft(self, slot: int) -> OfferDraft | None:
        draft = super()._draft(slot)
        return None if draft is None else replace(draft, base=self._newest[draft.fragment])


class OfferFirst(SimulatedLearner):
    """Publishes an offer, and then the payload that it names."""

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        signed = self.run.keyring.sign(learner_signer(self.name), offer_key(*offer.id), encode(offer))
        yield Create(offer_key(*offer.id), signed)
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
        return signed


# -- adopting -----------------------------------------------------------------------------------------------------


class LastInFirstOut(Follower):
    """Hands out versions like a pile of letters: the newest first, the older ones after it."""

    def _put(self, versions: list[FetchedVersion]) -> None:
        self._mail.append(Mail(self.state, {version[0].fragment: version for version in versions}))
        self._wakes()

    def take(self) -> Mail | None:
        return replace(self._mail.pop(), state=self.state) if self._mail else None


class AdoptsOlderVersions(SimulatedLearner):
    """Adopts whatever comes, also when it has something newer."""

    follower_type = LastInFirstOut


class KeepsWhatWasMerged(SimulatedLearner):
    """Moves all its progress onto the version that it rebases on, also what that version holds."""

    def _adopt(self, output: FragmentVersion, values: Values, seen_s: float, now_s: float) -> None:
        fragment, own = output.fragment, self.training.read(output.fragment)
        rebases = self.progress.mixing_of(output, self.state) == "rebase"
        progress = own - self.fragments.bases[fragment]
        super()._adopt(output, values, seen_s, now_s)
        if rebases:
            self.training.write(fragment, values + progress)


class CountsFromTheAdoption(Progress):
    """Takes no note of what a version that it rebases on holds: its next offers hold that once more."""

    def kept_since(self, fragment: int) -> OfferDraft | None:
        return None


# -- rollbacks ----------------------------------------------------------------------------------------------------


class OvertakenError(Exception):
    """The base of an offer has become void."""


class DropsUploads(SimulatedLearner):
    """Forgets the offers that a rollback overtook on their way, and so their numbers are missing."""

    def _upload(
        self, draft: OfferDraft, base: Values, values: Values, loss: float | None, moments: str | None
    ) -> Steps[None]:
        with suppress(OvertakenError):
            yield from super()._upload(draft, base, values, loss, moments)

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
        if offer.base < self.follower.state.base_floor:
            raise OvertakenError
        return (yield from super()._publish(offer, payload))


class DeafToRollbacks(Progress):
    """Goes on from void versions as if nobody had rolled the run back."""

    def is_behind_rollback(self, state: RunState) -> bool:
        return False

    def is_left_behind(self, fragment: int, state: RunState) -> bool:
        return False


class MomentsOfAfter(SimulatedLearner):
    """Goes on after a rollback with the newest moments that it has saved, which belong to what was left behind."""

    def _leave_behind(self, state: RunState) -> Steps[None]:
        newest, self.saves.go_back = self.saves.newest, lambda rollbacks: newest  # type: ignore[method-assign]
        yield from super()._leave_behind(state)
        del self.saves.go_back


# -- moments, restarts, leaving -----------------------------------------------------------------------------------


class FirstMoments(SimulatedLearner):
    """Restores the oldest moments of its name that are there, of whichever incarnation."""

    def _join(self) -> Steps[Joined]:
        joined = yield from super()._join()
        keys: list[str] = yield List(f"inner/{self.name}/", limit=1)
        return replace(joined, saves=tuple((n, keys[0]) for n, _ in joined.saves[-1:] if keys))


class NeverSaves(SimulatedLearner):
    """Leaves a successor no moments."""

    def _save(self) -> None:
        self.saved_at = self.uploaded_at = self.progress.steps


class NamesWhatIsNotThere(SimulatedLearner):
    """Names its moments before they are in the store."""

    def _upload_moments(self, moments: Moments, log_n: int, steps: int) -> Steps[None]:
        data = moments.encode()
        self.saves.add(inner_key(self.name, self.progress.incarnation, moments.step, digest(data)), log_n)
        yield Sleep(10 * PAUSE_S)
        yield from super()._upload_moments(moments, log_n, steps)


class LeavesAtOnce(SimulatedLearner):
    """Goes without a word on what it has not offered, and without waiting for what becomes of its offers."""

    def drain(self) -> Steps[None]:
        yield from ()


# -- what it reads, who it is, what it says of its data -----------------------------------------------------------


class ListingFollower(Follower):
    """Takes the newest version that a listing shows, as if what is there were committed."""

    def look(self) -> Steps[bool]:
        found: bool = yield from super().look()
        for fragment in range(self._learner.run.num_fragments):
            keys: list[str] = yield List(f"weights/{fragment:04d}/")
            version = read_version_key(keys[-1]) if keys else None
            if version is None or version[1] <= self._fetched[fragment]:
                continue
            data: bytes | None = yield Get(keys[-1], MAX_RECORD_BYTES)
            known = self.state.outputs[fragment]
            output = replace(known, version=version[1], epoch=version[2], weights_digest=version[3])
            if data is not None:
                self._fetched[fragment] = version[1]
                self._put([(output, self._learner.wire.decode(output, data), 0.0)])
        return found


class LooksForTheNewest(SimulatedLearner):
    follower_type = ListingFollower


class NoIncarnations(SimulatedLearner):
    """Every process of a learner writes under the same number."""

    def _join(self) -> Steps[Joined]:
        return replace((yield from super()._join()), incarnation=1)

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
        signed = self.run.keyring.sign(learner_signer(self.name), offer_key(*offer.id), encode(offer))
        yield Create(offer_key(*offer.id), signed)
        return signed


class DropsSilently(SimulatedLearner):
    """Begins a fragment anew now and then, and says to nobody what becomes of the data that it had processed."""

    def step(self) -> Steps[None]:
        yield from super().step()
        if self.progress.steps % 5 == 0:
            self.progress._start_anew(0)
            self.fragments.go_back(0)


class CountsTwice(SimulatedLearner):
    """Says that progress in flight was given up for what it adopts, and offers it all the same."""

    def _adopt(self, output: FragmentVersion, values: int, seen_s: float, now_s: float) -> None:
        fragment, book = output.fragment, self.progress.books[output.fragment]
        progress = self.training.read(fragment) - self.fragments.bases[fragment]
        start, steps = book.data_start, book.steps
        super()._adopt(output, values, seen_s, now_s)
        if book.waits is None and self.progress.mixing_of(output, self.state) == "replace":
            book.data_start, book.steps = start, steps
            self.training.write(fragment, values + progress)
