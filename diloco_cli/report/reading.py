"""Reads a run's log for a report: each commit once, and never again on this machine.

Nothing is verified a second time: the caller has the log's end from a reader that checks it, and the records before it
are chained to that by their digests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.events.event import EVENT_KINDS, KINDS, events_of
from diloco_cli.paths import user_cache_directory
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.metrics import Metrics, metrics_after
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode, record_digest
from diloco_cli.report.history import CommitLine, CommitPart, Mark, RunHistory
from diloco_cli.runtime.daemon import CommitsAhead
from diloco_cli.runtime.files import make_directory, write_whole
from diloco_cli.store.port import Store

TOLD_EVERY = 512
VERIFY = "diloco verify"
NOTABLE = {kind.note for kind in EVENT_KINDS if kind.note and not kind.routine} - {"eval", "gc_floor"}
"""Kinds of commits whose events are always marked; an evaluation is if the loss jumped."""
VERSION = 2  # of the kept files; others are read anew
MAX_KEPT_BYTES = 64 << 20
_line = msgspec.json.Decoder(CommitLine).decode
_part = msgspec.json.Decoder(CommitPart).decode
Progress = Callable[[int, int], None]


class KeptHistory(msgspec.Struct):
    version: int
    history: RunHistory


def read_history(
    store: Store, run: RunFormat, state: RunState, progress: Progress = lambda done, of: None
) -> RunHistory:
    """The commits up to that of `state`. Raises DataCheckError where they do not lead to it."""
    path = user_cache_directory("report") / f"{digest(run.run_id.encode()).partition('-')[2]}.json"
    history = _kept(path, run, state)
    if history is not None and history.n < state.n and not _continues(store, history):
        history = None
    history = history or RunHistory(run.run_id, _parameters(run))
    read = history.n
    with CommitsAhead(store, last=state.n) as ahead:
        for n in range(read + 1, state.n + 1):
            _add(history, n, ahead.get(commit_key(n), MAX_RECORD_BYTES))
            if n % TOLD_EVERY == 0:
                progress(n, state.n)
    if history.digest != state.digest:
        raise DataCheckError("the kept commits do not lead to the log's end", where=commit_key(state.n), hint=VERIFY)
    history.tokens_before = state.tokens(run.layout) - history.tokens
    if history.n > read:
        _keep(path, history)
    return history


def _parameters(run: RunFormat) -> tuple[int, ...]:
    return tuple(fragment.num_parameters for fragment in run.layout.fragments)


def _add(history: RunHistory, n: int, data: bytes | None) -> None:
    if data is None:
        history.missing += 1
        history.digest = ""
        return
    try:
        line = _read(data)
        if history.digest and (line.previous != history.digest or line.n != n):
            raise DataCheckError("the hash chain is broken", where=commit_key(n), hint=VERIFY)
        s = history.add(line, record_digest(data))
    except (msgspec.MsgspecError, IndexError, OverflowError, RecursionError) as error:
        raise DataCheckError(f"not a commit: {error}", where=commit_key(n), hint=VERIFY) from error
    if line.kind in NOTABLE or line.jumped:
        for event in events_of(metrics_after(Metrics(), decode(Commit, data, commit_key(n)), 0)):
            if not KINDS[event.kind].routine:
                history.mark(Mark(s, event.kind, event.unit, event.text))


def _read(data: bytes) -> CommitLine:
    """All of a commit, also of a long one (protocol/log/parts.py)."""
    head, *parts = data.split(b"\n")
    line = _line(head)
    for part in map(_part, parts):
        line.inputs, line.outcomes = line.inputs + part.inputs, line.outcomes + part.outcomes
    return line


def _kept(path: Path, run: RunFormat, state: RunState) -> RunHistory | None:
    """What an earlier report left here, if it is of this very log."""
    try:
        if path.stat().st_size > MAX_KEPT_BYTES:
            return None
        kept = msgspec.json.decode(path.read_bytes(), type=KeptHistory, strict=False)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    history = kept.history
    fits = kept.version == VERSION and history.run_id == run.run_id and history.parameters == _parameters(run)
    if not fits or history.n > state.n or (history.n == state.n and history.digest != state.digest):
        return None
    return history


def _continues(store: Store, history: RunHistory) -> bool:
    """Whether the log goes on from what was kept: a bucket may have been restored from an older copy."""
    data = store.get(commit_key(history.n), MAX_RECORD_BYTES)
    return data is None or record_digest(data) == history.digest


def _keep(path: Path, history: RunHistory) -> None:
    """A report does not fail because nothing can be kept."""
    with suppress(OSError, UsageError):
        make_directory(path.parent)
        write_whole(path, msgspec.json.encode(KeptHistory(VERSION, history)))
