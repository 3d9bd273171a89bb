"""The study: python -m tests.power_cuts.study [--states N]

Every recorded workload is cut before each of its ops, and each state that the cut may leave is written into a directory
of its own. Then the product opens it, and it must hold:

told        every object that a caller was told of is there; nothing deleted is back; a name has whole bytes or none
recovered   the log reads to at least the last commit that anybody was told of; its chain holds, and every state,
            delta and offer it names lies there with the right digest (a reader of its own: tests/histories/replayer.py)
goes on     the run is started again on it, and ends as it should
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from diloco_cli.store.local import LocalStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from tests.histories.replayer import Replayer
from tests.power_cuts.disk import Disk, Tree
from tests.power_cuts.recorder import hasty
from tests.power_cuts.workload import FOLDER, RUN, Work, WorkloadHistory, bare_calls, record, run_to_the_end

MEMORY = Path("/dev/shm")  # many small files, none of which needs to last
SEED = 1
MAX_OF_A_CUT = 12  # states; where more are legal, the extremes and a draw of the others
DEATHS = 12  # of all processes, each in a recording of its own, spread over the run


@dataclass
class Findings:
    """`states`: distinct states of the disk, each once. `violations`: in words, with the op of the cut."""

    states: set[int] = field(default_factory=set)
    cuts: int = 0
    gone_on: int = 0
    violations: list[str] = field(default_factory=list)


def cuts(history: WorkloadHistory, max_of_a_cut: int = 100, every: int = 1) -> Iterator[tuple[int, Tree]]:
    """(op before which the power goes, a state that this may leave), each state once for the same promises; at every
    so many-th op."""
    seen: set[tuple[int, int]] = set()
    told_at = sorted(call.done for calls in history.calls.values() for call in calls if call.done is not None)
    chance = Random(SEED)
    disk = Disk(history.directories)
    for at, op in enumerate([*history.ops, None]):
        if at % every == 0:
            promises = bisect_right(told_at, at)
            for tree in disk.states(max_of_a_cut, chance):
                name = (name_of(tree), promises)
                if name not in seen:
                    seen.add(name)
                    yield at, tree
        if op is not None:
            disk.play(op)


def spread(found: list[tuple[int, Tree]], most: int) -> list[tuple[int, Tree]]:
    """At most so many of them, evenly over the whole history."""
    return found if len(found) <= most else [found[number * len(found) // most] for number in range(most)]


def name_of(tree: Tree) -> int:
    """The same for equal trees."""
    return hash(frozenset(tree.items()))


def materialise(tree: Tree, base: Path) -> None:
    base.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (base / path).mkdir(mode=0o700)
        else:
            (base / path).write_bytes(data)


def examine(
    history: WorkloadHistory, work: Work, chosen: Iterable[tuple[int, Tree]], folder: Path, findings: Findings
) -> Iterator[str]:
    """Hold states against what was told; yields each violation. The folder is used again and again."""
    for at, tree in chosen:
        findings.states.add(name_of(tree))
        findings.cuts += 1
        base = folder / "cut"
        materialise(tree, base)
        try:
            _check(history, work, at, base, findings)
        except Exception as error:  # whatever stops it is what the study looks for
            findings.violations.append(f"cut before op {at} of {len(history.ops)}: {type(error).__name__}: {error}")
            yield findings.violations[-1]
        finally:
            shutil.rmtree(base)


def _check(history: WorkloadHistory, work: Work, at: int, base: Path, findings: Findings) -> None:
    root = base / FOLDER
    store: Store | None = LocalStore(root) if root.is_dir() else None
    keys = set(store.list("", limit=100_000)) if store else set()
    for key in sorted(keys | set(history.calls)):
        found = store.get(key) if store else None
        allowed = history.allowed(key, at)
        assert found in allowed, f"told: {key} holds {found!r:.60}, allowed {allowed!r:.120}"
    if work is not run_to_the_end:
        return
    if store is not None and "FORMAT.json" in keys:
        told = history.commits_told(at)
        found = Replayer(store, RUN).read().n + 1
        assert found >= told, f"recovered: {found} commits where {told} were acknowledged"
    with hasty():
        again = open_store(root.as_uri(), create=True)
        run_to_the_end(again, generation=9)
        kinds = Replayer(again, RUN).read().kinds
        assert kinds[-1] == "finish", f"goes on: it ended with {kinds[-1]}"
    findings.gone_on += 1


def recordings(folder: Path, without: str = "") -> Iterator[tuple[str, Work, WorkloadHistory]]:
    """The workloads, undisturbed and with deaths."""
    yield "bare calls", bare_calls, record(folder / "bare", bare_calls, without=without)
    whole = record(folder / "run", run_to_the_end, without=without)
    yield "a run", run_to_the_end, whole
    for number in range(DEATHS):
        at = len(whole.ops) * (2 * number + 1) // (2 * DEATHS)
        deaths = (at, at + len(whole.ops) // 5)
        history = record(folder / f"run-{number}", run_to_the_end, without=without, dies_at=deaths)
        yield f"a run, all killed at ops {deaths[0]} and {deaths[1]}", run_to_the_end, history


def study(folder: Path, most: int) -> Findings:
    """At most so many states, spread evenly over every recording."""
    findings = Findings()
    for number, (name, work, history) in enumerate(recordings(folder)):
        legal = list(cuts(history, MAX_OF_A_CUT))
        chosen = spread(legal, (most - findings.cuts) // (DEATHS + 2 - number))
        for violation in examine(history, work, chosen, folder, findings):
            print(violation, flush=True)
        print(f"{name}: {len(history.ops)} ops, {len(chosen)} states examined", flush=True)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description="power cuts of a local store")
    parser.add_argument("--states", type=int, default=5000)
    most = parser.parse_args().states
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        findings = study(Path(folder), most)
    print(
        f"{len(findings.states)} distinct states of the disk ({findings.cuts} with what was told at the time), "
        f"{findings.gone_on} went on to the end; {len(findings.violations)} violations"
    )
    return 11 if findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())
