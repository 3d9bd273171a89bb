"""Reading and writing the commit log and its snapshots. Creating commit n+1 is the only way to change a run's state.

Snapshots hold the folded log after every SNAPSHOT_EVERY commits, so that a log of any age opens fast. They are checked
against the log, and never needed: an older one, or the log from its first commit, gives the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, takewhile
from math import inf
from typing import TypeVar

from msgspec import structs

from diloco_cli.errors import DilocoError, FencedError, NotFoundError, RefusedError, UsageError
from diloco_cli.layout import contradiction_in_layout
from diloco_cli.protocol.log.claims import own_keyring
from diloco_cli.protocol.log.commits import Commit, apply
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    HEAD_HINT_KEY,
    commit_key,
    is_name,
    read_snapshot_key,
    snapshot_key,
)
from diloco_cli.protocol.log.operations import Create, Get, List, Now, Put, Sleep, Steps, together, together_got
from diloco_cli.protocol.log.records import (
    FORMAT_SCHEMA,
    LOOKS,
    MAX_EXACT,
    MAX_RECORD_BYTES,
    SCHEMA,
    RecordError,
    RunFormat,
    create_signed,
    decode,
    encode,
    read_signed,
    record_digest,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import (
    KEY_HINT,
    LOG,
    OPERATOR,
    Checksummed,
    Keyring,
    Secret,
    Signature,
    SignatureError,
    body_of,
    public_key,
    short_key,
)

T = TypeVar("T")
SNAPSHOT_EVERY = 64
SNAPSHOT_HOLDS = 70_000  # learners x fragments, at some 118 bytes each in a signed run
TRIES = 3  # of the newest snapshots; after that the log is read from commit 0


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


def newest_snapshot(run: RunFormat, beyond: int, before: int = MAX_EXACT) -> Steps[RunState | None]:
    """The newest valid snapshot of a commit > `beyond` and < `before`; None if there is none."""
    numbers = yield from snapshots_between(beyond + 1, before - 1)
    for number in numbers[::-1][:TRIES]:
        state = yield from snapshot_at(run, number)
        if state is not None:
            return state
    return None


def snapshots_between(first: int, last: int) -> Steps[tuple[int, ...]]:
    """Numbers of snapshots in [first, last], rising. From a listing, which may lag and may name invalid snapshots."""
    found: list[int] = []
    after = snapshot_key(first - 1) if first > 0 else ""
    while True:
        keys: list[str] = yield List("snapshot/", after)
        numbers = [number for number in map(read_snapshot_key, keys) if number is not None]
        found += [number for number in numbers if number <= last]
        if not keys or (numbers and numbers[-1] > last):
            return tuple(found)
        after = keys[-1]


def hinted_snapshot(run: RunFormat) -> Steps[RunState]:
    hint_data = yield Get(HEAD_HINT_KEY, MAX_RECORD_BYTES)
    try:
        if hint_data is None:
            return RunState()
        n = decode(HeadHint, hint_data, HEAD_HINT_KEY).snapshot
    except RecordError:
        return RunState()
    return (yield from snapshot_at(run, n)) or RunState()


def snapshot_at(run: RunFormat, n: int) -> Steps[RunState | None]:
    """The state after commit n from its snapshot; None if it is missing or invalid: an older start is slower, never
    wrong. A snapshot of another schema was folded by other rules, and is invalid; so is one that another key signed
    than commit n itself: a syncer writes snapshots of its own commits."""
    if not 0 <= n < MAX_EXACT:
        return None
    data, commit = yield from together_got([snapshot_key(n), commit_key(n)], MAX_RECORD_BYTES)
    if data is None or commit is None:
        return None
    signed = run.keyring.signature(LOG, snapshot_key(n), data)
    if signed is None or signed != run.keyring.signature(LOG, commit_key(n), commit):
        return None
    try:
        snapshot = decode(Snapshot, data, snapshot_key(n))
    except RecordError:
        return None
    same = snapshot.run_id == run.run_id and snapshot.state.n == n and snapshot.schema == SCHEMA
    same = same and signed.public in ("", snapshot.state.epoch_key)
    return snapshot.state if same and snapshot.commit_digest == record_digest(commit) else None


def write_snapshot(run: RunFormat, state: RunState) -> Steps[bool]:
    """Write the snapshot of a state, and the hint to it. False for a state too long for a record: it gets none, and
    readers start from an older one."""
    key = snapshot_key(state.n)
    try:
        data = encode(Snapshot(state, state.digest, run.run_id))
    except RecordError:
        return False
    yield Create(key, run.keyring.sign(LOG, key, data))
    yield Put(HEAD_HINT_KEY, encode(HeadHint(state.n)))
    return True


RESTORE_HINT = (
    "the bucket's owner puts back the earlier version that the bucket keeps, or a region's copy; if there is none and"
    " no later commit, somebody else wrote it: then delete this one object, and the run goes on (diloco bucket-policy)"
)
FORMAT_HINT = (
    "it never changes during a run: a living process of the run puts it back within ten minutes; else the owner of the"
    " bucket puts back its first version, or a region's copy; nothing of the run starts without it"
)
LONG_WAY = 2 * SNAPSHOT_EVERY  # commits read from a snapshot, after which newer snapshots are looked for
LOOK_BACK = 4096  # commits: further back than any two snapshots of one epoch lie apart
AHEAD = 64  # commits that are read at a time by who is far behind
IN_A_LOOK = 16  # and by who has a time limit


BAD_READS_S = 60.0
READS_AGAIN_S = 2.0


Asks = Callable[[DilocoError], Steps[None]]
"""Tells the processes that live which record cannot be read, in case they have it (mending.py)."""


def asks_nobody(error: DilocoError) -> Steps[None]:
    yield from ()


def patiently(read: Callable[[], Steps[T]], asks: Asks = asks_nobody) -> Steps[T]:
    """For a daemon: what is read wrong, as through a broken gateway, is read again for BAD_READS_S before it counts as
    damage."""
    since_s: float = yield Now()
    while True:
        try:
            return (yield from read())
        except (RecordError, SignatureError) as error:
            now_s: float = yield Now()
            if now_s - since_s >= BAD_READS_S:
                raise
            yield from asks(error)
        yield Sleep(READS_AGAIN_S)


def read_format(where: str, secret: Secret | None = None, signs_as: tuple[str, ...] = ()) -> Steps[RunFormat]:
    """FORMAT.json of the run at `where` (a URL, for errors), checked with `secret`. Raises NotFoundError; refuses a
    newer schema and another run's key. `signs_as`: the signers that a daemon needs keys for (see require_keys)."""
    if not signs_as:
        return (yield from _read_format(where, secret))
    run = yield from patiently(lambda: _read_format(where, secret))
    require_keys(run, secret, signs_as, where)
    return run


