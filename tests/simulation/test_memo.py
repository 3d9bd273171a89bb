"""What a history remembers of the product's pure functions is what they would say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli import signing
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log import records
from diloco_cli.protocol.log.commit_log import Snapshot
from diloco_cli.protocol.log.commits import Commit, Skip
from diloco_cli.protocol.log.records import SCHEMA, RecordError
from diloco_cli.protocol.log.state import RunState
from tests.histories.memo import remembered

SNAPSHOT = Snapshot(RunState(), "digest", "id")


def test_a_record_of_its_own_making_is_remembered_as_the_original() -> None:
    with remembered():
        data = records.encode(SNAPSHOT)
        assert records.decode(Snapshot, data, "here") is log.decode(Snapshot, data, "here", SCHEMA) is SNAPSHOT


@pytest.mark.parametrize("written_here", [True, False])
def test_a_newer_record_is_refused_by_whoever_asks_for_the_schema_and_by_nobody_else(written_here: bool) -> None:
    newer = replace(SNAPSHOT, schema=SCHEMA + 1)
    data = records.encode(newer)
    with remembered():
        if written_here:
            assert records.encode(newer) == data
        for _ in range(2):
            assert records.decode(Snapshot, data, "here").schema == SCHEMA + 1
            with pytest.raises(RecordError, match="written with schema"):
                records.decode(Snapshot, data, "here", SCHEMA)


def test_a_commit_of_its_own_making_is_remembered_for_readers_of_any_kind_of_commit() -> None:
    commit = Skip(slot=1)
    data = records.encode(commit)
    with remembered():
        records.encode(commit)
        assert records.decode(Commit, data, "here", SCHEMA) is records.decode(Skip, data, "here") is commit
    assert records.decode(Commit, data, "here", SCHEMA) == commit


def test_only_the_signature_made_here_is_remembered_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    private = "1" * 64
    checked: list[bytes] = []
    check = signing.is_signature

    def counted(public: str, code: str, text: bytes) -> bool:
        checked.append(text)
        return check(public, code, text)

    monkeypatch.setattr(signing, "is_signature", counted)
    monkeypatch.setattr(signing, "is_signature", counted)
    with remembered():
        code, public = signing.signature(private, b"text"), signing.public_key(private)
        assert signing.is_signature(public, code, b"text")
        assert checked == []
        for _ in range(2):
            assert not signing.is_signature(public, code, b"another")
            assert not signing.is_signature(signing.public_key("2" * 64), code, b"text")
    assert checked == [b"another", b"text"]
