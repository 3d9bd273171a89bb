"""Changed copies are what `dataclasses.replace` makes, and leave the original alone."""

from __future__ import annotations

import dataclasses

import pytest

from diloco_cli.protocol.frozen import replace
from diloco_cli.protocol.records import Event
from diloco_cli.protocol.state import LearnerRecord, RunState


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (RunState(), {"n": 3, "digest": "d", "learners": {"a": LearnerRecord()}}),
        (RunState(slot=7, notes=()), {}),
        (LearnerRecord(floor=2, fated=(1, 4)), {"next_seq": 5}),
        (Event("steps", count=1, batch_tokens=8), {"count": 2}),
    ],
)
def test_it_is_what_dataclasses_make(record: RunState, changes: dict[str, object]) -> None:
    before = dataclasses.asdict(record)
    changed = replace(record, **changes)  # type: ignore[arg-type]
    assert changed == dataclasses.replace(record, **changes)  # type: ignore[arg-type]
    assert type(changed) is type(record) and changed is not record
    assert dataclasses.asdict(record) == before


def test_a_copy_is_frozen_too() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(RunState(), n=1).n = 2  # type: ignore[misc]


def test_no_field_comes_in_by_a_slip() -> None:
    with pytest.raises(TypeError, match="RunState has no field 'slott'"):
        replace(RunState(), slott=3)  # type: ignore[call-arg]
