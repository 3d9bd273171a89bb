"""Single records that the bucket loses or damages: a rule that deletes what is old, a bad disk, a wrong command.

Whoever lives and has the bytes puts them back; where nobody does, the bucket's owner has to, when faults cease. The
head itself is only damaged: of a deleted one, only the syncer before can say that it was there, and that may die first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.protocol.log.keys import FORMAT_KEY, HEAD_HINT_KEY, commit_key
from tests.histories.options import MENDS_SOON_S
from tests.histories.processes import Process
from tests.histories.script import NemesisEvent
from tests.histories.stream import Stream

if TYPE_CHECKING:
    from tests.histories.history import History


OLDEST = 12  # commits before the head
MENDED_WITHIN_S = 4 * MENDS_SOON_S
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
        back = max(back, 1) if harm == "delete" else back
        key = {"format": FORMAT_KEY, "hint": HEAD_HINT_KEY}.get(kind, commit_key(max(0, n - back)))
        objects = self.history.bucket.objects
        if key not in objects or (kind == "commit" and n < 1):
            return
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
        harmed = any(self.history.bucket.objects.get(key) != data for key, data in self.whole.items())
        return MENDED_WITHIN_S if harmed else 0.0

    def owner_restores(self) -> None:
        """What is harmed, and no living process can put back."""
        held = [_held(process) for process in self.history.supervisor.processes if not process.ended]
        for key, data in self.whole.items():
            if self.history.bucket.objects.get(key) != data and not any(kept.get(key) == data for kept in held):
                self.history.note(f"the bucket's owner put back {key}")
                self.history.bucket.put(key, data)


def _held(process: Process) -> dict[str, bytes]:
    actor = process.learner or process.serves
    return {} if actor is None else actor.run.kept
