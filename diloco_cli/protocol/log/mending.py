"""A log that is put back by those who have it: FORMAT.json and the newest commits, which every process holds in memory.

A syncer that begins looks behind the log's end before it writes: a commit there shows that one is missing, and what is
missing must not be taken for the end (`whole_log`). While it waits, its heartbeat says which records it cannot read; a
standby that begins adds its own to that heartbeat, as there may be no syncer left to say it.

Who holds a record puts it back: one that is missing by a create, so that nothing is ever replaced by it; over a damaged
one, which no process can read, the same bytes. A syncer looks at what it holds again and again; others at what it
wants, and while the log stands still, when there may be no syncer, or one that waits for an offer that is lost, at what
all need and at their own offers (`Mender`).

The folder of a living run may be moved or removed, and another run begun in its place. So FORMAT.json is looked at
first, and alone: nothing is put back unless the bucket is this run's, by FORMAT.json or by most of the newest commits.
What is missing is put back only where most of these are there, or where a syncer wants it, and FORMAT.json only while
commit 0 is there, too: else the run was removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from types import MappingProxyType

from diloco_cli.errors import DilocoError, FencedError
from diloco_cli.protocol.log.commit_log import RESTORE_HINT, Asks, asks_nobody, parse_format, patiently, read_log
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, SyncerHeartbeat, of_syncer
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, commit_key, heartbeat_key, read_commit_key
from diloco_cli.protocol.log.operations import Get, List, Mend, Now, Steps, Undeleted, together, together_got
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
RECENT = 48  # commits that are looked at; more are kept, so that those of before the last look still are
NEWEST = 2  # of them at each look
IN_TURN = 8  # and older ones, so that all are looked at within a minute
LOOKS_EVERY_S = 10.0  # or less often, so that a syncer's looks take no more than
MOST_OF_TIME = 0.01  # of its time
MOST_APART = 8  # slots, but LOOKS_EVERY_S at least: learners that cannot read a commit wait for the next look
MOST_APART_S = 60.0  # also after a look that waited for its store
STILL_S = 20.0  # without a commit, or two slots, after which those who only read look at what all need
MOST_WANTED = 16
LOOKS_BACK_EVERY_S = 300.0  # at the oldest commit, which no process of a run deletes
LOG_SHOWN_BY = 8  # commits
EMPTIED_S = 600.0  # after which a bucket that is being emptied has nothing left of before
REMOVED = (
    "and commit 0 or most of the newest commits are gone: somebody seems to have moved or removed the run, so nothing"
    " is put back; if nobody has, look for a rule of the bucket that deletes what is old: what later commits show to"
    " be this run's gets its FORMAT.json again after ten minutes, else the bucket's owner puts back earlier versions"
)
MOVED_HINT = "the run of this process was moved or removed; where it lies now it goes on by: diloco resume URL"
VANISHED = (
    "is gone, and no process of this run deletes commits: look for a rule of the bucket that deletes what is old"
    " (lifecycle, expiration), and end it"
)


def records_per_look(slot_s: float) -> int:
    """How many records a syncer looks at each LOOKS_EVERY_S: the format, and recent commits, in turn or, where many are
    new, all that were recent at the look before."""
    if NEWEST * slot_s >= LOOKS_EVERY_S:
        return 1 + NEWEST + IN_TURN
    return 1 + min(COMMITS_KEPT, RECENT + ceil(LOOKS_EVERY_S / slot_s) if slot_s > 0 else COMMITS_KEPT)


class GapError(RecordError):
    """Commits are missing before later ones. `where` is the first of them; `wants` names the first few."""

    code = "gap"
    wants: tuple[str, ...] = ()


def wanted_by(error: DilocoError) -> tuple[str, ...]:
    """The keys of the records that could not be read."""
    return error.wants if isinstance(error, GapError) else (error.where or "",)


def patient_log(run: RunFormat, known: RunState | None = None, asks: Asks = asks_nobody) -> Steps[RunState]:
    """`read_log` for a daemon. It may have read before what it cannot read now: then it puts that back itself, and else
    `asks`. The log of a `run` with members ends nowhere before their admission."""
    mender = Mender(run)

    def whole() -> Steps[RunState]:
        state = yield from read_log(run, known)
        if len(state.members) < len(run.members):
            raise _gap(state.n + 1, max(filter(None, map(read_commit_key, run.kept)), default=state.n + 1), -1)
        return state

    def mends_or_asks(error: DilocoError) -> Steps[None]:
        yield from mender.mend(known or RunState(), wanted=wanted_by(error))
        yield from asks(error)

    return (yield from patiently(whole, mends_or_asks))


def whole_log(run: RunFormat) -> Steps[RunState]:
    """The log to its end, for a process that is going to write behind it. Raises GapError if that is not the end."""
    while True:
        state = yield from read_log(run)
        later = yield from _later_commit(run, state)
        said = (yield from heard_from_syncer(run, state)) if later is None else None
        if later is None and (said is None or said.n <= state.n):
            return state
        if (yield from read_signed(run.keyring, LOG, commit_key(state.n + 1))) is None:
            raise _gap(state.n + 1, later, -1 if said is None else said.n)


def _later_commit(run: RunFormat, state: RunState) -> Steps[int | None]:
    """A commit in the bucket behind the one that comes next. The nearest are asked for, because a listing may lag."""
    keyring, nearest = run.keyring.without(state.revoked), range(state.n + 2, state.n + 2 + ASKED_FOR)
    listed: list[str] = yield List("commit/", commit_key(nearest[-1]), LISTED)
    numbers: list[int] = [*nearest, *(number for number in map(read_commit_key, listed) if number is not None)]
    read = yield from together([read_signed(keyring, LOG, commit_key(number)) for number in numbers])
    for number, data in zip(numbers, read, strict=True):
        if data is not None and keyring.authenticates(LOG, commit_key(number), data) and _is_commit(number, data):
            return number
    return None


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


def _gap(missing: int, later: int | None, said: int) -> GapError:
    """`later`: a commit that lies behind it in the bucket; if there is none, the syncer before has `said` one."""
    hint = f"a living learner or standby that has read it puts it back within a minute: end none; else {RESTORE_HINT}"
    if later is None:
        later = said
        hint += (
            "; or, if the log was put back from an older copy and what came after it is lost for good: end its syncers"
            f" and standbys, remove {heartbeat_key(SYNCER)}, which alone tells of these commits, and start again"
        )
    until = f" to {later - 1}" if later - 1 > missing else ""
    what = f"missing, and commit {later} was written after it: {missing}{until} must be put back before the run goes on"
    error = GapError(what, where=commit_key(missing), hint=hint)
    error.wants = tuple(map(commit_key, range(missing, min(later, missing + MOST_WANTED))))
    return error


def _harm(run: RunFormat, state: RunState, key: str, mine: bytes) -> Steps[tuple[str, bytes | None]]:
    """What is wrong with a record that this process holds: "missing", "damaged", or "". And its bytes there."""
    there: bytes | None = None
    for _ in range(LOOKS):  # the damage may be in the read
        there = yield Get(key, MAX_RECORD_BYTES)
        if there == mine or (there is not None and _is_sound(run, state, key, there)):
            return "", there
    return ("missing" if there is None else "damaged"), there


def _is_sound(run: RunFormat, state: RunState, key: str, data: bytes) -> bool:
    """Whether these other bytes than one's own may stay. FORMAT.json is what commit 0 names. A commit is sound if its
    writer has signed it, or its checksum fits; only the log's successor could judge between two such."""
    if key == FORMAT_KEY:
        named, other = state.format, _format_in(data)
        return record_digest(data) == named if named else other is not None and other.run_id == run.run_id
    number = read_commit_key(key)
    return number is not None and run.keyring.authenticates(LOG, key, data) and _is_commit(number, data)


