"""A run over token shards in a bucket, with kills, a joiner and a leaver: python -m tests.studies.own_data --mb 1024

Shards go into the GCS fake of the contract suite; three learners of `diloco launch` train a model of a few numbers on
real batches of them, a fourth joins and is told to leave again, and two learners and the syncer are killed on the way.
Every sequence begins with its own number. Afterwards the log is read as plain JSON, apart from the product's books: of
each learner's positions, which counted (once a fragment, or it is a violation), which were offered and discarded, and
which are in no offer (lost with a process, or dropped at the drift bound); and whether the sequences that counted are
those that the learners' models saw. The cache on the disk is measured all the while. Ends with a row for README.md, and
with status 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from diloco_cli.config.presets import BYTE_VOCABULARY
from diloco_cli.corpus.cache import BlockCache
from diloco_cli.corpus.index import BLOCK_BYTES
from diloco_cli.corpus.indexing import index_shards
from diloco_cli.corpus.shuffle import BlockShuffle
from diloco_cli.corpus.split import Split
from diloco_cli.store.gcs import GCSStore
from tests.contract.fake_gcs import FakeGCS
from tests.studies.launched import inventory_of
from tests.studies.toy_runs import FRAGMENTS, ROOT

NAME = "own"
LEARNERS, JOINER = ("l0", "l1", "l2"), "l3"
SHARDS = len(LEARNERS) + 1
SEQUENCE, EVERY, HELD_OUT, SEED = 256, 16, 0.01, 0
STEP_S = 0.1
CACHE_BYTES = 64_000_000
SHARD_BYTES = 32 << 20
WITHIN_S = 3000.0
HEADER = (
    "| shards | of the data | kills | merged twice | applied | discarded | in no offer (longest, steps) | largest"
    " cache | s | violations |\n|---|---|---|---|---|---|---|---|---|---|"
)
Range = tuple[int, int]


@dataclass
class DataBooks:
    """What an own reading of the log finds; positions are in tokens of a learner's stream, summed over fragments."""

    applied: int = 0
    twice: int = 0
    discarded: int = 0
    lost: int = 0
    longest_lost: int = 0
    ranges: dict[int, list[Range]] = field(default_factory=lambda: defaultdict(list))  # of fragment 0, by stream
    violations: list[str] = field(default_factory=list)


