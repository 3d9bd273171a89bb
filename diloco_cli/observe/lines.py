"""Lines of a screen: text that fits a width, and how it is styled."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.text import Text

GAP = "   "
GOOD, WARNING, BAD = "green", "yellow", "bold red"
CURVE, AXIS = "cyan", r"[^ ]*[┤│]"
STYLES = {
    GOOD: ("TRAINING", "UPLOADING", "SERVING", "MERGING", "FINISHING", "STANDING_BY", "FINISHED", "DONE"),
    BAD: ("LOST", "FAILED", "STUCK", "SILENT", "STALLED"),
    WARNING: (
        "STARTING", "SLOW", "DEGRADED", "PAUSED", "STOPPED", "DRAINING", "SUSPECT", "WAITING", "RECOVERING", "FENCED",
        "QUARANTINED", "READING", "CLAIMING",
    ),
}  # fmt: skip
STYLE_OF = {word: style for style, words in STYLES.items() for word in words}


class StyledLine(NamedTuple):
    """`style`: in Rich's words; `state`: the word in it that is coloured by what it means."""

    text: str
    style: str = ""
    state: str = ""


def flowing(parts: Iterable[str], width: int | None, indent: str = "  ", first: str = "") -> list[str]:
    """The parts beside each other, in as many lines as they need, those after the first indented; a part that is too
    long is wrapped by its words."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and (width is None or len(lines[-1]) + len(GAP) + len(part) <= width):
            lines[-1] += GAP + part
        else:
            lines += wrapped(part, width, indent, indent if lines else first)
    return lines


def wrapped(text: str, width: int | None, indent: str = "  ", first: str = "") -> list[str]:
    """The text in lines of at most `width`, those after the first indented."""
    if width is None or len(first) + len(text) <= width:
        return [first + text]
    return textwrap.wrap(
        text, max(width, 20), initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    )  # fmt: skip


def cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + "…"


def plain(lines: Sequence[StyledLine]) -> str:
    return "\n".join(line.text for line in lines)


def styled(lines: Sequence[StyledLine]) -> Text:
    """The same for a terminal."""
    from rich.text import Text

    view = Text(no_wrap=True, end="")
    for number, line in enumerate(lines):
        text = Text(line.text, line.style)
        if line.style == CURVE:
            text.highlight_regex(AXIS, "default")
        if line.state:
            text.highlight_words([line.state], STYLE_OF.get(line.state, ""))
        view.append_text(Text("\n") if number else Text()).append_text(text)
    return view
