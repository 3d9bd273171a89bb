"""`diloco` in forks of a process that has loaded it: each has its own memory, directory, environment and exit status,
as a process that a user starts, without the second or two that loading takes."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import diloco_cli
from diloco_cli.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
CALLBACKS = [f"diloco_cli.integrations.{library}" for library in ("lightning", "transformers")]  # need the libraries
LATER = ["torch._dynamo", "pydantic.type_adapter"]  # what torch and typer import when something is called
MAX_S = 240


def run_diloco(*words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`environment`: beside this process's own."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with TemporaryDirectory() as place:
        order = {"words": words, "folder": str(folder), "environment": {**os.environ, **environment}, "place": place}
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = ((Path(place) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(words, status, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, which holds its standard input."""
    command = [sys.executable, "-c", "from tests.forked import serve; serve()"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """An order a line, answered by the exit status."""
    found = [module.name for module in pkgutil.walk_packages(diloco_cli.__path__, "diloco_cli.")]
    for name in [*found, *LATER]:
        if not name.endswith("__main__") and name not in CALLBACKS:
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            _become(**json.loads(line))


def _become(words: list[str], folder: str, environment: dict[str, str], place: str) -> None:
    signal.alarm(MAX_S)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate((os.devnull, f"{place}/out", f"{place}/err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv, sys.path[0] = ["diloco", *words], str(Path(sys.executable).parent)
    try:
        main()
    except SystemExit as ended:  # without the end of the interpreter, which would copy all that was loaded
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0)
