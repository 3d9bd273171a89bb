"""The guarantees that a run rests on, one small check each, tried below a fresh random prefix that is empty again
afterwards. Two clients are two sessions, as two machines have.

Further: how long a bucket keeps deleted objects and what that costs, what the present credentials allow, and how fast
whole objects are written and read.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from diloco_cli import clock
from diloco_cli.clock import seconds_of
from diloco_cli.errors import DilocoError, StoreError
from diloco_cli.randomness import nonce
from diloco_cli.store.bucket import BucketStore, Retention
from diloco_cli.store.open import checks_uploads
from diloco_cli.store.port import Created, Exists, ObjectStat, Store, StoreForbiddenError, StoreUnavailableError
from diloco_cli.store.retry import Retrying, RetryingStore
from diloco_cli.store.url import join_url, parse_url
from diloco_cli.store.wrappers import Deadline, PrefixedStore, StoreWrapper, TimeBoxedStore, call_within
from diloco_cli.units import format_bandwidth, format_duration, format_size

CLEAN_UP_S = 6.0
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
ALL = ("create", "read", "overwrite", "list", "delete")
NEEDS = {
    "learner": ("create", "read", "list"),
    "syncer": ("create", "read", "list", "delete"),
}
"""A learner lists to find the newest snapshot, and some stores answer 403 for a missing key without the permission to
list. Overwriting its own heartbeat is useful for `status`; a learner never deletes."""
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
        self._quiet = threading.Condition(self._lock)
        self._num_writing = 0
        self._closed = False
        self._keys: set[str] = set()
        self._sessions: list[Store] = []
        self.store = self.client(0)

    @property
    def prefix_url(self) -> str:
        return join_url(self.url, self.prefix)

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
        return _Announced(PrefixedStore(session, self.prefix), self.writing)

    def patiently(self, verb: str, call: Callable[[], T]) -> T:
        """A call that is no verb of the port, repeated and bounded as theirs are."""
        patient = RetryingStore(self.store, math.inf, left_s=self.box.left_s, on_retry=self._note)
        return patient.persist(verb, lambda: call_within(self.box, call, self.url))

    def remember(self, key: str) -> None:
        """Note a key that this process, or a racing process, is about to write."""
        with self._lock:
            self._keys.add(key)

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Around each write. Raises StoreUnavailableError once the clean-up has begun: an interrupted race must not
        write behind its back."""
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the examination is over")
            self._keys.add(key)
            self._num_writing += 1
        try:
            yield
        finally:
            with self._quiet:
                self._num_writing -= 1
                self._quiet.notify_all()

    def clean_up(self, seconds: float = CLEAN_UP_S) -> list[str]:
        """Deletes all that was written; the keys that could not be deleted."""
        self.box.restart(seconds)
        with self._quiet:
            self._closed = True
            self._quiet.wait_for(lambda: self._num_writing == 0, seconds / 2)
            left = sorted(self._keys)
        with ThreadPoolExecutor(CLEANERS) as pool:
            stuck = [key for key, is_gone in zip(left, pool.map(self._is_deleted, left), strict=True) if not is_gone]
        parsed = parse_url(self.url)
        if parsed.scheme == "file":  # which keeps empty directories, and the temporary file of a racer that was killed
            shutil.rmtree(Path(parsed.place) / self.prefix, ignore_errors=True)
        return [f"{self.prefix}/{key}" for key in stuck]

    def _is_deleted(self, key: str) -> bool:
        try:
            self.store.delete(key)
        except DilocoError:
            return False
        return True

    def _note(self, retrying: Retrying) -> None:
        with self._lock:
            self.num_repeated += 1
            self.last_trouble = retrying.last_error


class _Announced(StoreWrapper):
    """A store that notes each key before it writes it."""

    def __init__(self, store: Store, writing: Callable[[str], AbstractContextManager[None]]) -> None:
        super().__init__(store)
        self._writing = writing

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        with self._writing(key) if verb in ("create", "put") else nullcontext():
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
    _check_overwriting(place, reader)
    _check_for_torn_objects(place, reader)
    return passed(f"{rounds} objects at once, none torn")


def _check_overwriting(place: Place, reader: Store) -> None:
    """Hints and heartbeats are overwritten; readers see the newest. Without the permission, which `permissions`
    reports, nothing is checked; a limit of one write a second is no fault."""
    with suppress(StoreForbiddenError, StoreUnavailableError):
        for data in (b"first", b"second"):
            place.client(0, patient=False).put("hint/overwritten", data)
            found = reader.get("hint/overwritten")
            demand(found == data, "an overwritten object still has its old bytes", NO_CACHES)


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


def upload_check(place: Place) -> Finding:
    """An upload with a wrong checksum is refused; otherwise a syncer reads back every version that it has written."""
    key, store = "upload/trial", place.open_again()
    with place.writing(key):
        refuses = call_within(place.box, lambda: checks_uploads(store, f"{place.prefix}/{key}"), place.url)
    told = "damaged uploads are refused: versions are not read back"
    if not refuses:
        told = "damaged uploads are not seen to be refused: versions are read back, one more call before each commit"
    if not refuses or not isinstance(store, BucketStore) or store.sends_parts:
        return passed(told)
    slow = "no parts may be made below parts-of-uploads/, so that one connection carries an object of any size"
    return warned(f"{told}; {slow}", "bind the roles that diloco bucket-policy prints")


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


