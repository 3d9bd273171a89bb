"""Hooks are the user's own command and webhook, for when a run stalls, fails or finishes. They come from flags,
DILOCO_ON_EVENT and DILOCO_WEBHOOK, or the user's own file, never from a run file or a bucket: who may write those must
not run commands here. The command gets no shell (`sh -c '...'` asks for one), the event as JSON on stdin, and
DILOCO_EVENT_KIND, _RUN, _URL, _TEXT, _TIME in its environment."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from diloco_cli.clock import utc_now_text
from diloco_cli.config.run_file import read_user_text
from diloco_cli.environment import environment_with
from diloco_cli.errors import DilocoError, RefusedError, UsageError
from diloco_cli.events.cause import safe

TIMEOUT_S = 10.0
HookKind = Literal["stalled", "failed", "finished"]


@dataclass(frozen=True)
class Hooks:
    """ "" where there is none."""

    on_event: str = ""
    webhook: str = ""

    def environment(self) -> dict[str, str]:
        """For a process that goes on with them: an address may hold a secret, which argv would show."""
        named = {"DILOCO_ON_EVENT": self.on_event, "DILOCO_WEBHOOK": self.webhook}
        return {name: value for name, value in named.items() if value}


def hooks_of(on_event: str | None, webhook: str | None) -> Hooks:
    """From the flags, else DILOCO_ON_EVENT and DILOCO_WEBHOOK, else the user's own file. Raises UsageError for what
    can never work."""
    command, named = (on_event, "--on-event") if on_event is not None else read_user_text("on_event")
    address, given = (webhook, "--webhook") if webhook is not None else read_user_text("webhook")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"on_event: {error}: {command!r}", where=named) from error
    if command and not words:
        raise UsageError("on_event: an empty command", where=named)
    parts = urlsplit(address)
    if address and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise UsageError("webhook: not an http:// or https:// address", where=given)
    return Hooks(command, address)


class HookCaller:
    """Calls the hooks beside the work, each kind once until another state lies between. A failure is said once."""

    def __init__(self, hooks: Hooks, run: str, url: str, say: Callable[[str], None]) -> None:
        self._hooks, self._run, self._url, self._say = hooks, run, url, say
        self._last = ""
        self._told: set[str] = set()
        self._calls: list[threading.Thread] = []

    def look(self, state: str, reason: str) -> None:
        """The state of the run, as it is shown."""
        if state == "STALLED":
            self.call("stalled", reason)
        else:
            self._last = ""

    def call(self, kind: HookKind, text: str) -> None:
        if kind == self._last or not (self._hooks.on_event or self._hooks.webhook):
            return
        self._last = kind
        event = {"kind": kind, "run": self._run, "url": safe(self._url), "text": safe(text), "time": utc_now_text()}
        for name, work in (("on_event", self._command), ("webhook", self._post)):
            if getattr(self._hooks, name):
                thread = threading.Thread(target=self._try, args=(name, work, event), name=name, daemon=True)
                self._calls.append(thread)
                thread.start()

    def __enter__(self) -> HookCaller:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """An error of the run is its failure. Waits for the calls that were begun, which end within TIMEOUT_S."""
        if isinstance(error, DilocoError) and not isinstance(error, RefusedError):
            self.call("failed", str(error))
        for thread in self._calls:
            thread.join(TIMEOUT_S + 1)

    def _try(self, name: str, work: Callable[[dict[str, str]], None], event: dict[str, str]) -> None:
        try:
            work(event)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if name not in self._told:
                self._told.add(name)
                self._say(f"warning: {name} failed ({safe(_told(error))}); if it fails again, that is not said")

    def _command(self, event: dict[str, str]) -> None:
        facts = {f"DILOCO_EVENT_{key.upper()}": value for key, value in event.items()}
        subprocess.run(
            shlex.split(self._hooks.on_event),
            input=json.dumps(event).encode(),
            env=environment_with(**facts),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=True,
        )

    def _post(self, event: dict[str, str]) -> None:
        from urllib.request import Request, urlopen  # it takes its time to load

        headers = {"Content-Type": "application/json", "User-Agent": "diloco"}
        request = Request(self._hooks.webhook, json.dumps(event).encode(), headers, method="POST")
        with urlopen(request, timeout=TIMEOUT_S):
            pass


def _told(error: Exception) -> str:
    """Without the command or the address, which may hold secrets."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no end within {TIMEOUT_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"status {error.returncode}: {(error.stderr or b'').decode(errors='replace').strip()[-200:]}"
    return f"{type(error).__name__}: {error}"
