"""What a learner holds beyond its resident part: `python -m tests.benchmarks.learner_memory`.

A real learner (`run_learner`) and a real `diloco syncer` exchange a light model of so many equal fragments on file://.
The learner's anonymous memory (RssAnon) is sampled from outside, all the time; in shared memory the learner marks what
it does: it offers from reading the fragment until the offer is in the bucket, adopts from the version's download until
it trains on it, saves from copying the moments until they are in the bucket. A sample counts for everything that was
under way. Resident is what the process had before it built its model, and of each parameter 20 bytes: parameter,
gradient, two moments, base; and the rounding errors that error feedback keeps. Not resident, so in the figures: values
that `rebase` keeps of offers on their way, and versions that wait for the end of a step. Figures are above the least
that it held while it did none of this, which is a row of its own. Freed memory goes back to the system at once
(MALLOC_MMAP_THRESHOLD_), so that what is seen is what is held. After a step the learner rests for twice as long, so
that most samples fall where all gradients are there.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco_cli.clock import sleep_s
from diloco_cli.config.settings import (
    DataSettings,
    EvaluationSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.environment import environment_with
from diloco_cli.layout import make_layout
from diloco_cli.learner import daemon
from diloco_cli.protocol.actors.learner import FetchedVersion, Follower, Learner
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Island, RunFormat, encode
from diloco_cli.runtime.consent import Allowance, NamedHere
from diloco_cli.store.local import LocalStore
from diloco_cli.tensors.flat import parameter_facts
from tests.benchmarks.measure import ROOT, machine, row

MODULE = "tests.benchmarks.learner_memory"
BATCH, WIDTH = 8, 1024
RESIDENT_BYTES = 20  # a parameter
GOAL, SAMPLE_S = 2.0, 0.002
OFFERS, ADOPTS, SAVES, STEPS = range(4)
PLACES = 3  # int64: how many of each are under way, a byte each; bytes before the model was built; rounding errors


class LightModel(nn.Module):
    """Equal matrices, one a fragment; a step reads one row of each, and its gradients are dense."""

    def __init__(self, fragments: int, rows: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((rows, WIDTH), 0.5)) for _ in range(fragments)])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part[:1] - targets.float().mean()).square().mean() for part in self.parts]).sum()


def build_model(fragments: int, rows: int) -> nn.Module:
    return LightModel(fragments, rows)


class ConstantBatches:
    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, batch_tokens), torch.full((1, batch_tokens), 1.0 + position % 3)

    def held_out(self, num_sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []


@dataclass(frozen=True)
class LearnerCase:
    """`save_every`: rounds between two saves of the moments; the default: none is saved."""

    name: str
    sync: SyncSettings
    save_every: int = 10**6

    def run(self, millions: int) -> RunFormat:
        """`millions`: Mi parameters in all."""
        rows = millions * 2**20 // WIDTH // self.sync.fragments
        model = ModelSettings(entrypoint=f"{MODULE}:build_model", args={"fragments": self.sync.fragments, "rows": rows})
        settings = RunSettings(
            "memory", model=model, sync=self.sync, data=DataSettings(entrypoint=f"{MODULE}:ConstantBatches"),
            train=TrainSettings(tokens=10**12, batch_tokens=BATCH, inner=InnerSettings(save_every=self.save_every)),
            evaluation=EvaluationSettings(every=10**6),
        )  # fmt: skip
        layout = make_layout(parameter_facts(build_model(self.sync.fragments, rows)), self.sync)
        island = Island("l0", "here", BATCH, self.sync.every, 1.0, 1.0, slowdown=3.0)
        return RunFormat("id", "memory", "2026-01-01T00:00:00.000Z", settings, (island,), layout, "bench")


def cases(fragments: int) -> list[LearnerCase]:
    def sync(**changes: Any) -> SyncSettings:
        return SyncSettings(every=4 * fragments, fragments=fragments, quorum=1, **changes)

    return [
        LearnerCase("replace, bf16", sync()),
        LearnerCase("replace, fp32 up and down", sync(codec="fp32", weights_codec="fp32")),
        LearnerCase("replace, int4, error feedback", sync(codec="int4", error_feedback=True)),
        LearnerCase("rebase, bf16", sync(mixing="rebase")),
        LearnerCase("replace, bf16, moments each round", sync(), save_every=1),
    ]


# -- in the learner's process -----------------------------------------------------------------------------------------


class Marks:
    """What the learner does, in memory that the benchmark reads too."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._room = memoryview(mmap.mmap(file.fileno(), 8 * PLACES)).cast("q")  # each is written at once
        self._counts, self._lock = [0, 0, 0, 0], threading.Lock()
        self.before_bytes = self.error_bytes = 0

    def add(self, what: int, count: int) -> None:
        with self._lock:
            self._counts[what] += count
            self.write()

    def write(self) -> None:
        self._room[1], self._room[2] = self.before_bytes, self.error_bytes
        self._room[0] = int.from_bytes(self._counts, "little")

    def read(self) -> tuple[tuple[int, ...], int, int]:
        return tuple(self._room[0].to_bytes(4, "little")), self._room[1], self._room[2]

    @contextmanager
    def on(self, what: int) -> Iterator[None]:
        self.add(what, 1)
        try:
            yield
        finally:
            self.add(what, -1)


