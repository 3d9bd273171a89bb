"""Google Cloud Storage: uploads in chunks and parts, checksums that the store verifies, the bucket's own settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcsfs.credentials import GoogleCredentials
from gcsfs.retry import validate_response
from google.auth.exceptions import DefaultCredentialsError

from diloco_cli import clock
from diloco_cli.doctor.examine import Place, expiry, retention
from diloco_cli.environment import environment_with
from diloco_cli.errors import NoSpaceError
from diloco_cli.randomness import nonce
from diloco_cli.store import gcs, transfers
from diloco_cli.store.gcs import GCSStore
from diloco_cli.store.gcs import sorted_error as error_of_gcs
from diloco_cli.store.open import discard_leftovers_at
from diloco_cli.store.port import (
    Created,
    Discarded,
    Exists,
    StoreForbiddenError,
    StoreGoneError,
    StoreUnavailableError,
    UploadDamagedError,
    gentle,
)
from diloco_cli.store.wrappers import Deadline
from tests.contract.fake_gcs import Blob, FakeGCS, Kind

DATA = os.urandom((5 << 20) + 123)


@pytest.fixture
def store(gs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> GCSStore:
    """What a mebibyte or more holds goes up in parts of half a mebibyte, or of a sixth."""
    monkeypatch.setattr(gcs, "IN_PARTS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(gcs, "MOST_COMPOSED", 6)
    monkeypatch.setattr(transfers, "PART_BYTES", 1 << 19)
    monkeypatch.setattr(transfers, "pause_s", lambda attempt, error, jitter: 0.0)
    monkeypatch.setattr(gs, "num_composed", 0)
    return GCSStore("bucket", "runs/one")


def test_bytes_damaged_on_their_way_up_are_refused_by_the_store(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(transfers, "crc32c", lambda data: "AAAAAA==")
        with pytest.raises(StoreUnavailableError):
            store.create("k", b"x")
        with pytest.raises(StoreUnavailableError):
            store.create("large", DATA)
    assert store.get("k") is None
    assert store.get("large") is None


def names_in(gs: FakeGCS) -> list[str]:
    return sorted(gs.objects["bucket"])


def test_a_large_object_is_composed_of_parts_and_exclusively(gs: FakeGCS, store: GCSStore) -> None:
    assert store.create("large", DATA) == Created()
    assert store.get("large") == DATA
    assert store.create("large", DATA[::-1]) == Exists(DATA)
    assert store.create("large", DATA) == Created()
    store.put("large", DATA[::-1])
    assert store.get("large") == DATA[::-1]
    assert gs.num_composed == 2 and names_in(gs) == ["runs/one/large"], "what is there is seen before parts go up"


@pytest.mark.parametrize(("holds", "most"), [(True, 1), (False, 4)])
def test_what_is_gentle_goes_up_one_part_after_the_other(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch, holds: bool, most: int
) -> None:
    original, under_way, seen = GCSStore._send, [0], list[int]()

    async def send(*arguments: Any) -> bytes:
        under_way[0] += 1
        seen.append(under_way[0])
        try:
            return await original(*arguments)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(GCSStore, "_send", send)
    with gentle(lambda: holds):
        assert store.create("large", DATA) == Created()
    assert len(seen) == 6 and max(seen) == most and gs.num_composed == 1 and store.get("large") == DATA


@pytest.mark.parametrize("kind", ["503", "lost_answer"])
def test_a_part_that_failed_is_sent_again_alone(gs: FakeGCS, store: GCSStore, kind: Kind) -> None:
    before = gs.requests
    gs.inject(kind, "POST", times=2)
    assert store.create("large", DATA) == Created()
    assert gs.num_pending() == 0 and gs.num_composed == 1
    assert gs.requests - before <= 1 + 6 * 2 + 1 + 2, "uploads and deletes of six parts, and what failed"
    assert store.get("large") == DATA and names_in(gs) == ["runs/one/large"]


def test_a_composition_whose_answer_was_lost_is_found_to_be_ones_own(gs: FakeGCS, store: GCSStore) -> None:
    original = GCSStore._compose

    async def lost(*arguments: Any) -> None:
        await original(*arguments)
        raise StoreUnavailableError("its answer was lost")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GCSStore, "_compose", lost)
        assert store.create("large", DATA) == Created()
    assert names_in(gs) == ["runs/one/large"]


@pytest.mark.parametrize("status", [403, 404, 501, 400])
def test_where_nothing_is_composed_one_connection_carries_all(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(gs, "refuses_to_compose", status)
    assert store.create("large", DATA) == Created()
    before = gs.requests
    assert store.create("larger", DATA + DATA) == Created()
    assert gs.requests - before == 1, "parts are not tried again"
    assert names_in(gs) == ["runs/one/large", "runs/one/larger"]
    monkeypatch.setattr(gs, "refuses_to_compose", 0)
    now_s = clock.monotonic_s()
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s + gcs.REFUSED_FOR_S + 1)
    assert store.create("later", DATA) == Created()
    assert gs.num_composed == 1, "it may have been the refusal of an old token"


def test_a_writer_that_may_not_delete_its_parts_makes_no_more(gs: FakeGCS, store: GCSStore) -> None:
    gs.inject("403", "DELETE", times=6)
    assert store.create("large", DATA) == Created()
    assert gs.num_pending() == 0 and len(names_in(gs)) == 1 + 6
    assert store.create("another", DATA) == Created()
    assert gs.num_composed == 1 and len(names_in(gs)) == 2 + 6


def test_parts_that_are_composed_to_other_bytes_are_no_success(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, "composes_backwards", True)
    with pytest.raises(UploadDamagedError):
        store.create("large", DATA)
    assert not names_in(gs), "its key is free for the next try"


def test_parts_of_a_killed_writer_go_after_a_day(gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else, whatever its name; nor does a strange name hide the ones behind it."""
    monkeypatch.setattr(transfers, "LIST_PAGE", 2)
    part, others = (
        f"parts-of-uploads/delta/iowa/k/{nonce()}-00",
        ["parts-of-uploads/part-00000.parquet", "delta/iowa/k"],
    )
    for key in (part, *others):
        store.create(key, b"12345")
    strange = f"runs/one/parts-of-uploads/a b/{nonce()}-00"
    gs.objects["bucket"][strange] = Blob(b"?", 1)
    for number in range(5):
        store.create(f"parts-of-uploads/c/{number}", b"x")
    assert discard_leftovers_at(store.url) == Discarded()
    now_s = clock.wall_s()
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + gcs.OLD_PART_S + 1)
    assert discard_leftovers_at(store.url) == Discarded(1, 5)
    left = names_in(gs)
    assert f"runs/one/{part}" not in left and {strange, *(f"runs/one/{key}" for key in others)} <= set(left)


