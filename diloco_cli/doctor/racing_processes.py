"""Processes that race for one key: started once, told each round's start by a line on their standard input.

parent -> racer   {"key", "entry" (hex), "at_s"}     create it at that moment of the machine's monotonic clock
racer -> parent   {"ready": true}                    once, when its client is warm
                  {"won", "holder" (hex), "trouble"} after each round
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from diloco_cli import clock
from diloco_cli.errors import DilocoError
from diloco_cli.store.port import Created, StoreUnavailableError

HEAD_START_S = 0.02
LEAVE_WITHIN_S = 0.5
GIVE_UP_S = 20.0


@dataclass(frozen=True)
class Reply:
    won: bool
    holder: bytes
    trouble: str


@dataclass
class _Racer:
    process: subprocess.Popen[str]
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the missing answer says so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=max(0.0, within_s))
        except queue.Empty:
            line = ""
        if not line:
            raise StoreUnavailableError("a racing process gave no answer in time")
        plain: dict[str, Any] = json.loads(line)
        return plain


class RacingProcesses:
    """`with RacingProcesses(url, 3) as processes`: none of them outlives the block. They form process groups of their
    own, so that Ctrl-C is heard here alone."""

    def __init__(self, url: str, racers: int) -> None:
        self._url = url
        self._num_racers = racers
        self._racers: list[_Racer] = []

    def __enter__(self) -> RacingProcesses:
        words = [sys.executable, "-m", __name__, self._url]
        for _ in range(self._num_racers):
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
            self._racers.append(_Racer(process))
            threading.Thread(target=self._racers[-1].listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for racer in self._racers:
            assert racer.process.stdin is not None
            with suppress(OSError):
                racer.process.stdin.close()
        for racer in self._racers:
            with suppress(subprocess.TimeoutExpired):
                racer.process.wait(LEAVE_WITHIN_S)
            racer.process.kill()
            racer.process.wait()

    def wait_until_ready(self, within_s: float) -> None:
        """Raises StoreUnavailableError if a racer cannot reach the store in time."""
        end_s = clock.monotonic_s() + within_s
        for racer in self._racers:
            said = racer.answer(end_s - clock.monotonic_s())
            if said.get("trouble"):
                raise StoreUnavailableError(str(said["trouble"]))

    def race(self, key: str, entries: Sequence[bytes], within_s: float) -> list[Reply]:
        """Everybody at the same moment."""
        end_s = clock.monotonic_s() + within_s
        at_s = clock.monotonic_s() + HEAD_START_S
        for racer, entry in zip(self._racers, entries, strict=True):
            racer.tell({"key": key, "entry": entry.hex(), "at_s": at_s})
        answers = [racer.answer(end_s - clock.monotonic_s()) for racer in self._racers]
        return [Reply(bool(a["won"]), bytes.fromhex(a["holder"]), str(a["trouble"])) for a in answers]


def _run_racer(url: str) -> None:
    """The other side: until the parent closes the pipe."""
    from diloco_cli.store.open import open_store
    from diloco_cli.store.retry import RetryingStore

    try:
        store = RetryingStore(open_store(url), deadline_s=GIVE_UP_S)
        store.get("race/warm-up")
    except DilocoError as error:
        _say({"trouble": str(error)})
        return
    _say({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        entry = bytes.fromhex(task["entry"])
        clock.sleep_s(task["at_s"] - clock.monotonic_s())
        try:
            outcome = store.create(task["key"], entry)
        except DilocoError as error:
            _say({"won": False, "holder": "", "trouble": str(error)})
            continue
        won = isinstance(outcome, Created)
        _say({"won": won, "holder": (entry if isinstance(outcome, Created) else outcome.data).hex(), "trouble": ""})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _run_racer(sys.argv[1])
