"""The guarantees that a run rests on, proved before a run uses a store: one small check each, tried below a fresh
random prefix that is empty again afterwards. Two clients are two sessions, as two machines have.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from diloco_cli import clock
from diloco_cli.clock import seconds_of
from diloco_cli.errors import DilocoError, NoSpaceError, StoreError
from diloco_cli.quantities import format_bandwidth, format_duration, format_size
from diloco_cli.randomness import nonce
from diloco_cli.store.bucket import BucketStore, Retention
from diloco_cli.store.open import open_store
from diloco_cli.store.port import (
    Created,
    Exists,
    ObjectStat,
    Store,
    StoreBrokenError,
    StoreForbiddenError,
    StoreGoneError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import Retrying, RetryingStore
from diloco_cli.store.url import StoreKind, parse_url
from diloco_cli.store.wrappers import Deadline, PrefixedStore, StoreWrapper, TimeBoxedStore, call_within

CLEAN_UP_S = 6.0
RACE_BYTES = 2000
GET_READY_S = 10.0
CLEANERS = 8
UNHURRIED_S = 600.0
SIZES = (0, 1, 64, 100_000, 1_000_000)
TORN_BYTES = 4_000_000
LISTED = 20
LISTING_PATIENCE_S = 5.0
LOOK_AGAIN_S = 0.1
TOLERATED_SKEW_S = 5.0
SIGNING_SKEW_S = 300.0
T = TypeVar("T")
Level = Literal["pass", "warn", "fail", "skip"]
"""warn: a run works, and a person should know. skip: the check does not apply here, or could not be tried because an
earlier one failed."""
USE_ANOTHER = "no run is safe here: use a store that keeps what it confirmed (GCS, S3, Azure, a local directory)"
NO_CACHES = "switch off caches before the store"
DAY_S = 86_400.0
STORAGE_PRICE_PER_GB_MONTH = 0.02
"""US dollars; standard storage in the cheaper regions of the public price lists."""
EXAMPLE_GB_PER_DAY = 100.0
SMALL_READS = 11
FIRST_BYTES = 1_000_000
GROWTH = 4
LONG_ENOUGH_S = 1.0
"""An object that takes this long is large enough: larger ones are not tried."""
SLOWER_BY = 12.0
"""The next size up may take `GROWTH` times as long, thrice (up, down, clean-up): not begun with less time left."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    detail: str
    hint: str = ""


def passed(detail: str) -> Finding:
    return Finding("pass", detail)


def warned(detail: str, hint: str = "") -> Finding:
    return Finding("warn", detail, hint)


def skipped(detail: str) -> Finding:
    return Finding("skip", detail)


class PromiseBrokenError(Exception):
    """The store does not keep what a run rests on: the check has failed."""

    def __init__(self, detail: str, hint: str) -> None:
        super().__init__(detail)
        self.finding = Finding("fail", detail, hint)


def demand(holds: bool, otherwise: str, hint: str = USE_ANOTHER) -> None:
    if not holds:
        raise PromiseBrokenError(otherwise, hint)


class Place:
    """Hands out clients that are limited to the prefix. Every key is noted before it is written, and the noted keys are
    deleted in the end; keys from listings are never deleted."""

    def __init__(self, open_again: Callable[[], Store], url: str, box: Deadline | None = None) -> None:
        self.prefix = f"doctor-{nonce()}"
        self.box = box or Deadline(UNHURRIED_S)
        self.url = url
        self.num_repeated, self.last_trouble = 0, ""
        self.open_again = open_again
        self._lock = threading.Lock()
        self._closed = False
        self._keys: set[str] = set()
        self._sessions: list[Store] = []
        self.store = self.client(0)

    def client(self, number: int = 1, *, patient: bool = True) -> Store:
        """One of several clients, each a session of its own like that of another machine; `store` is number 0. Calls
        with transient errors are repeated, as in a run, as long as the check has time, unless it is not patient.
        Sessions are kept: some clients take half a second to start."""
        with self._lock:
            while len(self._sessions) <= number:
                self._sessions.append(TimeBoxedStore(self.open_again(), self.box, keeps_trying=True))
            session = self._sessions[number]
        if patient:
            session = RetryingStore(session, math.inf, left_s=self.box.left_s, on_retry=self._note)
        return _Announced(PrefixedStore(session, self.prefix), self.noted)

    def noted(self, key: str) -> None:
        """Before each write. Raises StoreUnavailableError once the clean-up has begun: an interrupted race must not
        write behind its back."""
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the examination is over")
            self._keys.add(key)

    def clean_up(self, seconds: float = CLEAN_UP_S) -> list[str]:
        """Deletes all that was written; the keys that could not be deleted."""
        self.box.restart(seconds)
        with self._lock:
            self._closed = True
            left = sorted(self._keys)
        with ThreadPoolExecutor(CLEANERS) as pool:
            stuck = [key for key, is_gone in zip(left, pool.map(self._is_deleted, left), strict=True) if not is_gone]
        parsed = parse_url(self.url)
        if parsed.scheme == "file":  # which keeps empty directories
            shutil.rmtree(Path(parsed.place) / self.prefix, ignore_errors=True)
        return [f"{self.prefix}/{key}" for key in stuck]

    def _is_deleted(self, key: str) -> bool:
        try:
            self.store.delete(key)
        except StoreGoneError:
            return True  # without a bucket nothing was written
        except DilocoError:
            return False
        return True

    def _note(self, retrying: Retrying) -> None:
        with self._lock:
            self.num_repeated += 1
            self.last_trouble = retrying.last_error


