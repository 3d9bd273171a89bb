"""Runs the commands of README.md and writes what they print into it: python examples/plan/record.py [--check]

A block is a fence of the kind `console` whose first line is `$ diloco ...`; a block that ends with `...` keeps the
number of lines it shows. With --check nothing is written, and the exit status is 1 if anything would change.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BLOCK = re.compile(r"```console\n\$ diloco (?P<command>[^\n]+)\n(?P<shown>.*?)```", re.DOTALL)
MORE = "...\n"
COLUMNS = "100"  # in a pipe the table of -v has every column; a page is narrower


def printed(command: str) -> str:
    """What `diloco COMMAND` prints on stdout, in this folder."""
    words = [sys.executable, "-m", "diloco_cli", *shlex.split(command)]
    done = subprocess.run(
        words, cwd=HERE, env={**os.environ, "COLUMNS": COLUMNS}, capture_output=True, text=True, check=False
    )
    return done.stdout + (done.stderr if done.returncode not in (0, 10) else "")


def recorded(block: re.Match[str]) -> str:
    output, shown = printed(block["command"]), block["shown"]
    if shown.endswith(MORE):
        lines = output.splitlines(keepends=True)
        output = "".join(lines[: max(1, shown.count("\n") - 1)]).rstrip("\n") + "\n" + MORE
    return f"```console\n$ diloco {block['command']}\n{output}```"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    fresh = BLOCK.sub(recorded, text)
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