def _read_format(where: str, secret: Secret | None) -> Steps[RunFormat]:
    data: bytes | None = None
    for _ in range(LOOKS):
        before, data = data, (yield Get(FORMAT_KEY, MAX_RECORD_BYTES))
        if data is None:
            if (yield List("commit/", limit=1)):
                what, place = "missing, though commits of a run lie there", f"{where}/{FORMAT_KEY}"
                raise RecordError(what, where=place, hint=FORMAT_HINT)
            raise NotFoundError(f"no run at {where}", hint="list the runs of this machine: diloco runs")
        if data == before or is_whole(data, where):
            break
    assert data is not None
    try:
        run = with_keys(parse_format(data, where), secret, where)
    except (RecordError, SignatureError) as error:
        error.hint = error.hint or FORMAT_HINT
        raise
    if run.signing is not None and secret is not None and secret.own:
        run = replace(run, keyring=(yield from own_keyring(run.run_id, secret)))
    run.keep(FORMAT_KEY, data)
    return run


def is_whole(data: bytes, where: str) -> bool:
    """Whether these are a format's undamaged bytes."""
    try:
        parse_format(data, where)
    except (RecordError, SignatureError):
        return False
    return True


def parse_format(data: bytes, where: str) -> RunFormat:
    """Raises RecordError for bytes that are damaged or no format, also for a format that ends with a signature although
    its fields say that the run has none: then that field is damaged. A signed format is checked with the operator's key
    that it names itself; `with_keys` says whether that is the right operator."""
    run = decode(RunFormat, data, f"{where}/{FORMAT_KEY}", FORMAT_SCHEMA, oldest=FORMAT_SCHEMA)
    strange = [name for name in (run.name, *(island.name for island in run.all_islands)) if not is_name(name)]
    if strange:  # names become parts of keys and of local paths
        raise RecordError(f"{strange[0]!a} is not a name", where=f"{where}/{FORMAT_KEY}")
    if (wrong := contradiction_in_layout(run.layout)) is not None:
        raise RecordError(f"not the layout of a model: {wrong}", where=f"{where}/{FORMAT_KEY}")
    if run.signing is not None:
        keyring = Keyring(run.run_id, run.signing.operator)
        if not keyring.authenticates(OPERATOR, FORMAT_KEY, data):
            raise SignatureError(f"the run's format {keyring.wrong}", where=f"{where}/{FORMAT_KEY}")
        return replace(run, keyring=keyring)
    checksums = Checksummed(run.run_id)
    signed = run.checksums or body_of(data) != data
    if signed and not (run.checksums and checksums.authenticates(OPERATOR, FORMAT_KEY, data)):
        raise RecordError(f"the run's format {checksums.wrong}", where=f"{where}/{FORMAT_KEY}")
    return replace(run, keyring=checksums) if run.checksums else run


