"""A run over token shards in a bucket, with kills, a joiner and a leaver: python -m tests.studies.own_data --mb 1024

Shards go into the GCS fake of the contract suite; three learners of `diloco launch` train a model of a few numbers on
real batches of them, with `--real` a small transformer; a fourth joins and is told to leave again, and two learners and
the syncer are killed on the way. Every sequence begins with its own number. Afterwards the log is read as plain JSON,
apart from the product's books (data_books.py): what became of each position, and whether the sequences that counted are
those that the learners' models saw. The cache on the disk is measured all the while, and each learner states how long
its steps waited for their data. Ends with a row for README.md, one for each cause of what is in no offer, and with
status 1 if anything was violated.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from diloco_cli.config.presets import BYTE_VOCABULARY
from diloco_cli.corpus.index import BLOCK_BYTES
from diloco_cli.corpus.shards import BlockCache
from diloco_cli.corpus.shuffle import BlockShuffle, Split
from diloco_cli.corpus.tokenizing import index_shards
from diloco_cli.store.gcs import GCSStore
from tests.contract.fake_gcs import FakeGCS
from tests.studies.data_books import DataBooks, read_data_books
from tests.studies.launched import inventory_of
from tests.studies.toy_runs import FRAGMENTS, ROOT
from tests.studies.toy_task import NUMBER_TOKENS

NAME = "own"
LEARNERS, JOINER = ("l0", "l1", "l2"), "l3"
SHARDS = len(LEARNERS) + 1
SEQUENCE, EVERY, HELD_OUT, SEED = 256, 16, 0.01, 0
STEP_S = 0.1  # of the model that is none
CACHE_BYTES = 64_000_000
SHARD_BYTES = 32 << 20
WITHIN_S = 3000.0
HEADER = (
    "| shards | of the data | kills | merged twice | applied | discarded | given up by living learners | lost with"
    " processes (longest, steps) | waiting for data | largest cache | s | violations |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
CAUSES = "| learner, incarnation | why in no offer | tokens | longest, steps |\n|---|---|---|---|"
MOST_WAITING_PERCENT = 1.0  # of a real trainer's steps


def sequences_of_a_shard(first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """[count x SEQUENCE] tokens below 256; each sequence begins with the four bytes of its number, the lowest first,
    and counts on from there."""
    numbers = np.arange(first, first + count)
    tokens = ((numbers[:, None] + np.arange(SEQUENCE)) % BYTE_VOCABULARY).astype("<u2")
    for place in range(NUMBER_TOKENS):
        tokens[:, place] = numbers >> (8 * place) & 0xFF
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

    def __init__(
        self, folder: Path, server: FakeGCS, tokens: int, batch_tokens: int, real: bool = False,
        names: tuple[str, ...] = LEARNERS,
    ) -> None:  # fmt: skip
        self.folder, self.server, self.batch_tokens = folder, server, batch_tokens
        self.journal = folder / "journal"
        self.journal.mkdir()
        self.environment = {
            **os.environ, "DILOCO_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "STORAGE_EMULATOR_HOST": server.url,
        }  # fmt: skip
        args = {"journal": str(self.journal)} | ({} if real else {"elements": 16, "step_s": STEP_S})
        model = {"entrypoint": f"tests.studies.toy_task:{'noting_gpt' if real else 'reading_model'}",
                 "sequence": SEQUENCE, "args": args}  # fmt: skip
        whole = {
            "version": 1, "name": NAME, "inventory": "inventory.yaml", "model": model,
            "data": {"tokens": "gs://runs/tokens", "shards": SHARDS, "held_out": HELD_OUT, "cache": f"{CACHE_BYTES} B"},
            "train": {"tokens": tokens, "batch_tokens": batch_tokens, "seed": SEED, "inner": {"lr": 1e-3}},
            "sync": {"every": EVERY, "fragments": FRAGMENTS, "mixing": "rebase", "codec": "fp32"},
            "evaluation": {"every": 1_000_000}, "retention": {"rounds": "all"},
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        islands = inventory_of(names).replace("url: bucket", "url: gs://runs/here")
        if not real:
            islands = islands.replace('"cpu:1"', f'"cpu:1", tokens_per_s: {batch_tokens / STEP_S:.0f}')
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

    def most_lost(self) -> int:
        """Tokens of one fragment that an incarnation may lose: as many steps as an offer may hold."""
        written = json.loads(self.server.objects["runs"][f"here/{NAME}/FORMAT.json"].data)
        sync, steps = written["settings"]["sync"], [island["local_steps"] for island in written["islands"]]
        return int(
            (sync["drift_rounds"] + sync["staleness_rounds"] + 2) * max(sync["every"], *steps) * self.batch_tokens
        )

    def waiting(self) -> dict[str, float]:
        """Of each learner's steps, what they waited for data, in percent: as `diloco status --json` says."""
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", "status", NAME, "--json"], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        learners = json.loads(done.stdout)["data"]["learners"]
        return {one["name"]: one["data_percent"] for one in learners if one["data_percent"] is not None}

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


