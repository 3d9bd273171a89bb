"""What only a remote bucket can do to us: lose answers, cut bodies, stall, refuse, not exist. The same for every client
and every service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.randomness import nonce
from diloco_cli.store import transfers
from diloco_cli.store.open import open_store
from diloco_cli.store.port import (
    Created,
    Exists,
    Store,
    StoreBrokenError,
    StoreForbiddenError,
    StoreUnavailableError,
)
from diloco_cli.store.retry import RetryingStore
from tests.contract.conftest import REMOTE, shared_client
from tests.contract.faults import Faults, Kind


@dataclass
class FaultyBucket:
    """`upload` is the HTTP method by which small objects go up."""

    store: Store
    open: Callable[[str], Store]
    faults: Faults
    upload: str


@pytest.fixture(params=REMOTE)
def bucket(request: pytest.FixtureRequest) -> Iterator[FaultyBucket]:
    scheme: str = request.param
    faults: Faults = request.getfixturevalue(scheme).faults

    def open_part(path: str) -> Store:
        return open_store(f"{scheme}://{path}")

    store = shared_client(f"{scheme}://bucket/faults/{nonce()}")
    yield FaultyBucket(store, open_part, faults, "POST" if scheme == "gs" else "PUT")


def at_once(store: Store) -> RetryingStore:
    return RetryingStore(store, sleep=lambda seconds: None)


def test_a_create_whose_answer_was_lost_is_recognised_as_ones_own(bucket: FaultyBucket) -> None:
    bucket.faults.inject("lost_answer", bucket.upload)
    assert bucket.store.create("k", b"mine") == Created()
    assert bucket.faults.num_pending() == 0


def test_a_create_that_lost_its_answer_to_anothers_object_is_not(bucket: FaultyBucket) -> None:
    bucket.store.create("k", b"theirs")
    bucket.faults.inject("lost_answer", bucket.upload)
    assert bucket.store.create("k", b"mine") == Exists(b"theirs")


@pytest.mark.parametrize("kind", ["503", "429", "409"])
def test_a_create_that_never_arrived_is_an_error_and_works_when_repeated(bucket: FaultyBucket, kind: Kind) -> None:
    bucket.faults.inject(kind, bucket.upload, times=3)
    with pytest.raises(StoreUnavailableError):
        bucket.store.create(f"k{kind}", b"mine")
    assert at_once(bucket.store).create(f"k{kind}", b"mine") == Created()
    assert bucket.faults.num_pending() == 0


def test_a_create_survives_a_lost_answer_and_a_failing_read_back(bucket: FaultyBucket) -> None:
    bucket.faults.inject("lost_answer", bucket.upload)
    bucket.faults.inject("503", "GET", times=2)
    assert at_once(bucket.store).create("k", b"mine") == Created()
    assert bucket.store.get("k") == b"mine"


@pytest.mark.parametrize("kind", ["503", "429", "409", "cut_body", "flip_bit"])
def test_a_spoilt_download_is_never_returned_and_may_be_repeated(bucket: FaultyBucket, kind: Kind) -> None:
    bucket.store.put("k", b"payload" * 100_000)
    bucket.faults.inject(kind, "GET")
    with pytest.raises(StoreUnavailableError):
        bucket.store.get("k")
    assert bucket.store.get("k") == b"payload" * 100_000


@pytest.mark.parametrize("verb", ["get", "create"])
def test_a_stalled_request_ends_by_itself(bucket: FaultyBucket, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.store.put("k", b"x")
    monkeypatch.setattr(transfers, "SILENCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(transfers, "CALL_DEADLINE_S", 0.3)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 1e9)
    store = bucket.open(bucket.store.url.partition("://")[2])  # a new client, with these limits
    bucket.faults.inject("stall", times=2)  # the reading back of a create in doubt is the second
    with pytest.raises(StoreUnavailableError):
        store.get("k") if verb == "get" else store.create("new", b"x")


@pytest.mark.parametrize("verb", ["get", "get_range", "list"])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up_when_the_time_of_the_size_is_over(
    bucket: FaultyBucket, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.store.put("k", b"x" * 100_000)
    monkeypatch.setattr(transfers, "CALL_DEADLINE_S", 0.5)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_S", 1e9)
    store = bucket.open(bucket.store.url.partition("://")[2])  # a new client, with these limits
    bucket.faults.inject("trickle")
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("k"),
        "get_range": lambda: store.get_range("k", 0, 90_000),
        "list": lambda: store.list(""),
    }
    for _ in range(5):  # a new client's first call may be over before it is sent
        began_s = monotonic_s()
        with pytest.raises(StoreUnavailableError):
            calls[verb]()
        assert monotonic_s() - began_s < 10
        if not bucket.faults.num_pending():
            return
    pytest.fail("no call was sent")


@pytest.mark.parametrize("max_bytes", [1_000, 999_999])
def test_no_more_of_a_longer_object_travels_than_is_asked_for(bucket: FaultyBucket, max_bytes: int) -> None:
    data = bytes(range(250)) * 4_000
    bucket.store.put("k", data)
    before = bucket.faults.down_bytes, bucket.faults.requests
    assert bucket.store.get("k", max_bytes) == data[: max_bytes + 1]
    assert bucket.faults.down_bytes - before[0] == max_bytes + 1
    assert bucket.faults.requests - before[1] == 1


def test_what_is_as_long_as_the_bound_allows_is_checked_as_a_whole(bucket: FaultyBucket) -> None:
    bucket.store.put("k", b"payload" * 1_000)
    bucket.faults.inject("flip_bit", "GET")
    with pytest.raises(StoreUnavailableError, match="crc32c"):
        bucket.store.get("k", 7_000)
    assert bucket.store.get("k", 7_000) == b"payload" * 1_000


def test_a_forbidden_call_says_so_with_a_hint(bucket: FaultyBucket) -> None:
    for method, call in [("GET", lambda: bucket.store.get("k")), (bucket.upload, lambda: bucket.store.put("k", b"x"))]:
        bucket.faults.inject("403", method)
        with pytest.raises(StoreForbiddenError) as refused:
            call()
        assert refused.value.hint
        assert refused.value.exit_status == 6


def test_a_missing_bucket_is_no_empty_bucket(bucket: FaultyBucket) -> None:
    nowhere = bucket.open("nobody-has-this/runs")
    for call in (lambda: nowhere.list(""), lambda: nowhere.create("k", b"x"), lambda: nowhere.put("k", b"x")):
        with pytest.raises(StoreBrokenError, match="no such bucket") as missing:
            call()
        assert "nobody-has-this" in (missing.value.hint or "")


def test_nothing_outside_the_prefix_is_touched(bucket: FaultyBucket) -> None:
    one, other = bucket.open("bucket/apart/one"), bucket.open("bucket/apart/one-more")
    one.put("a/k", b"x")
    one.put("h", b"x")
    other.put("k", b"x")
    assert one.list("") == ["a/k", "h"]
    assert other.list("") == ["k"]
    one.delete("a/k")
    one.delete("h")
    assert bucket.open("bucket/apart").list("") == ["one-more/k"]


def test_a_call_is_one_request(bucket: FaultyBucket) -> None:
    before = bucket.faults.requests
    bucket.store.create("k", b"x")
    bucket.store.get("k")
    bucket.store.stat("k")
    bucket.store.list("")
    bucket.store.delete("k")
    assert bucket.faults.requests - before == 5


def test_an_outage_is_outlived(bucket: FaultyBucket) -> None:
    bucket.faults.start_outage(0.5)
    with pytest.raises(StoreUnavailableError):
        bucket.store.get("k")
    assert RetryingStore(bucket.store, deadline_s=20).create("k", b"x") == Created()


def test_a_storm_of_everything_loses_nothing_and_invents_nothing(bucket: FaultyBucket) -> None:
    rates: dict[Kind, float] = {"503": 0.1, "429": 0.05, "409": 0.05, "lost_answer": 0.1, "cut_body": 0.1}
    bucket.faults.set_rates({**rates, "flip_bit": 0.05})
    store = at_once(bucket.store)
    expected = {f"storm/{number}": bytes([number]) * 20_000 for number in range(12)}
    for key, data in expected.items():
        assert store.create(key, data) == Created()
        assert store.create(key, b"another's") == Exists(data)
    assert {key: store.get(key) for key in expected} == expected
    bucket.faults.heal()
    assert bucket.store.list("storm/") == sorted(expected)
