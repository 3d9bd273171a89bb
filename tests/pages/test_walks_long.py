"""Each page's commands as a user types them, in order, in a copy of the examples: `pytest -m long tests/pages`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks_of
from tests.waiting import wait_until

WITHIN_S = 900.0
INSTALLS = ("pip install", "python3 -m venv", "pytest", "git clone")  # what CI and the installed tests do


def runnable(command: str) -> bool:
    return not any(word in command for word in INSTALLS)


class PageWalk:
    """One page in a folder of its own, with a fresh home. `launch` in the background, while a block beside it runs."""

    def __init__(self, folder: Path) -> None:
        for name in ("examples", "templates"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("bucket", "__pycache__"))
        bin_folder = folder / ".venv" / "bin"
        bin_folder.parent.symlink_to(sys.prefix)  # as a whole: its `python` finds its packages by what lies beside bin/
        self.folder = folder
        self.environment = {
            **os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "DILOCO_HOME": str(folder / "home"),
        }  # fmt: skip

    def begin(self, command: str) -> subprocess.Popen[str]:
        words = ["bash", "-euo", "pipefail", "-c", command]
        return subprocess.Popen(
            words, cwd=self.folder, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, command: str) -> None:
        if command.startswith("cd "):
            self.folder = self.folder / command.removeprefix("cd ")
        else:
            ended_well(self.begin(command), command)

    def wait_for_merges(self) -> None:
        """Until the newest run of this folder has merged; `status` ends with 4 while there is none."""

        def merges() -> bool:
            seen = self.begin("diloco status --json")
            out, _ = seen.communicate(timeout=WITHIN_S)
            return seen.returncode == 0 and json.loads(out.splitlines()[-1])["data"]["tokens"] > 0

        wait_until(merges, WITHIN_S)


def ended_well(process: subprocess.Popen[str], command: str) -> None:
    try:
        out, _ = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:  # as Ctrl-C: a launch ends its units
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 0, f"{command}\n{out[-4000:]}"


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs_here for block in blocks_of(page))])
def test_commands_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    walk = PageWalk(tmp_path)
    blocks = [block for block in blocks_of(page) if block.runs_here]
    for block, following in zip_longest(blocks, blocks[1:]):
        commands = [command for command in block.commands if runnable(command)]
        if block.beside:
            continue  # it ran with the one before
        *first, last = commands or ["true"]
        for command in first:
            walk.run(command)
        if following is None or not following.beside:
            walk.run(last)
            continue
        launched = walk.begin(last)
        walk.wait_for_merges()
        for command in following.commands:
            walk.run(command)
        ended_well(launched, last)
