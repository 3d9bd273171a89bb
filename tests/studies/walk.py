"""How many modules a newcomer passes: python -m tests.studies.walk [--list]

    a delta    from a learner's first inner step to the adoption of the version that it went into: two learners and a
               syncer with real tensors, on their threads, in one process
    a launch   from `diloco launch` to the start of the first process

A module counts if one of its functions runs on the way; what is only imported does not. --list names them.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "diloco_cli."
QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


class Walk:
    """The modules whose functions run while `walks` holds, in any thread that begins within `traced`."""

    def __init__(self) -> None:
        self.walks = self.ended = False
        self.modules: set[str] = set()

    @contextmanager
    def traced(self) -> Iterator[None]:
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)
        try:
            yield
        finally:
            threading.setprofile(None)
            sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.ended:
            sys.setprofile(None)  # of this thread
        if not self.walks or event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return  # the body of a module or class is no function
        name = module_of(frame)
        if name.startswith(PACKAGE) and name not in self.modules and not is_loading(frame):
            self.modules.add(name)


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def is_loading(frame: FrameType) -> bool:
    """Whether the body of a module called this, as it does while it makes its data classes, for example."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and module_of(caller).startswith(PACKAGE):
            return True
        caller = caller.f_back
    return False


def delta_walk() -> set[str]:
    from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
    from diloco_cli.protocol.actors.learner import Observer
    from tests.numerics import harness

    walk = Walk()

    class ModuleWatch(Observer):
        def began(self, learner: Any) -> None:
            walk.walks = True

        def adopted(self, output: Any, since: Any) -> None:
            walk.ended = walk.ended or (walk.walks and output.version > 0)
            walk.walks = walk.walks and not walk.ended

    wired = harness.process_of

    def watched(*arguments: Any, **options: Any) -> Any:
        return wired(*arguments, observer=ModuleWatch(), **options)

    run = harness.make_run(2, 3, SyncSettings(every=4, fragments=1), OuterSettings(), InnerSettings())
    harness.process_of = watched
    try:
        with walk.traced():
            harness.run_to_end(run)
    finally:
        harness.process_of = wired
    return walk.modules


def launch_walk() -> set[str]:
    """In a process of its own: a launch ends where it would start the first unit."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(QUICKSTART, Path(folder) / "q", ignore=shutil.ignore_patterns("bucket"))
        command = [sys.executable, "-c", "from tests.studies.walk import launch; launch()"]
        root = str(QUICKSTART.parents[1])
        environment = {"PATH": "", "HOME": folder, "DILOCO_HOME": f"{folder}/home", "PYTHONPATH": root}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.removeprefix("walked ") for line in done.stdout.splitlines() if line.startswith("walked ")]
    if not lines:
        raise RuntimeError(done.stderr)
    return set(lines)


def launch() -> None:
    walk, popen = Walk(), subprocess.Popen

    def first_unit(command: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(command, list | tuple) and {"syncer", "learner"} & set(map(str, command)):
            sys.setprofile(None)
            print(*(f"walked {name}" for name in sorted(walk.modules)), sep="\n", flush=True)
            sys.exit(0)
        return popen(command, *arguments, **options)

    from diloco_cli.cli.main import main

    subprocess.Popen = first_unit  # type: ignore[assignment, misc]
    sys.argv = ["diloco", "launch", "q/run.yaml"]
    with walk.traced():
        walk.walks = True
        main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    wants_list = parser.parse_args().list
    for name, modules in (("a delta", delta_walk()), ("a launch", launch_walk())):
        print(f"{name} passes {len(modules)} modules")
        for module in sorted(modules) if wants_list else ():
            print(f"    {module}")


if __name__ == "__main__":
    main()
