"""Runs the quickstart and writes its live screen into a picture: python examples/quickstart/record.py [FILE.svg]"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from diloco_cli.cli.arguments import LOOK_S
from diloco_cli.cli.status import Watcher, awaited_run
from diloco_cli.clock import sleep_s
from diloco_cli.observe.screen import Curves, LiveScreen
from diloco_cli.store.wrappers import Deadline

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 100, 30
FAR_ENOUGH = 0.6  # of the run's tokens
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # Rich's pictures load theirs from the network


def main() -> None:
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "watch.svg"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("run.yaml", "inventory.yaml"):
            shutil.copy(HERE / name, folder)
        launch = [sys.executable, "-m", "diloco_cli", "launch", f"{folder}/run.yaml"]
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(launch, env=os.environ | {"DILOCO_HOME": folder}, stdout=quiet, stderr=quiet)
        try:
            picture.write_text(recorded(f"file://{folder}/bucket/quickstart"), encoding="utf-8")
        finally:
            child.send_signal(signal.SIGINT)
            child.wait()


def recorded(url: str) -> str:
    box, curves = Deadline(LOOK_S), Curves()
    watcher = Watcher(awaited_run(url, box, 1.0), box)
    while (current := watcher.look()).tokens < FAR_ENOUGH * current.tokens_target:
        curves.add(watcher.metrics)
        sleep_s(1.0)
    console = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT, force_terminal=True, record=True)
    console.print(LiveScreen(current, curves))
    return FONT.sub("", console.export_svg(title="diloco status --watch"))


if __name__ == "__main__":
    main()
