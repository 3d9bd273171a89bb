"""What a simulation changes about the protocol's modules for the length of one history, and why that is fair.

Many simulated processes read one log: what the product's own `fold` made of a state and a record is remembered. A fold
is a pure function of (state, bytes), so the second process to fold the same bytes onto the very same state object gets
the object that the first one got. A state of another origin (a snapshot's, a mistaken one's) is folded anew.

Snapshots are written more often, so that short histories see what long runs do.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diloco_cli.protocol import log, wire
from diloco_cli.protocol.records import RunFormat
from diloco_cli.protocol.state import RunState

EMPTY = RunState()
PROTOCOL = "diloco_cli.protocol."


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A history keeps nearly all that it makes until its end: looking through it again and again finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def remembered_folds() -> Iterator[None]:
    """For the length of one history. Not for threads: a simulation has only one."""
    fold = log.fold
    known: dict[tuple[int, bytes], tuple[RunState, RunState]] = {}

    def remembered(run: RunFormat, state: RunState, data: bytes) -> RunState:
        if state.n < 0 and state == EMPTY:
            state = EMPTY
        found = known.get((id(state), data))
        if found is None:  # the state is held, so that its id stays its own
            found = known[id(state), data] = (state, fold(run, state, data))
        return found[1]

    log.fold = remembered
    try:
        with _remembered_decoding():
            yield
    finally:
        log.fold = fold


@contextmanager
def _remembered_decoding() -> Iterator[None]:
    """The same bytes as the same kind of record give the same object: records are frozen."""
    decode = wire.decode
    known: dict[tuple[type[Any], bytes], Any] = {}

    def remembered(kind: type[Any], data: bytes, where: str) -> Any:
        found = known.get((kind, data))
        if found is None:
            found = known[kind, data] = decode(kind, data, where)
        return found

    modules = [module for name, module in sys.modules.items() if name.startswith(PROTOCOL)]
    users = [module for module in modules if getattr(module, "decode", None) is decode]
    for module in users:
        module.decode = remembered  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.decode = decode  # type: ignore[attr-defined]


@contextmanager
def snapshots_every(commits: int) -> Iterator[None]:
    """In every module that knows how often snapshots are written."""
    known = [module for name, module in sys.modules.items() if name.startswith(PROTOCOL)]
    before = {module: module.SNAPSHOT_EVERY for module in known if hasattr(module, "SNAPSHOT_EVERY")}
    for module in before:
        module.SNAPSHOT_EVERY = commits  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, usual in before.items():
            module.SNAPSHOT_EVERY = usual  # type: ignore[attr-defined]
