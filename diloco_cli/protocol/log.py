"""Reading and writing the commit log. Creating commit n+1 is the only way to make anything true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco_cli.digests import digest
from diloco_cli.errors import FencedError, NotFoundError
from diloco_cli.protocol.keys import FORMAT_KEY, HEAD_HINT_KEY, commit_key, epoch_key, is_name, snapshot_key
from diloco_cli.protocol.operations import Create, Get, Put, Steps
from diloco_cli.protocol.records import MOST, SCHEMA, Commit, ProcessClaim, RunFormat
from diloco_cli.protocol.state import RunState, apply
from diloco_cli.protocol.wire import RecordError, decode, decode_plain, encode
from diloco_cli.store.port import Created

SNAPSHOT_EVERY = 64
KeyOf = Callable[[int], str]


@dataclass(frozen=True)
class Snapshot:
    """The folded log up to commit n. Checked against commit n's digest, so it is never trusted blindly."""

    state: RunState
    commit_digest: str
    run_id: str
    schema: int = SCHEMA


@dataclass(frozen=True)
class HeadHint:
    """Where to start reading: the newest snapshot. A lost or stale hint costs time, never correctness."""

    snapshot: int


def read_format(where: str) -> Steps[RunFormat]:
    """FORMAT.json of the run at `where` (a URL, for errors). Raises NotFoundError; a newer schema is refused."""
    data = yield Get(FORMAT_KEY)
    if data is None:
        raise NotFoundError(f"no run at {where}", hint="list the runs of this directory: diloco runs")
    return parse_format(data, where)


def parse_format(data: bytes, where: str) -> RunFormat:
    plain = decode_plain(data, f"{where}/{FORMAT_KEY}")
    refuse_newer(plain.get("schema"), f"{where}/{FORMAT_KEY}")
    run = decode(RunFormat, data, f"{where}/{FORMAT_KEY}")
    strange = [name for name in (run.name, *(island.name for island in run.everybody)) if not is_name(name)]
    if strange:  # names become parts of keys and of local paths
        raise RecordError(f"{strange[0]!a} is not a name", where=f"{where}/{FORMAT_KEY}")
    return run


def refuse_newer(schema: object, where: str) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordError(
            f"written with schema {schema}; this version reads up to {SCHEMA}",
            where=where,
            hint="pip install --upgrade diloco",
        )


def kept_versions(run: RunFormat) -> int:
    return run.settings.sync.staleness_rounds + 2


def next_commit(run: RunFormat, state: RunState) -> Steps[RunState | None]:
    """The state after commit n+1, or None if there is no such commit yet."""
    key = commit_key(state.n + 1)
    data = yield Get(key)
    return None if data is None else fold(run, state, data)


def fold(run: RunFormat, state: RunState, data: bytes) -> RunState:
    """One more record's bytes, checked and applied."""
    key = commit_key(state.n + 1)
    refuse_newer(decode_plain(data, key).get("schema"), key)
    return apply(state, decode(Commit, data, key), digest(data), run.layout, kept_versions(run))


def read_log(run: RunFormat, state: RunState | None = None) -> Steps[RunState]:
    """The log to its end: from `state`, or from the newest snapshot that holds, or from commit 0."""
    if state is None:
        state = yield from _newest_snapshot(run)
    while True:
        later = yield from next_commit(run, state)
        if later is None:
            return state
        state = later


def _newest_snapshot(run: RunFormat) -> Steps[RunState]:
    hint_data = yield Get(HEAD_HINT_KEY)
    try:
        if hint_data is None:
            return RunState()
        n = decode(HeadHint, hint_data, HEAD_HINT_KEY).snapshot
        if not 0 <= n < MOST:
            return RunState()
        data = yield Get(snapshot_key(n))
        commit = yield Get(commit_key(n))
        if data is None or commit is None:
            return RunState()
        snapshot = decode(Snapshot, data, snapshot_key(n))
    except RecordError:
        return RunState()  # damaged: an older start is slower, never wrong
    holds = snapshot.run_id == run.run_id and snapshot.state.n == n and snapshot.commit_digest == digest(commit)
    return snapshot.state if holds else RunState()


def write_snapshot(run: RunFormat, state: RunState) -> Steps[None]:
    snapshot = Snapshot(state, state.digest, run.run_id)
    yield Create(snapshot_key(state.n), encode(snapshot))
    yield Put(HEAD_HINT_KEY, encode(HeadHint(state.n)))


def claim_number(claim: ProcessClaim, first: int, key_of: KeyOf) -> Steps[int]:
    """The first free number from `first` on, now claimed by this process: `incarnation` or `epoch`."""
    number = first
    while True:
        mine = encode(replace(claim, number=number))
        answer = yield Create(key_of(number), mine)
        if isinstance(answer, Created) or answer.data == mine:
            return number
        number += 1


def claim_epoch(claim: ProcessClaim, state: RunState) -> Steps[int]:
    return (yield from claim_number(claim, state.epoch + 1, epoch_key))


def append(run: RunFormat, state: RunState, draft: Commit) -> Steps[tuple[RunState, bool]]:
    """Create the next commit. Returns the new state and whether the record is this draft.

    If another record holds the slot of the log, it is adopted instead; one of a higher epoch ends this syncer:
    FencedError. So after a commit, memory is what the log says, whoever wrote it.
    """
    record = replace(draft, n=state.n + 1, previous=state.digest)
    data = encode(record)
    answer = yield Create(commit_key(record.n), data)
    if isinstance(answer, Created) or answer.data == data:
        return fold(run, state, data), True
    theirs = fold(run, state, answer.data)
    fence(theirs, draft.epoch)
    return theirs, False


def fence(state: RunState, epoch: int) -> None:
    """Raise FencedError if the log has gone on in a higher epoch."""
    if state.epoch > epoch:
        raise FencedError(
            f"epoch {state.epoch} has taken over from epoch {epoch}; nothing was changed",
            hint="this syncer may be forgotten: another one serves the run",
        )
