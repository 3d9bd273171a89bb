"""Processes that are forks of one that has loaded torch and `diloco`: real ones, with their own pid, signals, memory,
directory, environment and exit status, without the seconds that each would take to load them."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import diloco_cli
from diloco_cli.runtime.daemon import connections

ROOT = Path(__file__).resolve().parents[1]
LATER = ["torch._dynamo", "pydantic.type_adapter"]  # what torch and typer import when something is called
MODULES = [module.name for module in pkgutil.walk_packages(diloco_cli.__path__, "diloco_cli.")]
ROOM = "ROOM_FOR_VARIABLES"  # in the environment of what is forked, see `_tell_kernel`
os.environ.setdefault(ROOM, "." * 16_384)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([name for name in MODULES if not name.endswith("__main__")] + LATER)
MAX_S = 240.0


class ForkedProcess:
    """Runs `work` with its arguments, as subprocess.Popen runs a program."""

    def __init__(
        self, work: Callable[..., object], *arguments: Any, folder: Path = ROOT, log: Path | None = None,
        **environment: str,
    ) -> None:  # fmt: skip
        """`environment`: beside this process's own. `log`: gets all that it says, instead of `said`."""
        self._place = TemporaryDirectory()
        files = [Path(self._place.name, name) if log is None else log for name in ("out", "err")]
        for file in files:
            file.touch()
        place = (str(folder), {**os.environ, **environment}, *map(str, files))
        self._process = FORKS.Process(target=_work, args=(*place, work, arguments))
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = MAX_S) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, "".join(self.said()))
        return self._process.exitcode

    def communicate(self, timeout: float = MAX_S) -> tuple[str, str]:
        self.wait(timeout)
        return self.said()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """If it has not ended."""
        self._process.kill()

    def said(self) -> tuple[str, str]:
        """On stdout and on stderr, so far."""
        out, err = ((Path(self._place.name) / name).read_text() for name in ("out", "err"))
        return out, err


def run_diloco(
    *words: str, folder: Path = ROOT, forking: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`diloco` to its end. `forking`: the units that it starts are forks, too. `environment`: beside this process's."""
    process = ForkedProcess(forking_diloco if forking else diloco, *words, folder=folder, **environment)
    try:
        return subprocess.CompletedProcess(words, process.wait(), *process.said())
    finally:
        process.kill()


def diloco(*words: str) -> None:
    from diloco_cli.cli.main import main

    sys.argv, sys.path[0] = ["diloco", *words], str(Path(sys.executable).parent)
    main()


def script(path: str, *words: str) -> None:
    """A program in the folder where it runs, as `python -u PATH WORDS`; its data loaders fork as they would there."""
    multiprocessing.set_start_method("fork", force=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv, sys.path[0] = [path, *words], os.getcwd()
    runpy.run_path(path, run_name="__main__")


def forking_diloco(*words: str) -> None:
    """`diloco`, whose units are forks of it, too."""
    import torch

    torch.set_num_threads(1)  # its own threads would not live on in a fork
    if sys.platform == "linux":
        subprocess.Popen = ForkedChild  # type: ignore[misc]
    diloco(*words)


def leading_diloco(*words: str) -> None:
    """The same, in a session of its own."""
    os.setsid()
    forking_diloco(*words)


_POPEN = subprocess.Popen


class ForkedChild(subprocess.Popen[bytes]):
    """In place of subprocess.Popen, in a forked process: `python ... -m MODULE WORDS` as a fork of it."""

    def __new__(cls, command: Sequence[str], **options: Any) -> Any:
        forks = not isinstance(command, str) and "-m" in command and subprocess.PIPE not in options.values()
        return super().__new__(cls) if forks else _POPEN(command, **options)

    def __init__(
        self,
        command: Sequence[str],
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args, self.returncode, self.stdin, self.stdout, self.stderr = command, None, None, None, None
        self._waitpid_lock, self._child_created = threading.Lock(), True  # what Popen's own methods look at
        self._communication_started = False
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            if stdout is not None:
                os.dup2(stdout.fileno(), 1)
            if stderr == subprocess.STDOUT:
                os.dup2(1, 2)
            _let_go()
            _leave_as(_run_module, command, env)


def _let_go() -> None:
    """Of files that a new program would not have, locked ones among them. Their numbers stay taken: what the parent
    knew of them may be closed here later."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in os.listdir("/dev/fd"):
        if int(number) > 2 and int(number) != null:
            os.dup2(null, int(number), inheritable=False)


def _run_module(command: Sequence[str], environment: Mapping[str, str] | None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
        _tell_kernel(environment)
    connections.cache_clear()  # no thread lives on in a fork
    _, module, *words = command[command.index("-m") :]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _tell_kernel(environment: Mapping[str, str]) -> None:
    """Others may read a process's environment as it was when its program began: this writes over that."""
    if sys.platform != "linux":
        return
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    said = b"".join(f"{name}={value}".encode() + b"\0" for name, value in environment.items() if name != ROOM)
    assert len(said) <= end - start, "the environment has grown by more than ROOM"
    ctypes.memmove(start, said.ljust(end - start, b"\0"), end - start)


def _work(
    folder: str, environment: Mapping[str, str], out: str, err: str, work: Callable[..., object], arguments: Any
) -> None:
    gc.freeze()  # what was loaded is looked through, and copied, by no collection
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate((out, err), 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _leave_as(work, *arguments)


def _leave_as(work: Callable[..., object], *arguments: Any) -> None:
    """End as a program that does this, without the end of the interpreter, which would copy all that was loaded."""
    status = 1
    try:
        work(*arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
