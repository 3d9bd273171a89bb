"""Scripts of own loops as processes, and a count of what they drew that knows nothing of the product's books."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from diloco_cli.corpus.shuffle import BlockShuffle
from diloco_cli.protocol.log.commit_log import parse_format
from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import decode
from diloco_cli.store.port import Store
from tests.end_to_end.conftest import EXAMPLES, Playground
from tests.forked import ForkedProcess, script

LINE = re.compile(r"token (\d+)|samples \[([\d, ]+)\]")
SEQUENCE, SAMPLES = 32, 100_000


@dataclass
class LoopScript:
    """Processes of one script as one island, one after the other; each incarnation prints into a file of its own."""

    place: Playground
    script: str
    url: str
    name: str
    more: tuple[str, ...] = ()
    outputs: list[Path] = field(default_factory=list)
    process: ForkedProcess | None = None

    def start(self) -> LoopScript:
        folder = self.place.directory / "own-loop"
        self.outputs.append(folder / f"{self.name}-{len(self.outputs) + 1}.log")
        words, log = (self.script, self.url, self.name, *self.more), self.outputs[-1]
        self.process = ForkedProcess(script, *words, folder=folder, log=log, **self.place.environment)
        return self

    def kill(self) -> None:
        """Its own process alone, as the machine's memory killer would: a loader's workers end by themselves."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def drawn(self, incarnation: int) -> dict[int, list[int]]:
        """The samples by the position at which their batch began, as the script printed them."""
        batches, at = {}, 0
        for begins, samples in LINE.findall(self.outputs[incarnation - 1].read_text()):
            at = int(begins or at)
            if samples:
                batches[at] = [int(text) for text in samples.split(",")]
                at += len(batches[at]) * SEQUENCE
        return batches

    def ended_well(self, within_s: float) -> None:
        assert self.process is not None
        status = self.process.wait(within_s)
        assert status == 0, self.outputs[-1].read_text()[-3000:]


def own_loop(place: Playground, url: str, tokens: int, file: str = "run.yaml") -> None:
    """The example's run at `url`, created and served; its islands are yet to begin, and it needs them both."""
    folder = place.directory / "own-loop"
    for name in ("own-loop", "hugging-face"):
        ignored = shutil.ignore_patterns("bucket", "__pycache__")
        shutil.copytree(EXAMPLES / name, place.directory / name, ignore=ignored)
    inventory = folder / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace("{url: bucket,", f"{{url: '{url}',"))
    words = ["--set", f"train.tokens={tokens}", "--set", "evaluation.every=1000", "--set", "sync.quorum=2"]
    done = place.run("launch", f"own-loop/{file}", "--detach", *words)
    assert done.returncode == 0, done.stderr
    place.environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])


def expected(shard: int, num_shards: int, position: int, tokens: int, seed: int) -> list[int]:
    """The samples of a shard from `position` on: its part of each epoch's order, which the seed gives."""
    order = BlockShuffle(SAMPLES, 1, seed)
    found: list[int] = order.shard(shard, num_shards, position // SEQUENCE, tokens // SEQUENCE).tolist()
    return found


def merged_samples(store: Store, scripts: list[LoopScript]) -> dict[int, Counter[int]]:
    """Of each fragment: how often each sample was merged, by what the scripts printed of the ranges in the log."""
    run = parse_format(store.get(FORMAT_KEY) or b"", "format")
    counts: dict[int, Counter[int]] = {fragment: Counter() for fragment in range(run.num_fragments)}
    by_name = {script.name: script for script in scripts}
    n = 0
    while (data := store.get(commit_key(n))) is not None:
        commit = decode(Commit, data, "log")
        n += 1
        for item in commit.inputs if isinstance(commit, Merge) else ():
            batches = by_name[item.learner].drawn(item.incarnation)
            inside = [at for at in batches if item.data_start <= at < item.data_end]
            assert sum(len(batches[at]) for at in inside) * SEQUENCE == item.tokens == item.data_end - item.data_start
            for at in inside:
                counts[commit.outputs[0].fragment].update(batches[at])
    return counts