def check_sequences(run: DisturbedRun, books: DataBooks, tokens: int) -> None:
    """The sequences that counted: none twice in an epoch, none held out, all seen by a model."""
    split = Split((tokens - 1) // SEQUENCE, HELD_OUT)
    order = BlockShuffle(split.train, -(-BLOCK_BYTES // (SEQUENCE * 2)), SEED)
    seen = np.concatenate([np.fromfile(path, "<i8") for path in run.journal.iterdir()])
    held_out = split.evaluated(split.size)
    drawn: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
    for stream, name in enumerate((*LEARNERS, JOINER)):
        length = (stream + 1) * split.train // SHARDS - stream * split.train // SHARDS
        for start, stop in books.ranges.get(name, ()):
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


def study(folder: Path, num_bytes: int, share: float, steps: int, real: bool = False) -> tuple[DataBooks, str]:
    """Train on `share` of the tokens, in about so many steps of all learners. The books, and the row for README.md."""
    began_s = time.monotonic()
    with FakeGCS("runs") as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        tokens = write_shards(GCSStore("runs", "tokens"), num_bytes)
        target = int(share * tokens)
        run = DisturbedRun(folder, server, target, max(1, target // steps // SEQUENCE) * SEQUENCE, real)
        try:
            with watched(folder / "home" / ".data" / "blocks") as largest:
                _disturbed(run, target)
            books = read_data_books(run.objects("commit"), run.objects("offer"), run.is_over(), run.most_lost())
            check_sequences(run, books, tokens)
            waiting = run.waiting()
            verified = run.diloco("verify", NAME).wait()
        finally:
            run.end()
    most = max(waiting.values())
    books.violations += [f"verify ended with {verified}"] if verified else []
    books.violations += [f"{books.twice} tokens merged twice"] if books.twice else []
    books.violations += [f"the cache held {largest[0]} bytes"] if largest[0] > CACHE_BYTES else []
    books.violations += [f"steps waited for data: {waiting}"] if real and most > MOST_WAITING_PERCENT else []
    whole = FRAGMENTS * tokens
    row = (
        f"| {num_bytes >> 20} MiB{', real' if real else ''} | {books.applied / whole:.0%} | 3 | {books.twice} |"
        f" {books.applied // FRAGMENTS:,} | {books.discarded // FRAGMENTS:,} | {books.given_up // FRAGMENTS:,} |"
        f" {books.lost // FRAGMENTS:,} ({books.longest_lost // run.batch_tokens}) | {most:.2f} % |"
        f" {largest[0] / 1e6:.1f} of {CACHE_BYTES / 1e6:.0f} MB | {time.monotonic() - began_s:.0f} |"
        f" {len(books.violations)} |"
    )
    return books, "\n".join([row, "", CAUSES, *_causes(books, run.batch_tokens)])


def _causes(books: DataBooks, batch_tokens: int) -> Iterator[str]:
    """A row for each incarnation and reason."""
    parts: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for one in books.stretches:
        parts[one.learner, one.incarnation, one.reason or "lost when the process ended"].append(one.tokens)
    for (learner, incarnation, reason), tokens in sorted(parts.items()):
        yield f"| {learner}, {incarnation} | {reason} | {sum(tokens) // FRAGMENTS:,} | {max(tokens) // batch_tokens} |"


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
    parser.add_argument(
        "--real", action="store_true", help="a transformer trains, and its steps must not wait for data"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        books, row = study(Path(folder), given.mb << 20, given.share, given.steps, given.real)
    print(HEADER, row, *books.violations, sep="\n")
    sys.exit(bool(books.violations))


if __name__ == "__main__":
    main()
