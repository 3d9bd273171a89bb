"""Repair: publishes committed weights anew that can no longer be read.

Usually the next merge supersedes such a version: learners go on from their older version, and their deltas are
re-anchored. This fails after a rollback, because no older version may be a base, and when all learners are dead,
because a new incarnation starts from committed versions alone: then no learner can make the superseding delta.

So a syncer reads the weights of each fragment that has not been merged for `ROUNDS` rounds (or once since it began to
serve, if a slot could be skipped and no learner has offered), at growing intervals, and sooner for a new incarnation.
The length of a round is measured by its merges, not by the fastest learner's pace: models are large, and a merge must
not wait for such a read. A version that could not be read `LOOKS` times in a row is superseded by a rollback to the
newest commit itself: all fragments are published again from their states, under new keys. No object is overwritten and
no merge is lost, but progress in flight is. If a fragment has no merge after `MAX_REPAIRS` repairs, the syncer stops
repairing it and says so in the log: people must then look into the bucket.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.joining import fetch_weights
from diloco_cli.protocol.actors.merging import READS, Recover, make_resident, write_surely
from diloco_cli.protocol.actors.ports import Arithmetic, Merged
from diloco_cli.protocol.actors.requests import back_to, refuse
from diloco_cli.protocol.log.commit_log import Pulse
from diloco_cli.protocol.log.commits import Commit, Refuse
from diloco_cli.protocol.log.keys import state_key, weights_key
from diloco_cli.protocol.log.operations import Now, Steps
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState

ROUNDS = 2  # without a merge, after which a fragment's weights are read
LOOKS = 3  # in a row: a store that does not show an object for a moment must not cost the learners' progress
MAX_REPAIRS = 3  # of a fragment that is not merged between them
SOONEST_S, MAX_PAUSE_S = 5.0, 3600.0  # between two looks, where nothing takes longer than that
MERGES_SEEN = 32  # newest merges, by which the length of a slot is measured


@dataclass
class _Watched:
    """A fragment's newest version: when its weights were last read (or first seen), the pause after that (None: never
    read), and how many reads in a row failed. `repairs`: repairs since its newest merge. `told`: the log says that the
    syncer does nothing more about it."""

    version: int
    looked_s: float
    pause_s: float | None = None
    failed: int = 0
    repairs: int = 0
    told: bool = False


class Repairer:
    """The repairs of one syncer process."""

    def __init__(self, run: RunFormat, arithmetic: Arithmetic, recover: Recover) -> None:
        self.run, self.arithmetic, self.recover = run, arithmetic, recover
        self._watched: dict[int, _Watched] = {}
        self._suspected: set[int] = set()
        self._heard: set[tuple[str, int]] = set()
        self._offered = False
        self._merges_s: deque[float] = deque(maxlen=MERGES_SEEN)

    def suspect(self, fragment: int) -> None:
        """The caller, on any thread, has found that the newest weights of this fragment cannot be read where learners
        read them, such as in a region's bucket. They are published anew, as if they could not be read at home."""
        self._suspected.add(fragment)

    def due(
        self, state: RunState, epoch: int, slot_s: float, inbox: Inbox, pulse: Pulse
    ) -> Steps[Commit | None]:  # fmt: skip
        """The commit that supersedes an unreadable version, or says that nothing can be done; None if there is none to
        make. One call reads one version at most, so that merges do not wait long for it."""
        now_s: float = yield Now()
        watched = [self._watch(state, output, now_s) for output in state.outputs]
        skip_after_s = self.run.settings.sync.skip_after_s
        usual_s = ROUNDS * self.run.num_fragments * max(slot_s, self._between_merges_s()) + skip_after_s
        self._hear(inbox, usual_s)
        for output, seen in zip(state.outputs, watched, strict=True):
            if output.fragment in self._suspected:
                self._suspected.discard(output.fragment)
                return (yield from self._supersede(state, output, seen, epoch, pulse))
            if now_s >= seen.looked_s + self._pause_s(seen, slot_s, usual_s):
                yield from self._look(output, seen, usual_s, pulse)
                if seen.failed < LOOKS:
                    return None
                return (yield from self._supersede(state, output, seen, epoch, pulse))
        return None

    def _hear(self, inbox: Inbox, usual_s: float) -> None:
        """A new incarnation needs the weights of all fragments, so pauses that have grown are cut to the
        usual one."""
        self._offered = self._offered or any(box.found_s is not None for box in inbox.mailboxes.values())
        if not inbox.mailboxes.keys() <= self._heard:
            for seen in self._watched.values():
                seen.pause_s = None if seen.pause_s is None else min(seen.pause_s, usual_s)
            self._heard = set(inbox.mailboxes)

    def _watch(self, state: RunState, output: FragmentVersion, now_s: float) -> _Watched:
        """A merge resets the pause; after a rollback, which may be a repair in vain, the pause goes on growing."""
        seen = self._watched.setdefault(output.fragment, _Watched(output.version, now_s))
        if seen.version != output.version:
            self._suspected.discard(output.fragment)
            kept = replace(seen, version=output.version, looked_s=now_s, failed=0, told=False)
            merged = output.version > state.base_floor
            self._merges_s.extend([now_s] if merged else [])
            seen = self._watched[output.fragment] = _Watched(output.version, now_s, 0.0) if merged else kept
        return seen

    def _between_merges_s(self) -> float:
        """The mean time between merges on this process's clock: fast islands may wait for slower ones."""
        times = self._merges_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def _pause_s(self, seen: _Watched, slot_s: float, usual_s: float) -> float:
        """The pause is short if no learner has offered since this process began, because all may be dead, and after a
        read that has just failed."""
        skip_after_s = self.run.settings.sync.skip_after_s
        if 0 < seen.failed < LOOKS:
            return max(SOONEST_S, skip_after_s)
        early = seen.pause_s is None and not self._offered
        return skip_after_s + slot_s if early else max(usual_s, seen.pause_s or 0.0)

    def _look(self, output: FragmentVersion, seen: _Watched, usual_s: float, pulse: Pulse) -> Steps[None]:
        readable = yield from is_readable(self.run, output, pulse)
        seen.looked_s = yield Now()
        seen.failed = 0 if readable else seen.failed + 1
        if readable or seen.failed >= LOOKS:
            seen.pause_s = min(max(usual_s, MAX_PAUSE_S), max(usual_s, 2 * (seen.pause_s or 0.0)))

    def _supersede(
        self, state: RunState, bad: FragmentVersion, seen: _Watched, epoch: int, pulse: Pulse
    ) -> Steps[Commit | None]:  # fmt: skip
        what = f"version {bad.version} of fragment {bad.fragment} cannot be read"
        if seen.repairs >= MAX_REPAIRS:
            answer = refuse(f"{what}, though made anew {seen.repairs} times since it was merged: look into the bucket")
        else:
            answer = yield from self._made_anew(state, what, epoch, pulse)
        if isinstance(answer, Refuse):
            told, seen.told = seen.told, True
            return None if told else answer
        for one in self._watched.values():
            one.repairs += 1
        return answer

    def _made_anew(self, state: RunState, what: str, epoch: int, pulse: Pulse) -> Steps[Commit]:
        """Publish all fragments anew. Nothing is written before all states were read; a failure is retried later."""
        try:
            for output in state.outputs:
                yield from pulse()
                yield from self._settled(output)
            outputs = []
            for output in state.outputs:
                yield from pulse()
                made = yield from self._settled(output)
                anew = replace(output, version=state.n + 1, slot=state.slot - 1, epoch=epoch)
                names = (output.fragment, anew.version, epoch)
                yield from write_surely(state_key(*names, output.state_digest), made.state)
                yield from write_surely(weights_key(*names, output.weights_digest), made.weights)
                outputs.append(anew)
        except DataCheckError as error:
            return refuse(f"{what}, nor made anew: {error}")
        return back_to(state, tuple(outputs), f"{what}: all made anew")

    def _settled(self, output: FragmentVersion) -> Steps[Merged]:
        """The version's bytes, from its state. Raises DataCheckError if they cannot be made from it."""
        yield from make_resident(self.run, self.arithmetic, output, self.recover)
        made = self.arithmetic.settled(output.fragment)
        if digest(made.weights) != output.weights_digest:
            raise DataCheckError("its state gives other bytes here", where=f"fragment {output.fragment}")
        return made


def is_readable(run: RunFormat, output: FragmentVersion, pulse: Pulse) -> Steps[bool]:
    """Whether one of READS reads succeeds, as a read may be damaged. Models are large: `pulse` runs before each."""
    for _ in range(READS):
        yield from pulse()
        if (yield from fetch_weights(run, output)) is not None:
            return True
    return False