class MarkedFollower(Follower):
    def _fetch(self, output: Any, seen_s: float) -> Steps[FetchedVersion | None]:
        learner = self._learner
        if isinstance(learner, MarkedLearner) and hasattr(learner, "progress"):
            learner.begins_to_adopt(output.fragment)
        return (yield from super()._fetch(output, seen_s))


class MarkedLearner(Learner):
    follower_type = MarkedFollower
    marks: Marks

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._arriving: set[int] = set()
        self._encode = self.wire.encode
        self.wire.encode = self._encoded  # type: ignore[method-assign]

    def begins_to_adopt(self, fragment: int) -> None:
        if fragment not in self._arriving:
            self._arriving.add(fragment)
            self.marks.add(ADOPTS, 1)

    def _adopt(self, output: Any, *others: Any) -> None:
        super()._adopt(output, *others)
        if output.fragment in self._arriving:
            self._arriving.remove(output.fragment)
            self.marks.add(ADOPTS, -1)

    def step(self) -> Steps[None]:
        train = self.training.train  # type: ignore[attr-defined]

        def marked(*args: Any) -> Any:
            with self.marks.on(STEPS):
                return train(*args)

        self.training.train = marked  # type: ignore[attr-defined]
        yield from super().step()
        self.training.train = train  # type: ignore[attr-defined]

    def _send(self, draft: Any) -> None:
        self.marks.add(OFFERS, 1)
        super()._send(draft)

    def _upload(self, *args: Any) -> Steps[None]:
        yield from super()._upload(*args)
        del args  # or the mark goes before what it stands for
        self.marks.add(OFFERS, -1)

    def _encoded(self, fragment: int, seq: int, applied: int | None, *values: Any) -> bytes:
        left = self.wire.residuals.left  # type: ignore[attr-defined]
        kept = {f: len([of for of in errors if f != fragment or of == applied]) for f, errors in left.items()}
        made = 1 if self.run.settings.sync.error_feedback else 0
        self.marks.error_bytes = (sum(kept.values()) + made) * 4 * self.run.layout.fragments[0].num_parameters
        self.marks.add(OFFERS, 0)
        return self._encode(fragment, seq, applied, *values)

    def save(self) -> Steps[None]:
        with self.marks.on(SAVES):
            yield from super().save()

    def _upload_moments(self, *args: Any) -> Steps[None]:
        with self.marks.on(SAVES):
            yield from super()._upload_moments(*args)
            del args


