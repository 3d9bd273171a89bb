"""Trust on first use: what is said, what is remembered, and what is refused afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.errors import RefusedError
from diloco_cli.launch.new_run import signed
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.runtime.known_operators import check_operator, trust_of
from diloco_cli.signing import Secret, short_key
from tests.simulation.toy import make_run

OURS, THEIRS = Secret("our operator's secret, 32 letters", "TEST"), Secret("a stranger's secret of 32 letters", "TEST")
UNSIGNED_RUN = make_run()
RUN, FORGED = signed(UNSIGNED_RUN, OURS), signed(UNSIGNED_RUN, THEIRS)
URL = "gs://bucket/runs/toy"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    return tmp_path / ".operators"


def told(run: RunFormat, secret: Secret | None = None, url: str = URL) -> list[str]:
    said: list[str] = []
    check_operator(run, url, secret, said.append)
    return said


def test_the_first_key_is_believed_aloud_and_remembered_for_its_owner_alone(home: Path) -> None:
    (said,) = told(RUN)
    assert short_key(OURS.operator) in said and "first time" in said
    (file,) = home.iterdir()
    assert (file.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o600, 0o700)
    assert told(RUN) == [] == told(RUN, url=URL + "/")
    assert len(told(RUN, url="gs://bucket/runs/another")) == 1, "an address is known by itself"


@pytest.mark.parametrize("replaced", [FORGED, UNSIGNED_RUN, replace(FORGED, run_id="another")])
def test_from_then_on_no_other_operator_is_believed_nor_a_run_that_is_not_signed(replaced: RunFormat) -> None:
    told(RUN)
    with pytest.raises(RefusedError, match=short_key(OURS.operator)) as refused:
        told(replaced)
    assert "rm " in (refused.value.hint or "")
    assert told(RUN) == [], "and the key that was seen first stays"


def test_a_key_file_says_whose_run_it_is_and_that_is_remembered(home: Path) -> None:
    told(FORGED)
    assert told(RUN, OURS) == []
    with pytest.raises(RefusedError):
        told(FORGED)


def test_nothing_is_remembered_of_runs_that_are_not_signed(home: Path) -> None:
    assert told(UNSIGNED_RUN) == [] and not home.exists()
    assert len(told(RUN)) == 1


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"operator":"x"}', b'{"operator":7}'])
def test_a_torn_or_foreign_file_says_nothing(home: Path, junk: bytes) -> None:
    told(RUN)
    (file,) = home.iterdir()
    file.write_bytes(junk)
    assert len(told(RUN)) == 1


def test_whom_a_run_trusts_is_said_in_a_line() -> None:
    assert trust_of(UNSIGNED_RUN) == "not signed: whoever may write into the bucket is trusted"
    assert short_key(OURS.operator) in trust_of(RUN)