def with_keys(run: RunFormat, secret: Secret | None, where: str) -> RunFormat:
    """The run with the keys that `secret` gives for it. Raises UsageError for another operator's or run's key."""
    if run.signing is None or secret is None:
        return run
    keyring = secret.keyring(run.run_id)
    hint = "give the run's own key (one that was handed over is made for one run), or none to believe FORMAT.json"
    if keyring.operator != run.signing.operator:
        here, named = short_key(keyring.operator), short_key(run.signing.operator)
        what = f"the operator's key {here} is not the one that run {run.name} names: {named}"
        raise UsageError(what, where=secret.where, hint=hint)
    if misfits := keyring.misfits():
        what = f"the key for {misfits[0]} is not the one for run {run.name}: it was made for another run"
        raise UsageError(what, where=secret.where, hint=hint)
    return replace(run, keyring=keyring)


def require_keys(run: RunFormat, secret: Secret | None, signers: tuple[str, ...], where: str) -> None:
    """A process with a key takes no part in an unsigned run: else replacing the format would switch signing off. Raises
    UsageError then, and where the run is signed and a key is missing."""
    if run.signing is None and secret is not None:
        hint = f"start it without {secret.where}, or start a new run, which will be signed"
        raise UsageError("there is a signing key, and this run is not signed", where=where, hint=hint)
    missing = [signer for signer in signers if not run.keyring.holds(signer)]
    if missing:
        what = f"run {run.name} is signed, and this process has no key for {' and '.join(missing)}"
        raise UsageError(what, where=where, hint=missing_hint(secret, where, missing[0]))
    if secret is not None and secret.is_operators and LOG in signers:
        what = "the operator's secret signs no merges: a syncer has a key of its own"
        raise UsageError(
            what, where=secret.where, hint=f"diloco resume {where}, which makes one, or diloco key request"
        )


def missing_hint(secret: Secret | None, where: str, signer: str) -> str:
    """`signer`: one whose key is missing."""
    role, _, name = signer.partition("/")
    role, name = (role, name) if name else ("syncer", "NAME")
    request = f"to make one: diloco key request {where} {role} {name} {name}.key"
    if secret is None:
        return f"{KEY_HINT}; {request}"
    if not secret.own:
        return request
    role, _, name = secret.signers[0].partition("/")
    return f"ask its operator for: diloco key certify {where} {role} {name} {public_key(secret.own)}"


