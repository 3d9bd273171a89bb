"""A fleet in virtual time that decides as the daemons do and trains nothing: what comes out is a tape.

Learners keep the product's own books (`Progress`), the syncer takes the product's own decisions (`decide_slot`,
`grace_window`, `refusal`, `token_weight`) and folds its commits with `apply`; only clocks, links and training are
replaced. One heap of events, ties in the order of their making: the same arguments give the same tape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.protocol.log import kept_versions
from diloco_cli.protocol.mixing import mixing_of
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.records import Commit, Event, Offer, Output, RunFormat, Timings
from diloco_cli.protocol.state import RunState, apply
from diloco_cli.protocol.tape import Tape, Track
from diloco_cli.protocol.training import merge_is_due, waited_for
from diloco_cli.tapes.pacing import Pacing, StepClock
from diloco_cli.tapes.virtual_syncer import VirtualSyncer

MOST_SKIPPED_ROUNDS = 10  # without a merge between them; then the fleet is taken to be stuck


@dataclass
class VirtualLearner:
    """One learner: its books, its clock, what has arrived, and the track that its offers tell."""

    run: RunFormat
    progress: Progress
    clock: StepClock
    track: list[Event] = field(default_factory=list)
    log: RunState = field(default_factory=RunState)
    arrived: dict[int, Output] = field(default_factory=dict)
    awaited: deque[Draft] = field(default_factory=deque)
    sent_s: float = 0.0
    slot_s: float = 0.0
    waiting: bool = False

    def __post_init__(self) -> None:
        self.at_tau = self.run.settings.sync.adoption == "at_tau"
        self.full_batch = self.progress.island.batch_tokens

    def hear(self) -> None:
        """Adopt what has arrived, unless it is held back for its time; take note of the head."""
        if not self.at_tau:
            for fragment in sorted(self.arrived):
                self._adopt(self.arrived.pop(fragment))
        pacing = self.clock.pacing
        self.progress.heard(self.log, pacing.step_s, pacing.upload_s + pacing.download_s)
        self.progress.overgrown()

    def step(self, batch_tokens: int) -> list[Draft]:
        """One inner step; the offers that are due after it."""
        self.progress.island = replace(self.progress.island, batch_tokens=batch_tokens)
        self.progress.stepped()
        return self._sent(self.progress.due())

    def at_the_bound(self) -> list[Draft]:
        return self._sent(self.progress.due_at_the_bound())

    def _sent(self, drafts: list[Draft]) -> list[Draft]:
        for draft in drafts:
            fed_back = draft.applied if self.run.settings.sync.error_feedback else None
            sent = Event("sent", seq=draft.seq, fragment=draft.fragment, slot=draft.slot, since=fed_back)
            self.track += [*draft.events, sent]
            if self.at_tau:
                self.awaited.append(draft)
        return drafts

    def must_wait(self) -> bool:
        """`at_tau`: adopts every merge whose time has come; True while one of them is not there yet."""
        while self.awaited and merge_is_due(self.run.settings.sync, self.awaited[0], self.progress.next_slot):
            draft = self.awaited[0]
            found = waited_for(draft, self.arrived.get(draft.fragment), self.progress.base_floor)
            if found == "to come":
                return True
            self.hear()
            if found == "here":
                self._adopt(self.arrived.pop(draft.fragment))
            self.awaited.popleft()
        return False

    def _adopt(self, output: Output) -> None:
        if mixing_of(self.run.settings.sync, output) == "rebase":
            self.progress.rebased(output, self.progress.kept_since(output, self.log))
        else:
            self.progress.adopted(output)

    def offer(self, draft: Draft, pacing: Pacing) -> Offer:
        timings = Timings(pacing.step_s, self.slot_s, pacing.upload_s, pacing.download_s)
        return self.progress.offer(draft, "", 0, "", timings, None, None)


@dataclass
class Fleet:
    """Everybody of one run, until the learners together have processed `tokens`. Batches are whole multiples of
    `quantum_tokens`. Raises UsageError for `adaptive` mixing: how deltas agree is known only where somebody trains."""

    run: RunFormat
    pacings: tuple[Pacing, ...]
    tokens: int
    quantum_tokens: int = 1
    now_s: float = 0.0
    processed: int = 0
    skips_in_a_row: int = 0

    def __post_init__(self) -> None:
        if self.run.settings.sync.mixing == "adaptive":
            raise UsageError(
                "a fleet that trains nothing cannot mix by `adaptive`: it asks how the learners' deltas agree",
                hint="sync.mixing: replace, blend or rebase",
            )
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._decides_s = inf  # the next moment at which the syncer looks again without an offer
        genesis = _genesis(self.run)
        self.syncer = VirtualSyncer(self.run, genesis)
        self.learners = [
            VirtualLearner(
                self.run, Progress(self.run, island.name, 1, genesis, 0), StepClock(pacing, self.quantum_tokens)
            )
            for island, pacing in zip(self.run.islands, self.pacings, strict=True)
        ]

    def make_tape(self) -> Tape:
        for learner in self.learners:
            self._begin(learner)
        while self._heap:
            self.now_s, _, happen = heappop(self._heap)
            happen()
        if self.processed < self.tokens or not self.syncer.merges:
            raise self._stuck()
        tracks = tuple(
            Track(
                learner.progress.learner, 1, 0, (0,) * self.run.num_fragments, events=tuple(learner.track)
            )
            for learner in self.learners
        )  # fmt: skip
        return Tape(self.run, tracks, tuple(self.syncer.merges))

    def _stuck(self) -> RunFailedError:
        return RunFailedError(
            f"the fleet stopped after {self.processed:,} of {self.tokens:,} tokens and "
            f"{len(self.syncer.merges)} merges: nobody can go on",
            hint="lower sync.quorum, or give the learners more time",
        )

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        heappush(self._heap, (when_s, next(self._order), happen))

    # -- learners -----------------------------------------------------------------------------------------------

    def _begin(self, learner: VirtualLearner) -> None:
        """The next step, or a wait for news."""
        learner.hear()
        if self.processed >= self.tokens:
            return
        if not learner.progress.may_step().allowed:
            learner.waiting = True
            self._publish(learner, learner.at_the_bound())
            return
        taken = learner.clock.next_step(self.now_s, learner.full_batch)
        if taken is not None:
            self.processed += taken.batch_tokens
            self._at(taken.end_s, lambda: self._stepped(learner, taken.batch_tokens))

    def _stepped(self, learner: VirtualLearner, batch_tokens: int) -> None:
        reached = learner.progress.slots_reached
        drafts = learner.step(batch_tokens)
        for _ in range(learner.progress.slots_reached - reached):
            learner.slot_s, learner.sent_s = self.now_s - learner.sent_s, self.now_s
        self._publish(learner, drafts)
        self._go_on(learner)

    def _go_on(self, learner: VirtualLearner) -> None:
        learner.waiting = learner.must_wait()
        if not learner.waiting:
            self._begin(learner)

    def _publish(self, learner: VirtualLearner, drafts: list[Draft]) -> None:
        pacing = learner.clock.pacing
        for draft in drafts:
            offer = learner.offer(draft, pacing)
            self._at(self.now_s + pacing.upload_s, lambda offer=offer: self._offered(offer))  # type: ignore[misc]

    def _heard(self, learner: VirtualLearner, state: RunState) -> None:
        learner.log = state
        output = state.outputs[_newest(state)]
        learner.arrived[output.fragment] = output
        if learner.waiting:
            learner.waiting = False
            if learner.at_tau:
                self._go_on(learner)
            else:
                self._begin(learner)

    # -- the syncer ---------------------------------------------------------------------------------------------

    def _offered(self, offer: Offer) -> None:
        self.syncer.receive(offer, self.now_s)
        self._decide()

    def _decide_again(self) -> None:
        self._decides_s = inf
        self._decide()

    def _decide(self) -> None:
        """Merge what can be merged now; come back when the grace window ends."""
        while True:
            decision = self.syncer.decide(self.now_s)
            if decision.action == "wait":
                again_s = self.syncer.skips_at_s if decision.until_s is None else decision.until_s
                if self.now_s < again_s < self._decides_s:
                    self._decides_s = again_s
                    self._at(again_s, self._decide_again)
                return
            if decision.action == "skip" and self.processed >= self.tokens:
                return  # what lies there has no quorum any more, and nobody offers again
            merged = decision.action == "merge"
            state = self.syncer.carry_out(decision, self.now_s)
            self.skips_in_a_row = 0 if merged else self.skips_in_a_row + 1
            if self.skips_in_a_row > MOST_SKIPPED_ROUNDS * self.run.num_fragments:
                raise self._stuck()
            if not merged:
                continue
            for learner in self.learners:
                arrives_s = self.now_s + learner.clock.pacing.download_s
                self._at(arrives_s, lambda learner=learner, state=state: self._heard(learner, state))  # type: ignore[misc]


def _newest(state: RunState) -> int:
    return max(range(len(state.outputs)), key=lambda fragment: state.outputs[fragment].version)


def _genesis(run: RunFormat) -> RunState:
    outputs = tuple(Output(fragment, 0, -1, 1, "", "") for fragment in range(run.num_fragments))
    first = Commit(0, "epoch_start", 1, "", "", "", run.software, outputs=outputs)
    return apply(RunState(), first, "0", run.layout, kept_versions(run))
