"""Trains the quickstart, breaks it three times, and draws its report: python examples/quickstart/picture.py

Writes report.svg beside this file, and report.html into the current directory. It takes as long as the quickstart does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
FAULTS = {0.2: ["kill", "iowa"], 0.35: ["kill", "syncer"], 0.5: ["pause", "belgium", "--for", "10s"]}
"""What happens when this share of the tokens is merged."""


def diloco(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco_cli", *words]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)


def status(folder: str) -> dict[str, Any]:
    """Empty while there is no such run."""
    found = json.loads(diloco(folder, "status", "quickstart", "--json").stdout)
    return dict(found["data"]) if found["ok"] else {}


def main() -> None:
    with TemporaryDirectory() as folder:
        shutil.copytree(HERE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("bucket"))
        launched = subprocess.Popen([sys.executable, "-m", "diloco_cli", "launch", "run.yaml"], cwd=folder)
        waiting = dict(FAULTS)
        while launched.poll() is None:
            time.sleep(1.0)
            now = status(folder) if waiting else {}
            done = [share for share in waiting if now and now["tokens"] >= share * now["tokens_target"]]
            for share in done:
                diloco(folder, "chaos", *waiting.pop(share))
        for path in (HERE / "report.svg", Path("report.html").absolute()):
            print(diloco(folder, "report", "quickstart", "-y", "-o", str(path)).stdout, end="")
    sys.exit(launched.returncode)


if __name__ == "__main__":
    main()
