"""FORMAT.json is the first thing read from a bucket that a stranger may have written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import diloco_cli
from diloco_cli.protocol.beats import UNIT_STATES
from diloco_cli.protocol.log import parse_format
from diloco_cli.protocol.wire import RecordError, encode
from tests.unit.protocol.records import RUN


@pytest.mark.parametrize("name", ["../up", "", "A", "a b", "a/b", "\x1b[31m", "a" * 64])
def test_names_that_could_leave_their_place_are_refused(name: str) -> None:
    assert parse_format(encode(RUN), "here") == RUN
    for hostile in (replace(RUN, name=name), replace(RUN, islands=(replace(RUN.islands[0], name=name),))):
        with pytest.raises(RecordError, match="is not a name"):
            parse_format(encode(hostile), "here")


def test_every_state_that_a_learner_shows_is_explained() -> None:
    """The words are read out of the learner's own code."""
    package = Path(diloco_cli.__file__).parent
    source = "".join(path.read_text() for path in sorted((package / "learner").glob("*.py")))
    shown = set(re.findall(r'state = "([A-Z]+)"', source)) | set(re.findall(r'"([A-Z]+)" if joined', source))
    assert {"TRAINING", "WAITING", "DONE", "FAILED"} <= shown
    assert shown <= set(UNIT_STATES)
