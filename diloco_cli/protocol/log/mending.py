"""A log that is put back by those who have it: FORMAT.json and the newest commits, which every process holds in memory.

A syncer that begins looks behind the log's end before it writes: a commit there shows that one is missing, and what is
missing must not be taken for the end (`whole_log`). While it waits, its heartbeat says which records it cannot read.

Who holds a record puts it back: one that is missing by a create, so that nothing is ever replaced by it; over a damaged
one, which no process can read, the same bytes (`mended`). A syncer looks at what it holds again and again; others at
what it wants, and while the log stands still, when there may be no syncer, at what all need (`Mender`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from diloco_cli.errors import DilocoError, FencedError
from diloco_cli.protocol.log.commit_log import RESTORE_HINT, is_whole, parse_format, patiently, read_log
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, SyncerHeartbeat, of_syncer
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, commit_key, heartbeat_key, read_commit_key
from diloco_cli.protocol.log.operations import Get, List, Mend, Now, Steps, Undeleted, together
from diloco_cli.protocol.log.records import (
    COMMITS_KEPT,
    LOOKS,
    MAX_RECORD_BYTES,
    SCHEMA,
    RecordError,
    RunFormat,
    decode,
    read_signed,
    record_digest,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import LOG

ASKED_FOR = 8  # commits behind the log's end
LISTED = 64  # keys behind these
NEWEST = 2  # commits, at each look
IN_TURN = 6  # and older ones, so that all are looked at within a minute
LOOKS_EVERY_S = 10.0  # or less often, so that a syncer's looks take no more than
MOST_OF_TIME = 0.01  # of its time
STILL_S = 20.0  # without a commit, or two slots, after which those who only read look at what all need
MOST_WANTED = 16
LOOKS_BACK_EVERY_S = 300.0  # at the oldest commit, which no process of a run deletes
VANISHED = (
    "is gone, and no process of this run deletes commits: look for a rule of the bucket that deletes what is old"
    " (lifecycle, expiration), and end it"
)


class GapError(RecordError):
    """Commits are missing before later ones. `where` is the first of them; `wants` names the first few."""

    code = "gap"
    wants: tuple[str, ...] = ()


def patient_log(run: RunFormat, known: RunState | None = None) -> Steps[RunState]:
    """`read_log` for a daemon. It may have read before what it cannot read now: then it puts that back itself."""

    def asks(error: DilocoError) -> Steps[None]:
        yield from Mender(run).mend(known or RunState(), [error.where or ""])

    return (yield from patiently(partial(read_log, run, known), asks))


def whole_log(run: RunFormat) -> Steps[RunState]:
    """The log to its end, for a process that is going to write behind it. Raises GapError if that is not the end."""
    while True:
        state = yield from read_log(run)
        later = yield from _later_commit(run, state)
        if later is None:
            return state
        if (yield from read_signed(run.keyring, LOG, commit_key(state.n + 1))) is None:
            raise _gap(state.n + 1, later)


def _later_commit(run: RunFormat, state: RunState) -> Steps[int | None]:
    """A commit behind the one that comes next, by the bucket or by the word of the syncer before. The nearest are asked
    for, because a listing may lag."""
    keyring, nearest = run.keyring.without(state.revoked), range(state.n + 2, state.n + 2 + ASKED_FOR)
    listed: list[str] = yield List("commit/", commit_key(nearest[-1]), LISTED)
    numbers: list[int] = [*nearest, *(number for number in map(read_commit_key, listed) if number is not None)]
    read = yield from together([read_signed(keyring, LOG, commit_key(number)) for number in numbers])
    for number, data in zip(numbers, read, strict=True):
        if data is not None and keyring.authenticates(LOG, commit_key(number), data) and _is_commit(number, data):
            return number
    said = yield from heard_from_syncer(run, state)
    return said.n if said is not None and said.n > state.n else None


def _is_commit(number: int, data: bytes) -> bool:
    try:
        return decode(Commit, data, commit_key(number), SCHEMA).n == number
    except RecordError:
        return False


def heard_from_syncer(run: RunFormat, state: RunState) -> Steps[SyncerHeartbeat | None]:
    data: bytes | None = yield Get(heartbeat_key(SYNCER), MAX_HEARTBEAT_BYTES)
    try:
        said = of_syncer(run.keyring.without(state.revoked), data)
        return None if said is None else decode(SyncerHeartbeat, said, heartbeat_key(SYNCER))
    except RecordError:
        return None


def _gap(missing: int, later: int) -> GapError:
    until = f" to {later - 1}" if later - 1 > missing else ""
    what = f"missing, and commit {later} was written after it: {missing}{until} must be put back before the run goes on"
    hint = f"a living learner or standby that has read it puts it back within a minute: end none; else {RESTORE_HINT}"
    error = GapError(what, where=commit_key(missing), hint=hint)
    error.wants = tuple(map(commit_key, range(missing, min(later, missing + MOST_WANTED))))
    return error


def mended(run: RunFormat, state: RunState, key: str) -> Steps[str]:
    """Put a record that this process holds back if it is missing or damaged in the bucket. What was done, for people;
    empty if it is sound, or is not held, or if no commit is left: then somebody has removed the whole run. Raises
    FencedError if another run was begun in its place."""
    mine, there = run.kept.get(key), None
    for _ in range(LOOKS):  # the damage may be in the read
        there = yield Get(key, MAX_RECORD_BYTES)
        if mine is None or there == mine or (there is not None and _is_sound(run, state, key, there)):
            return ""
    assert mine is not None
    if key == FORMAT_KEY and there is not None and _is_another_run(run, there):
        raise FencedError("another run was begun in the place of this one", where=key)
    if there is None and not (yield List("commit/", limit=1)):
        return ""
    how = "was missing" if there is None else "was damaged"
    answer: Undeleted | None = yield Mend(key, mine, there is not None)
    done = "put back" if answer is None else f"cannot be put back by this process: the store has {answer.value} it"
    return f"{key} {how}: {done}"


def _is_another_run(run: RunFormat, data: bytes) -> bool:
    """Not asked by signed runs: whoever may write into the bucket could end their processes so."""
    try:
        return run.signing is None and parse_format(data, FORMAT_KEY).run_id != run.run_id
    except DilocoError:
        return False


def _is_sound(run: RunFormat, state: RunState, key: str, data: bytes) -> bool:
    """Whether these other bytes than one's own may stay. FORMAT.json is what commit 0 names. A commit is sound if its
    writer has signed it, or its checksum fits; only the log's successor could judge between two such."""
    if key == FORMAT_KEY:
        return record_digest(data) == state.format if state.format else is_whole(data, key)
    number = read_commit_key(key)
    return number is not None and run.keyring.authenticates(LOG, key, data) and _is_commit(number, data)