def kept_versions(run: RunFormat) -> int:
    return run.settings.sync.staleness_rounds + 2


def next_commit(run: RunFormat, state: RunState) -> Steps[RunState | None]:
    """The state after commit n+1, or None if there is no such commit yet."""
    data = yield from read_signed(run.keyring, LOG, commit_key(state.n + 1))
    return None if data is None else _folded(run, state, data)


def _folded(run: RunFormat, state: RunState, data: bytes) -> RunState:
    """One more record's bytes as they lie in the bucket, which this process can put back from now on."""
    after = fold(run, state, data)
    run.keep(commit_key(after.n), data)
    return after


def fold(run: RunFormat, state: RunState, data: bytes) -> RunState:
    """One more record's bytes, checked and applied. Raises SignatureError where they are not what a syncer wrote."""
    key = commit_key(state.n + 1)
    by = _written_by(run, key, data)
    with _restorable():
        commit = decode(Commit, data, key, SCHEMA)
    return apply(state, commit, record_digest(data), run.layout, kept_versions(run), by)


def _written_by(run: RunFormat, key: str, data: bytes) -> Signature:
    by = run.keyring.signature(LOG, key, data)
    if by is None:
        what = f"this commit {run.keyring.wrong}; the log cannot go on behind it"
        raise SignatureError(what, where=key, hint=RESTORE_HINT)
    return by


@contextmanager
def _restorable() -> Iterator[None]:
    """Errors in a commit's record say what can be done."""
    try:
        yield
    except RecordError as error:
        error.hint = error.hint or RESTORE_HINT
        raise


def read_log(run: RunFormat, known: RunState | None = None, most_s: float = inf) -> Steps[RunState]:
    """The log to its end: from the state `known`, or from the newest valid snapshot, or from commit 0.

    If the hint is lost or old, or its snapshot damaged, more than LONG_WAY commits follow; then newer snapshots are
    looked for, once. So a log of any age opens with a bounded number of reads. A snapshot does not count whose key the
    log has revoked since, or behind which the log does not go on: the log is read once more without that key's.

    `most_s`: for a look at a slow store; the state is that of an earlier commit where no more were read in time."""
    until_s: float = most_s + (yield Now()) if most_s < inf else inf
    distrusted: set[str] = set()
    start = known
    while True:
        trusting = trusting_none_of(run, distrusted)
        state = (yield from hinted_snapshot(trusting)) if start is None else start
        keys: set[str] = set() if known is not None else {state.epoch_key}
        far = state.n + LONG_WAY
        try:
            for wanted in _portions(AHEAD if most_s == inf else IN_A_LOOK):
                most = min(wanted, far - state.n) if state.n < far else wanted
                read = yield from commits_beyond(run, state.n, most)
                for data in read:
                    state = _folded(run, state, data)
                newer = (yield from newest_snapshot(trusting, -1)) if state.n < 0 else None
                if newer is not None:  # the log's beginning is lost
                    state, keys = newer, keys | {newer.epoch_key}
                    continue
                if len(read) < most or (until_s < inf and (yield Now()) >= until_s):
                    break
                newer = (yield from newest_snapshot(trusting, state.n)) if state.n == far else None
                if newer is not None:
                    state, keys = newer, keys | {newer.epoch_key}
        except (RecordError, SignatureError):
            if state.n < 0 and (newer := (yield from newest_snapshot(trusting, -1))) is not None:
                start = newer  # the log's beginning is damaged
                continue
            if not keys - {""} - distrusted:
                raise
            distrusted |= keys
            start = known
            continue
        if not keys & state.revoked.keys():
            if known is None:
                check_format(run, state)
            return state
        distrusted |= state.revoked.keys()
        start = known


def check_format(run: RunFormat, state: RunState) -> None:
    """Raises RecordError if FORMAT.json, as this process has read it, is not the one that commit 0 names."""
    if state.format and run.format_digest not in ("", state.format):
        what = "not the one that this run began with, which commit 0 names"
        raise RecordError(what, where=FORMAT_KEY, hint=FORMAT_HINT)