class _Announced(StoreWrapper):
    """A store that notes each key before it writes it."""

    def __init__(self, store: Store, noted: Callable[[str], None]) -> None:
        super().__init__(store)
        self._noted = noted

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        if verb in ("create", "put"):
            self._noted(key)
        return call()


def noise(seed: str, num_bytes: int) -> bytes:
    """Random-looking bytes, the same for the same seed: bytes that compress or repeat could make a link look faster."""
    return hashlib.shake_128(seed.encode()).digest(num_bytes)


def write(place: Place) -> Finding:
    """Objects of several sizes can be created at all."""
    for size in SIZES:
        created = place.store.create(f"size/{size}", noise(f"size {size}", size))
        demand(created == Created(), f"a new object of {format_size(size)} is said to exist already")
    return passed(f"{len(SIZES)} objects, the largest {format_size(max(SIZES))}")


def read_back(place: Place, rounds: int) -> Finding:
    """A confirmed object can be read at once and whole, by another client too; a partly written one cannot be read."""
    reader = place.client()
    for size in SIZES:
        is_same = reader.get(f"size/{size}") == noise(f"size {size}", size)
        demand(is_same, f"an object of {format_size(size)} came back different")
    for number in range(rounds):
        key, data = f"poll/{number:04d}", noise(f"poll {number}", 1000)
        demand(reader.get(key) is None, "an object is there before it was created")
        place.store.create(key, data)
        found = reader.get(key)  # which it asked for before: a client or proxy that remembers "absent" fails here
        what = "is not there" if found is None else "is different"
        demand(found == data, f"an object {what} right after it was created (round {number + 1} of {rounds})")
    may_overwrite = _check_overwriting(place, reader)
    _check_for_torn_objects(place, reader)
    detail = f"{rounds} objects at once, none torn"
    if not may_overwrite:
        return warned(f"{detail}; these credentials may not overwrite", "without it no heartbeats, and no `status`")
    return passed(detail)


def _check_overwriting(place: Place, reader: Store) -> bool:
    """Hints and heartbeats are overwritten; readers see the newest. False without the permission, where nothing is
    checked; a limit of one write a second is no fault."""
    with suppress(StoreUnavailableError):
        for data in (b"first", b"second"):
            try:
                place.client(0, patient=False).put("hint/overwritten", data)
            except StoreForbiddenError:
                return False
            found = reader.get("hint/overwritten")
            demand(found == data, "an overwritten object still has its old bytes", NO_CACHES)
    return True


def _check_for_torn_objects(place: Place, reader: Store) -> None:
    """A client that reads all the time while a large object is created gets nothing, then all of it."""
    whole, seen, done = noise("torn", TORN_BYTES), list[int](), threading.Event()

    def look() -> None:
        with suppress(DilocoError):  # no finding: the object is read afterwards
            while not done.is_set() and not seen:
                found = reader.get("torn/object")
                seen.extend([] if found is None or found == whole else [len(found)])

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        place.store.create("torn/object", whole)
    finally:
        done.set()
        watcher.join(place.box.left_s())
    size = format_size(TORN_BYTES)
    demand(reader.get("torn/object") == whole, f"an object of {size} came back different")
    demand(not seen, f"a reader saw {format_size(sum(seen))} of an object of {size}")


@dataclass(frozen=True)
class RaceAnswer:
    """One racer's answer: whether it won, and the bytes that the key holds. `trouble`: why it got no answer."""

    won: bool
    holder: bytes = b""
    trouble: str = ""


