"""A learner's own books, pure: steps, counters, data ranges, offers on their way, and the next offers.

c_steps[p], c_tokens[p]   inner steps and tokens since this learner last RECEIVED fragment p
(arXiv 2604.21428, algorithm 2), here together with the range of the data stream that they stand for.

At most one offer of a fragment is on its way. Its outcome is known as soon as the log has passed its slot: applied
there, or not at all; or as soon as the log has a rollback after its base: not at all. The progress of an offer that
was not applied goes into the fragment's next offer, with all progress since, as long as no newer version is adopted; an
adoption drops it, with any `mixing`. `rebase` keeps only the progress since an offer that was applied, or may still be
applied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Island,
    Mixing,
    Offer,
    RunFormat,
    Timings,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import LearnerRecord, RunPhase, RunState
from diloco_cli.protocol.rules.aim import Aim
from diloco_cli.protocol.rules.merging import is_stale, max_ahead, max_steps
from diloco_cli.protocol.rules.pacing import (
    StepPermit,
    Turn,
    fraction_of_run,
    may_step,
    measured_local_steps,
)


@dataclass(frozen=True)
class OfferDraft:
    """A decision to offer fragment `fragment` for slot `slot`, as offer number `seq`. `applied`: the seq of the newest
    own offer of the fragment that is known to be merged."""

    seq: int
    slot: int
    fragment: int
    base: FragmentVersion
    data_start: int
    data_end: int
    steps: int
    applied: int | None


def is_over(state: RunState, joined_at: int) -> bool:
    """Whether the run has ended for a process that began at commit `joined_at`. A stop that was in the log before does
    not concern it: the run is being resumed."""
    return state.phase == RunPhase.FINISHED or (state.phase == RunPhase.STOPPED and state.n > joined_at)


def phase_for(state: RunState, joined_at: int) -> RunPhase:
    """The run's phase for a process that began at commit `joined_at`: RUNNING until the run `is_over` for it."""
    return state.phase if is_over(state, joined_at) else RunPhase.RUNNING


@dataclass
class FragmentBooks:
    """One fragment of one learner since its last adoption. `waits`: its offer whose outcome is not known yet; `sent`:
    its newest offer with progress that the parameters still hold, unless that offer was not merged."""

    base: FragmentVersion
    data_start: int
    steps: int = 0
    sent: OfferDraft | None = None
    waits: OfferDraft | None = None


