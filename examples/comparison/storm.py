"""A kill every so often: python examples/comparison/storm.py [--repetitions 3]. See README.md beside this file.

Useful tokens/s of `diloco` and of data-parallel training that torchrun restarts, of what each has undisturbed. What is
measured lies in storm.jsonl, where a second start finds it done; the table goes into README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import psutil
import yaml
from kept import HERE, ROOT, complete, measured_on, publish  # it says where the package lies
from paced import BATCH_TOKENS
from restarted import checkpoints, step_of

from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.records import decode
from diloco_cli.store.open import open_store
from diloco_cli.store.port import all_keys

LEARNERS = ("l0", "l1", "l2", "l3")
TARGETS = (*LEARNERS, "syncer", "supervisor")
STEP_S = 0.1
H, FRAGMENTS = 40, 4
SAVE_EVERY = 20  # steps of data-parallel training: 2 s
AWAY_S = 1.0  # until somebody starts anew what starts the others
HANGS_S = 60.0  # without progress
ENDS_WITHIN_S = 30.0
METHODS = {"ddp": "data-parallel, restarted by torchrun", "diloco": "`diloco`"}


@dataclass(frozen=True)
class StormCase:
    """`every_s`: between kills; None: nobody is killed."""

    method: str
    every_s: float | None
    seed: int

    def kills(self, seconds: float) -> Iterator[tuple[float, str]]:
        """When, and of what: the same for every method."""
        drawn, at_s = random.Random(self.seed), 0.0
        while self.every_s is not None and (at_s := at_s + self.every_s) < seconds:
            yield at_s - drawn.uniform(0.1, 0.6) * self.every_s, drawn.choice(TARGETS)


class Contender(Protocol):
    def marks(self) -> int:
        """What grows with progress."""

    def kill(self, target: str) -> None: ...

    def tokens(self) -> float:
        """That are kept, of all islands."""

    def close(self) -> None: ...


class Decoupled:
    """`diloco launch` with learners on this machine, and a folder as the bucket. `slower`: by how much each is."""

    def __init__(self, folder: Path, seed: int, slower: Mapping[str, float]) -> None:
        islands = [
            {
                "name": name, "region": "here", "accelerators": "cpu:1", "emulate": {"slowdown": factor},
                "tokens_per_s": BATCH_TOKENS / STEP_S / factor,
            }
            for name, factor in slower.items()
        ]  # fmt: skip
        run = {
            "version": 1, "name": "storm", "inventory": "inventory.yaml",
            "model": {"entrypoint": "paced:build_model", "args": {"step_s": STEP_S}},
            "data": {"entrypoint": "paced:build_data", "shards": 16},
            "train": {
                "tokens": 10**9, "seed": seed, "batch_tokens": BATCH_TOKENS, "micro_batch_tokens": BATCH_TOKENS,
                "inner": {"lr": 0.001, "save_every": H},
            },
            "sync": {"every": H, "fragments": FRAGMENTS, "mixing": "rebase"},
            "evaluation": {"every": 1_000_000},
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
        inventory = {"version": 1, "store": {"url": "bucket"}, "islands": islands}
        (folder / "inventory.yaml").write_text(yaml.safe_dump(inventory, sort_keys=False))
        self.folder = folder
        self.environment = os.environ | {
            "DILOCO_HOME": str(folder / "home"), "PYTHONPATH": f"{HERE}:{ROOT}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._diloco("launch", "run.yaml", "--detach")
        self.url = f"file://{folder}/bucket/storm"
        self.store = open_store(self.url)

    def marks(self) -> int:
        return sum(1 for _ in all_keys(self.store, "commit/"))

    def kill(self, target: str) -> None:
        self._diloco("chaos", "kill", target)
        if target == "supervisor":
            time.sleep(AWAY_S)
            self._diloco("resume", "--detach")

    def tokens(self) -> float:
        """Each fragment's merges count all of them."""
        commits = [decode(Commit, self.store.get(key) or b"", key) for key in all_keys(self.store, "commit/")]
        return sum(commit.merged_tokens for commit in commits if isinstance(commit, Merge)) / FRAGMENTS

    def close(self) -> None:
        self._diloco("stop")
        ours = [one for one in psutil.process_iter(["cmdline"]) if self.url in (one.info["cmdline"] or [])]
        for left in psutil.wait_procs(ours, ENDS_WITHIN_S)[1]:
            left.kill()

    def _diloco(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 4):
            print(f"diloco {' '.join(words)}: {done.returncode}: {done.stderr[-300:]}", file=sys.stderr)


