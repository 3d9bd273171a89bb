"""The syncer's own numbers between bucket and memory: for tests.benchmarks.merge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from diloco_cli.config.settings import RunSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.layout import ParameterFact, make_layout
from diloco_cli.protocol.actors.merging import Merged
from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import TorchArithmetic, state_spec
from diloco_cli.tensors.merge import delta_formats
from diloco_cli.tensors.payload import Blank
from tests.benchmarks.measure import interleaved, ratios, row

CODEC = "int8"
STATUS = Path("/proc/self/status")


def run_of(size: int) -> RunFormat:
    """One fragment of square matrices, RDA, int8 up and bf16 down."""
    sync = SyncSettings(fragments=1, codec=CODEC)
    width = 2048 if size >= 1 << 22 else 64
    facts = [ParameterFact(f"w{i}", (width, width), False) for i in range(size // width**2)]
    return RunFormat("id", "bench", "", RunSettings("bench", sync=sync), (), make_layout(facts, sync), "test")


def offer(payload: bytes) -> Offer:
    return Offer("l", 1, 0, 0, 0, 0, "", 0, 1, 1, 1, digest(payload), len(payload), "")


def prepared(size: int, learners: int) -> tuple[TorchArithmetic, list[bytes]]:
    """An arithmetic that holds a version, and payloads of deltas against it."""
    run = run_of(size)
    generator, form = torch.Generator().manual_seed(1), delta_formats(run.layout, run.settings.sync)[0]
    payloads = [form.encode(torch.randn(size, generator=generator)) for _ in range(learners)]
    blank = Blank(state_spec(size, "nesterov"))
    blank.tensors["parameters"].normal_(generator=generator)
    arithmetic = TorchArithmetic(run)
    arithmetic.restore(0, "first", blank.seal())
    return arithmetic, payloads


def merged(arithmetic: TorchArithmetic, payloads: list[bytes]) -> Merged:
    sources = [arithmetic.read_delta(offer(payload), payload, None) for payload in payloads]
    found = arithmetic.merge(0, [(source, 1.0 + i % 3, 1.0, 1) for i, source in enumerate(sources)])  # type: ignore[misc]
    assert isinstance(found, Merged), found
    return found


def megabytes_beyond(learners: int, size: int) -> float:
    """Peak memory of one merge (Linux), less what is stated to be resident: the version before, the payloads, and the
    new state and weights."""
    merged(*prepared(1 << 16, 2))  # what libraries allocate once
    arithmetic, payloads = prepared(size, learners)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _kilobytes("VmRSS")
    found = merged(arithmetic, payloads)
    return (_kilobytes("VmHWM") - before) * 1024 / 1e6 - (len(found.state) + len(found.weights)) / 1e6


def _kilobytes(what: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(what))


def ingest(size: int, learners: int, folder: Path, rounds: int) -> list[str]:
    """From durable payloads through digest, merge and digest to a durable state and weights; beside it, the same bytes
    read and durably written by bare Python."""
    store = open_store((folder / "bucket").as_uri(), create=True)
    arithmetic, payloads = prepared(size, learners)
    for i, payload in enumerate(payloads):
        store.create(f"delta/{i}", payload)
    written = [len(merged(arithmetic, payloads).state), len(arithmetic.weights_codec.to_bytes(torch.zeros(size)))]
    stages: dict[str, list[float]] = {"read": [], "merge": [], "write": []}
    names = iter(range(10**6))
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: _one_merge(store, arithmetic, learners, f"{next(names)}", stages),
        "copy": lambda: _copy(folder, learners, written, f"{next(names)}"),
    }
    took = interleaved(works, rounds, cpu=False)
    bits = 8 * sum(len(payload) for payload in payloads)
    rate = [bits / s / 1e9 for s in took["ours"]]
    each = ", ".join(f"{name} {median(seconds[1:]):.2f} s" for name, seconds in stages.items())
    return [
        row("4 durable payloads -> durable version, Gbit/s ingested", rate, ">= 5", median(rate) >= 5),
        row("  the same / bare reads and durable writes, time", ratios(took["ours"], took["copy"]), "", None),
        f"  of that: {each}",
    ]


def _one_merge(
    store: Store, arithmetic: TorchArithmetic, learners: int, name: str, stages: dict[str, list[float]]
) -> None:
    marks = [time.perf_counter()]
    payloads = [store.get(f"delta/{i}") or b"" for i in range(learners)]
    assert all(digest(payload) for payload in payloads)
    marks.append(time.perf_counter())
    found = merged(arithmetic, payloads)
    marks.append(time.perf_counter())
    store.create(f"state/{name}", found.state)
    store.create(f"weights/{name}", found.weights)
    marks.append(time.perf_counter())
    for stage, start, end in zip(stages.values(), marks, marks[1:], strict=False):
        stage.append(end - start)
    for kind in ("state", "weights"):
        store.delete(f"{kind}/{name}")


def _copy(folder: Path, learners: int, written: list[int], name: str) -> None:
    payloads = [(folder / "bucket" / "delta" / f"{i}").read_bytes() for i in range(learners)]
    assert payloads
    for index, size in enumerate(written):
        with (folder / f"copy-{name}-{index}").open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    for index in range(len(written)):
        (folder / f"copy-{name}-{index}").unlink()
