"""The training loop of one island, top to bottom (arXiv 2604.21428, algorithm 2, through a bucket).

adopt what has arrived; draw a batch; forward, backward, inner step; count; offer the fragment that is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite

from diloco_cli.algorithm.flat import gather, scatter
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.errors import RunFailedError
from diloco_cli.learner.adoption import mixed
from diloco_cli.learner.exchange import Arrival, Exchange
from diloco_cli.learner.inner import inner_state
from diloco_cli.learner.moments import restore_or_reset
from diloco_cli.learner.rate import step_learning_rate
from diloco_cli.learner.replica import Replica
from diloco_cli.processes.daemon import say
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.records import RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.training import awaits_last, is_over, merge_is_due, save_is_due, waited_for

PAUSE_S = 0.2


@dataclass
class Facts:
    """What the loop knows about itself, for beats and for the end's summary."""

    state: str = "STARTING"
    loss: float | None = None
    tokens_per_s: float = 0.0
    mean_tokens_per_s: float = 0.0
    blocked_s: float = 0.0
    busy_s: float = 0.0
    note: str = ""


@dataclass
class Trainer:
    """One incarnation of one learner. `stopping` is asked before every step. Once it holds the learner leaves: while
    `may_drain` says that there is time, only when its last offers have their fate."""

    run: RunFormat
    progress: Progress
    exchange: Exchange
    replica: Replica
    stopping: Callable[[], bool]
    facts: Facts
    may_drain: Callable[[], bool] = lambda: False
    moments_lost: bool = False
    steps_at_loss: int = 0
    awaited: deque[Draft] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.tensors = self.replica.tensors
        self.at_tau = self.run.settings.sync.adoption == "at_tau"
        self.held_back: dict[int, Arrival] = {}
        self.saved_at = 0
        self.joined_at = self.exchange.state.n

    def train(self) -> None:
        """Until the log says that the run is over, or `stopping` says so."""
        self.progress.begin(self.exchange.moments.newest, self.moments_lost)
        slot_started_s = monotonic_s()
        while not self._over():
            blocked_s = self._timed(self.hear)
            if not self._may_step():
                slot_started_s += self._timed(self._wait_at_the_bound)  # a slot's time is what its steps take
                continue
            started_s = monotonic_s()
            self.step()
            self._throttle(monotonic_s() - started_s)
            self.exchange.step_took(monotonic_s() - started_s)
            reached = self.progress.slots_reached
            for draft in self.progress.due():
                blocked_s += self._timed(lambda draft=draft: self.send(draft))  # type: ignore[misc]
            for _ in range(self.progress.slots_reached - reached):
                self.exchange.slot_took(monotonic_s() - slot_started_s)
                slot_started_s = monotonic_s()
            waited_s = self._timed(self.await_merges)
            slot_started_s += waited_s
            blocked_s += waited_s
            blocked_s += self._timed(self._save_inner_now_and_then)
            self._note_speed(monotonic_s() - started_s, blocked_s)
        if self.stopping():
            self.drain()

    def drain(self) -> None:
        """Leave in order: offer what no offer holds yet, and wait until every offer has its fate."""
        if not self.may_drain():
            return
        self.facts.state = "DRAINING"
        for draft in self.progress.last_offers():
            self.send(draft)
        while awaits_last(self.progress.awaits_fates(), self.may_drain(), self.exchange.state, self.joined_at):
            self.exchange.news.wait(PAUSE_S)
            self.exchange.news.clear()
            _, state = self.exchange.arrivals()  # raises what ended a background thread; nothing is adopted any more
            self.progress.heard(state)

    # -- one step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One inner step on one batch of this learner's shard."""
        batch_tokens = self.progress.island.batch_tokens
        self.facts.loss = self.replica.step(self.progress.position, batch_tokens, self.learning_rate())
        if not isfinite(self.facts.loss):
            raise RunFailedError(
                f"the loss of {self.progress.learner} is {self.facts.loss} at step {self.progress.steps}",
                hint="lower train.inner.lr; a restart begins at the newest committed parameters",
            )
        self.progress.stepped()
        if self.progress.steps == 1:
            name, incarnation = self.progress.learner, self.progress.incarnation
            say(f"{utc_now_text()} {name}: incarnation {incarnation} made its first step")

    def learning_rate(self) -> float:
        own_steps = self.progress.steps - self.steps_at_loss
        return step_learning_rate(self.run, self.progress.fraction(), own_steps, self.moments_lost)

    def _throttle(self, compute_s: float) -> None:
        """An emulated slower island: sleep so that a step takes `slowdown` times its own time."""
        slowdown = self.progress.island.slowdown
        if slowdown > 1.0:
            sleep_s((slowdown - 1.0) * compute_s)

    # -- the exchange -------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Adopt what has arrived, and take note of the log's head."""
        arrivals, state = self.exchange.arrivals()
        if self.progress.is_behind_rollback(state):
            self.leave_behind(state)
        for arrival in arrivals:
            if self.at_tau and not self.progress.is_left_behind(arrival.output.fragment, state):
                self.held_back[arrival.output.fragment] = arrival
            else:
                self.adopt(arrival, state)
        timings = self.exchange.timings
        if self.progress.heard(state, timings.step_s, timings.upload_s + timings.adoption_s):
            self.go_back(range(self.run.num_fragments))
        self.go_back(self.progress.overgrown())

    def leave_behind(self, state: RunState) -> None:
        """A rollback: all fragments arrive anew, or will, and the moments are those of before, or none (then it warms
        up). The data goes on where it is."""
        self.held_back, self.awaited = {}, deque()
        if restore_or_reset(self.replica, self.exchange.moments_before_rollback(state)):
            self.exchange.moments.forget()
            self.moments_lost, self.steps_at_loss = True, self.progress.steps
        name, since = self.progress.learner, "new" if self.exchange.moments.newest is None else "from before"
        say(f"{utc_now_text()} {name}: the run went back to commit {state.rolled_back_to}, inner moments {since}")

    def go_back(self, fragments: Iterable[int]) -> None:
        """Drop the progress on these fragments: to the parameters as they were adopted."""
        for index in fragments:
            scatter(self.run.layout.fragments[index], self.exchange.sent_values(index, None), self.tensors)

    def adopt(self, arrival: Arrival, state: RunState | None = None) -> None:
        """Take over a committed version as `sync.mixing` says; a new incarnation's first ones always as they are. The
        inner optimizer's moments, the learning-rate schedule and the data position go on as if nothing had happened.
        `state`: the log that it came with; without it, the newest known."""
        output, sync = arrival.output, self.run.settings.sync
        fragment = self.run.layout.fragments[output.fragment]
        state = state or self.exchange.state
        mixing = self.progress.mixing_of(output, state) if self.exchange.has_base(output.fragment) else "replace"
        own = arrival.values if mixing == "replace" else gather(fragment, self.tensors)
        reference = None
        if mixing == "rebase":
            since = self.progress.kept_since(output, state)
            reference = self.exchange.sent_values(output.fragment, since)
            self.progress.rebased(output, since)
        else:
            self.progress.adopted(output)
        scatter(fragment, mixed(mixing, arrival.values, own, reference, sync.blend), self.tensors)
        self.exchange.adopted(arrival)

    def send(self, draft: Draft) -> None:
        fragment = self.run.layout.fragments[draft.fragment]
        self.exchange.send(draft, gather(fragment, self.tensors), self.facts.loss)
        if self.at_tau:
            self.awaited.append(draft)

    def await_merges(self) -> None:
        """`at_tau`: adopt each merge exactly tau slots after its own slot, waiting for it if need be."""
        while self.awaited and merge_is_due(self.run.settings.sync, self.awaited[0], self.progress.next_slot):
            draft = self.awaited.popleft()
            while not self._over():
                arrival = self.held_back.get(draft.fragment)
                found = waited_for(draft, None if arrival is None else arrival.output, self.progress.base_floor)
                if found == "here":
                    self.adopt(self.held_back.pop(draft.fragment), self.exchange.state)
                if found != "to come":
                    break
                self.facts.state = "WAITING"
                self.exchange.news.wait(PAUSE_S)
                self.exchange.news.clear()
                self.hear()
        self.facts.state = "TRAINING"

    def _over(self) -> bool:
        return self.stopping() or is_over(self.exchange.state, self.joined_at)

    def _may_step(self) -> bool:
        permit = self.progress.may_step()
        self.facts.note = permit.reason or self.exchange.trouble
        if permit.allowed:
            self.facts.state = "TRAINING"
            return True
        return False

    def _wait_at_the_bound(self) -> None:
        self.facts.state = "WAITING"
        for draft in self.progress.due_at_the_bound():
            self.send(draft)
        self.exchange.news.wait(PAUSE_S)
        self.exchange.news.clear()

    def _save_inner_now_and_then(self) -> None:
        steps, every_rounds = self.progress.steps, self.run.settings.train.inner.save_every
        if save_is_due(steps, self.progress.island.local_steps, every_rounds, self.saved_at):
            self.saved_at = steps
            tensors = inner_state(self.replica.model, self.replica.optimizer)
            if tensors is not None:
                self.progress.saved(int(tensors["step"][0]))
                self.exchange.save_inner(tensors)

    # -- measuring ----------------------------------------------------------------------------------------------

    def _timed(self, work: Callable[[], None]) -> float:
        started_s = monotonic_s()
        work()
        return monotonic_s() - started_s

    def _note_speed(self, step_s: float, blocked_s: float) -> None:
        self.facts.blocked_s += blocked_s
        self.facts.busy_s += step_s
        rate = self.progress.island.batch_tokens / max(step_s, 1e-9)
        self.facts.tokens_per_s += (rate - self.facts.tokens_per_s) * (0.05 if self.facts.tokens_per_s else 1.0)
        self.facts.mean_tokens_per_s = self.progress.steps * self.progress.island.batch_tokens / self.facts.busy_s