class Restarted:
    """torchrun with four ranks. Its own death takes them along, and it is started anew, as a scheduler does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start()

    def _start(self) -> None:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=1000000"]
        script = [str(HERE / "restarted.py"), str(self.folder), str(STEP_S), str(SAVE_EVERY)]
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{ROOT}", "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("a") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", *words, *script], env=environment, stdout=log, stderr=log
            )

    def marks(self) -> int:
        return step_of(found[-1]) if (found := checkpoints(self.folder)) else 0

    def kill(self, target: str) -> None:
        if target == "supervisor":
            self.close()
            time.sleep(AWAY_S)
            self._start()
            return
        rank = LEARNERS.index(target) if target in LEARNERS else 0  # that of the syncer is rank 0's part
        for child in psutil.Process(self.agent.pid).children():
            with suppress(psutil.Error):
                if child.environ().get("RANK") == str(rank):
                    child.kill()

    def tokens(self) -> float:
        return self.marks() * len(LEARNERS) * BATCH_TOKENS

    def close(self) -> None:
        ranks = psutil.Process(self.agent.pid).children(recursive=True)
        self.agent.kill()
        self.agent.wait()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


def measured(storm: StormCase, seconds: float) -> dict[str, Any]:
    """From the time that everybody trains on. A hang ends it."""
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        contender: Contender
        if storm.method == "diloco":
            contender = Decoupled(folder, storm.seed, dict.fromkeys(LEARNERS, 1.0))
        else:
            contender = Restarted(folder)
        try:
            enough = 2 * FRAGMENTS + 2 if storm.method == "diloco" else SAVE_EVERY
            while contender.marks() < enough:
                time.sleep(0.2)
            return weathered(storm, contender, seconds)
        finally:
            contender.close()


def weathered(storm: StormCase, contender: Contender, seconds: float) -> dict[str, Any]:
    kills, killed = list(storm.kills(seconds)), 0
    began_s, before = time.monotonic(), contender.tokens()
    marks, since_s, longest_s = contender.marks(), began_s, 0.0
    with ThreadPoolExecutor(1) as killer:  # what is slow to kill holds up no look
        while (now_s := time.monotonic()) < began_s + seconds and now_s - since_s < HANGS_S:
            if killed < len(kills) and now_s - began_s >= kills[killed][0]:
                killer.submit(contender.kill, kills[killed][1])
                killed += 1
            if (new := contender.marks()) != marks:
                marks, since_s = new, now_s
            longest_s = max(longest_s, now_s - since_s)
            time.sleep(0.1)
        rate = (contender.tokens() - before) / (time.monotonic() - began_s)
    hangs = longest_s >= HANGS_S - 1
    return {"tokens_per_s": round(rate, 2), "kills": killed, "longest_s": round(longest_s, 1), "hangs": hangs}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown, of what is there."""
    groups: dict[tuple[float | None, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["every_s"], row["method"]), []).append(row)
    rates = {key: [row["tokens_per_s"] for row in group] for key, group in groups.items()}
    heads = (
        "a kill every",
        "method",
        "useful tokens/s",
        "of its undisturbed (lowest to highest)",
        "longest pause",
        "hangs",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|"
    for (every_s, method), group in sorted(groups.items(), key=lambda item: (-(item[0][0] or 1e9), item[0][1])):
        rate = statistics.median(rates[every_s, method])
        calm = statistics.median(rates.get((None, method), [rate]))
        shares = [100 * one / calm for one in rates[every_s, method]]
        cells = [
            "undisturbed" if every_s is None else f"{every_s:g} s",
            METHODS[method],
            f"{rate:,.1f}",
            f"{statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}, n={len(group)})",
            f"{max(row['longest_s'] for row in group):.0f} s",
            f"{sum(row['hangs'] for row in group)} of {len(group)}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield f"{sum(row['kills'] for row in rows)} kills. {measured_on(rows)}"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--every-s", type=float, nargs="+", default=[60.0, 15.0], help="between kills")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=180.0, help="of each storm")
    parser.add_argument("--output", type=Path, default=HERE / "storm.jsonl")
    options = parser.parse_args(words)
    storms = [
        StormCase(method, every_s, seed)
        for seed, every_s, method in product(range(options.repetitions), (None, *options.every_s), options.methods)
    ]
    same = {"seconds": options.seconds}
    rows = complete(options.output, map(vars, storms), same, lambda one: measured(StormCase(**one), options.seconds))
    publish("storm", options.output, table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
