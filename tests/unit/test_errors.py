"""Nothing that is shown steers a terminal."""

from __future__ import annotations

import pytest

from diloco_cli.errors import escaped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("grün, 3 µs", "grün, 3 µs"),
        ("\x1b[2J\r", "\\x1b[2J\\r"),
        ("\u202ereversed", "\\u202ereversed"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_not_printable_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert escaped(text) == shown and escaped(text).isprintable()


def test_what_is_to_be_kept_stays() -> None:
    assert escaped("a\n\tb\x07", keep="\n\t") == "a\n\tb\\x07"
