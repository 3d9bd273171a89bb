"""What a history remembers of the product's pure functions is what they would say."""

from __future__ import annotations

import pytest

from diloco_cli import signing
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log import records
from diloco_cli.protocol.log.commit_log import Snapshot
from diloco_cli.protocol.log.records import SCHEMA
from diloco_cli.protocol.log.state import RunState
from tests.histories.memo import remembered

SNAPSHOT = Snapshot(RunState(), "digest", "id")


def test_a_record_of_its_own_making_is_remembered_as_the_original() -> None:
    with remembered():
        data = records.encode(SNAPSHOT)
        assert records.decode(Snapshot, data, "here") is log.decode(Snapshot, data, "here", SCHEMA) is SNAPSHOT


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