def _portions(largest: int) -> Iterator[int]:
    """How many commits to ask for at a time: most often the next one is the last."""
    yield 1
    yield from (min(largest, 1 << doubled) for doubled in count())


def commits_beyond(run: RunFormat, n: int, most: int) -> Steps[list[bytes]]:
    """The records of the commits n+1 to n+`most`, read at the same time, up to the first that is not there."""
    keys = [commit_key(number) for number in range(n + 1, n + 1 + most)]
    read = yield from together([read_signed(run.keyring, LOG, key) for key in keys])
    return list(takewhile(lambda data: data is not None, read))  # type: ignore[arg-type]


def trusting_none_of(run: RunFormat, revoked: Collection[str]) -> RunFormat:
    """To read snapshots with: those that these keys have signed do not count."""
    return replace(run, keyring=run.keyring.without(revoked)) if revoked else run


def append(run: RunFormat, state: RunState, draft: Commit) -> Steps[tuple[RunState, bool]]:
    """Create the next commit. Returns the new state and whether the record is this draft.

    If another record has taken the number, that record is folded instead; one of a higher epoch ends this syncer with
    FencedError. So after every call the returned state is that of the log, also where another syncer wrote the commit.
    """
    refuse_revoked(run, state, LOG)
    record = structs.replace(draft, n=state.n + 1, previous=state.digest)
    key = commit_key(record.n)
    data = run.keyring.sign(LOG, key, encode(record))
    mine = fold(run, state, data)  # before it is written: no process could read past a commit that cannot be folded
    there = yield from create_signed(run.keyring, LOG, key, data)
    if there == data:
        run.keep(key, data)
        return mine, True
    theirs = _folded(run, state, there)
    fence(theirs, draft.epoch)
    return theirs, False


def refuse_revoked(run: RunFormat, state: RunState, role: str) -> None:
    """Raises RefusedError if the key with which this process signs as `role` has been revoked."""
    since = state.revoked.get(run.keyring.public(role)) if state.revoked else None
    if since is not None:
        raise RefusedError(
            f"this machine's key for {role} was revoked by commit {since}",
            where=run.name,
            hint="make another one and have it certified: diloco key request",
        )


def fence(state: RunState, epoch: int) -> None:
    """Raise FencedError if the log has gone on in a higher epoch."""
    if state.epoch > epoch:
        raise FencedError(
            f"epoch {state.epoch} has taken over from epoch {epoch}; nothing was changed",
            hint="this syncer may be forgotten: another one serves the run",
        )


Pulse = Callable[[], Steps[None]]
"""Sends the syncer's heartbeat during long work, so that no standby takes the syncer for dead."""


def no_pulse() -> Steps[None]:
    yield from ()


def state_after(run: RunFormat, n: int, revoked: Collection[str], pulse: Pulse = no_pulse) -> Steps[RunState]:
    """The state after commit n, from the newest valid snapshot up to n by none of the keys that are `revoked` now, else
    from commit 0; `pulse` runs before AHEAD commits are read. Raises NotFoundError if there is no such commit."""
    state = yield from _start(trusting_none_of(run, revoked), n)
    while state.n < n:
        yield from pulse()
        read = yield from commits_beyond(run, state.n, min(AHEAD, n - state.n))
        for data in read or [b""]:
            held = run.kept.get(commit_key(state.n + 1))  # the bucket's may be lost or damaged, and not put back yet
            if held is None and not read:
                raise NotFoundError(f"the log ends at commit {state.n}, before commit {n}", where=commit_key(n))
            state = fold(run, state, data if held is None else held)
    return state


def _start(run: RunFormat, n: int) -> Steps[RunState]:
    recent = yield from snapshots_between(max(0, n - LOOK_BACK), n)
    numbers = recent or (yield from snapshots_between(0, n))
    for number in numbers[::-1][:TRIES]:
        state = yield from snapshot_at(run, number)
        if state is not None:
            return state
    return RunState()
