"""Four islands across an ocean: python examples/comparison/ocean.py [--repetitions 3]. See README.md beside this file.

Tokens/s of data-parallel training, of synchronous DiLoCo and of `diloco`, without bounds and over links whose speed is
to a small model and its fixed step what 2 and 5 Gbit/s are to 12B parameters and steps of 2 s. What is measured lies in
ocean.jsonl, where a second start finds it done; the table goes into README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import product
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml
from kept import HERE, ROOT, complete, measured_on, publish  # it says where the package lies
from links import HUB, INTERFACE, Sea, sea, why_not
from paced import BATCH_TOKENS, num_parameters

from diloco_cli.forecast.bandwidth import Exchange, data_parallel_gbps, decoupled_gbps, ring_factor
from diloco_cli.plan.link import CODEC_BITS
from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.records import decode
from diloco_cli.store.open import open_store

PARAMETERS, STEP_S, GRADIENT_BITS = 12e9, 2.0, 16.0  # of the run that is stood for
SYNCER_GBPS = 3.5  # what one process of it moves (diloco_cli/plan/link.py)
ROUND_TRIP_S = 0.1
ISLANDS, SYNCER = ("l0", "l1", "l2", "l3"), "syncer"
SETTLED = 2  # merges of a fragment, after which its pace counts
CODEC, FRAGMENTS = "int4", 12
METHODS = {
    "alone": "no exchange",
    "ddp": "data-parallel, 16 bits",
    "sync": "synchronous DiLoCo, 16 bits",
    "diloco": f"`diloco`, {CODEC}",
}
URL = "gs://sea/runs/ocean"
LIMIT_S = 600.0


@dataclass(frozen=True)
class Size:
    """How much of it is played: a step's seconds, H, rounds of `diloco`, steps of data-parallel training."""

    step_s: float = 0.08
    every: int = 200
    rounds: int = 7
    steps: int = 3

    def bits_per_s(self, gbps: float) -> float:
        """The same model bytes / bandwidth / step time as that of the run that is stood for."""
        return gbps * 1e9 * (num_parameters() / PARAMETERS) * (STEP_S / self.step_s)


@dataclass(frozen=True)
class Voyage:
    """`gbps`: None for links without bounds."""

    method: str
    gbps: float | None
    seed: int


