"""A learner's own books, pure: steps, counters, data ranges, offers on their way, what to offer next.

c_steps[p], c_tokens[p]   inner steps and tokens since this learner last RECEIVED fragment p
(arXiv 2604.21428, algorithm 2), here together with the range of the data stream that they stand for.

At most one offer of a fragment is on its way. Its outcome is known as soon as the log has passed its slot: applied
there, or not at all. What an offer held that was not applied goes into the fragment's next one, with all progress
since, as long as no newer version is adopted; an adoption gives it up, whatever the `mixing`. Only progress since an
offer that was applied, or may still be, is kept by `rebase`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco_cli.protocol.actors.decisions import OfferDraft
from diloco_cli.protocol.log.records import (
    Beginning,
    Event,
    FragmentVersion,
    Island,
    Mixing,
    Offer,
    RunFormat,
    Timings,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.protocol.log.tape import EventLog
from diloco_cli.protocol.rules.aim import Aim
from diloco_cli.protocol.rules.eligibility import is_stale, max_ahead, max_steps
from diloco_cli.protocol.rules.merging import mixing_of
from diloco_cli.protocol.rules.schedule import (
    StepPermit,
    Turn,
    fraction_of_run,
    may_step,
    measured_local_steps,
    steps_share,
)


@dataclass
class FragmentBooks:
    """One fragment of one learner since its last adoption. `waits`: its offer whose outcome is not known yet; `sent`:
    its newest offer that holds progress which is in the parameters still, unless that was refused."""

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
        self.steps_since_commit = 0
        self.local_steps = float(island.local_steps)
        self.next_seq = 0
        sync = run.settings.sync
        pace = "steps" if sync.adoption == "at_tau" else sync.local_steps
        self.aim = Aim(run.num_fragments, state.slot, pace, self._is_dispensable(state), state.window, max_ahead(run))
        self.books = [FragmentBooks(output, position) for output in state.outputs]
        self.events = EventLog()
        self._applied: dict[int, int | None] = {}
        self._produced: dict[int, int] = {}
        self._faults = state.learner(learner).faults
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
        """Whether merges go on without this learner, and so its offers can be too late."""
        sync, members = self.run.settings.sync, state.with_members(self.run).everybody
        return sync.adoption == "on_arrival" and sync.quorum < len(members)

    # -- stepping -----------------------------------------------------------------------------------------------

    def may_step(self) -> StepPermit:
        if self.quarantined is not None:
            return StepPermit(
                False, f"quarantined by commit {self.quarantined}; to go on: diloco readmit {self.learner}"
            )
        held = self.turn.held(self.aim.head)
        if held is not None:
            return StepPermit(False, held)
        drift = min(self.steps_since_commit, max(book.steps for book in self.books))
        return may_step(drift, self.local_steps, self.run.settings.sync.drift_rounds)

    @property
    def round_steps(self) -> float:
        """H_i of the round in which its next offer's slot is: fewer in a cold start."""
        return self.local_steps * steps_share(self.run, max(self.aim.next_slot, self.aim.head))

    def begin(self, inner: str | None, moments_lost: bool) -> None:
        """Training starts, from what has been adopted and restored by now."""
        versions = tuple(book.base.version for book in self.books)
        self.events.begin(Beginning(self.position, versions, inner, moments_lost))

    def stepped(self, tokens: int) -> None:
        """One inner step on `tokens` tokens was done."""
        self.events.stepped(tokens)
        self.steps += 1
        self.steps_since_commit += 1
        self.position += tokens
        self.aim.stepped(self.round_steps)
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

    def due(self, now_s: float, step_s: float) -> list[OfferDraft]:
        """The offers to make after this step: usually none or one."""
        return self._drafts(self.aim.due(now_s, step_s, self._is_ready), now_s)

    def everything(self, now_s: float) -> list[OfferDraft]:
        """What a learner offers that leaves, or that may not step: every fragment with progress and no offer on its
        way, for the next slot that it can reach. (Without this, one that stands at the drift bound, all its offers
        refused, would wait for a merge that waits for it.)"""
        if not self.awaits_outcomes():  # slots of the past no longer count, nor do refused offers for later ones
            self.aim.begin_at(self.aim.head)
        drafts: list[OfferDraft] = []
        slot, offered = -1, set[int]()
        while len(offered) < self.run.num_fragments:
            slot = max(slot + 1, self.aim.first_reachable(now_s, len(drafts)))
            fragment = fragment_of_slot(slot, self.run.num_fragments)
            draft = None if fragment in offered else self._draft(slot)
            drafts += [] if draft is None else [draft]
            offered.add(fragment)
        for draft in drafts:
            self.aim.sent(draft.slot, now_s)
        return drafts

    def is_refused(self, draft: OfferDraft) -> bool:
        """Whether this offer is known to be in no merge."""
        book = self.books[draft.fragment]
        return draft is not book.waits and draft is not book.sent

    def awaits_outcomes(self) -> bool:
        """Whether the outcome of any own offer is not known yet."""
        return any(book.waits is not None for book in self.books)

    def _drafts(self, slots: Iterable[int], now_s: float) -> list[OfferDraft]:
        drafts = [draft for draft in map(self._draft, slots) if draft is not None]
        for draft in drafts:
            self.aim.sent(draft.slot, now_s)
        return drafts

    def _is_ready(self, slot: int) -> bool:
        """Not while an offer of the fragment is on its way, or the version that holds its newest one, nor before the
        next step after that; not from a base that is too old by then. A version that cannot be read holds nothing up.
        """
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        book = self.books[fragment]
        if book.waits is not None or book.steps == 0 or self.is_too_old(fragment, slot):
            return False
        return fragment in self.unreadable or not self.awaits(fragment)

    def is_too_old(self, fragment: int, slot: int | None = None) -> bool:
        """Whether an offer for this slot (the one that is due, if none is given) is refused for the age of its base, as
        far as is known."""
        base = self.books[fragment].base
        return base.version < self._newest[fragment].version and is_stale(
            base, self.aim.head if slot is None else slot, self.run
        )

    def awaits(self, fragment: int) -> bool:
        """Nothing is offered from a base behind a rollback, or one that an own offer has consumed: its successor has to
        be adopted first."""
        return self.books[fragment].base.version < max(self.base_floor, self._produced.get(fragment, 0))

    def _draft(self, slot: int) -> OfferDraft | None:
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        book = self.books[fragment]
        if self.quarantined is not None or book.waits is not None or book.steps == 0 or self.awaits(fragment):
            return None
        happened = self.events.take()
        draft = OfferDraft(
            self.next_seq, slot, fragment, book.base, book.data_start, self.position, book.steps, *happened,
            self._applied.get(fragment),
        )  # fmt: skip
        book.sent = book.waits = draft
        self.next_seq += 1
        return draft

    def offer(
        self, draft: OfferDraft, payload_digest: str, payload_bytes: int, nonce: str,
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
            began=draft.began,
            events=draft.events,
        )

    # -- giving up ----------------------------------------------------------------------------------------------

    def overgrown(self) -> list[int]:
        """Fragments whose progress has outgrown what an offer may claim: their books start anew, and their parameters
        must go back to what was adopted. Only fragments that nobody merges for many rounds come here."""
        most = max_steps(self.run)
        found = [index for index, book in enumerate(self.books) if book.steps >= most]
        for index in found:
            self._start_anew(index)
        return found

    def _start_anew(self, fragment: int) -> None:
        """An offer on its way stays so: nothing is offered of the fragment before its outcome is known."""
        book = self.books[fragment]
        book.data_start, book.steps, book.sent = self.position, 0, None
        self.events.note(Event("dropped", fragment=fragment))

    # -- hearing from the log -----------------------------------------------------------------------------------

    def heard(self, state: RunState, own_step_s: float = 0.0) -> bool:
        """A newer head is known: where the run is, what became of own offers, how fast the others step.

        True if the books have started anew, and so the parameters must go back to what was adopted: a predecessor's
        late offer was applied to data that this incarnation is working on, or a quarantine has ended.
        """
        if state.n <= self.log_n:
            return False
        rolled_back = self.is_behind_rollback(state)
        news, planned = state.merges > self._merges or rolled_back, self.local_steps
        if news:  # skips are no news: they bring no version to adopt
            self.steps_since_commit = 0
            self.turn.heard()
        self.log_n, self._merges = state.n, state.merges
        self.head_tokens = state.tokens(self.run.layout)
        if rolled_back:  # the due slot, and the learning rate, are those of the parameters that were just adopted
            self.base_floor, self._progress = state.base_floor, 0.0
            self.aim.begin_at(state.slot)
            self._applied = dict.fromkeys(self._applied)  # those merges no longer count: nothing is owed for them
        known = state.learner(self.learner)
        self._learn_outcomes(state, known)
        sync = self.run.settings.sync
        if sync.local_steps == "measured" and sync.adoption == "on_arrival" and own_step_s > 0:
            fastest = min([own_step_s, *state.recent_paces(sync.drift_rounds * self.run.num_fragments)])
            self.local_steps = measured_local_steps(sync.every, own_step_s, fastest)
        if news or self.local_steps != planned:
            self.events.note(Event("heard", n=state.n, local_steps=self.local_steps))
        return self._is_let_in(known.quarantined) | self._step_aside(known)

    def _learn_outcomes(self, state: RunState, known: LearnerRecord) -> None:
        """An offer is in the merge of its slot or in none, so the log's slot tells, also before its refusal does."""
        self.aim.known, self.aim.closes = known.floor == self.incarnation, self._is_dispensable(state)
        blamed, self._faults = known.faults > self._faults, known.faults  # for what an offer held, not for its way
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
            passed = draft.slot < state.slot
            refused = not applied and known.floor == self.incarnation and known.has_outcome(draft.seq)
            if applied or passed or refused:
                book.waits = None
                book.sent = book.sent if applied else None
                in_time = None if blamed else self._was_in_time(draft, applied, state)
                self.aim.settled(draft.slot, in_time, not applied and is_stale(draft.base, draft.slot, self.run))

    def _was_in_time(self, draft: OfferDraft, applied: bool, state: RunState) -> bool | None:
        """None: the log does not tell, for its slot was skipped."""
        if applied or draft.slot >= state.slot:
            return True
        of_fragment = (output.slot for output in state.history if output.fragment == draft.fragment)
        return False if draft.slot in of_fragment else None

    def is_behind_rollback(self, state: RunState) -> bool:
        """Whether the log knows of a rollback that these books do not know."""
        return state.base_floor > self.base_floor

    def is_left_behind(self, fragment: int, state: RunState) -> bool:
        """Whether what is adopted of this fragment lies behind a rollback: no offer is made from that, so nothing is to
        be awaited before its successor."""
        return self.books[fragment].base.version < state.base_floor

    def mixing_of(self, output: FragmentVersion, state: RunState) -> Mixing:
        """By what rule to adopt `output`: the run's, except where what it replaces lies behind a rollback (of that
        nothing goes on), or where `rebase` would keep progress that no version holds, and none will: others have gone
        the same way without it."""
        mixing = mixing_of(self.run.settings.sync, output)
        book = self.books[output.fragment]
        if self.is_left_behind(output.fragment, state) or (mixing == "rebase" and book.sent is None):
            return "replace"
        return mixing

    def _is_let_in(self, quarantined: int | None) -> bool:
        """What made its offers bad may be in what was trained since the last adoption."""
        readmitted = self.quarantined is not None and quarantined is None
        self.quarantined = quarantined
        if readmitted:
            self.steps_since_commit = 0
            for fragment in range(len(self.books)):
                self._start_anew(fragment)
        return readmitted

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

    # -- adopting -----------------------------------------------------------------------------------------------

    def adopted(self, output: FragmentVersion, mixing: Mixing = "replace") -> None:
        """Fragment overwritten by a committed version (`replace`, `blend`): its counters start anew. What was trained
        on it and is in no merge is discarded, which the gap before the next data range records. With `blend` a share
        of it lives on in the parameters, and so in the next delta, but is not counted: no token ever counts twice."""
        book = self.books[output.fragment]
        book.data_start, book.steps, book.sent = self.position, 0, None
        self._note_adoption(output, mixing, None)

    def rebased(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        """Fragment moved onto a committed version with the progress made after `since`: counters go on from there."""
        book = self.books[output.fragment]
        if since is not None:
            book.data_start, book.steps = since.data_end, book.steps - since.steps
        self._note_adoption(output, "rebase", since)

    def saved(self, inner_step: int) -> None:
        """The inner optimizer's moments, as they are now, at its own step, are on their way to the store."""
        self.events.note(Event("saved", count=inner_step))

    def kept_since(self, fragment: int) -> OfferDraft | None:
        """With `rebase`: the send after which own progress is in no version: that of the offer that a merge applied.
        None: all since the adoption before, for a newer offer is on its way, and its outcome is not known."""
        book = self.books[fragment]
        return None if book.waits is not None else book.sent

    def _note_adoption(self, output: FragmentVersion, mixing: Mixing, since: OfferDraft | None) -> None:
        book = self.books[output.fragment]
        book.base = output
        if book.waits is None:
            book.sent = None
        stated = None if mixing == self.run.settings.sync.mixing else mixing
        seq = None if since is None else since.seq
        self.events.note(Event("adopted", fragment=output.fragment, version=output.version, mixing=stated, since=seq))

    def behind(self) -> int:
        """Slots between the log's head and this learner's next one; 0 when it leads."""
        return max(0, self.aim.head - self.aim.next_slot)
