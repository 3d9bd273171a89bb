"""Casts in a region's bucket that can no longer be read there: found, told, and handed to whoever makes them anew.

A mirror writes each cast once and never again, for nothing that a reader may have seen is overwritten. What is damaged
there later, learners elsewhere do not notice; those of the region pass it over until the next merge of that fragment.
Where there is none, because the quorum needs them, only new versions under new keys help: the syncer's to make (see
protocol/actors/repair.py). So a cast that has not been superseded for some rounds is looked at, at growing intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco_cli.protocol.actors.joining import fetch_cast
from diloco_cli.protocol.actors.loading import READS
from diloco_cli.protocol.log.keys import cast_key
from diloco_cli.protocol.log.operations import Steps, there
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat

ROUNDS = 4  # without a merge: after the syncer has looked at its own
LOOKS = 3  # in a row, that fail: a store that says for a moment that something is not there costs nobody anything
SOONEST_S, LATEST_S = 5.0, 3600.0

Suspect = Callable[[FragmentVersion], None]
"""Told the version whose cast cannot be read."""


def read_cast(run: RunFormat, output: FragmentVersion) -> Steps[bytes | None]:
    """The bytes that the log names, or None. They are damaged on their way, too: so they are read again first."""
    for _ in range(READS):
        data = yield from fetch_cast(run, output)
        if data is not None:
            return data
    return None


@dataclass
class _Watched:
    """A fragment's newest version, when its cast is to be looked at, and how many looks in a row failed."""

    version: int
    due_s: float
    pause_s: float
    failed: int = 0


class CastWatch:
    """Of one region. `damaged`: by fragment, in words, until a version that can be read is there."""

    def __init__(self, run: RunFormat, pace: Callable[[], float], suspect: Suspect) -> None:
        self.run, self.pace, self.suspect = run, pace, suspect
        self.damaged: dict[int, str] = {}
        self._watched: dict[int, _Watched] = {}

    def look(self, outputs: Iterable[FragmentVersion], now_s: float) -> Steps[bool]:
        """At the first of the region's newest versions whose time it is; False if there was none."""
        usual_s = max(SOONEST_S, ROUNDS * self.run.num_fragments * self.pace())
        for output in outputs:
            seen = self._watch(output, now_s, usual_s)
            if now_s >= seen.due_s:
                data = yield from there(read_cast(self.run, output))
                self._found(output, seen, data is not None)
                seen.pause_s = min(max(usual_s, LATEST_S), 2 * seen.pause_s)
                seen.due_s = now_s + (SOONEST_S if 0 < seen.failed < LOOKS else seen.pause_s)
                return True
        return False

    def _watch(self, output: FragmentVersion, now_s: float, usual_s: float) -> _Watched:
        """The pauses go on growing over what was made anew: a bucket that shows no cast at all costs little."""
        seen = self._watched.get(output.fragment)
        if seen is None or seen.version != output.version:
            pause_s = seen.pause_s if seen is not None and seen.failed else usual_s
            seen = self._watched[output.fragment] = _Watched(output.version, now_s + pause_s, pause_s)
        return seen

    def _found(self, output: FragmentVersion, seen: _Watched, readable: bool) -> None:
        seen.failed = 0 if readable else seen.failed + 1
        if readable:
            self.damaged.pop(output.fragment, None)
        elif seen.failed >= LOOKS:
            key = cast_key(output.fragment, output.version, output.epoch, output.cast_digest)
            self.damaged[output.fragment] = f"{key} cannot be read in the region's bucket"
            self.suspect(output)
