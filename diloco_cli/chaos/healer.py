"""A small process that ends a pause when its time is over, or once the chaos command is gone.

It is started before anything is paused. Both ends talk over a pipe: the kernel closes it on any death.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco_cli.chaos.faults import resume_process
from diloco_cli.chaos.journal import JournalEntry, read_entries, record
from diloco_cli.errors import TryAgainError
from diloco_cli.runtime.child import Child, end_all
from diloco_cli.runtime.identity import Identity, identity_from_json, identity_to_json

READY, GO = "ready", "go"
START_S = 15.0
END_S = 10.0
MAX_LINE_BYTES = 4096


@contextmanager
def healer(run: str, identity: Identity, entry: JournalEntry, for_s: float) -> Iterator[Callable[[], None]]:
    """The chaos command's side. Leaving the block for any reason heals. The function that it yields starts the time of
    the pause and waits for its end."""
    child = Child("diloco_cli.chaos.healer", apart=True)
    try:
        child.tell({"run": run, "entry": entry.id, "identity": identity_to_json(identity), "for_s": for_s})
        if not _is_ready(child):
            raise TryAgainError("the process that would end the pause did not start, so nothing was paused")

        def wait() -> None:
            child.tell(GO)  # if it has died, the caller heals by itself
            child.process.wait(for_s + END_S)

        yield wait
    finally:
        end_all([child], END_S)


def _is_ready(child: Child) -> bool:
    try:
        return bool(child.answer(START_S) == READY)
    except (TimeoutError, ValueError):
        return False


def main() -> None:
    """The healer's side: an order, `ready`, then `go` or the pipe's end, then the time's or the pipe's end."""
    order = json.loads(_read_line())
    identity = identity_from_json(order["identity"])
    print(json.dumps(READY), flush=True)
    if _read_line() == f"{json.dumps(GO)}\n".encode():
        select.select([0], [], [], float(order["for_s"]))
    healed = resume_process(identity)
    entry = next(entry for entry in read_entries(order["run"]) if entry.id == order["entry"])
    record(order["run"], entry, healed=healed)


def _read_line() -> bytes:
    """Byte by byte, so that nothing is left in a buffer that `select` does not see."""
    line = b""
    while len(line) < MAX_LINE_BYTES and not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


if __name__ == "__main__":
    main()