@dataclass
class Mender:
    """Looks whether the records that this process holds are in the bucket. `tell`: takes what it has put back. `wants`:
    of the newest commits, those that it neither holds nor can read."""

    run: RunFormat
    tell: Callable[[str], None] = lambda text: None
    wants: tuple[str, ...] = ()
    _next_s: float = 0.0
    _back_s: float = 0.0
    _turn: int = 0
    _n: int = -1
    _still_since_s: float = 0.0
    _told: str = ""

    def serve(self, state: RunState, now_s: float) -> Steps[None]:
        """The syncer's look: at the format, at the newest commits, and at older ones in turn, or all of them. What it
        does not hold, because it has begun behind it, it reads."""
        if now_s < self._next_s:
            return
        self._back_s = self._back_s or now_s + LOOKS_BACK_EVERY_S
        if now_s >= self._back_s:
            self._back_s = now_s + LOOKS_BACK_EVERY_S
            if (yield Get(commit_key(0), MAX_RECORD_BYTES)) is None:
                self._say(f"{commit_key(0)} {VANISHED}")
        is_fast, self._n = state.n - self._n > NEWEST, state.n
        in_turn = COMMITS_KEPT if is_fast else IN_TURN  # which go out of memory before their turn comes
        ages = {*range(NEWEST), *((self._turn + place) % COMMITS_KEPT for place in range(in_turn))}
        self._turn += in_turn
        keys = [commit_key(state.n - age) for age in sorted(ages) if age <= state.n]
        yield from self.mend(state, [FORMAT_KEY, *keys])
        unknown = [key for key in dict.fromkeys((*keys, *self.wants)) if key not in self.run.kept]
        read = yield from together([read_signed(self.run.keyring, LOG, key) for key in unknown])
        found = dict(zip(unknown, read, strict=True))
        sound = {key: data for key, data in found.items() if data is not None and _is_sound(self.run, state, key, data)}
        for key, data in sound.items():
            self.run.keep(key, data)
        self.wants = tuple(key for key in unknown if key not in sound)[:MOST_WANTED]
        after_s: float = yield Now()
        self._next_s = after_s + max(LOOKS_EVERY_S, (after_s - now_s) / MOST_OF_TIME)

    def follow(self, state: RunState, now_s: float) -> Steps[None]:
        """The look of those who only read: at what the syncer wants; while there is no new commit, at the format and at
        the newest commit, too."""
        if state.n != self._n:
            self._n, self._still_since_s = state.n, now_s
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOKS_EVERY_S
        said = yield from heard_from_syncer(self.run, state)
        wanted = () if said is None else said.wants[:MOST_WANTED]
        slots_s = [island.local_steps * island.step_s / self.run.num_fragments for island in self.run.islands]
        slots_s += [] if state.window is None else [state.window.slot_s]
        is_still = now_s >= self._still_since_s + max(STILL_S, 2 * max(slots_s))
        yield from self.mend(state, [*wanted, *([FORMAT_KEY, commit_key(state.n)] if is_still else ())])

    def mend(self, state: RunState, keys: Sequence[str]) -> Steps[None]:
        held = [key for key in dict.fromkeys(keys) if key in self.run.kept]
        for said in (yield from together([mended(self.run, state, key) for key in held])):
            if said:
                self._say(said)

    def _say(self, text: str) -> None:
        """What this process may not do, or can do nothing about, once."""
        if text != self._told:
            self._told = text
            self.tell(text)
