"""A unit that runs out of memory or of file descriptors: nobody else is harmed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.runtime.registry import log_path
from diloco_cli.runtime.supervisor import StopPolicy, SupervisionEvent, supervise
from diloco_cli.runtime.units import UnitSpec

TAKES_MEMORY = "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 30)"
TAKES_FILES = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (16, 16)); f = [open('/dev/null') for _ in range(99)]"
SOUND = "import time; print('up', flush=True); time.sleep(60)"
STARVED_STORE = """
import os, resource, sys
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import StoreUnavailableError
store = LocalStore(sys.argv[1])
store.create("a/first", b"1")
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for call in (lambda: store.create("a/second", b"2"), lambda: store.get("a/first"), lambda: store.list("")):
    try:
        call()
    except StoreUnavailableError as error:
        print(error.message)
for descriptor in held:
    os.close(descriptor)
print(store.create("a/second", b"2"), store.list(""))
"""


@pytest.mark.parametrize(
    ("code", "said"), [(TAKES_MEMORY, "MemoryError"), (TAKES_FILES, "Too many open files")], ids=["memory", "files"]
)
def test_only_the_starved_unit_dies_and_its_supervisor_reports_it(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log says why; the other unit lives until the run is over."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    events: list[SupervisionEvent] = []
    programs = {"starved": code, "sound": SOUND}
    units = [UnitSpec(name, "learner", (sys.executable, "-S", "-c", text)) for name, text in programs.items()]
    outcome = supervise(
        "nano",
        units,
        run_state=lambda: "FINISHED" if any(event.kind == "ended" for event in events) else "RUNNING",
        on_event=events.append,
        poll_s=0.02,
        state_every_s=0.05,
        stop=StopPolicy(finish_s=0.0, leave_s=0.3, kill_s=1.0, give_up_s=2.0),
    )
    ended = next(event for event in events if event.kind == "ended")
    assert ended.unit == "starved" and "status 1" in ended.text, ended
    assert next(event.kind for event in events if event.unit == "sound") == "started"
    assert said in log_path("nano", "starved").read_text()
    assert outcome.reason == "finished"


def test_a_store_without_free_descriptors_says_so_and_works_again(tmp_path: Path) -> None:
    """Retryable, with the system's reason; nothing is half written."""
    words = [sys.executable, "-c", STARVED_STORE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["too many open files"] * 3, done.stderr
    assert lines[3] == "Created(checked=True) ['a/first', 'a/second']"
