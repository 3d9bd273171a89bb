"""What a syncer process needs beyond its resident part: `python -m tests.benchmarks.syncer_memory`.

A real `diloco syncer` serves a run of one fragment on file://; M learners' offers with payloads of so many megabytes
lie in the bucket together, and quorum M lets it merge all of them at once. Anonymous memory (RssAnon) is sampled from
outside, all the time. Resident, as syncer/arithmetic.py says: the version (8 bytes a parameter); while merging the next
version and its weights (2 bytes); a directory's files are not read back. The payloads on their way, at most 400 MB, do
not count: they come before the next version is made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.settings import ModelSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.digests import digest
from diloco_cli.layout import make_layout
from diloco_cli.protocol.actors.joining import publish
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import Island, Offer, RunFormat, Timings, encode
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.tensors.merge import delta_formats
from tests.benchmarks.measure import machine, row

BATCH = 8
SAMPLE_S = 0.004
GOAL_MB = 64.0
WIDTH = 1000
BYTES_BEFORE, BYTES_NEXT = 8, 8 + 2  # a parameter


def build_model(rows: int) -> nn.Module:
    """One matrix."""
    return nn.Linear(WIDTH, rows, bias=False)


def make_run(directory: Path, learners: int, megabytes: float) -> RunFormat:
    """bf16 up and down: two bytes a parameter."""
    rows = max(1, round(megabytes * 1e6 / 2 / WIDTH))
    sync = SyncSettings(every=1, fragments=1, quorum=learners)
    settings = RunSettings(
        "memory",
        model=ModelSettings(entrypoint=f"{__name__ if __name__ != '__main__' else 'tests.benchmarks.syncer_memory'}"
                            ":build_model", args={"rows": rows}),
        train=TrainSettings(tokens=10**12, batch_tokens=BATCH),
        sync=sync,
    )  # fmt: skip
    layout = make_layout(parameter_facts(build_model(rows)), sync)
    islands = tuple(Island(f"l{i:02d}", "here", BATCH, 1, 1.0, 1.0) for i in range(learners))
    run = RunFormat("id", "memory", "2026-01-01T00:00:00.000Z", settings, islands, layout, "bench")
    directory.mkdir(parents=True)
    LocalStore(directory).create(FORMAT_KEY, encode(run))
    return run


class MemoryWatch:
    """A process, and the most anonymous memory it had since the last look, in megabytes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self._peak_mb = process, 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self._peak_mb = max(self._peak_mb, self.now_mb())
            sleep_s(SAMPLE_S)

    def now_mb(self) -> float:
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it ended between the look at its state and this one
            return 0.0
        return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon")), 0.0)

    def peak_mb(self) -> float:
        peak, self._peak_mb = self._peak_mb, 0.0
        return peak


def offer_all(run: RunFormat, store: LocalStore, clock: SystemClock) -> None:
    """One delta of every learner against version 0."""
    base = perform(read_log(run), store, clock).outputs[0]
    form = delta_formats(run.layout, run.settings.sync)[0]
    generator = torch.Generator().manual_seed(1)
    for island in run.islands:
        payload = form.encode(torch.randn(run.layout.num_parameters, generator=generator) * 1e-3)
        offer = Offer(
            island.name, 1, 0, 0, 0, 0, base.weights_digest, 0, BATCH, BATCH, 1, digest(payload), len(payload), nonce(),
            Timings(1.0, 1.0, 0.1, 0.1),
        )  # fmt: skip
        perform(publish(offer, payload), store, clock)


def measured(learners: int, megabytes: float) -> float:
    """Megabytes beyond the resident part at the worst moment of one merge of so many learners."""
    clock = SystemClock(monotonic_s, sleep_s, lambda: None)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "bucket", learners, megabytes)
        store = LocalStore(Path(folder) / "bucket")
        consent = ["--allow-code", "tests.benchmarks.syncer_memory"]
        words = [sys.executable, "-m", "diloco_cli", "syncer", store.url, *consent]
        with (Path(folder) / "log").open("wb") as log:
            environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "DILOCO_HOME": folder}
            process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment)
        try:
            watched = MemoryWatch(process)
            _await(store, commit_key(0), process)
            sleep_s(1.0)
            before_mb = watched.now_mb() - BYTES_BEFORE * run.layout.num_parameters / 1e6
            watched.peak_mb()
            offer_all(run, store, clock)
            _await(store, commit_key(1), process)
            resident_mb = (BYTES_BEFORE + BYTES_NEXT) * run.layout.num_parameters / 1e6
            return watched.peak_mb() - before_mb - resident_mb
        finally:
            process.kill()
            process.wait()


def _await(store: LocalStore, key: str, process: subprocess.Popen[bytes]) -> None:
    while store.stat(key) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the syncer ended with status {process.returncode}")
        sleep_s(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--megabytes", type=float, default=50.0, help="of one payload")
    options = parser.parse_args()
    print(machine())
    for learners in options.learners:
        beyond_mb = measured(learners, options.megabytes)
        figure = f"{learners} payloads of {options.megabytes:g} MB, beyond the resident part, MB"
        print(row(figure, [beyond_mb], f"<= {GOAL_MB:g} MB", beyond_mb <= GOAL_MB, digits=1), flush=True)


if __name__ == "__main__":
    main()
