"""Tapes on disk: what is written is read back; anything else is an error that says why."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_cli.errors import UsageError
from diloco_cli.tapes.files import read_tape, write_tape
from tests.unit.tapes.tiny_tape import TAPE

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tape") / "t.json"
    write_tape(TAPE, path)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["run.tape", "run.tape.gz"])
def test_a_tape_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / name, tmp_path / f"2{name}"
    size = write_tape(TAPE, first)
    assert read_tape(first) == TAPE
    write_tape(TAPE, second)
    assert first.read_bytes() == second.read_bytes() and len(first.read_bytes()) == size
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, f"2{name}"]), "a temporary file is left"


def test_events_are_written_without_what_goes_without_saying(written: bytes) -> None:
    events = json.loads(written)["tracks"][0]["events"]
    assert events[0] == {"kind": "steps", "count": 2, "batch_tokens": 4}
    assert events[6] == {"kind": "adopted", "version": 1, "since": 0}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a whole tape"),
        (b"[]", "not a whole tape"),
        (b'{"kind": "other"}', "this is not a tape"),
        (b'{"kind": "diloco tape", "schema": 99}', "schema 99; this version reads 3 only"),
        (b'{"kind": "diloco tape", "schema": 1}', "schema 1; this version reads 3 only"),
        (b'{"kind": "diloco tape"}', "schema None; this version reads 3 only"),
        (b'{"kind": "diloco tape", "schema": 3}', "'run' is missing"),
        (b'{"kind": "diloco tape", "schema": 2, "schema": 3}', "a key appears twice"),
        (b'{"kind": NaN}', "NaN is not a number"),
    ],
)
def test_what_is_no_tape_is_refused_with_the_reason(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=reason) as caught:
        read_tape(path)
    assert caught.value.where == str(path) and caught.value.hint
    packed = tmp_path / "t.gz"
    packed.write_bytes(gzip.compress(data))
    with pytest.raises(UsageError, match=reason):
        read_tape(packed)


def test_a_missing_a_torn_and_an_unwritable_file_are_said_as_such(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_tape(tmp_path / "none")
    write_tape(TAPE, tmp_path / "t.gz")
    (tmp_path / "torn.gz").write_bytes((tmp_path / "t.gz").read_bytes()[:200])
    with pytest.raises(UsageError, match="not a whole gzip file"):
        read_tape(tmp_path / "torn.gz")
    with pytest.raises(UsageError, match="cannot write"):
        write_tape(TAPE, tmp_path / "no" / "folder")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_tape_only_a_usage_error_comes_out(
    data: st.DataObject, written: bytes, tmp_path: Path
) -> None:
    """One value somewhere becomes any other, or the file ends early, or a byte flips."""
    if data.draw(st.booleans()):
        plain = json.loads(written)
        place, key = data.draw(st.sampled_from(_places(plain)))
        place[key] = data.draw(anything)
        torn = json.dumps(plain).encode()
    else:
        cut = data.draw(st.integers(0, len(written) - 1))
        torn = written[:cut] + data.draw(st.binary(max_size=2)) + written[cut + data.draw(st.integers(0, 2)) :]
    path = tmp_path / "t.json"
    path.write_bytes(torn)
    try:
        read_tape(path)
    except UsageError as error:
        assert error.where == str(path)


def _places(plain: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    keys = list(plain) if isinstance(plain, dict) else range(len(plain)) if isinstance(plain, list) else []
    return [(plain, key) for key in keys] + [place for key in keys for place in _places(plain[key])]