def permissions(place: Place) -> Finding:
    """Tries each verb and sees which are forbidden."""
    return finding_of(tuple(verb for verb in ALL if _may(verb, place)))


def finding_of(allowed: Collection[str]) -> Finding:
    """The roles for which the allowed verbs are enough."""
    may = ", ".join(verb for verb in ALL if verb in allowed) or "nothing"
    lacking = {role: [verb for verb in needs if verb not in allowed] for role, needs in NEEDS.items()}
    fits = [role for role, missing in lacking.items() if not missing]
    if len(fits) == len(NEEDS) and "overwrite" in allowed:
        return passed(f"{may}: enough for a learner and a syncer")
    notes = [f"a {role} also needs {' and '.join(missing)}" for role, missing in lacking.items() if missing]
    if "overwrite" not in allowed:
        notes.append("without overwrite no heartbeats: `status` cannot show this unit's state")
    fit = f"enough for a {' and a '.join(fits)}" if fits else "not enough for a run"
    return warned(f"{may}: {fit}", "; ".join(notes))


def _may(verb: str, place: Place) -> bool:
    store = place.store
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: store.create("may/created", b"x"),
        "read": lambda: store.get("may/created"),
        "overwrite": lambda: place.client(0, patient=False).put("may/put", b"x"),
        "list": lambda: store.list("may/"),
        "delete": lambda: store.delete("may/created"),
    }
    try:
        for _ in range(2):  # because the right to create is all that a first put needs
            calls[verb]()
    except StoreForbiddenError:
        return False
    except StoreUnavailableError:
        if verb != "overwrite":
            raise  # some stores take one write a second to a name: that is no lack of permission
    return True


def retention(place: Place, written_gb_per_day: float | None) -> Finding:
    """How long the bucket keeps deleted objects. To read that takes a permission that a run does not need: without it
    the check is skipped. `written_gb_per_day`: what a run would write there."""
    key, store = "retention/object", place.open_again()
    if not isinstance(store, BucketStore):
        return passed("what is deleted is gone")
    try:
        with place.writing(key):
            found = place.patiently("look", lambda: store.retention(f"{place.prefix}/{key}"))
    except StoreForbiddenError:
        return skipped("these credentials may not read the bucket's settings")
    except StoreError as error:
        return skipped(f"the bucket does not tell: {error}")
    if found is None:
        return skipped("the service does not tell whether it keeps what is deleted")
    return retention_finding(found, written_gb_per_day)


def retention_finding(retention: Retention, written_gb_per_day: float | None) -> Finding:
    """A run that collects its garbage deletes about as much as it writes, so the bucket also holds, and bills, the data
    written in `kept_s`."""
    if retention.kept_s == 0:
        return passed("what is deleted is gone, and not billed")
    hint = f"a run deletes nearly all that it writes; to turn it off: {retention.turn_off}"
    if retention.kept_s is None:
        return warned("what is deleted stays, and is billed, until it is removed for good", hint)
    kept = f"what is deleted is kept, and billed, for {format_duration(retention.kept_s)}"
    if written_gb_per_day is None:
        monthly = monthly_cost(EXAMPLE_GB_PER_DAY, retention.kept_s)
        return warned(f"{kept}: ${monthly:,.2f} a month for each 100 GB a day that a run writes", hint)
    monthly = monthly_cost(written_gb_per_day, retention.kept_s)
    return warned(f"{kept}: ${monthly:,.2f} a month for this run's {format_size(1e9 * written_gb_per_day)} a day", hint)


def monthly_cost(written_gb_per_day: float, kept_s: float) -> float:
    """US dollars a month for the deleted objects that the bucket still holds. 100 GB a day kept for 7 days: 700 GB,
    $14."""
    return written_gb_per_day * kept_s / DAY_S * STORAGE_PRICE_PER_GB_MONTH


@dataclass(frozen=True)
class Speed:
    """The speed with the largest object tried."""

    payload_bytes: int
    up_bps: float
    down_bps: float
    latency_s: float

    def text(self) -> str:
        return (
            f"{format_bandwidth(self.up_bps)} up, {format_bandwidth(self.down_bps)} down (one object of "
            f"{format_size(self.payload_bytes)}), {format_duration(self.latency_s)} a small read"
        )


def measure_speed(place: Place, max_bytes: int) -> Speed:
    """Objects grow until one takes a second, or there is no time for the next."""
    place.store.create("speed/small", b"x" * 64)
    latency_s = median(seconds_of(lambda: place.store.get("speed/small", 64)) for _ in range(SMALL_READS))
    size = FIRST_BYTES
    while True:
        key, data = f"speed/{size}", noise(f"speed {size}", size)
        up_s = seconds_of(lambda key=key, data=data: place.store.create(key, data))  # type: ignore[misc]
        down_s = seconds_of(lambda key=key, size=size: place.store.get(key, size))  # type: ignore[misc]
        slower_s = max(up_s, down_s)
        bigger = size * GROWTH
        if slower_s >= LONG_ENOUGH_S or bigger > max_bytes or SLOWER_BY * slower_s > place.box.left_s():
            return Speed(size, 8 * size / up_s, 8 * size / down_s, latency_s)
        size = bigger
