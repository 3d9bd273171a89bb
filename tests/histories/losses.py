"""Single records that the bucket loses or damages: a rule that deletes what is old, a bad disk, a wrong command.

Whoever lives and has the bytes puts them back; where nobody does, the bucket's owner has to, when faults cease. What is
the lock of the log is only damaged: of a head that was deleted only the syncer before can say that it was there, and it
may die first; and a syncer that stands before a commit that was deleted, or a create that is still on its way, may take
that number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.protocol.log.keys import FORMAT_KEY, HEAD_HINT_KEY, SYNCER, commit_key, read_commit_key
from tests.histories.options import MENDS_SOON_S
from tests.histories.processes import Process
from tests.histories.script import NemesisEvent
from tests.histories.stream import Stream

if TYPE_CHECKING:
    from tests.histories.history import History


OLDEST = 12  # commits before the head
MENDED_WITHIN_S = 6 * MENDS_SOON_S
MISSED_WITHIN = 8  # commits before the head: what is older may be in nobody's memory when it is asked for
KINDS = ("commit", "commit", "commit", "format", "hint")
HARMS = ("delete", "flip", "truncate")


class Losses:
    """`whole`: what lay under the keys that were struck."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.whole: dict[str, bytes] = {}

    def strike(self, event: NemesisEvent) -> None:
        draw, n = Stream(self.history.seed, f"loss at {event.at_s}"), self.history.monitor.replayer.n
        kind, harm, back = draw.choice(KINDS), draw.choice(HARMS), draw.whole(0, OLDEST)
        number = max(0, n - back)
        key = {"format": FORMAT_KEY, "hint": HEAD_HINT_KEY}.get(kind, commit_key(number))
        objects = self.history.bucket.objects
        shown = any(not self._is_harmed(commit_key(later)) for later in range(number + 1, n + 1))
        if kind == "commit" and harm == "delete" and (not shown or self._is_before(number)):
            harm = "flip"  # what comes behind a commit that was deleted shows that it was there
        if not objects.get(key) or (kind == "commit" and n < 1):  # a forger's hint may be empty
            return
        if kind == "commit" and any(lost not in objects for lost in self.whole):
            return  # it may be what shows the commit that was deleted
        data = objects[key]
        self.history.note(f"{key} is lost: {harm}")
        if kind != "hint":
            self.whole.setdefault(key, data)
        place = draw.whole(0, len(data) - 1)
        if harm == "delete":
            self.history.bucket.delete(key)
        elif harm == "flip":
            self.history.bucket.put(key, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        else:
            self.history.bucket.put(key, data[:place])

    def mended_within_s(self) -> float:
        """How long it may take from now on: a syncer that begins asks, and a learner answers."""
        return MENDED_WITHIN_S if any(map(self._is_harmed, self.whole)) else 0.0

    def _is_harmed(self, key: str) -> bool:
        return key in self.whole and self.history.bucket.objects.get(key) != self.whole[key]

    def _is_before(self, number: int) -> bool:
        """Whether a syncer lives that has not read this commit, or one's create of that number is still on its way."""
        living = self.history.supervisor.living(SYNCER)
        late = any(getattr(one, "key", "") == commit_key(number) for one in self.history.world.under_way)
        return late or any(process.serves is not None and process.serves.state.n < number for process in living)

    def owner_restores(self, over: bool = False) -> None:
        """What is harmed, and no living process will put back: that needs one who has it, and one who misses it, or, in
        a run that is `over`, perhaps had no time for it."""
        region, n = self.history.region, self.history.monitor.replayer.n
        apart = set() if region is None else region.residents
        living = [process for process in self.history.supervisor.processes if process.role not in apart]
        epoch = self.history.monitor.replayer.epoch
        held = [_held(process, epoch) for process in living if not process.ended and not process.frozen]
        # without its beginning a run may have been removed, and who holds that waits for minutes
        removed = all(self._is_harmed(key) for key in (FORMAT_KEY, commit_key(0)))
        for key, data in self.whole.items():
            few = n < 2 and key not in self.history.bucket.objects  # of two commits one that is left shows no log
            missed = (
                not over
                and not removed
                and not few
                and self.history.monitor.replayer.kinds[-1:] != ["stop"]
                and (key == FORMAT_KEY or n - (read_commit_key(key) or 0) <= MISSED_WITHIN)
            )
            is_held = missed and any(kept.get(key) == data for kept in held)
            if self.history.bucket.objects.get(key) != data and not is_held:
                self.history.note(f"the bucket's owner put back {key}")
                self.history.bucket.put(key, data)


def _held(process: Process, epoch: int) -> dict[str, bytes]:
    """By one who looks: a learner, or the syncer that serves."""
    if process.learner is not None:
        return process.learner.run.kept
    serves = process.serves
    return serves.run.kept if serves is not None and serves.epoch == epoch and serves.doing != "DONE" else {}