def answer_to(store: Store, key: str, entry: bytes) -> RaceAnswer:
    """One racer's turn."""
    try:
        outcome = store.create(key, entry)
    except DilocoError as error:
        return RaceAnswer(False, trouble=str(error))
    return RaceAnswer(True, entry) if isinstance(outcome, Created) else RaceAnswer(False, outcome.data)


def fault_of_round(entries: Sequence[bytes], answers: Sequence[RaceAnswer], final: bytes | None) -> str:
    """The error of one round, empty if there is none. `entries`: each racer's bytes; `final`: the key's bytes when all
    racers have their answers."""
    told = [(entry, answer) for entry, answer in zip(entries, answers, strict=True) if not answer.trouble]
    winners = [entry for entry, answer in told if answer.won]
    if len(winners) > 1:
        return f"{len(winners)} of {len(entries)} racers were told that they had created the same object"
    if final is None:
        return "the object that was created is not there"
    if final not in entries:
        return "the object holds bytes that no racer wrote"
    if winners and winners[0] != final:
        return "the object holds a loser's bytes"
    if not winners and len(told) == len(entries):
        return "no racer was told that it had created the object"
    if any(answer.holder != final for _, answer in told if not answer.won):
        return "a loser was shown other bytes than the winner's"
    return ""


def exclusive_create(place: Place, racers: int, rounds: int) -> Finding:
    """Of all racers that create a key at one time, each through a client of its own, exactly one wins, and all agree on
    it."""
    clients = [place.client(number) for number in range(racers)]
    wrong = []
    for number in range(rounds):
        key = f"race/{number:04d}"
        entries = [f"racer {me} of {key} ".encode() + noise(f"{key} {me}", RACE_BYTES) for me in range(racers)]
        answers = _race(clients, key, entries)
        fault = fault_of_round(entries, answers, place.store.get(key))
        wrong += [fault] if fault else []
        if all(answer.trouble for answer in answers):  # no racer got an answer, so the round proves nothing
            raise StoreUnavailableError(answers[0].trouble)
    demand(not wrong, f"{racers} racers: {len(wrong)} of {rounds} rounds went wrong: {wrong[0] if wrong else ''}")
    return passed(f"{racers} racers, {rounds} rounds: one winner each")


def _race(clients: Sequence[Store], key: str, entries: Sequence[bytes]) -> list[RaceAnswer]:
    """Let all clients create the key at once."""
    gun = threading.Barrier(len(clients))

    def run(client: Store, entry: bytes) -> RaceAnswer:
        gun.wait(GET_READY_S)
        return answer_to(client, key, entry)

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(run, clients, entries))


def own_write(place: Place) -> Finding:
    """A repeated create whose first answer was lost counts as a success; a create of other bytes never does."""
    data = noise("own", 2000)
    created = [place.store.create("own/repeated", data) for _ in range(2)]
    demand(created == [Created()] * 2, "repeating one's own create is answered as if another writer had made it")
    deaf = RetryingStore(_LosesTheFirstAnswer(place.store), place.box.left_s(), left_s=place.box.left_s)
    is_own = deaf.create("own/lost", data) == Created()
    demand(is_own, "a create whose answer was lost is taken for another writer's")
    other = place.client().create("own/lost", data[::-1])
    demand(other == Exists(data), "another's create of the same name was not refused")
    demand(place.store.get("own/lost") == data, "a refused create has changed the object")
    return passed("a repeated create and one whose answer was lost are known as one's own")


class _LosesTheFirstAnswer(StoreWrapper):
    """The first create takes effect, and its answer is lost."""

    _lost = False

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        outcome = call()
        if not self._lost:
            self._lost = True
            raise StoreUnavailableError("the answer was lost on purpose")
        return outcome


def list_after_write(place: Place, objects: int = LISTED) -> Finding:
    """New keys are listed, in order, page by page. Decisions do not depend on listings; tools and clean-up do."""
    keys = [f"list/{number:04d}" for number in range(objects)]
    for key in keys:
        place.store.create(key, key.encode())
    reader = place.client()
    waited_s = _seconds_until(lambda: reader.list("list/") == keys, min(LISTING_PATIENCE_S, place.box.left_s() / 2))
    if waited_s is None:
        shown = len(set(reader.list("list/")) & set(keys))
        late = f"{shown} of {objects} new objects are listed after {LISTING_PATIENCE_S:.0f} s"
        raise PromiseBrokenError(late, USE_ANOTHER)
    half = objects // 2
    pages = reader.list("list/", limit=half), reader.list("list/", after=keys[half - 1])
    wrong = "a listing does not start behind the key, or end at the limit, that it was given"
    demand(pages == (keys[:half], keys[half:]), wrong)
    if waited_s > 0:
        return warned(f"{objects} objects, listed only after {format_duration(waited_s)}")
    return passed(f"{objects} objects, at once and in order")


