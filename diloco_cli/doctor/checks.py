"""The guarantees that a run rests on, one small check each. Two clients are two sessions, as two machines have.

Further: how long a bucket keeps deleted objects and what that costs, what the present credentials allow, and how fast
whole objects are written and read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from diloco_cli import clock
from diloco_cli.clock import seconds_of
from diloco_cli.doctor.place import USE_ANOTHER, Finding, Place, failed, noise, passed, skipped, warned
from diloco_cli.errors import DilocoError, StoreError
from diloco_cli.store.bucket import BucketStore, Retention
from diloco_cli.store.open import checks_uploads
from diloco_cli.store.port import Created, Exists, ObjectStat, Store, StoreForbiddenError, StoreUnavailableError
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import StoreWrapper, call_within
from diloco_cli.units import format_bandwidth, format_duration, format_size

SIZES = (0, 1, 64, 100_000, 1_000_000)
TORN_BYTES = 4_000_000
LISTED = 20
LISTING_PATIENCE_S = 5.0
LOOK_AGAIN_S = 0.1
TOLERATED_SKEW_S = 5.0
SIGNING_SKEW_S = 300.0
T = TypeVar("T")
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


def write(place: Place) -> Finding:
    """Objects of several sizes can be created at all."""
    for size in SIZES:
        if place.store.create(f"size/{size}", noise(f"size {size}", size)) != Created():
            return failed(f"a new object of {format_size(size)} is said to exist already", USE_ANOTHER)
    return passed(f"{len(SIZES)} objects, the largest {format_size(max(SIZES))}")


def read_back(place: Place, rounds: int) -> Finding:
    """A confirmed object can be read at once and whole, by another client too; a partly written one cannot be read."""
    reader = place.client()
    for size in SIZES:
        if reader.get(f"size/{size}") != noise(f"size {size}", size):
            return failed(f"an object of {format_size(size)} came back different", USE_ANOTHER)
    for number in range(rounds):
        key, data = f"poll/{number:04d}", noise(f"poll {number}", 1000)
        if reader.get(key) is not None:
            return failed("an object is there before it was created", USE_ANOTHER)
        place.store.create(key, data)
        found = reader.get(key)
        if found != data:  # the reader has asked for it before: a client or proxy that remembers "absent" fails here
            what = "is not there" if found is None else "is different"
            return failed(f"an object {what} right after it was created (round {number + 1} of {rounds})", USE_ANOTHER)
    return _overwritten(place, reader) or _torn(place, reader) or passed(f"{rounds} objects at once, none torn")


def _overwritten(place: Place, reader: Store) -> Finding | None:
    """Hints and heartbeats are overwritten; readers see the newest. Without the permission nothing is checked."""
    try:
        for data in (b"first", b"second"):
            place.impatient_client().put("hint/overwritten", data)
            if reader.get("hint/overwritten") != data:
                return failed("an overwritten object still has its old bytes", "switch off caches before the store")
    except (StoreForbiddenError, StoreUnavailableError):
        return None  # no permission, which `permissions` reports, or a limit of one write a second, which is no fault
    return None


def _torn(place: Place, reader: Store) -> Finding | None:
    """A client that reads all the time while a large object is created gets nothing, then all of it."""
    whole, seen, done = noise("torn", TORN_BYTES), list[int](), threading.Event()

    def look() -> None:
        while not done.is_set():
            found = reader.get("torn/object")
            if found is not None and found != whole:
                seen.append(len(found))
                return

    watcher = threading.Thread(target=_quietly, args=(look,), daemon=True)
    watcher.start()
    try:
        place.store.create("torn/object", whole)
    finally:
        done.set()
        watcher.join(place.box.left_s())
    if reader.get("torn/object") != whole:
        return failed(f"an object of {format_size(TORN_BYTES)} came back different", USE_ANOTHER)
    if not seen:
        return None
    return failed(f"a reader saw {format_size(seen[0])} of an object of {format_size(TORN_BYTES)}", USE_ANOTHER)


def _quietly(work: Callable[[], None]) -> None:
    """A watcher's own errors are no finding: the check itself reads the object afterwards."""
    with suppress(DilocoError):
        work()


