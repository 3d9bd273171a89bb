"""Trains the quickstart, breaks it three times, and keeps what is seen: python examples/quickstart/record.py

Writes watch.svg, the live screen as a moving picture, and report.svg beside this file, and report.html into the current
directory. It takes as long as the quickstart does.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import SVG_EXPORT_THEME as THEME

from diloco_cli.cli.arguments import LOOK_S
from diloco_cli.cli.status import Watcher, awaited_run
from diloco_cli.observe.screen import Curves, LiveScreen
from diloco_cli.observe.situation import OVER
from diloco_cli.store.wrappers import Deadline

HERE = Path(__file__).resolve().parent
FAULTS = {0.3: ["kill", "iowa"], 0.45: ["kill", "syncer"], 0.6: ["pause", "belgium", "--for", "10s"]}
"""What happens when this share of the tokens is merged."""
FIRST = 0.25  # of the tokens, at the first frame: what shows no motion shows that one
WIDTH, HEIGHT = 100, 30
EVERY_S, SHOWN_S, LAST_S = 3.0, 0.6, 5.0  # between two frames as they are taken, as they are shown; the last frame
CELL, LINE, EDGE = 8.4, 17, 12  # pixels
Row = list[Segment]


def main() -> None:
    with TemporaryDirectory() as folder:
        copytree(HERE, folder, dirs_exist_ok=True, ignore=ignore_patterns("bucket"))
        launched = diloco(folder, "launch", "run.yaml")
        frames = list(recorded(folder))
        launched.wait()
        (HERE / "watch.svg").write_text(moving(frames), encoding="utf-8")
        for path in (HERE / "report.svg", Path("report.html").absolute()):
            diloco(folder, "report", "quickstart", "-y", "-o", str(path)).wait()
    sys.exit(launched.returncode)


def diloco(folder: str, *words: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"DILOCO_HOME": f"{folder}/home"}
    return subprocess.Popen([sys.executable, "-m", "diloco_cli", *words], cwd=folder, env=environment)


def recorded(folder: str) -> Iterator[list[Row]]:
    """The frames, while the faults happen in their turn."""
    box, curves, waiting = Deadline(LOOK_S), Curves(), dict(FAULTS)
    watcher = Watcher(awaited_run(f"file://{folder}/bucket/quickstart", box, 1.0), box)
    console = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT, force_terminal=True, color_system="truecolor")
    while True:
        current = watcher.look()
        curves.add(watcher.metrics)
        merged = current.tokens / current.tokens_target
        if merged >= FIRST:
            yield console.render_lines(LiveScreen(current, curves), pad=False)
        if current.state in OVER:
            return
        for share in [share for share in waiting if merged >= share]:
            diloco(folder, "chaos", *waiting.pop(share))
        time.sleep(EVERY_S)


def moving(frames: Sequence[list[Row]]) -> str:
    """One SVG that shows the frames one after the other, for ever. A row that looks the same in many is in it once."""
    frames = [*frames, *[frames[-1]] * round(LAST_S / SHOWN_S)]
    width, height = round(WIDTH * CELL) + 2 * EDGE, HEIGHT * LINE + 2 * EDGE
    rows: dict[str, int] = {}
    uses = [
        f'<use href="#r{rows.setdefault(drawn, len(rows))}" y="{frame * height + line * LINE}"/>'
        for frame, lines in enumerate(frames)
        for line, row in enumerate(lines[:HEIGHT])
        if (drawn := drawn_row(row))
    ]
    defined = [f'<g id="r{number}">{drawn}</g>' for drawn, number in rows.items()]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">',
            "<style>text { font: 14px Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }",
            f".film {{ animation: play {len(frames) * SHOWN_S:.1f}s steps({len(frames)}) infinite }}",
            f"@keyframes play {{ to {{ transform: translateY(-{len(frames) * height}px) }} }}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{THEME.background_color.hex}"/>',
            *["<defs>", *defined, "</defs>"],
            f'<svg x="{EDGE}" y="{EDGE}" width="{width}" height="{height - EDGE}"><g class="film">',
            *[*uses, "</g></svg>", "</svg>", ""],
        ]
    )


def drawn_row(row: Row) -> str:
    """Each piece at its column: fonts differ in how wide they are."""
    pieces, column = [], 0
    for segment in map(by_name, row):
        for found in re.finditer(r"\S+( \S+)*", segment.text):
            x, length = (round(CELL * cell_len(text), 1) for text in (segment.text[: found.start()], found[0]))
            pieces.append(
                f'<text x="{round(CELL * column + x, 1)}" y="{LINE - 4}" textLength="{length}"{look(segment)}>'
                f"{escape(found[0], quote=False)}</text>"
            )
        column += segment.cell_length
    return "".join(pieces)


def by_name(segment: Segment) -> Segment:
    """Commands of hints, with the run's name for where it lay while it was recorded."""
    return Segment(re.sub(r"file://\S+", "quickstart", segment.text), segment.style)


def look(segment: Segment) -> str:
    style = segment.style
    color = (style.color if style else None) or Color.default()
    weight = ' font-weight="bold"' if style and style.bold else ""
    faint = ' opacity=".6"' if style and style.dim else ""
    return f' fill="{color.get_truecolor(THEME).hex}"{weight}{faint}'


if __name__ == "__main__":
    main()