def range_read(place: Place) -> Finding:
    """Parts of an object are exactly those parts."""
    data = noise("range", 300_000)
    size = len(data)
    place.store.create("range/object", data)
    wanted = [(0, 10), (0, size), (123_456, 234_567), (size - 5, size), (size - 5, size + 100), (size + 10, size + 20)]
    for start, end in wanted:
        found = place.store.get_range("range/object", start, end)
        told = "nothing" if found is None else f"{len(found)} bytes"
        demand(found == data[start:end], f"bytes {start} to {end} of {size} came back wrong ({told})")
    absent = place.store.get_range("range/absent", 0, 10)
    demand(absent is None, "a part of an object that does not exist came back as bytes")
    return passed(f"{len(wanted)} ranges, also over and behind the end")


def delete(place: Place) -> Finding:
    """No client can read a deleted object; deleting a missing one is no error."""
    reader = place.client()
    place.store.create("delete/object", b"gone soon")
    reader.get("delete/object")
    try:
        place.store.delete("delete/object")
        place.store.delete("delete/object")
    except StoreForbiddenError:
        return warned("these credentials may not delete", "a learner need not; a syncer and `diloco gc` must")
    is_gone = reader.get("delete/object") is None and reader.stat("delete/object") is None
    demand(is_gone, "a deleted object can still be read", NO_CACHES)
    waited_s = _seconds_until(lambda: not reader.list("delete/"), min(LISTING_PATIENCE_S, place.box.left_s() / 2))
    demand(waited_s is not None, "a deleted object is still listed")
    return passed("gone at once; deleting nothing is no error")


def clock_skew(place: Place) -> Finding:
    """The store's clock against this machine's. Only ages shown to people and signatures of requests depend on it."""
    before_s = clock.wall_s()
    place.store.create("clock/now", b"tick")
    found = place.store.stat("clock/now")
    after_s = clock.wall_s()
    if found is None:
        raise PromiseBrokenError("an object that was just created has no description", USE_ANOTHER)
    return skew_finding(found, before_s, after_s)


def skew_finding(found: ObjectStat, before_s: float, after_s: float) -> Finding:
    """The object was written between two times of this machine's clock; if the store's time lies outside of them, the
    clocks differ by at least that distance."""
    ahead_s = found.modified_s - after_s if found.modified_s > after_s else min(0.0, found.modified_s - before_s)
    size = abs(ahead_s)
    if size <= TOLERATED_SKEW_S:
        return passed(f"the store's clock is within {max(size, 1.0):.0f} s of this machine's")
    detail = f"the store's clock is {format_duration(size)} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    why = "requests signed so far off are refused" if size > SIGNING_SKEW_S else "ages in `status` will be off"
    return warned(detail, f"{why}: let this machine's clock be set from the network (chrony, systemd-timesyncd)")


def _seconds_until(holds: Callable[[], bool], patience_s: float) -> float | None:
    """Seconds until the condition held, 0 if it held at the first look, None if it did not in time."""
    started_s = clock.monotonic_s()
    if holds():
        return 0.0
    while clock.monotonic_s() - started_s < patience_s:
        clock.sleep_s(LOOK_AGAIN_S)
        if holds():
            return clock.monotonic_s() - started_s
    return None


def retention(place: Place, written_gb_per_day: float | None) -> Finding:
    """How long the bucket keeps deleted objects. `written_gb_per_day`: what a run would write there."""
    key = "retention/object"
    place.noted(key)
    found = _setting(place, lambda store: store.retention(f"{place.prefix}/{key}"), "it keeps what is deleted")
    return found if isinstance(found, Finding) else retention_finding(found, written_gb_per_day)


def expiry(place: Place) -> Finding:
    """Whether rules of the bucket delete what is there: a run needs its log until it is over."""
    found = _setting(place, lambda store: store.expiry(), "its rules delete what is old")
    if isinstance(found, Finding):
        return found
    if not found:
        return passed("no rule of the bucket deletes what is there")
    hint = "end it, or keep the runs' prefix out of it: a run needs its log and its newest versions until it is over"
    return warned(f"a rule of the bucket (lifecycle) deletes what is there: {found}", hint)


