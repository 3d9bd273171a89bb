"""The pages for users, README.md and those beside what they explain: their commands, and their links.

A comment before a block of commands says what a test cannot give it: `<!-- needs: a cloud account -->`; or a package
that it runs with where that is installed: `<!-- needs: transformers -->`. A block after
`<!-- while the run before goes on -->` runs beside the last command before it, once that run merges.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in sorted([
        ROOT / "README.md", *ROOT.glob("examples/*/README.md"), *ROOT.glob("templates/*/README.md"),
    ])
)  # fmt: skip
BLOCK = re.compile(r"(?:<!-- (?P<marker>[^>]*) -->\n)?```bash\n(?P<text>.*?)```", re.S)
BESIDE = "while the run before goes on"


@dataclass(frozen=True)
class CommandBlock:
    """The commands of one fenced block. `needs`: what no test has, or a package, or ""; `beside`: for a second
    terminal."""

    commands: tuple[str, ...]
    needs: str = ""
    beside: bool = False

    @property
    def runs_here(self) -> bool:
        return not self.needs or (self.needs.isidentifier() and importlib.util.find_spec(self.needs) is not None)


def blocks_of(page: str) -> list[CommandBlock]:
    found = []
    for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        marker = match["marker"] or ""
        needs = marker.removeprefix("needs: ") if marker.startswith("needs: ") else ""
        joined = match["text"].replace("\\\n", " ")
        commands = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in joined.splitlines())
        found.append(CommandBlock(tuple(filter(None, commands)), needs, marker == BESIDE))
    return found
