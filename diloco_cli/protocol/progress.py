"""A learner's own books, pure: steps, counters, data ranges, outstanding offers, what to offer next.

c_steps[p], c_tokens[p]   inner steps and tokens since this learner last RECEIVED fragment p
(arXiv 2604.21428, algorithm 2), here together with the range of the data stream that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_cli.protocol.eligibility import most_steps
from diloco_cli.protocol.event_log import EventLog
from diloco_cli.protocol.mixing import mixing_of
from diloco_cli.protocol.records import Beginning, Event, Island, Mixing, Offer, Output, RunFormat, Timings
from diloco_cli.protocol.schedule import (
    MOST_IN_FLIGHT,
    StepPermit,
    fraction_of_run,
    fragment_of_slot,
    may_step,
    measured_local_steps,
    most_ahead,
    slot_to_offer,
    slots_reached,
)
from diloco_cli.protocol.state import LearnerRecord, RunState

MAX_OUTSTANDING = 2  # offers without a fate, per fragment


@dataclass(frozen=True)
class Draft:
    """A decision to offer: fragment `fragment` for slot `slot`, as offer number `seq`. As far as is known, `applied` is
    the newest own offer of the fragment that a merge took, and the `pending` ones have no fate yet."""

    seq: int
    slot: int
    fragment: int
    base: Output
    data_start: int
    data_end: int
    steps: int
    began: Beginning | None
    events: tuple[Event, ...]
    applied: int | None
    pending: tuple[int, ...]


@dataclass
class FragmentBooks:
    """One fragment of one learner since its last adoption. `sent`: what was offered since, oldest first."""

    base: Output
    data_start: int
    steps: int = 0
    outstanding: set[int] = field(default_factory=set)
    sent: list[Draft] = field(default_factory=list)


class Progress:
    """The books of one incarnation. `position` is where its data stream stands, in tokens."""

    def __init__(self, run: RunFormat, learner: str, incarnation: int, state: RunState, position: int) -> None:
        island = state.with_members(run).island(learner)
        assert island is not None
        self.run, self.learner, self.incarnation = run, learner, incarnation
        self.island: Island = island
        self.position = position
        self.steps = 0
        self.steps_since_commit = 0
        self.local_steps = island.local_steps
        self.slots_reached = 0
        self._exchange_s = self._slot_s = 0.0
        self._credit = 0
        self.next_slot = 0
        self.next_seq = 0
        self.books = [FragmentBooks(output, position) for output in state.outputs]
        self.events = EventLog()
        self._applied: dict[int, int | None] = {}
        self.log_n = state.n
        self.head_slot = state.slot
        self.head_tokens = state.tokens(run.layout)
        self._merges = state.merges
        self._progress = 0.0
        self.base_floor = state.base_floor
        self.quarantined = state.learner(learner).quarantined

    # -- stepping -----------------------------------------------------------------------------------------------

    def may_step(self) -> StepPermit:
        if self.quarantined is not None:
            return StepPermit(False, f"quarantined by commit {self.quarantined}; to go on: diloco lift {self.learner}")
        return may_step(self.steps_since_commit, self.local_steps, self.run.settings.sync.drift_rounds)

    def begin(self, inner: str | None, moments_lost: bool) -> None:
        """Training starts, from what has been adopted and restored by now."""
        versions = tuple(book.base.version for book in self.books)
        self.events.begin(Beginning(self.position, versions, inner, moments_lost))

    def stepped(self) -> None:
        """One inner step on one batch was done."""
        self.events.stepped(self.island.batch_tokens)
        self.steps += 1
        self.steps_since_commit += 1
        self.position += self.island.batch_tokens
        for book in self.books:
            book.steps += 1

    def fraction(self) -> float:
        """Position on the learning-rate schedule in [0, 1] (see fraction_of_run). Only a rollback ever decreases it."""
        settings = self.run.settings
        now = fraction_of_run(
            self.head_tokens, settings.train.tokens, self.run.round_tokens, self.steps_since_commit, self.local_steps,
            settings.sync.drift_rounds,
        )  # fmt: skip
        self._progress = max(self._progress, now)
        return self._progress

    # -- offering -----------------------------------------------------------------------------------------------

    def due(self) -> list[Draft]:
        """The offers to make after this step: usually none or one. While the bound of outstanding offers is full the
        learner goes on stepping, and its next offer is the whole delta since adoption."""
        due, self._credit = slots_reached(self._credit, self.local_steps, self.run.num_fragments)
        drafts = []
        for _ in range(due):
            self.slots_reached += 1
            slot = self._slot_to_offer()
            if slot is None:
                continue
            self.next_slot = slot + 1
            draft = self._draft(slot)
            if draft is not None:
                drafts.append(draft)
        return drafts

    def _slot_to_offer(self) -> int | None:
        """Without a bound before the first own offer was merged, because the time of an exchange is not known then, and
        where each merge is waited for (`at_tau`)."""
        free = not self._applied or self.run.settings.sync.adoption == "at_tau"
        ahead = MOST_IN_FLIGHT if free else most_ahead(self._exchange_s, self._slot_s)
        in_touch = self.steps_since_commit <= self.local_steps
        return slot_to_offer(self.next_slot, self.head_slot, self.run.num_fragments, ahead, in_touch)

    def due_at_the_bound(self) -> list[Draft]:
        """What a learner offers that may not step: every fragment with progress and no offer on its way, for its next
        slot. Without this, one whose offers were all refused would wait for a merge that waits for it."""
        slots = range(self.head_slot, self.head_slot + self.run.num_fragments)
        drafts = [
            self._draft(s) for s in slots if not self.books[fragment_of_slot(s, self.run.num_fragments)].outstanding
        ]
        return [draft for draft in drafts if draft is not None]

    def last_offers(self) -> list[Draft]:
        """What a learner offers that leaves: every fragment with progress and no offer since its last adoption, for its
        next slot. (Where there is one, a merge of it would consume the base of a second.)"""
        slots = range(self.head_slot, self.head_slot + self.run.num_fragments)
        unsent = [slot for slot in slots if not self.books[fragment_of_slot(slot, self.run.num_fragments)].sent]
        return [draft for draft in map(self._draft, unsent) if draft is not None]

    def awaits_fates(self) -> bool:
        """Whether any own offer has no fate yet, as far as is known."""
        return any(book.outstanding for book in self.books)

    def overgrown(self) -> list[int]:
        """Fragments whose progress has outgrown what an offer may claim: their books start anew, and their parameters
        must go back to what was adopted. Only fragments that nobody merges for many rounds come here."""
        most = most_steps(self.run)
        found = [index for index, book in enumerate(self.books) if book.steps >= most]
        stuck = not self.may_step().allowed
        for index in found:
            self._start_anew(index)
        if found and stuck:  # what was dropped has not drifted; without progress it could never offer again
            self.steps_since_commit = 0
        return found

    def _start_anew(self, fragment: int) -> None:
        book = self.books[fragment]
        book.data_start, book.steps, book.sent = self.position, 0, []
        self.events.note(Event("dropped", fragment=fragment))

    def _draft(self, slot: int) -> Draft | None:
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        book = self.books[fragment]
        if self.quarantined is not None or len(book.outstanding) >= MAX_OUTSTANDING or book.steps == 0:
            return None
        if book.base.version < self.base_floor:  # what takes its place after the rollback could not be had yet
            return None
        happened = self.events.take()
        draft = Draft(
            self.next_seq, slot, fragment, book.base, book.data_start, self.position, book.steps, *happened,
            self._applied.get(fragment), tuple(sorted(book.outstanding)),
        )  # fmt: skip
        book.outstanding.add(draft.seq)
        book.sent.append(draft)
        self.next_seq += 1
        return draft

    def offer(
        self, draft: Draft, payload_digest: str, payload_bytes: int, nonce: str,
        timings: Timings, loss: float | None, inner: str | None,
    ) -> Offer:  # fmt: skip
        """The record of a draft whose payload is encoded. Touches nothing of the books: any thread may call it."""
        return Offer(
            learner=self.learner,
            incarnation=self.incarnation,
            seq=draft.seq,
            slot=draft.slot,
            fragment=draft.fragment,
            base=draft.base.version,
            base_digest=draft.base.cast_digest,
            data_start=draft.data_start,
            data_end=draft.data_end,
            tokens=draft.data_end - draft.data_start,
            steps=draft.steps,
            payload_digest=payload_digest,
            payload_bytes=payload_bytes,
            nonce=nonce,
            timings=timings,
            loss=loss,
            inner=inner,
            feeds_back=draft.applied if self.run.settings.sync.error_feedback else None,
            began=draft.began,
            events=draft.events,
        )

    # -- hearing from the log -----------------------------------------------------------------------------------

    def heard(self, state: RunState, own_step_s: float = 0.0, exchange_s: float = 0.0) -> bool:
        """A newer head is known: where the run is, which own offers have their fate, how fast the others step.
        `exchange_s`: how long this learner's own upload and adoption take, together.

        True if the books have started anew, and so the parameters must go back to what was adopted: a predecessor's
        late offer was applied to data that this incarnation is working on, or a quarantine has been lifted.
        """
        if state.n <= self.log_n:
            return False
        rolled_back = self.is_behind_rollback(state)
        news, planned = state.merges > self._merges or rolled_back, self.local_steps
        if news:  # skips are no news: they bring no version to adopt
            self.steps_since_commit = 0
        self.log_n, self.head_slot, self._merges = state.n, state.slot, state.merges
        self.head_tokens = state.tokens(self.run.layout)
        if rolled_back:  # the due slot, and the learning rate, are those of the parameters that were just adopted
            self.base_floor, self.next_slot, self._progress = state.base_floor, state.slot, 0.0
            self._applied = dict.fromkeys(self._applied)  # those merges no longer count: nothing is owed for them
        known = state.learner(self.learner)
        if known.floor == self.incarnation:
            for book in self.books:
                book.outstanding = {seq for seq in book.outstanding if not known.has_fate(seq)}
        mine = {
            fragment: last.seq
            for fragment, last in known.applied.items()
            if last.incarnation == self.incarnation and last.produced >= state.base_floor
        }
        self._applied.update(mine)
        sync = self.run.settings.sync
        if sync.local_steps == "measured" and sync.adoption == "on_arrival" and own_step_s > 0:
            fastest = min([own_step_s, *state.recent_paces(sync.drift_rounds * self.run.num_fragments)])
            self.local_steps = measured_local_steps(sync.every, own_step_s, fastest)
        self._exchange_s, self._slot_s = exchange_s, own_step_s * self.local_steps / self.run.num_fragments
        if news or self.local_steps != planned:
            self.events.note(Event("heard", n=state.n, local_steps=self.local_steps))
        return self._is_let_in(known.quarantined) | self._step_aside(known)

    def is_behind_rollback(self, state: RunState) -> bool:
        """Whether the log knows of a rollback that these books do not know."""
        return state.base_floor > self.base_floor

    def is_left_behind(self, fragment: int, state: RunState) -> bool:
        """Whether what is adopted of this fragment lies behind a rollback: no offer is made from that, so nothing is to
        be awaited before its successor."""
        return self.books[fragment].base.version < state.base_floor

    def mixing_of(self, output: Output, state: RunState) -> Mixing:
        """By what rule to adopt `output`: the run's, except where what it replaces lies behind a rollback. Of that
        nothing goes on."""
        if self.is_left_behind(output.fragment, state):
            return "replace"
        return mixing_of(self.run.settings.sync, output)

    def _is_let_in(self, quarantined: int | None) -> bool:
        """What made its offers bad may be in what was trained since the last adoption."""
        lifted = self.quarantined is not None and quarantined is None
        self.quarantined = quarantined
        if lifted:
            self.steps_since_commit = 0
            for fragment in range(len(self.books)):
                self._start_anew(fragment)
        return lifted

    def _step_aside(self, known: LearnerRecord) -> bool:
        """Only another incarnation can be ahead of this one's position, or have brought what a fragment's next offer
        would hold: that overlaps for ever, if its adoption keeps own progress."""
        late = {n: last for n, last in known.applied.items() if last.incarnation < self.incarnation}
        overtaken = known.data_end > self.position
        if not overtaken and all(last.data_end <= self.books[n].data_start for n, last in late.items()):
            return False
        if overtaken:
            self.position = known.data_end
            self.events.note(Event("moved", position=self.position))
        for fragment in range(len(self.books)):
            self._start_anew(fragment)
        return True

    def adopted(self, output: Output) -> None:
        """Fragment overwritten by a committed version (`replace`, `blend`): its counters start anew. What was trained
        on it since the last offer is discarded, which the gap before the next data range records. With `blend` a share
        of it lives on in the parameters, and so in the next delta, but is not counted: no token ever counts twice."""
        book = self.books[output.fragment]
        book.data_start, book.steps = self.position, 0
        self._note_adoption(output, "replace", None)

    def rebased(self, output: Output, since: Draft | None) -> None:
        """Fragment moved onto a committed version with the progress made after `since`: counters go on from there."""
        book = self.books[output.fragment]
        if since is not None:
            book.data_start, book.steps = since.data_end, book.steps - since.steps
        self._note_adoption(output, "rebase", since)

    def saved(self, inner_step: int) -> None:
        """The inner optimizer's moments, as they are now, at its own step, are on their way to the store."""
        self.events.note(Event("saved", count=inner_step))

    def kept_since(self, output: Output, state: RunState) -> Draft | None:
        """With `rebase`: the send after which own progress is neither in `output` nor on its way in an offer. That is
        the send that a merge applied; else the newest one that still waits for its fate; None: the adoption before."""
        sent = self.books[output.fragment].sent
        known = state.learner(self.learner)
        applied = known.applied.get(output.fragment)
        if applied is not None and applied.incarnation == self.incarnation:  # maybe in a version yet to be adopted
            mine = next((draft for draft in sent if draft.seq == applied.seq), None)
            if mine is not None:
                return mine
        settled = known.floor == self.incarnation
        waiting = [draft for draft in sent if not (settled and known.has_fate(draft.seq))]
        return waiting[-1] if waiting else None

    def _note_adoption(self, output: Output, mixing: Mixing, since: Draft | None) -> None:
        book = self.books[output.fragment]
        book.base, book.sent = output, []
        stated = mixing if self.run.settings.sync.mixing == "adaptive" else None
        seq = None if since is None else since.seq
        self.events.note(Event("adopted", fragment=output.fragment, version=output.version, mixing=stated, since=seq))

    def behind(self) -> int:
        """Slots between the log's head and this learner's next one; 0 when it leads."""
        return max(0, self.head_slot - self.next_slot)