def test_an_emulator_that_is_not_on_this_machine_needs_tls(gs: FakeGCS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.example.com")
    with pytest.raises(StoreForbiddenError, match="loopback"):
        GCSStore("bucket").get("k")


@pytest.fixture
def on_gce(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What NO_GCE_CHECK was at each look for credentials: only the metadata server has some. Its name is known as long
    as nothing else is patched in."""
    looked: list[str | None] = []

    def none_of_the_users(self: GoogleCredentials) -> None:
        looked.append(os.environ.get("NO_GCE_CHECK"))
        raise DefaultCredentialsError

    for name in ("NO_GCE_CHECK", *gcs.SPOKEN_FOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(GoogleCredentials, "_connect_google_default", none_of_the_users)
    monkeypatch.setattr(GoogleCredentials, "_connect_cloud", lambda self: setattr(self, "credentials", "the machine's"))
    monkeypatch.setattr(GoogleCredentials, "tokens", {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [])
    return looked


def failing(number: int) -> Callable[[str, object], None]:
    def resolve(host: str, port: object) -> None:
        raise socket.gaierror(number, "not known")

    return resolve


def test_elsewhere_the_metadata_server_of_googles_cloud_is_not_waited_for(
    on_gce: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(socket.EAI_NONAME))
    assert gcs.start_client().credentials.credentials is None
    assert on_gce == ["true"] and "NO_GCE_CHECK" not in environment_with(), "its units look for themselves"


@pytest.mark.parametrize("number", [socket.EAI_AGAIN, socket.EAI_FAIL])
def test_a_name_server_that_fails_makes_nobody_anonymous(
    on_gce: list[str | None], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = GCSStore("bucket")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", failing(number))
        with pytest.raises(StoreUnavailableError, match="no name is found now"):
            store.get("k")
    assert store._client().credentials.credentials == "the machine's" and on_gce == ["true", None]
    monkeypatch.setattr(GoogleCredentials, "_connect_google_default", lambda self: setattr(self, "credentials", "own"))
    monkeypatch.setattr(socket, "getaddrinfo", failing(number))
    assert gcs.start_client().credentials.credentials == "own", "such as behind a proxy, which finds names itself"


@pytest.mark.parametrize("name", ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"])
def test_a_metadata_server_that_the_user_names_is_asked(
    on_gce: list[str | None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "[::1]:80")
    monkeypatch.setattr(socket, "getaddrinfo", failing(socket.EAI_NONAME))
    assert gcs.start_client().credentials.credentials == "the machine's"


@pytest.mark.parametrize("text", [None, "", '{"type": "x"', "[]", "\x00"])
def test_a_file_of_credentials_that_cannot_be_read_is_named(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv(gcs.CREDENTIALS_VARIABLE, str(file))
    with pytest.raises(StoreForbiddenError, match=f"{gcs.CREDENTIALS_VARIABLE}=.*key.json: the file of credentials"):
        GCSStore("bucket").get("k")


OVER = b'{"error":{"code":403,"errors":[{"reason":"quotaExceeded"}],"message":"The bucket has exceeded its quota."}}'
DENIED = b'{"error":{"code":403,"message":"no permission to use the quota project"}}'
FULL = b'{"error":{"code":507,"message":"no room"}}'


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [(403, OVER, NoSpaceError), (507, FULL, NoSpaceError), (403, DENIED, StoreForbiddenError)],
)
def test_gcs_says_so_by_its_status_or_its_message(status: int, body: bytes, expected: type[Exception]) -> None:
    with pytest.raises(Exception) as raised:
        validate_response(status, body, "b/bucket/o/quota-exceeded")
    assert type(error_of_gcs(raised.value, "gs://bucket/k")) is expected


def test_who_asks_a_bucket_that_charges_names_a_project(
    gs: FakeGCS, store: GCSStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gcs.PAYER_VARIABLE, raising=False)
    monkeypatch.setitem(gs.settings, "bucket", {"billing": {"requesterPays": True}})
    for ask in (
        lambda: store.get("k"),
        lambda: store.create("k", b"x"),
        lambda: store.list(""),
        lambda: store.stat("k"),
    ):
        with pytest.raises(StoreForbiddenError) as refused:
            ask()
        assert gcs.PAYER_VARIABLE in (refused.value.hint or "")
    monkeypatch.setenv(gcs.PAYER_VARIABLE, "project-1")
    paying = GCSStore("bucket", "runs/one")
    assert paying.create("large", DATA) == paying.create("k", DATA) == Created()
    assert paying.get("k") == DATA and paying.get_range("k", 1, 3) == DATA[1:3] and paying.list("") == ["k", "large"]
    paying.delete("k")
    assert paying.stat("k") is None


def test_soft_delete_and_versioning_of_a_bucket_are_read(gs: FakeGCS) -> None:
    settings: dict[str, object] = {}
    gs.settings["bucket"] = settings
    store = GCSStore("bucket")
    assert store.retention("k").kept_s == 0
    settings["softDeletePolicy"] = {"retentionDurationSeconds": "604800", "effectiveTime": "2024-03-01T00:00:00Z"}
    week = store.retention("k")
    assert week.kept_s == 7 * 86_400 and week.turn_off.endswith("gs://bucket --clear-soft-delete")
    settings["versioning"] = {"enabled": True}
    assert store.retention("k").kept_s is None
    with pytest.raises(StoreGoneError, match="no such bucket"):
        GCSStore("nobody-has-this").retention("k")
    del gs.settings["bucket"]


@pytest.mark.parametrize(
    ("action", "condition", "found"),
    [
        ("Delete", {"age": 30}, "age: 30"),
        ("Delete", {"age": 30, "matchesPrefix": ["runs/", "x"]}, "age: 30, matchesPrefix: ['runs/', 'x']"),
        ("Delete", {"createdBefore": "2027-01-01", "matchesPrefix": ["runs/one/event/"]}, "createdBefore"),
        ("Delete", {"age": 30, "matchesPrefix": ["others/"]}, ""),
        ("Delete", {"age": 30, "isLive": False}, ""),
        ("Delete", {"numNewerVersions": 3}, ""),
        ("SetStorageClass", {"age": 30}, ""),
    ],
)
def test_rules_of_a_bucket_that_delete_a_runs_objects_are_read(
    gs: FakeGCS, action: str, condition: dict[str, object], found: str
) -> None:
    store = GCSStore("bucket", "runs/one")
    assert store.expiry() == ""
    gs.settings["bucket"] = {"lifecycle": {"rule": [{"action": {"type": action}, "condition": condition}]}}
    assert found in store.expiry() and bool(store.expiry()) == bool(found)
    place = Place(lambda: GCSStore("bucket", "runs/one"), "gs://bucket/runs/one", Deadline(20))
    assert expiry(place).level == ("warn" if found else "pass") and found in expiry(place).detail
    del gs.settings["bucket"]


def test_settings_that_may_not_be_read_are_no_fault(gs: FakeGCS) -> None:
    place = Place(lambda: GCSStore("bucket"), "gs://bucket", Deadline(20))
    for ask in (lambda: retention(place, None), lambda: expiry(place)):
        gs.inject("403", "GET")
        found = ask()
        assert (found.level, "may not read" in found.detail) == ("skip", True)
