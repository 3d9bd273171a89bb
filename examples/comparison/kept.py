"""What a comparison has measured: rows beside it, where a second start finds them, and the table in README.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

Row = dict[str, Any]


def complete(
    output: Path, wanted: Iterable[Mapping[str, Any]], same: Mapping[str, Any], measured: Callable[[Any], Row]
) -> list[Row]:
    """A row for each that is wanted. What the file has under `same` circumstances is not measured again; each new row
    is written as it comes, with the circumstances, the machine and the commit."""
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    lines = output.read_text().splitlines() if output.exists() else []
    rows = [row for row in map(json.loads, lines) if same.items() <= row.items()]
    for one in wanted:
        if any(one.items() <= row.items() for row in rows):
            continue
        row = {**one, **measured(one), **same, **circumstances()}
        print(json.dumps(row), flush=True)
        with output.open("a") as out:
            out.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows


def circumstances() -> Row:
    from tests.benchmarks.measure import machine

    return {"machine": machine(), "load": round(os.getloadavg()[0], 1), "commit": commit()}


def commit() -> str:
    """Of the working tree, with a + if it holds changes; empty outside git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def measured_on(rows: Sequence[Row]) -> str:
    """The line below a table."""
    loads, commits = [row["load"] for row in rows], ", ".join(sorted({row["commit"] for row in rows}))
    return f"{rows[-1]['machine']}, load {min(loads):.1f} to {max(loads):.1f}, commit {commits}."


def publish(name: str, output: Path, lines: Iterable[str]) -> None:
    """Print the table, and put it between README.md's markers of that name if these are its rows."""
    text = "\n".join(lines) + "\n"
    print(text)
    if output == HERE / f"{name}.jsonl":
        page, marked = HERE / "README.md", rf"(?<=<!-- {name} -->\n).*?(?=<!-- {name}: end -->)"
        page.write_text(re.sub(marked, lambda _: f"\n{text}\n", page.read_text(), flags=re.DOTALL))