def sequences_of_a_shard(first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """[count x SEQUENCE] tokens; each sequence begins with its number, low bits first."""
    tokens = np.zeros((count, SEQUENCE), "<u2")
    numbers = np.arange(first, first + count)
    tokens[:, 0], tokens[:, 1] = numbers & 0xFFFF, numbers >> 16
    tokens[:, 2:] = numbers[:, None] % BYTE_VOCABULARY
    return tokens.reshape(-1)


def write_shards(store: GCSStore, num_bytes: int) -> int:
    """How many tokens they have: whole sequences, and one token more, which is the last one's successor."""
    each = SHARD_BYTES // (2 * SEQUENCE)
    total = num_bytes // (2 * SEQUENCE)
    for number, first in enumerate(range(0, total, each)):
        store.put(f"{number:05d}.bin", sequences_of_a_shard(first, min(each, total - first)).tobytes())
    store.put("99999.bin", np.zeros(1, "<u2").tobytes())
    index_shards(store)
    return total * SEQUENCE + 1


class DisturbedRun:
    """`diloco launch` in a folder, and learners beside it."""

    def __init__(self, folder: Path, server: FakeGCS, tokens: int, batch_tokens: int) -> None:
        self.folder, self.server, self.batch_tokens = folder, server, batch_tokens
        self.journal = folder / "journal"
        self.journal.mkdir()
        self.environment = {
            **os.environ, "DILOCO_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "STORAGE_EMULATOR_HOST": server.url,
        }  # fmt: skip
        model = {"entrypoint": "tests.studies.toy_task:reading_model", "sequence": SEQUENCE,
                 "args": {"elements": 16, "journal": str(self.journal), "step_s": STEP_S}}  # fmt: skip
        whole = {
            "version": 1, "name": NAME, "inventory": "inventory.yaml", "model": model,
            "data": {"tokens": "gs://runs/tokens", "shards": SHARDS, "held_out": HELD_OUT, "cache": f"{CACHE_BYTES} B"},
            "train": {"tokens": tokens, "batch_tokens": batch_tokens, "seed": SEED, "inner": {"lr": 1e-3}},
            "sync": {"every": EVERY, "fragments": FRAGMENTS, "mixing": "rebase", "codec": "fp32"},
            "evaluation": {"every": 1_000_000}, "retention": {"rounds": "all"},
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        speed = f'"cpu:1", tokens_per_s: {batch_tokens / STEP_S:.0f}'
        islands = inventory_of(LEARNERS).replace('"cpu:1"', speed).replace("url: bucket", "url: gs://runs/here")
        (folder / "inventory.yaml").write_text(islands)

    def diloco(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "said.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "diloco_cli", *words], cwd=self.folder, env=self.environment, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """The JSON objects of this kind, by key."""
        stored, prefix = self.server.objects["runs"], f"here/{NAME}/{kind}/"
        return [json.loads(stored[key].data) for key in sorted(stored) if key.startswith(prefix)]

    def merged(self) -> int:
        return sum(commit.get("tokens", 0) for commit in self.objects("commit") if commit["kind"] == "merge")

    def is_over(self) -> bool:
        log = self.objects("commit")
        return bool(log) and log[-1]["kind"] == "finish"

    def wait(self, share: float, tokens: int) -> None:
        """Until so much is merged. The log's tokens of a merge count for one of FRAGMENTS."""
        ends_s = time.monotonic() + WITHIN_S
        while not self.is_over() and self.merged() < share * tokens * FRAGMENTS:
            if time.monotonic() > ends_s:
                raise RuntimeError((self.folder / "said.log").read_text()[-3000:])
            time.sleep(0.5)

    def kill(self, unit: str) -> None:
        path = self.folder / "home" / NAME / "units" / f"{unit}.json"
        psutil.Process(json.loads(path.read_text())["identity"]["pid"]).kill()

    def end(self) -> None:
        for process in psutil.process_iter():
            try:
                if process.environ().get("DILOCO_HOME") == str(self.folder / "home"):
                    process.kill()
            except psutil.Error:
                continue


def read_books(run: DisturbedRun) -> DataBooks:
    """From the bucket's JSON alone."""
    books = DataBooks()
    commits, offers = run.objects("commit"), run.objects("offer")
    streams = {name: number for number, name in enumerate((*LEARNERS, JOINER))}
    counted: dict[tuple[str, int], list[Range]] = defaultdict(list)
    refused = {(o["learner"], o["incarnation"], o["seq"]) for commit in commits for o in commit["outcomes"]}
    used = set()
    for commit in commits:
        for item in commit.get("inputs", ()):
            used.add((item["learner"], item["incarnation"], item["seq"]))
            for output in commit["outputs"]:
                counted[item["learner"], output["fragment"]].append((item["data_start"], item["data_end"]))
    thrown: dict[tuple[str, int], list[Range]] = defaultdict(list)
    for offer in offers:
        known = (offer["learner"], offer["incarnation"], offer["seq"])
        if known not in used:
            thrown[offer["learner"], offer["fragment"]].append((offer["data_start"], offer["data_end"]))
            if known not in refused and not run.is_over():
                books.violations.append(f"offer {known} has no outcome")
    for place, ranges in counted.items():
        end = max(stop for _, stop in [*ranges, *thrown[place]])
        books.twice += _overlap(ranges)
        books.applied += _length(ranges)
        known_to = _union([*ranges, *thrown[place]])
        books.discarded += _length(known_to) - _length(_union(ranges))
        gaps = [
            start - stop for (_, stop), (start, _) in zip([(0, 0), *known_to], [*known_to, (end, end)], strict=True)
        ]
        books.lost += sum(gaps)
        books.longest_lost = max(books.longest_lost, *gaps)
        if place[1] == 0:
            books.ranges[streams[place[0]]] += ranges
    return books


def check_sequences(run: DisturbedRun, books: DataBooks, tokens: int) -> None:
    """The sequences that counted: none twice in an epoch, none held out, all seen by a model."""
    split = Split((tokens - 1) // SEQUENCE, HELD_OUT)
    order = BlockShuffle(split.train, -(-BLOCK_BYTES // (SEQUENCE * 2)), SEED)
    seen = np.concatenate([np.fromfile(path, "<i8") for path in run.journal.iterdir()])
    held_out = split.evaluated(split.size)
    drawn: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
    for stream, ranges in books.ranges.items():
        length = (stream + 1) * split.train // SHARDS - stream * split.train // SHARDS
        for start, stop in ranges:
            numbers = np.arange(start // SEQUENCE, stop // SEQUENCE)
            found = split.trained(order.shard(stream, SHARDS, start // SEQUENCE, len(numbers)))
            for epoch in set(numbers // length):
                drawn[int(epoch)].append(found[numbers // length == epoch])
    for epoch, parts in drawn.items():
        numbers = np.concatenate(parts)
        twice = len(numbers) - len(np.unique(numbers))
        if twice or np.isin(numbers, held_out).any():
            books.violations.append(f"epoch {epoch}: {twice} sequences counted twice, or held-out ones")
        if not np.isin(numbers, seen).all():
            books.violations.append(f"epoch {epoch}: sequences counted that no model has seen")


def _union(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _length(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _overlap(ranges: list[Range]) -> int:
    return _length(ranges) - _length(_union(ranges))


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """The largest size that the cache had."""
    largest, over = [0], threading.Event()
    cache = BlockCache(folder, CACHE_BYTES)

    def watch() -> None:
        while not over.wait(0.05):
            largest[0] = max(largest[0], cache.num_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield largest
    over.set()
    thread.join()


def study(folder: Path, num_bytes: int, share: float, steps: int) -> tuple[DataBooks, str]:
    """Train on `share` of the tokens, in about so many steps of all learners. The books, and the row for README.md."""
    began_s = time.monotonic()
    with FakeGCS("runs") as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        tokens = write_shards(GCSStore("runs", "tokens"), num_bytes)
        target = int(share * tokens)
        run = DisturbedRun(folder, server, target, max(1, target // steps // SEQUENCE) * SEQUENCE)
        try:
            with watched(folder / "home" / ".data" / "blocks") as largest:
                _disturbed(run, target)
            books = read_books(run)
            check_sequences(run, books, tokens)
            verified = run.diloco("verify", NAME).wait()
        finally:
            run.end()
    books.violations += [f"verify ended with {verified}"] if verified else []
    books.violations += [f"{books.twice} tokens merged twice"] if books.twice else []
    books.violations += [f"the cache held {largest[0]} bytes"] if largest[0] > CACHE_BYTES else []
    whole = FRAGMENTS * tokens
    row = (
        f"| {num_bytes >> 20} MiB | {books.applied / whole:.0%} | 3 | {books.twice} |"
        f" {books.applied // FRAGMENTS:,} | {books.discarded // FRAGMENTS:,} | {books.lost // FRAGMENTS:,}"
        f" ({books.longest_lost // run.batch_tokens}) | {largest[0] / 1e6:.1f} of {CACHE_BYTES / 1e6:.0f} MB |"
        f" {time.monotonic() - began_s:.0f} | {len(books.violations)} |"
    )
    return books, row


def _disturbed(run: DisturbedRun, target: int) -> None:
    launched = run.diloco("launch", "run.yaml")
    run.wait(0.1, target)
    where = ("--run", f"gs://runs/here/{NAME}", f"--name={JOINER}", "--join", "--allow-code", "tests.studies.toy_task")
    joiner = run.diloco("learner", *where)
    run.wait(0.25, target)
    run.kill("l1")
    run.wait(0.4, target)
    run.kill("syncer")
    run.wait(0.55, target)
    run.kill("l2")
    run.wait(0.7, target)
    joiner.send_signal(signal.SIGTERM)
    joiner.wait()
    run.wait(1.0, target)
    launched.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="MiB of shards")
    parser.add_argument("--share", type=float, default=1.0, help="of the data, in merged tokens")
    parser.add_argument("--steps", type=int, default=4000, help="of all learners together")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        books, row = study(Path(folder), given.mb << 20, given.share, given.steps)
    print(HEADER, row, *books.violations, sep="\n")
    sys.exit(bool(books.violations))


if __name__ == "__main__":
    main()
