"""FORMAT.json is the first thing read from a bucket that a stranger may have written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.layout import Fragment, Layout, TensorSlot
from diloco_cli.protocol.log.commit_log import parse_format
from diloco_cli.protocol.log.records import FORMAT_SCHEMA, RecordError, encode
from tests.unit.protocol.records import RUN


@pytest.mark.parametrize("name", ["../up", "", "A", "a b", "a/b", "\x1b[31m", "a" * 64])
def test_names_that_could_leave_their_place_are_refused(name: str) -> None:
    assert parse_format(encode(RUN), "here") == RUN
    for hostile in (replace(RUN, name=name), replace(RUN, islands=(replace(RUN.islands[0], name=name),))):
        with pytest.raises(RecordError, match="is not a name"):
            parse_format(encode(hostile), "here")


@pytest.mark.parametrize(
    "tensor",
    [TensorSlot("w", (2,) * 3000, 0), TensorSlot("w", (1,) * 65, 0), TensorSlot("w", (-2, -3), 0),
     TensorSlot("w", (1 << 40, 1 << 40), 0), TensorSlot("w", (4, 4), 8), TensorSlot("w", (4, 4), 0, rows=(2, 9)),
     TensorSlot("w", (4, 4), 0, rows=(3, 1)), TensorSlot("w", (), 0, rows=(0, 1))],
)  # fmt: skip
def test_a_layout_that_no_model_has_is_refused(tensor: TensorSlot) -> None:
    fragments = (*RUN.layout.fragments, Fragment((tensor,), False))
    with pytest.raises(RecordError, match="not the layout of a model: 'w'"):
        parse_format(encode(replace(RUN, layout=Layout(fragments, RUN.layout.digest))), "here")


@pytest.mark.parametrize("schema", [1, FORMAT_SCHEMA - 1])
def test_a_run_of_an_older_version_is_refused_with_a_way_out(schema: int) -> None:
    with pytest.raises(RecordError, match=f"schema {schema}.*reads {FORMAT_SCHEMA} only") as caught:
        parse_format(encode(replace(RUN, schema=schema)), "memory://x")
    assert caught.value.hint is not None and "the version that created it" in caught.value.hint


def test_a_format_of_schema_8_is_refused_for_its_schema_although_its_settings_are_gone() -> None:
    """Its bytes are as the version before wrote them."""
    data = (Path(__file__).parent / "older" / "format-of-schema-8.json").read_bytes()
    assert b'"max_step"' in data and FORMAT_SCHEMA > 8
    with pytest.raises(RecordError, match=f"older version .schema 8.*reads {FORMAT_SCHEMA} only") as caught:
        parse_format(data, "memory://x")
    assert caught.value.hint is not None and "the version that created it" in caught.value.hint
