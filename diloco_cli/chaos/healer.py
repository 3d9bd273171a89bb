"""A small process that ends a pause when its time is over, or once the chaos command is gone.

It is started before anything is paused. Both ends talk over a pipe: the kernel closes it on any death.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from types import TracebackType

from diloco_cli.chaos.faults import resume_process
from diloco_cli.chaos.journal import Entry, read_entries, record
from diloco_cli.environment import environment_with
from diloco_cli.errors import TryAgainError
from diloco_cli.processes.identity import Identity, identity_from_json, identity_to_json

READY = b"ready\n"
GO = b"go\n"
START_S = 15.0
END_S = 10.0
MAX_ORDER_BYTES = 4096


class Healer:
    """The chaos command's end. Leaving the `with` block heals, whatever was the reason to leave."""

    def __init__(self, run: str, identity: Identity, entry: Entry, for_s: float) -> None:
        self._for_s = for_s
        self._order = {
            "run": run,
            "entry": entry.id,
            "identity": identity_to_json(identity),
            "for_s": for_s,
        }

    def __enter__(self) -> Healer:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "diloco_cli.chaos.healer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_with(),
            start_new_session=True,
            bufsize=0,
        )
        self._send(json.dumps(self._order).encode() + b"\n")
        if self._receive() != READY:
            self._close()
            raise TryAgainError("the process that would end the pause did not start, so nothing was paused")
        return self

    def wait(self) -> None:
        """Starts the time of the pause and waits for its end."""
        self._send(GO)
        self._child.wait(self._for_s + END_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _send(self, line: bytes) -> None:
        try:
            os.write(_descriptor(self._child.stdin), line)
        except BrokenPipeError:
            # It died: the caller heals by itself, and `_receive` tells in the other case.
            return

    def _receive(self) -> bytes:
        descriptor = _descriptor(self._child.stdout)
        readable, _, _ = select.select([descriptor], [], [], START_S)
        return os.read(descriptor, len(READY)) if readable else b""


def _descriptor(stream: object) -> int:
    fileno = getattr(stream, "fileno", None)
    if fileno is None:
        raise TryAgainError("the pipe to the healing process is missing")
    return int(fileno())


def main() -> None:
    """The healer's end: an order, `ready`, then `go` or the pipe's end, then the time's or the pipe's end."""
    order = json.loads(_read_line(MAX_ORDER_BYTES))
    identity = identity_from_json(order["identity"])
    os.write(1, READY)
    if _read_line(len(GO)) == GO:
        select.select([0], [], [], float(order["for_s"]))
    healed = resume_process(identity)
    entry = next(entry for entry in read_entries(order["run"]) if entry.id == order["entry"])
    record(order["run"], entry, healed=healed)


def _read_line(limit: int) -> bytes:
    """Byte by byte, so that nothing is left in a buffer that `select` does not see."""
    line = b""
    while len(line) < limit and not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


if __name__ == "__main__":
    main()
