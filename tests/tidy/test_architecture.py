"""ARCHITECTURE.md draws the tables of states as they are, and names files that exist.

python -m tests.tidy.test_architecture      draws them anew
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from diloco_cli.protocol.log import state
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.runtime import units

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "ARCHITECTURE.md"
MARKER = re.compile(r"(<!-- states: (\w+) -->\n)(.*?)(?=\n[^\n]*:\n\n<!-- states: |<!-- states: end -->)", re.DOTALL)


def ways(name: str) -> list[tuple[str, str, str]]:
    """(from, to, what moves it) of one table, in the order of its rows."""
    if name == "unit":
        return [(str(a), str(b), str(event)) for (a, event), b in units.TRANSITIONS.items()]
    if name == "run":
        return [(str(now), str(to), kind) for now, row in state.RUN.items() for kind, to in row.items()]
    rows = {"learner": state.LEARNER, "syncer": state.SYNCER, "standby": state.STANDBY}[name]
    return [(str(now), str(to), "") for now, following in rows.items() for to in sorted(following)]


def drawn(name: str, found: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"    {a} --> {b}" + (f": {why}" if why else "") for a, b, why in found]
    first = lines[0].split()[0]
    return "\n".join(["", "```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *lines, "```", ""])


def with_diagrams(text: str) -> str:
    return MARKER.sub(lambda match: match[1] + drawn(match[2], ways(match[2])), text)


def test_the_diagrams_are_those_of_the_tables() -> None:
    text = DOCUMENT.read_text()
    assert [match[2] for match in MARKER.finditer(text)] == ["learner", "syncer", "standby", "run", "unit"]
    assert with_diagrams(text) == text, "draw them anew: python -m tests.tidy.test_architecture"


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`((?:tests/)?[a-z_]+/(?:[a-z_0-9]+/)*(?:[a-z_0-9]+\.py)?)`", DOCUMENT.read_text()))
    assert len(named) > 30
    missing = {path for path in named if not (ROOT / path).exists() and not (ROOT / "diloco_cli" / path).exists()}
    assert not missing


def test_every_kind_of_commit_is_explained() -> None:
    rows = " ".join(re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE))
    kinds = {str(kind.__struct_config__.tag) for kind in Commit.__subclasses__()}
    assert kinds == set(re.findall(r"`([a-z_]+)`", rows))


if __name__ == "__main__":
    DOCUMENT.write_text(with_diagrams(DOCUMENT.read_text()))