def _setting(place: Place, ask: Callable[[BucketStore], T | None], what: str) -> T | Finding:
    """To read a bucket's settings takes a permission that a run does not need: without it a check is skipped."""
    store = place.open_again()
    if not isinstance(store, BucketStore):
        return passed("what is deleted is gone, and nothing else")
    try:
        found = call_within(place.box, lambda: ask(store), place.url)
    except StoreForbiddenError:
        return skipped("these credentials may not read the bucket's settings")
    except StoreError as error:
        return skipped(f"the bucket does not tell: {error}")
    return skipped(f"the service does not tell whether {what}") if found is None else found


def retention_finding(retention: Retention, written_gb_per_day: float | None) -> Finding:
    """A run that collects its garbage deletes about as much as it writes, so the bucket also holds, and bills, the data
    written in `kept_s`."""
    if retention.kept_s == 0:
        return passed("what is deleted is gone, and not billed")
    hint = f"a run deletes nearly all that it writes; to turn it off: {retention.turn_off}"
    if retention.kept_s is None:
        return warned("what is deleted stays, and is billed, until it is removed for good", hint)
    kept = f"what is deleted is kept, and billed, for {format_duration(retention.kept_s)}"
    gb_per_day = EXAMPLE_GB_PER_DAY if written_gb_per_day is None else written_gb_per_day
    monthly = gb_per_day * retention.kept_s / DAY_S * STORAGE_PRICE_PER_GB_MONTH
    what = "each 100 GB a day that a run writes"
    if written_gb_per_day is not None:
        what = f"this run's {format_size(1e9 * written_gb_per_day)} a day"
    return warned(f"{kept}: ${monthly:,.2f} a month for {what}", hint)


CHECK_S = 12.0
CHECK_SHARE = 0.25
"""One check has its own limit, or this share of the time for all checks if that is more (slow links)."""
HOPELESS_S = 2.0
"""For the clean-up if no write succeeded: a failed write may have taken effect all the same."""
PROOF_S = 10.0
PROOF_RACERS, PROOF_ROUNDS = 4, 4
MORE_TIME = "give it more time: --timeout 300"
SLOW_OR_DEAD = f"is the store reachable from this machine? if it is only slow, {MORE_TIME}"
CANNOT_GO_ON = "not tried: nothing can be written"

Examiner = Callable[[Place], Finding]


@dataclass(frozen=True)
class Check:
    """A finding under its name. `ok`: it is no reason against using the store."""

    name: str
    ok: bool
    level: Level
    detail: str
    hint: str
    took_s: float


