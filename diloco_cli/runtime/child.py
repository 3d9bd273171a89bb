"""Child processes that work for the command that started them: they read and answer lines of JSON."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from diloco_cli.environment import environment_with


def python_command(module: str, *words: str) -> tuple[str, ...]:
    """`python -m MODULE WORD...` that imports nothing from the working directory, which may be a stranger's."""
    return (sys.executable, "-P", "-m", module, *words)


def diloco_command(*words: str) -> tuple[str, ...]:
    return python_command("diloco_cli", *words)


class Child:
    """`python -m MODULE WORD...`, which ends by itself at the end of its stdin: see `end_all`. `apart`: in a session of
    its own, so that only the parent gets Ctrl-C, and without stderr. `env`: added to the present environment."""

    def __init__(self, module: str, *words: str, apart: bool = False, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            python_command(module, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if apart else None,
            text=True,
            env=environment_with(**(env or {})),
            start_new_session=apart,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the missing answer shows that
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def answer(self, within_s: float) -> Any:
        """The value in its next line, None if it has ended. Raises TimeoutError."""
        try:
            line = self._lines.get(timeout=max(0.0, within_s))
        except queue.Empty:
            raise TimeoutError(f"no answer within {within_s:.0f} s") from None
        return json.loads(line) if line else None

    def end(self, within_s: float) -> None:
        """Close its stdin, wait, and kill it if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        self.process.kill()
        self.process.wait()
        self._listener.join(within_s)  # longer only if a child of its own holds the pipe

    def _listen(self) -> None:
        """Queue every line of its stdout, and an empty one when it has ended."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


def end_all(children: Sequence[Child], within_s: float) -> None:
    """End all these children, by killing those that do not end in time."""
    for child in children:
        assert child.process.stdin is not None
        with suppress(OSError):
            child.process.stdin.close()
    for child in children:
        child.end(within_s)