def anonymous_bytes(pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def learn(url: str, marks: str) -> None:
    """The learner's process."""
    MarkedLearner.marks = Marks(Path(marks))
    daemon.Learner = MarkedLearner  # type: ignore[misc]
    torch.zeros(1).add_(1)
    gc.collect()
    MarkedLearner.marks.before_bytes = anonymous_bytes()
    MarkedLearner.marks.write()
    daemon.run_learner(url, "l0", "cpu", here=NamedHere(Allowance((MODULE,))))


# -- outside ----------------------------------------------------------------------------------------------------------


@dataclass
class Peaks:
    """The most bytes beyond the resident part, by how many offers, adoptions, saves and steps were under way. `rest`:
    the least, while none was."""

    bytes: dict[tuple[int, ...], int] = field(default_factory=dict)
    rest: int = 2**62

    def note(self, counts: tuple[int, ...], beyond: int) -> None:
        if not any(counts):
            self.rest = min(self.rest, beyond)
        self.bytes[counts] = max(self.bytes.get(counts, -(2**62)), beyond)

    def of(self, what: MemoryRow) -> float | None:
        """None: it was never seen."""
        return max((most for counts, most in self.bytes.items() if what.fits(*counts)), default=None)


@dataclass(frozen=True)
class MemoryRow:
    """`fits`: whether these offers, adoptions, saves and steps belong to the row."""

    name: str
    fits: Callable[[int, int, int, int], bool]
    bound: bool = False


ROWS = (
    MemoryRow("offering", lambda offers, adopts, saves, _: (offers, adopts, saves) == (1, 0, 0), bound=True),
    MemoryRow("adopting", lambda offers, adopts, saves, _: (offers, adopts, saves) == (0, 1, 0), bound=True),
    MemoryRow("an offer and an adoption", lambda offers, adopts, saves, _: (offers, adopts, saves) == (1, 1, 0)),
    MemoryRow("several of a kind", lambda offers, adopts, saves, _: max(offers, adopts) > 1 and not saves),
    MemoryRow("saving moments", lambda offers, adopts, saves, _: saves > 0),
    MemoryRow("none of these", lambda offers, adopts, saves, _: offers == adopts == saves == 0),
)


def watched(process: subprocess.Popen[bytes], marks: Marks, resident: int, store: LocalStore, commits: int) -> Peaks:
    """Sample from commit 2 on, so that a learner's start does not count, until so many commits are there."""
    peaks, begun, turn = Peaks(), False, 0
    while process.poll() is None:
        seen = counts, before, errors = marks.read()
        try:
            held = anonymous_bytes(process.pid)
        except (FileNotFoundError, ProcessLookupError):
            break
        if begun and marks.read() == seen:  # else it was being written
            peaks.note(counts, held - before - resident - errors)
        turn += 1
        if turn % 100 == 0:
            begun = begun or store.stat(commit_key(2)) is not None
            if store.stat(commit_key(commits)) is not None:
                return peaks
        sleep_s(SAMPLE_S)
    raise RuntimeError(f"the learner ended with status {process.poll()}")


def measured(case: LearnerCase, millions: int, commits: int) -> Peaks:
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        folder = Path(name)
        run, bucket, marks = case.run(millions), folder / "bucket", folder / "marks"
        bucket.mkdir()
        store = LocalStore(bucket)
        store.create(FORMAT_KEY, encode(run))
        marks.write_bytes(bytes(8 * PLACES))
        log = ends.enter_context((folder / "log").open("wb"))
        own = {"DILOCO_HOME": name, "OMP_NUM_THREADS": "1"}

        def start(words: list[str], **variables: str) -> subprocess.Popen[bytes]:
            environment = environment_with(**own, **variables)
            process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=ROOT, stdout=log, stderr=log, env=environment
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        start(["diloco_cli", "syncer", store.url, "--allow-code", MODULE])
        learner = start([MODULE, "--learn", store.url, str(marks)], MALLOC_MMAP_THRESHOLD_="65536")
        try:
            return watched(learner, Marks(marks), RESIDENT_BYTES * run.layout.num_parameters, store, commits)
        except RuntimeError:
            print((folder / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--millions", type=int, default=64, help="Mi parameters")
    parser.add_argument("--fragments", type=int, default=8)
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    if options.learn:
        learn(*options.learn)
        return
    print(f"# {machine()}; load {os.getloadavg()[0]:.1f}", flush=True)
    unit = 4 * options.millions * 2**20 // options.fragments
    for case in cases(options.fragments):
        if options.only not in case.name:
            continue
        found = [measured(case, options.millions, options.commits) for _ in range(options.rounds)]
        rest = [peaks.rest for peaks in found]
        print(row(f"{case.name}: at rest, MB", [most / 1e6 for most in rest], "", None, digits=1))
        for what in ROWS:
            tops = [(peaks.of(what), least) for peaks, least in zip(found, rest, strict=True)]
            values = [(most - least) / unit for most, least in tops if most is not None]
            if values:
                goal, holds = (f"<= {GOAL:g} fragments", round(max(values), 2) <= GOAL) if what.bound else ("", None)
                print(row(f"{case.name}: {what.name}", values, goal, holds), flush=True)


if __name__ == "__main__":
    main()