@dataclass
class Examination:
    """The data of `doctor --json`. Megabits per second of whole objects, one after the other; milliseconds of the
    smallest read; None if they could not be measured. `num_repeated`: calls with transient errors that were repeated,
    the last of them with `last_trouble`. `left_behind`: keys that could not be deleted again."""

    url: str
    checks: list[Check] = field(default_factory=list)
    ok: bool = False
    up_mbps: float | None = None
    down_mbps: float | None = None
    latency_ms: float | None = None
    num_repeated: int = 0
    last_trouble: str = ""
    left_behind: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the failed checks."""
        return [check.name for check in self.checks if check.level == "fail"]


@dataclass(frozen=True)
class Effort:
    """The number of tries. `quick`: enough to find a store that is always wrong, not one that rarely is."""

    racers: int = 6
    rounds: int = 24
    reads: int = 30
    max_bytes: int = 64_000_000


QUICK = Effort(racers=4, rounds=6, reads=8, max_bytes=4_000_000)


def examine(
    url: str,
    say: Callable[[Check], None],
    timeout_s: float,
    effort: Effort,
    written_gb_per_day: float | None = None,
    open_again: Callable[[], Store] | None = None,
) -> Examination:
    """Examine the store at `url`; `say` hears each verdict at once. `written_gb_per_day`: what a run would write there.

    Everything is written below a fresh random prefix and deleted in the end, also when interrupted. Raises StoreError
    if the store cannot even be opened."""
    whole = Deadline(timeout_s)
    place = Place(open_again or partial(open_store, url), url, Deadline(timeout_s))
    found = Examination(url)
    examiner = _Examiner(place, whole, found, say)
    try:
        examiner.run(effort, parse_url(url).kind, written_gb_per_day)
    finally:
        found.left_behind = place.clean_up(CLEAN_UP_S if examiner.usable else HOPELESS_S)
    found.ok = all(check.ok for check in found.checks)
    found.num_repeated, found.last_trouble = place.num_repeated, place.last_trouble
    return found


def prove_exclusive_create(url: str) -> None:
    """A few quick races, before a new run trusts the store. Raises StoreBrokenError if two racers win, and whatever
    the store raises."""
    place = Place(partial(open_store, url), url, Deadline(PROOF_S))
    try:
        exclusive_create(place, PROOF_RACERS, PROOF_ROUNDS)
    except PromiseBrokenError as broken:
        raise StoreBrokenError(
            f"this store lost exclusive creates ({broken}): two syncers could both believe they had committed",
            where=url,
            hint=f"diloco doctor {url}",
        ) from broken
    finally:
        place.clean_up()


class _Examiner:
    """Runs the checks, each with its own time limit, and notes what they find."""

    def __init__(self, place: Place, whole: Deadline, found: Examination, say: Callable[[Check], None]) -> None:
        self._place, self._whole, self._found, self._say = place, whole, found, say

    @property
    def usable(self) -> bool:
        """Whether anything could be written."""
        return bool(self._found.checks) and self._found.checks[0].ok

    def run(self, effort: Effort, kind: StoreKind, written_gb_per_day: float | None) -> None:
        self._check("write", write)
        examiners: dict[str, Examiner] = {
            "read_back": lambda place: read_back(place, effort.reads),
            "exclusive_create": lambda place: exclusive_create(place, effort.racers, effort.rounds),
            "own_write": own_write,
            "list_after_write": list_after_write,
            "range_read": range_read,
            "delete": delete,
            "clock": clock_skew,
            "throughput": lambda place: self._throughput(place, effort.max_bytes),
        }
        if kind.retention:
            examiners[kind.retention] = lambda place: retention(place, written_gb_per_day)
            examiners["expiry"] = expiry
        for name, examiner in examiners.items():
            if self.usable:
                self._check(name, examiner)
            else:
                self._note(Check(name, False, "skip", CANNOT_GO_ON, "", 0.0))

    def _check(self, name: str, examiner: Examiner) -> None:
        box = self._place.box
        box.restart(min(max(CHECK_S, CHECK_SHARE * self._whole.seconds), self._whole.left_s()))
        started_s = clock.monotonic_s()
        if self._whole.is_over():
            finding = Finding("fail", "not tried: the time is used up", MORE_TIME)
        else:
            finding = self._asked(examiner)
        took_s = round(clock.monotonic_s() - started_s, 3)
        self._note(Check(name, finding.level != "fail", finding.level, finding.detail, finding.hint, took_s))

    def _note(self, check: Check) -> None:
        self._found.checks.append(check)
        self._say(check)

    def _asked(self, examiner: Examiner) -> Finding:
        """A store that raises has failed the check."""
        try:
            return examiner(self._place)
        except PromiseBrokenError as broken:
            return broken.finding
        except (StoreError, NoSpaceError) as error:
            return Finding("fail", str(error), SLOW_OR_DEAD if self._place.box.is_over() else error.hint or "")

    def _throughput(self, place: Place, max_bytes: int) -> Finding:
        """Objects grow until one takes a second, or there is no time for the next: the largest gives the speed."""
        place.store.create("speed/small", b"x" * 64)
        latency_s = median(seconds_of(lambda: place.store.get("speed/small", 64)) for _ in range(SMALL_READS))
        bigger = FIRST_BYTES
        while True:
            size, key, data = bigger, f"speed/{bigger}", noise(f"speed {bigger}", bigger)
            up_s = seconds_of(lambda key=key, data=data: place.store.create(key, data))  # type: ignore[misc]
            down_s = seconds_of(lambda key=key, size=size: place.store.get(key, size))  # type: ignore[misc]
            slower_s, bigger = max(up_s, down_s), size * GROWTH
            if slower_s >= LONG_ENOUGH_S or bigger > max_bytes or SLOWER_BY * slower_s > place.box.left_s():
                break
        up_bps, down_bps = 8 * size / up_s, 8 * size / down_s
        self._found.up_mbps, self._found.down_mbps = round(up_bps / 1e6, 3), round(down_bps / 1e6, 3)
        self._found.latency_ms = round(1000 * latency_s, 3)
        return passed(
            f"{format_bandwidth(up_bps)} up, {format_bandwidth(down_bps)} down (one object of {format_size(size)}), "
            f"{format_duration(latency_s)} a small read"
        )