def _format_in(data: bytes | None) -> RunFormat | None:
    try:
        return None if data is None else parse_format(data, FORMAT_KEY)
    except DilocoError:
        return None


@dataclass
class Mender:
    """Looks whether the records that this process holds are in the bucket. `tell`: takes what it has put back, or why
    nothing. `wants`: of the newest commits, those that it neither holds nor can read."""

    run: RunFormat
    tell: Callable[[str], None] = lambda text: None
    wants: tuple[str, ...] = ()
    _next_s: float = 0.0
    _back_s: float = 0.0
    _turn: int = 0
    _n: int = -1
    _still_since_s: float = 0.0
    _formless_since_s: float = inf
    _formed_n: int = -1
    _told: set[str] = field(default_factory=set)

    def serve(self, state: RunState, now_s: float) -> Steps[None]:
        """The syncer's look: at the format, at the newest commits, and at recent ones in turn, or all of them. What it
        does not hold, because it has begun behind it, it reads."""
        if now_s < self._next_s:
            return
        self._back_s = self._back_s or now_s + LOOKS_BACK_EVERY_S
        if now_s >= self._back_s:
            self._back_s = now_s + LOOKS_BACK_EVERY_S
            if (yield Get(commit_key(0), MAX_RECORD_BYTES)) is None:
                self._say(f"{commit_key(0)} {VANISHED}")
        num_new, self._n = state.n - self._n, state.n
        ages = {*range(NEWEST), *((self._turn + place) % RECENT for place in range(IN_TURN))}
        self._turn += IN_TURN
        if num_new > NEWEST:
            ages = {*range(min(COMMITS_KEPT, RECENT + num_new))}  # some would grow too old before their turn comes
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
        most_s = min(MOST_APART_S, MOST_APART * self._slot_s(state))
        self._next_s = after_s + max(LOOKS_EVERY_S, min(most_s, (after_s - now_s) / MOST_OF_TIME))

    def follow(self, state: RunState, now_s: float, own: Callable[[], Mapping[str, bytes]] = dict) -> Steps[None]:
        """The look of those who only read: at what the syncer wants; while there is no new commit, at the format, the
        newest commit and their `own` records, too."""
        if state.n != self._n:
            self._n, self._still_since_s = state.n, now_s
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOKS_EVERY_S
        said = yield from heard_from_syncer(self.run, state)
        wanted = () if said is None else said.wants[:MOST_WANTED]
        is_still = now_s >= self._still_since_s + max(STILL_S, 2 * self._slot_s(state))
        if is_still:
            yield from self.mend(state, [FORMAT_KEY, commit_key(state.n)], wanted, own())
        else:
            yield from self.mend(state, wanted=wanted)

    def _slot_s(self, state: RunState) -> float:
        """As merges show it, else as it was planned."""
        if state.window is not None and state.window.slot_s > 0:
            return state.window.slot_s
        return max(i.local_steps * i.step_s for i in self.run.islands) / self.run.num_fragments

    def mend(
        self,
        state: RunState,
        keys: Sequence[str] = (),
        wanted: Sequence[str] = (),
        own: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Steps[None]:
        """Put back what this process holds of these records, and before them FORMAT.json. `wanted`: by one who cannot
        read them; `own`: which nobody else writes. Raises FencedError if another run was begun in the place of this
        one."""
        if not (keys or wanted) or FORMAT_KEY not in self.run.kept or not (yield from self._is_here(state)):
            return
        asked = {key: self.run.kept.get(key) for key in (*wanted, *keys) if key != FORMAT_KEY}
        held = {**own, **{key: mine for key, mine in asked.items() if mine is not None}}
        found = yield from together([_harm(self.run, state, key, mine) for key, mine in held.items()])
        harms = {key: harm for key, (harm, _) in zip(held, found, strict=True) if harm}
        vanished = [key for key, harm in harms.items() if harm == "missing" and key not in wanted]
        if vanished and not (yield from self._has_log()):
            self._say(f"records are missing, {REMOVED}")
            harms = {key: harm for key, harm in harms.items() if key not in vanished}
        yield from together([self._put_back(key, held[key], harm) for key, harm in harms.items()])

    def _is_here(self, state: RunState) -> Steps[bool]:
        """Whether the bucket is this run's. A FORMAT.json that is missing may be the first object that goes of many: it
        is put back only where it was missing at a look before, too, and commit 0 is still there: who empties a bucket
        does not end the processes first, and these go on writing commits. A rule that deletes what is old takes both at
        once: then if the commit that was the newest while FORMAT.json was there is left after `EMPTIED_S`."""
        mine, own = self.run.kept[FORMAT_KEY], self.run.signing
        harm, there = yield from _harm(self.run, state, FORMAT_KEY, mine)
        now_s: float = yield Now()
        self._formless_since_s = min(self._formless_since_s, now_s) if harm == "missing" else inf
        if not harm:
            self._formed_n = state.n
            return True
        is_removed = harm == "missing" and (yield Get(commit_key(0), MAX_RECORD_BYTES)) is None
        if is_removed and self._formed_n > 0 and now_s >= self._formless_since_s + EMPTIED_S:
            is_removed = (yield Get(commit_key(self._formed_n), MAX_RECORD_BYTES)) is None
        if not is_removed and (yield from self._has_log()):
            if harm == "missing" and now_s < self._formless_since_s + LOOKS_EVERY_S:
                return False
            return (yield from self._put_back(FORMAT_KEY, mine, harm))
        other = _format_in(there)
        if other is not None and other.run_id != self.run.run_id:
            if own is None or (other.signing is not None and other.signing.operator == own.operator):
                raise FencedError("another run was begun in the place of this one", where=FORMAT_KEY, hint=MOVED_HINT)
            harm = "another run's, not signed by this one's operator"  # else whoever may write could end the processes
        if len(self.run.kept) > 1:  # commits, too
            self._say(f"{FORMAT_KEY} is {harm}, {REMOVED}")
        return False

    def _has_log(self) -> Steps[bool]:
        """Whether most of the newest commits that this process holds lie in the bucket. One of several shows nothing:
        this process may just have written it, into whatever lies there now."""
        newest = sorted(item for item in list(self.run.kept.items()) if item[0] != FORMAT_KEY)[-LOG_SHOWN_BY:]
        read = yield from together_got([key for key, _ in newest], MAX_RECORD_BYTES)
        there = sum(data == mine for data, (_, mine) in zip(read, newest, strict=True))
        return 2 * there > len(newest)

    def _put_back(self, key: str, mine: bytes, harm: str) -> Steps[bool]:
        answer: Undeleted | None = yield Mend(key, mine, harm == "damaged")
        if answer is None:
            self.tell(f"{key} was {harm}: put back")
        else:
            self._say(f"{key} was {harm}: cannot be put back by this process: the store has {answer.value} it")
        return answer is None

    def _say(self, text: str) -> None:
        """What this process may not do, or can do nothing about, once."""
        if text not in self._told:
            self._told.add(text)
            self.tell(text)
