"""Row 10: `diloco verify` of a signed run, by threads of the real learner and syncer: what is not signed is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.signing import UNSIGNED
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from tests.numerics.harness import copy_of, make_run, run_to_end
from tests.numerics.test_identities import CONSTANT
from tests.security.signed import as_fleet, as_learner, as_reader, signed_run

COMMIT_AT = commit_key(1)


@pytest.fixture(scope="module")
def finished() -> tuple[RunFormat, Store]:
    sync = SyncSettings(every=4, fragments=2, overlap=0, quorum=2)
    run = signed_run(make_run(2, 2, sync, OuterSettings("nesterov", 0.7, 0.9), CONSTANT))
    return run, run_to_end(as_fleet(run))[0]


def offer_at(bucket: Store) -> str:
    return bucket.list("offer/l0/", limit=1)[0]


def damaged(bucket: Store, key: str, old: bytes, new: bytes) -> MemoryStore:
    copy, data = copy_of(bucket), bucket.get(key) or b""
    assert old in data
    copy.put(key, data.replace(old, new, 1))
    return copy


def test_a_signed_run_verifies_with_any_key_and_with_none(finished: tuple[RunFormat, Store]) -> None:
    run, bucket = finished
    for opened in (run, as_learner(run, "l0"), as_reader(run)):
        found = LogVerifier(bucket, opened).replay()
        assert found.ok and found.merges >= 4 and found.offers_applied >= 8


def test_an_offer_that_was_changed_where_the_log_does_not_look_is_found_by_its_signature(
    finished: tuple[RunFormat, Store],
) -> None:
    run, bucket = finished
    forged = damaged(bucket, offer_at(bucket), b'"nonce":"', b'"nonce":"f')
    for opened in (run, as_learner(run, "l1"), as_reader(run)):
        found = LogVerifier(forged, opened).replay()
        assert found.mismatches == [f"{offer_at(bucket)} is not signed by the signer that it needs"]
    trusting = replace(run, keyring=UNSIGNED)
    assert LogVerifier(forged, trusting).replay().ok, "only the signature tells"


def test_a_commit_without_its_signature_is_found(finished: tuple[RunFormat, Store]) -> None:
    run, bucket = finished
    forged = damaged(bucket, COMMIT_AT, b',"signature":"syncer', b',"signed":"syncer')
    assert f"{COMMIT_AT} is not signed by the signer that it needs" in LogVerifier(forged, run).replay().mismatches