class Progress:
    """The books of one incarnation. `position` is where its data stream stands, in tokens."""

    def __init__(self, run: RunFormat, learner: str, incarnation: int, state: RunState, position: int) -> None:
        island = state.with_members(run).island(learner)
        assert island is not None
        self.run, self.learner, self.incarnation = run, learner, incarnation
        self.island: Island = island
        self.position = position
        self.steps = 0
        self.steps_since_merge = 0
        self.local_steps = float(island.local_steps)
        self.next_seq = 0
        pace = run.settings.sync.local_steps
        self.aim = Aim(run.num_fragments, state.slot, pace, self._is_dispensable(state), state.window, max_ahead(run))
        self.books = [FragmentBooks(output, position) for output in state.outputs]
        self._applied: dict[int, int | None] = {}
        self._produced: dict[int, int] = {}
        self._bad = state.learner(learner).bad_in_a_row
        self._newest = state.outputs
        self.log_n = state.n
        self.head_tokens = state.tokens(run.layout)
        self._merges = state.merges
        self._progress = 0.0
        self.base_floor = state.base_floor
        self.turn = Turn(run, learner)
        self.quarantined = state.learner(learner).quarantined
        self.unreadable: frozenset[int] = frozenset()

    def _is_dispensable(self, state: RunState) -> bool:
        """Whether merges go on without this learner, so that its offers can be too late."""
        return self.run.settings.sync.quorum < len(state.with_members(self.run).all_islands)

    # -- stepping -----------------------------------------------------------------------------------------------

    def may_step(self) -> StepPermit:
        if self.quarantined is not None:
            return StepPermit(
                False, f"quarantined by commit {self.quarantined}; to go on: diloco readmit {self.learner}"
            )
        held = self.turn.held(self.aim.head)
        if held is not None:
            return StepPermit(False, held)
        for fragment in self.full():
            most = f"as many steps as an offer can, {max_steps(self.run)}"
            return StepPermit(False, f"too fast for the run's pace: fragment {fragment} holds {most}")
        return self._within_drift()

    def _within_drift(self) -> StepPermit:
        drift = min(self.steps_since_merge, max(book.steps for book in self.books))
        return may_step(drift, self.local_steps, self.run.settings.sync.drift_rounds)

    def stepped(self, tokens: int) -> None:
        """One inner step on `tokens` tokens was done."""
        self.steps += 1
        self.steps_since_merge += 1
        self.position += tokens
        self.aim.stepped(self.local_steps)
        for book in self.books:
            book.steps += 1

    def fraction(self) -> float:
        """Position on the learning-rate schedule in [0, 1] (see fraction_of_run). Only a rollback ever decreases it."""
        settings = self.run.settings
        now = fraction_of_run(
            self.head_tokens,
            settings.train.tokens,
            self.run.round_tokens,
            self.steps_since_merge,
            self.local_steps,
            settings.sync.drift_rounds,
        )
        self._progress = max(self._progress, now)
        return self._progress

    # -- offering -----------------------------------------------------------------------------------------------

    def due(self, now_s: float, step_s: float) -> list[OfferDraft]:
        """The offers to make after this step: usually none or one."""
        return self._drafts(self.aim.due(now_s, step_s, self._is_ready), now_s)

    def standing(self, now_s: float) -> list[OfferDraft]:
        """The offers of a learner that may not step: everything; but where it waits for full fragments alone, these and
        what is due before them, as the others go on growing."""
        full = self.full()
        return self.everything(now_s, [i for i in full if self.books[i].waits is None] if full else None)

    def everything(self, now_s: float, wanted: Collection[int] | None = None) -> list[OfferDraft]:
        """The offers of a learner that leaves, or that may not step: every fragment with progress and no offer on its
        way, for the next slot that it can reach. (Without this, a learner at the drift bound whose offers were all
        refused would wait for a merge, while the merge waits for its offer.) `wanted`: only up to these fragments."""
        if not self.awaits_outcomes():  # slots of the past no longer count, nor do refused offers for later ones
            self.aim.begin_at(self.aim.head)
        drafts: list[OfferDraft] = []
        slot, offered = -1, set[int]()
        while not offered.issuperset(range(self.run.num_fragments) if wanted is None else wanted):
            slot = max(slot + 1, self.aim.first_reachable(now_s, len(drafts)))
            fragment = fragment_of_slot(slot, self.run.num_fragments)
            draft = None if fragment in offered else self._draft(slot)
            drafts += [] if draft is None else [draft]
            offered.add(fragment)
        for draft in drafts:
            self.aim.sent(draft.slot, now_s)
        return drafts

    def awaits_outcomes(self) -> bool:
        """Whether the outcome of any own offer is not known yet."""
        return any(book.waits is not None for book in self.books)

    def is_unmerged(self) -> bool:
        """Whether there is progress that is in no merge and may still come into one."""
        beyond = any(book.steps > (book.sent.steps if book.sent is not None else 0) for book in self.books)
        return self.awaits_outcomes() or (self.quarantined is None and beyond)

    def _drafts(self, slots: Iterable[int], now_s: float) -> list[OfferDraft]:
        drafts = [draft for draft in map(self._draft, slots) if draft is not None]
        for draft in drafts:
            self.aim.sent(draft.slot, now_s)
        return drafts

    def _is_ready(self, slot: int) -> bool:
        """Whether the slot's fragment can be offered: no offer of it is on its way, the version with its newest merged
        offer is adopted (or cannot be read), a step was made since, and its base is not too old for the slot."""
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        book = self.books[fragment]
        if book.waits is not None or book.steps == 0 or self.is_too_old(fragment, slot):
            return False
        return fragment in self.unreadable or not self.awaits(fragment)

    def is_too_old(self, fragment: int, slot: int | None = None) -> bool:
        """Whether an offer for this slot (default: the log's due slot) would be refused for the age of its base, by the
        newest known state of the log."""
        base = self.books[fragment].base
        return base.version < self._newest[fragment].version and is_stale(
            base, self.aim.head if slot is None else slot, self.run
        )

    def awaits(self, fragment: int) -> bool:
        """Whether a newer version must be adopted before the next offer, because the base lies before a rollback or an
        own offer from it was merged."""
        return self.books[fragment].base.version < max(self.base_floor, self._produced.get(fragment, 0))

    def _draft(self, slot: int) -> OfferDraft | None:
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        book = self.books[fragment]
        if self.quarantined is not None or book.waits is not None or book.steps == 0 or self.awaits(fragment):
            return None
        draft = OfferDraft(
            self.next_seq,
            slot,
            fragment,
            book.base,
            book.data_start,
            self.position,
            book.steps,
            self._applied.get(fragment),
        )
        book.sent = book.waits = draft
        self.next_seq += 1
        return draft

    def offer(
        self,
        draft: OfferDraft,
        payload_digest: str,
        payload_bytes: int,
        nonce: str,
        timings: Timings,
        loss: float | None,
        inner: str | None,
    ) -> Offer:
        """The record of a draft whose payload is encoded. Changes nothing in the books: any thread may call it."""
        return Offer(
            learner=self.learner,
            incarnation=self.incarnation,
            seq=draft.seq,
            slot=draft.slot,
            fragment=draft.fragment,
            base=draft.base.version,
            base_digest=draft.base.weights_digest,
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
        )

    # -- giving up ----------------------------------------------------------------------------------------------

    def full(self) -> list[int]:
        """Fragments with as much progress as an offer can hold; with `rebase`, which will keep it, as much beside what
        is on its way or merged already."""
        most, keeps = max_steps(self.run), self.run.settings.sync.mixing == "rebase"
        sent = [book.sent.steps if keeps and book.sent is not None else 0 for book in self.books]
        return [i for i, book in enumerate(self.books) if book.steps - sent[i] >= most]

    def overgrown(self) -> list[int]:
        """Full fragments that can be offered no more, as their base is too old, or its successor cannot be read, or an
        offer was not merged and all together is more than one can hold: their books start anew, and their parameters go
        back to the adopted version. At the drift bound all do: one without steps could be neither trained nor
        offered."""
        most = max_steps(self.run)
        refused = [book.sent is None and book.steps > most for book in self.books]
        stuck = [
            i for i in self.full() if refused[i] or self.is_too_old(i) or (i in self.unreadable and self.awaits(i))
        ]
        for fragment in stuck:
            self._start_anew(fragment)
        if stuck and not self._within_drift().allowed:
            stuck = list(range(len(self.books)))
            for fragment in stuck:
                self._start_anew(fragment)
        return stuck

    def _start_anew(self, fragment: int) -> None:
        """Start a fragment's books anew. An offer on its way stays: the fragment is offered again after its outcome."""
        book = self.books[fragment]
        book.data_start, book.steps, book.sent = self.position, 0, None

    def begin_at(self, position: int) -> None:
        """The data goes on there, and all books start anew."""
        self.position = position
        for fragment in range(len(self.books)):
            self._start_anew(fragment)

    # -- hearing from the log -----------------------------------------------------------------------------------

    def heard(self, state: RunState, own_step_s: float = 0.0) -> bool:
        """Take in a newer head: the run's position, the outcomes of own offers, the other learners' pace.

        True if the books have started anew, so that the parameters must go back to the adopted versions: a
        predecessor's late offer was applied to data that this incarnation works on, or a quarantine has ended.
        """
        if state.n <= self.log_n:
            return False
        rolled_back = self.is_behind_rollback(state)
        if state.merges > self._merges or rolled_back:  # skips are no news: they bring no version to adopt
            self.steps_since_merge = 0
            self.turn.heard()
        self.log_n, self._merges = state.n, state.merges
        self.head_tokens = state.tokens(self.run.layout)
        if rolled_back:  # the due slot, and the learning rate, are those of the parameters that were just adopted
            self.base_floor, self._progress = state.base_floor, 0.0
            self.aim.begin_at(state.slot)
            self._applied = dict.fromkeys(self._applied)  # no rounding error of merges that no longer count is fed back
        known = state.learner(self.learner)
        self._learn_outcomes(state, known)
        sync = self.run.settings.sync
        slot_s = 0.0 if state.window is None else state.window.slot_s
        if sync.local_steps == "measured" and own_step_s > 0 and slot_s > 0:
            self.local_steps = measured_local_steps(sync.every, own_step_s, slot_s * self.run.num_fragments)
        return self._is_readmitted(known.quarantined) | self._step_aside(known)

    def _learn_outcomes(self, state: RunState, known: LearnerRecord) -> None:
        """An offer is merged in its slot or never, so the log's slot tells the outcome, also before a refusal."""
        self.aim.known, self.aim.closes = known.floor == self.incarnation, self._is_dispensable(state)
        kept_out = self.quarantined is not None or known.quarantined is not None
        blamed = kept_out or known.bad_in_a_row > self._bad  # for what it held: not late
        self._bad = known.bad_in_a_row
        self._newest = state.outputs
        self._produced = {fragment: last.produced for fragment, last in known.applied.items()}
        mine = {
            fragment: last.seq
            for fragment, last in known.applied.items()
            if last.incarnation == self.incarnation and last.produced >= state.base_floor
        }
        self._applied.update(mine)
        for fragment, book in enumerate(self.books):
            draft, last = book.waits, known.applied.get(fragment)
            if draft is None:
                continue
            applied = last is not None and (last.incarnation, last.seq) == (self.incarnation, draft.seq)
            refused = not applied and known.floor == self.incarnation and known.has_outcome(draft.seq)
            undone = draft.base.version < state.base_floor  # the syncer may wait with this word, and for the next offer
            if applied or refused or undone or draft.slot < state.slot:
                book.waits = None
                book.sent = book.sent if applied else None
                in_time = None if blamed else self._was_in_time(draft, applied, state)
                self.aim.settled(draft.slot, in_time)

    def _was_in_time(self, draft: OfferDraft, applied: bool, state: RunState) -> bool | None:
        """Whether a settled offer came in time; None: the log does not tell (skipped slot), or its base was too old."""
        if applied or draft.slot >= state.slot:
            return True
        merged = any((o.fragment, o.slot) == (draft.fragment, draft.slot) for o in state.history)
        return False if merged and not is_stale(draft.base, draft.slot, self.run) else None

    def is_behind_rollback(self, state: RunState) -> bool:
        """Whether the log knows of a rollback that these books do not know."""
        return state.base_floor > self.base_floor

    def is_left_behind(self, fragment: int, state: RunState) -> bool:
        """Whether the adopted version of this fragment lies before a rollback: no offer is made from it, so its
        successor is adopted at once."""
        return self.books[fragment].base.version < state.base_floor

    def mixing_of(self, output: FragmentVersion, state: RunState) -> Mixing:
        """The rule by which to adopt `output`: the run's, except if the version that it replaces lies before a rollback
        (all its progress is dropped), or if `rebase` would keep progress that is in no version and never will be,
        because its offer was not merged or never made: both use `replace`."""
        mixing: Mixing = self.run.settings.sync.mixing
        book = self.books[output.fragment]
        if self.is_left_behind(output.fragment, state) or (mixing == "rebase" and book.sent is None):
            return "replace"
        return mixing

    def _is_readmitted(self, quarantined: int | None) -> bool:
        """Whether a quarantine has ended. Then the books start anew: the progress may be what made the offers bad."""
        readmitted = self.quarantined is not None and quarantined is None
        self.quarantined = quarantined
        if readmitted:
            self.steps_since_merge = 0
            self.begin_at(self.position)
        return readmitted

    def _step_aside(self, known: LearnerRecord) -> bool:
        """Whether an older incarnation's offer, applied late, holds data that the next offers would hold. Then the
        books start anew: with `rebase` every later offer would overlap it and be refused."""
        late = {n: last for n, last in known.applied.items() if last.incarnation < self.incarnation}
        overtaken = known.data_end > self.position
        if not overtaken and all(last.data_end <= self.books[n].data_start for n, last in late.items()):
            return False
        self.begin_at(max(self.position, known.data_end))
        return True

    # -- adopting -----------------------------------------------------------------------------------------------

    def adopted(self, output: FragmentVersion) -> None:
        """A committed version has overwritten the fragment: its counters start anew. Progress that is in no merge is
        discarded; the gap before the next data range records that."""
        self._start_anew(output.fragment)
        self._rest_on(output)

    def rebased(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        """The fragment was moved onto a committed version with its progress since `since`: its counters go on."""
        book = self.books[output.fragment]
        if since is not None:
            book.data_start, book.steps = since.data_end, book.steps - since.steps
        self._rest_on(output)

    def kept_since(self, fragment: int) -> OfferDraft | None:
        """With `rebase`: the merged offer since which own progress is in no version. None: a newer offer is on its way
        with an unknown outcome, so all progress since the adoption before is kept."""
        book = self.books[fragment]
        return None if book.waits is not None else book.sent

    def _rest_on(self, output: FragmentVersion) -> None:
        book = self.books[output.fragment]
        book.base = output
        if book.waits is None:
            book.sent = None

    def behind(self) -> int:
        """Slots between the log's head and this learner's next one; 0 when it leads."""
        return max(0, self.aim.head - self.aim.next_slot)
