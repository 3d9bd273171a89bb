"""What a syncer does unasked beside merging: whom to keep out, what may be forgotten."""

from __future__ import annotations

from diloco_cli.protocol.actors.collection import Collector, floor_in_turn
from diloco_cli.protocol.actors.operators import collected
from diloco_cli.protocol.log.commit_log import SNAPSHOT_EVERY
from diloco_cli.protocol.log.commits import Commit, Quarantine
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.quarantine import faults_for_quarantine, quarantine_reason
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState


class Housekeeper:
    """Of one syncer process. Everything that must not be lost is in the log."""

    def __init__(self, run: RunFormat) -> None:
        self.run = run
        self.collector = Collector(run)
        self._next_floor_n = 0

    def due(self, state: RunState) -> Steps[Commit | None]:
        """The commit that is due now, if any."""
        name = to_quarantine(state, self.run)
        if name is not None:
            return Quarantine(learner=name, reason=quarantine_reason(state.learner(name).faults))
        if state.n < self._next_floor_n:
            return None
        self._next_floor_n = state.n + SNAPSHOT_EVERY
        floor = yield from floor_in_turn(self.run, state)
        return None if floor is None else collected(floor, "in turn")

    def rest(self, state: RunState, seconds: float) -> Steps[None]:
        """Between two turns: pass so much time, with collecting as long as there is garbage. A merge never waits for
        more than one request of it; a syncer that never rests makes one a turn."""
        if self.collector.is_done(state):
            if seconds > 0:
                yield Sleep(seconds)
            return
        now_s: float = yield Now()
        self.collector.look(state, now_s)
        yield from self.collector.work(state, now_s, seconds)
        left_s = now_s + seconds - (yield Now()) if seconds > 0 else 0.0
        if left_s > 0:
            yield Sleep(left_s)


def to_quarantine(state: RunState, run: RunFormat) -> str | None:
    """The learner that is due for it, the first by name; None if nobody is.

    Nobody, too, where fewer would be left than the quorum needs: a run must not stop itself for what it refuses anyway.
    """
    enough = faults_for_quarantine(run.num_fragments)
    if all(known.faults < enough for known in state.learners.values()):
        return None
    names = {island.name for island in state.with_members(run).everybody}
    trusted = [name for name in sorted(names) if state.learner(name).quarantined is None]
    if len(trusted) <= run.settings.sync.quorum:
        return None
    return next((name for name in trusted if state.learner(name).faults >= enough), None)
