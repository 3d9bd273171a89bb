"""Many learners at little cost, in virtual time: the product's own, but told of each commit instead of reading it.

Their books, aim, claims, deltas and offers are the product's; so is all of the syncer. What they do not do: poll the
log and read each commit, fetch weights, send heartbeats, look for a successor. A head comes to each of them as late as
a poll would find it, evenly spread over the pause between two polls, and a version when it could have been fetched.
Nothing of this is for faults or rollbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.forecast.stand_ins import BITS, Condition, VirtualLearner
from diloco_cli.protocol.actors.joining import WAIT_FOR_GENESIS_S, Joined
from diloco_cli.protocol.actors.learner import FetchedVersion, Follower
from diloco_cli.protocol.log.claims import claim_incarnation
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.pacing import DENSE

GROUPS = 16  # of learners that hear at the same time


class ToldFollower(Follower):
    """Passes on what it is told, and asks for nothing."""

    def newest(self, state: RunState) -> Steps[tuple[RunState, dict[int, FetchedVersion]]]:
        self.state, now_s = state, (yield Now())
        self._fetched = {output.fragment: output.version for output in state.outputs}
        return state, {output.fragment: (output, None, now_s) for output in state.outputs}

    def follow(self) -> Steps[None]:
        yield from ()

    def hear(self, state: RunState, since_s: float, now_s: float) -> None:
        """One that has just joined may know of it."""
        if state.n > self.state.n:
            self.state, self.head = state, (state, since_s, now_s)
            self._put([])

    def receive(self, outputs: list[FragmentVersion], seen_s: float) -> None:
        news = [output for output in outputs if output.version > self._fetched[output.fragment]]
        self._fetched |= {output.fragment: output.version for output in news}
        self._put([(output, None, seen_s) for output in news])


@dataclass
class Board:
    """The log's head, and who is told of it, after `call_s` for each call, at most `pause_s` of waiting for a poll, and
    `download_s` more for a version."""

    call_at: Callable[[float, Callable[[], None]], None]
    call_s: float
    pause_s: float
    download_s: float
    state: RunState = field(default_factory=RunState)
    groups: list[dict[str, ToldFollower]] = field(default_factory=lambda: [{} for _ in range(GROUPS)])
    joined: int = 0

    def join(self, learner: str, follower: ToldFollower) -> RunState:
        """From now on it is told; the head as it is now."""
        self.groups[self.joined % GROUPS][learner] = follower
        self.joined += 1
        return self.state

    def show(self, state: RunState, now_s: float) -> None:
        """The log has a new head; all hear of it, and then get what it brings."""
        news = [output for output in state.outputs if output not in self.state.outputs]
        self.state = state
        for number, group in enumerate(self.groups):
            asked_s = now_s + self.pause_s * number / GROUPS
            heard_s = asked_s + self.call_s
            self.call_at(heard_s, _telling(group, state, asked_s - self.pause_s, heard_s))
            if news:
                self.call_at(heard_s + self.call_s + self.download_s, _bringing(group, news, heard_s))


def _telling(group: dict[str, ToldFollower], state: RunState, since_s: float, now_s: float) -> Callable[[], None]:
    def tell() -> None:
        for follower in group.values():
            follower.hear(state, since_s, now_s)

    return tell


def _bringing(group: dict[str, ToldFollower], news: list[FragmentVersion], seen_s: float) -> Callable[[], None]:
    def bring() -> None:
        for follower in group.values():
            follower.receive(news, seen_s)

    return bring


class ToldLearner(VirtualLearner):
    """The product's learner with such a follower."""

    follower_type = ToldFollower
    follower: ToldFollower

    def __init__(self, board: Board, condition: Condition, *arguments: Any) -> None:
        super().__init__(condition, *arguments)
        self.board = board

    def _join(self) -> Steps[Joined]:
        while not self.board.state.outputs:
            yield Sleep(WAIT_FOR_GENESIS_S)
        place = yield from claim_incarnation(self.run.keyring, self.name, self.claim)
        state = self.board.join(self.name, self.follower)
        return Joined(place.incarnation, state, 0, None, state.n)


@dataclass
class OfferingFleet(SimulatedFleet):
    """The product's syncer, and such learners, all with links like the first one's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        island = self.run.islands[0]
        slot_s = island.local_steps * island.step_s / self.run.num_fragments
        down_bps, call_s = island.link.down_bps, island.link.rtt_s
        download_s = max(self.sizes.weights) * BITS / down_bps if down_bps else 0.0
        self.board = Board(self.world.call_at, self.latency_s if call_s is None else call_s, DENSE * slot_s, download_s)

    def _committed(self, state: RunState) -> None:
        if state.n > self.state.n:
            self.board.show(state, self.world.now_s)
        super()._committed(state)

    def learner_of(self, condition: Condition, *arguments: Any) -> VirtualLearner:
        return ToldLearner(self.board, condition, *arguments)