def upload_check(place: Place) -> Finding:
    """An upload with a wrong checksum is refused; otherwise a syncer reads back every version that it has written."""
    key, store = "upload/trial", place.bare()
    with place.writing(key):
        refuses = call_within(place.box, lambda: checks_uploads(store, f"{place.prefix}/{key}"), place.url)
    told = "damaged uploads are refused: versions are not read back"
    if not refuses:
        told = "damaged uploads are not seen to be refused: versions are read back, one more call before each commit"
    if getattr(store, "sends_parts", None) is not False or parse_url(place.url).scheme != "gs":
        return passed(told)
    slow = "no parts may be made below parts-of-uploads/, so that one connection carries an object of any size"
    return warned(f"{told}; {slow}", "bind the roles that diloco bucket-policy prints")


def own_write(place: Place) -> Finding:
    """A repeated create whose first answer was lost counts as a success; a create of other bytes never does."""
    data = noise("own", 2000)
    if place.store.create("own/repeated", data) != Created() or place.store.create("own/repeated", data) != Created():
        return failed("repeating one's own create is answered as if another writer had made it", USE_ANOTHER)
    deaf = RetryingStore(_LosesTheFirstAnswer(place.store), place.box.left_s(), left_s=place.box.left_s)
    if deaf.create("own/lost", data) != Created():
        return failed("a create whose answer was lost is taken for another writer's", USE_ANOTHER)
    other = place.client().create("own/lost", data[::-1])
    if other != Exists(data):
        return failed("another's create of the same name was not refused", USE_ANOTHER)
    if place.store.get("own/lost") != data:
        return failed("a refused create has changed the object", USE_ANOTHER)
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
        return failed(f"{shown} of {objects} new objects are listed after {LISTING_PATIENCE_S:.0f} s", USE_ANOTHER)
    half = objects // 2
    if reader.list("list/", after=keys[half - 1]) != keys[half:] or reader.list("list/", limit=half) != keys[:half]:
        return failed("a listing does not start behind the key, or end at the limit, that it was given")
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
        if found != data[start:end]:
            told = "nothing" if found is None else f"{len(found)} bytes"
            return failed(f"bytes {start} to {end} of {size} came back wrong ({told})", USE_ANOTHER)
    if place.store.get_range("range/absent", 0, 10) is not None:
        return failed("a part of an object that does not exist came back as bytes", USE_ANOTHER)
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
    if reader.get("delete/object") is not None or reader.stat("delete/object") is not None:
        return failed("a deleted object can still be read", "switch off caches before the store")
    if _seconds_until(lambda: not reader.list("delete/"), min(LISTING_PATIENCE_S, place.box.left_s() / 2)) is None:
        return failed("a deleted object is still listed")
    return passed("gone at once; deleting nothing is no error")


def clock_skew(place: Place) -> Finding:
    """The store's clock against this machine's. Only ages shown to people and signatures of requests depend on it."""
    before_s = clock.wall_s()
    place.store.create("clock/now", b"tick")
    found = place.store.stat("clock/now")
    after_s = clock.wall_s()
    if found is None:
        return failed("an object that was just created has no description", USE_ANOTHER)
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
        "overwrite": lambda: _overwrite(place.impatient_client()),
        "list": lambda: store.list("may/"),
        "delete": lambda: store.delete("may/created"),
    }
    try:
        calls[verb]()
    except StoreForbiddenError:
        return False
    return True


def _overwrite(store: Store) -> None:
    try:
        for data in (b"x", b"y"):
            store.put("may/put", data)
    except StoreUnavailableError:
        return  # some stores take one write a second to a name: that is no lack of permission


def retention(place: Place, written_gb_per_day: float | None) -> Finding:
    """How long the bucket keeps deleted objects. To read that takes a permission that a run does not need: without it
    the check is skipped. `written_gb_per_day`: what a run would write there."""
    key, store = "retention/object", place.bare()
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