class Ocean:
    """Plays voyages in one sea."""

    def __init__(self, water: Sea, size: Size, folder: Path) -> None:
        self.water, self.size, self.folder = water, size, folder

    def tokens_per_s(self, voyage: Voyage) -> float:
        """Also stops whatever the voyage has started."""
        links = {} if voyage.gbps is None else {name: self.size.bits_per_s(voyage.gbps) for name in ISLANDS}
        if links:
            links[SYNCER] = self.size.bits_per_s(SYNCER_GBPS)
        self.water.shape(links)
        try:
            return self._decoupled(voyage) if voyage.method == "diloco" else self._synchronous(voyage)
        finally:
            self.water.clear()

    def _synchronous(self, voyage: Voyage) -> float:
        size = self.size
        steps = size.steps if voyage.method == "ddp" and voyage.gbps is not None else size.every
        every = size.every if voyage.method == "sync" else steps + 1
        words = ["ddp" if voyage.method == "ddp" else "diloco", steps, every, size.step_s, voyage.seed]
        ranks = []
        for rank, island in enumerate(ISLANDS):
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(len(ISLANDS)), "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": self.water.address(ISLANDS[0]), "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }  # fmt: skip
            command = [sys.executable, str(HERE / "synchronous.py"), *map(str, words)]
            ranks.append(self.water.start(island, command, environment, self.folder / f"{island}.log"))
        done = json.loads(self._output(ranks)[0])
        return len(ISLANDS) * BATCH_TOKENS * done["steps"] / done["seconds"]

    def _decoupled(self, voyage: Voyage) -> float:
        """A daemon in each place, as on machines of their own; the bucket is an emulator in the hub."""
        address = self.water.address(HUB)
        delay_ms = 0.0 if voyage.gbps is None else 1000 * ROUND_TRIP_S * self.size.step_s / STEP_S
        self._write_run(voyage, address, delay_ms)
        words = [sys.executable, "-m", "tests.contract.fake_gcs", "sea", "--host", address, f"--delay-ms={delay_ms}"]
        server = self.water.start(HUB, words, {"PYTHONPATH": str(ROOT)}, self.folder / "bucket.log")
        assert server.stdout is not None
        self.environment = {
            "STORAGE_EMULATOR_HOST": server.stdout.readline().strip(), "DILOCO_ALLOW_HTTP": address,
            "PYTHONPATH": f"{HERE}:{ROOT}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        diloco = [sys.executable, "-m", "diloco_cli"]
        self._output([self._home(HUB, [*diloco, "launch", "run.yaml", "--create-only"])])
        daemons = [[SYNCER, "syncer"], *([name, "learner", "--name", name] for name in ISLANDS)]
        more = ["--run", URL, "--allow-code", "paced"]
        self._output([self._home(place, [*diloco, *words, *more]) for place, *words in daemons])
        return json.loads(self._output([self._home(HUB, [sys.executable, __file__, "--read", URL])])[0])

    def _home(self, place: str, words: Sequence[str]) -> Popen[str]:
        environment = {**self.environment, "DILOCO_HOME": str(self.folder / f"home-{place}")}
        return self.water.start(place, words, environment, self.folder / f"{place}.log")

    def _write_run(self, voyage: Voyage, address: str, delay_ms: float) -> None:
        size = self.size
        model = {"entrypoint": "paced:build_model", "args": {"step_s": size.step_s}}
        run = {
            "version": 1, "name": "ocean", "inventory": "inventory.yaml",
            "model": model, "data": {"entrypoint": "paced:build_data"},
            "train": {
                "tokens": len(ISLANDS) * size.rounds * size.every * BATCH_TOKENS, "seed": voyage.seed,
                "batch_tokens": BATCH_TOKENS, "micro_batch_tokens": BATCH_TOKENS, "inner": {"lr": 0.001},
            },
            "sync": {
                "every": size.every, "fragments": FRAGMENTS, "mixing": "rebase",
                "codec": CODEC, "weights_codec": CODEC,
            },
            "evaluation": {"every": 1_000_000},
        }  # fmt: skip

        def linked(gbps: float) -> dict[str, object]:
            if voyage.gbps is None:
                return {}
            speed = f"{self.size.bits_per_s(gbps) / 1e6:.3f} Mbps"
            return {"link": {"up": speed, "down": speed, "rtt": f"{delay_ms:g} ms"}}

        about = {"accelerators": "cpu:1", "tokens_per_s": BATCH_TOKENS / size.step_s}
        islands = [{"name": name, "region": name, **about, **linked(voyage.gbps or 0)} for name in ISLANDS]
        url = URL.rpartition("/")[0]
        store = {"url": url, "region": SYNCER, "allow_http": address, **linked(SYNCER_GBPS)}
        inventory = {"version": 1, "store": store, "islands": islands}
        for name, content in (("run", run), ("inventory", inventory)):
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    def _output(self, processes: Sequence[Popen[str]]) -> list[str]:
        """What each has printed in the end. RuntimeError if one fails or none ends in time."""
        ends_s = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > ends_s:
                break
            time.sleep(0.1)
        if any(process.poll() != 0 for process in processes):
            said = "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
            raise RuntimeError(f"not all of {[process.args[4:] for process in processes]} came to their end\n{said}")
        return [process.stdout.read() for process in processes if process.stdout]


def merged_tokens_per_s(url: str) -> float:
    """Sum over islands, mean over the fragments: what was merged into one from its third merge on, over the time of
    that. (In the first rounds learners start and catch up, and slots find their length.)"""
    store = open_store(url)
    commits = [decode(Commit, store.get(key) or b"", key) for key in store.list("commit/")]
    merges = [commit for commit in commits if isinstance(commit, Merge)]
    rates = []
    for fragment in {merge.outputs[0].fragment for merge in merges}:
        steady = [merge for merge in merges if merge.outputs[0].fragment == fragment][SETTLED:]
        if len(steady) < 2:
            raise SystemExit(
                f"fragment {fragment} has {len(steady)} merges after {SETTLED}: --rounds {2 * SETTLED + 2}"
            )
        took = datetime.fromisoformat(steady[-1].time) - datetime.fromisoformat(steady[0].time)
        rates.append(sum(merge.merged_tokens for merge in steady[1:]) / took.total_seconds())
    return statistics.mean(rates)


def predicted(method: str, gbps: float, every: int) -> float:
    """The share of the time that islands compute, by the formulas of `diloco simulate bandwidth`."""

    def needed_gbps(share: float) -> float:
        if method == "ddp":
            return data_parallel_gbps(PARAMETERS * GRADIENT_BITS, len(ISLANDS), STEP_S, share)
        if method == "sync":  # all at once, and everybody waits
            bits = PARAMETERS * GRADIENT_BITS * ring_factor(len(ISLANDS))
            return decoupled_gbps(bits, STEP_S, Exchange(every, 1, 0), share)
        return decoupled_gbps(PARAMETERS * CODEC_BITS[CODEC], STEP_S, Exchange(every, FRAGMENTS), share)

    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        low, high = (share, high) if needed_gbps(share) < gbps else (low, share)
    return low


def table(rows: Sequence[Mapping[str, Any]], size: Size) -> Iterator[str]:
    """Markdown, of what is there."""
    figures: dict[tuple[float | None, str], list[float]] = {}
    for row in rows:
        figures.setdefault((row["gbps"], row["method"]), []).append(row["tokens_per_s"])
    middle = {key: statistics.median(values) for key, values in figures.items()}
    yield "| links | method | tokens/s (median, lowest to highest) | of no exchange | predicted | `diloco` over it |"
    yield "|---|---|---|---|---|---|"
    for (gbps, method), values in figures.items():
        shares = [middle[gbps, method] / middle[key] for key in [(None, "alone")] if key in middle]
        ratios = [middle[key] / middle[gbps, method] for key in [(gbps, "diloco")] if key in middle]
        cells = [
            "without bounds" if gbps is None else f"{gbps:g} Gbit/s",
            METHODS[method],
            f"{_number(middle[gbps, method])} ({_number(min(values))} to {_number(max(values))}, n={len(values)})",
            *([f"{100 * share:.1f} %" for share in shares] or [""]),
            "" if gbps is None else f"{100 * predicted(method, gbps, size.every):.1f} %",
            *([f"{ratio:.2f}x" for ratio in ratios if method != "diloco"] or [""]),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield f"{1 + max(row['seed'] for row in rows)} seeds. {measured_on(rows)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main(words: Sequence[str]) -> None:
    options = parse(words)
    if options.read:
        print(json.dumps(merged_tokens_per_s(options.read)))
        return
    size = Size(options.step_s, options.every, options.rounds, options.steps)
    voyages = [
        Voyage(method, gbps, seed)
        for seed, gbps, method in product(range(options.repetitions), (None, *options.gbps), options.methods)
        if method != "alone" or gbps is None
    ]
    with ExitStack() as opened:

        @cache
        def water() -> Sea:
            if reason := why_not():
                sys.exit(f"skipped: {reason}")
            return opened.enter_context(sea((*ISLANDS, SYNCER)))

        def measured(one: Mapping[str, Any]) -> dict[str, float]:
            with tempfile.TemporaryDirectory(prefix="ocean-") as folder:
                return {"tokens_per_s": round(Ocean(water(), size, Path(folder)).tokens_per_s(Voyage(**one)), 2)}

        rows = complete(options.output, map(vars, voyages), vars(size), measured)
    publish("ocean", options.output, table(rows, size))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--gbps", type=float, nargs="+", default=[2.0, 5.0], help="links of the run that is stood for")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--step-s", type=float, default=Size.step_s, help="of the small model")
    parser.add_argument("--every", type=int, default=Size.every, help="H")
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="that `diloco` trains")
    parser.add_argument("--steps", type=int, default=Size.steps, help="of data-parallel training over shaped links")
    parser.add_argument("--output", type=Path, default=HERE / "ocean.jsonl")
    parser.add_argument("--read", metavar="URL", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    main(sys.argv[1:])
