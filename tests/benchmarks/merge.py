"""Merging on one thread, beside a fused C kernel (if gcc is here), torch's add_ and naive code:
python -m tests.benchmarks.merge

Goals: int8 at most 2.5 times the fused kernel's time (without gcc: 1.8 G learner-parameters/s where add_ runs 20
GB/s); fp32 moves at least 45 % of add_'s bytes/s; from files at least 5 times as fast as stack-and-mean; RDA with
published norms, which it checks, at most 1.35 times the plain average, which checks nothing; at most 64 MB beyond the
resident part whatever M and N; 5 Gbit/s from durable payloads to a durable version, digests included.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.layout import Fragment, TensorSlot
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.merge import DeltaFormat, DeltaSource, MergeRule, Merging, apply_merge
from diloco_cli.tensors.payload import from_bytes
from tests.benchmarks import durable
from tests.benchmarks.measure import interleaved, machine, ratios, row

LEARNERS = 8
WIDTH = 2048
INT8_SIZE, FP32_SIZE, FILE_SIZE = 1 << 26, 1 << 25, 1 << 25
ROUNDS = 7
MEMORY_CASES = ((2, 1 << 24), (16, 1 << 24), (8, 1 << 26))
OUTER = OuterSettings("nesterov", 0.7, 0.9)
SHARES = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
# Not -ffast-math: what is linked with it flushes subnormal numbers to zero in the whole process that loads it.
FAST = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math")
FUSED = Path(__file__).with_name("fused.c")


@dataclass
class MergeBench:
    """A fragment of equal square tensors, M payloads of it, and a version to merge them into."""

    form: DeltaFormat
    payloads: list[bytes]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]

    def sources(self, claimed: bool) -> list[DeltaSource]:
        opened = [self.form.open(payload) for payload in self.payloads]
        return [DeltaSource(read, norms, claimed) for read, norms in opened if norms is not None]

    def merge(self, rule: MergeRule, *, check: bool) -> None:
        """As a syncer does it, from payloads in memory to new parameters and momentum."""
        merging = Merging(rule, self.form.cut, self.sources(check), SHARES[: len(self.payloads)])
        assert apply_merge(OUTER, merging, self.before, self.after) and not merging.unsound


def fragment_of(size: int) -> Fragment:
    tensors = max(1, size // WIDTH**2)
    shape = (WIDTH, WIDTH) if size >= WIDTH**2 else (size,)
    return Fragment(tuple(TensorSlot(f"t{i}", shape, i * (size // tensors)) for i in range(tensors)), False)


def bench(name: str, size: int, learners: int = LEARNERS) -> MergeBench:
    form = DeltaFormat(codec(name), fragment_of(size), SyncSettings())
    generator = torch.Generator().manual_seed(1)
    payloads = [form.encode(torch.randn(size, generator=generator)) for _ in range(learners)]
    vectors = [torch.randn(size, generator=generator), *(torch.zeros(size) for _ in range(3))]
    versions = [dict(zip(("parameters", "momentum"), pair, strict=True)) for pair in (vectors[:2], vectors[2:])]
    return MergeBench(form, payloads, *versions)


def fused_kernel(of: MergeBench, folder: Path) -> Callable[[], object] | None:
    """The same merge by compiled C; None without gcc."""
    if shutil.which("gcc") is None:
        return None
    library = folder / "fused.so"
    subprocess.run(
        ["gcc", "-O3", "-march=native", *FAST, "-shared", "-fPIC", str(FUSED), "-o", str(library)], check=True
    )
    run, m = ctypes.CDLL(str(library)).merge_int8, len(of.payloads)
    spec = {"norms": (torch.float32, (of.form.cut.num_norms,)), **of.form.codec.spec(of.form.cut.size)}
    tensors = [from_bytes(payload, spec) for payload in of.payloads]
    pointers = [(ctypes.c_void_p * m)(*(t[name].data_ptr() for t in tensors)) for name in ("quantised", "scales")]
    shares = (ctypes.c_float * m)(*(share / sum(SHARES[:m]) for share in SHARES[:m]))
    vectors = [ctypes.c_void_p(vector.data_ptr()) for vector in (*of.before.values(), *of.after.values())]
    rates = ctypes.c_float(OUTER.lr), ctypes.c_float(OUTER.momentum)
    kept = tensors  # the pointers' owners live as long as the kernel

    def merge() -> object:
        assert kept
        return run(ctypes.c_long(of.form.cut.size // 256), m, *pointers, shares, *vectors, *rates)

    return merge


def stack_and_mean(of: MergeBench, files: list[Path]) -> None:
    """What one writes first: decode all, stack, weigh, mean, step."""
    size = of.form.cut.size
    spec = {"norms": (torch.float32, (of.form.cut.num_norms,)), **of.form.codec.spec(size)}
    deltas = []
    for file in files:
        tensors = from_bytes(file.read_bytes(), spec)
        rows = tensors["quantised"].float().view(-1, 256) * tensors["scales"][:, None]
        deltas.append(rows.view(-1))
    weights = torch.tensor(SHARES[: len(files)])
    delta = (torch.stack(deltas) * weights[:, None]).sum(0) / weights.sum()
    momentum = OUTER.momentum * of.before["momentum"] + delta
    parameters = of.before["parameters"] - OUTER.lr * (delta + OUTER.momentum * momentum)
    of.after["parameters"].copy_(parameters)
    of.after["momentum"].copy_(momentum)


def kernels(int8: MergeBench, fp32: MergeBench, folder: Path, rounds: int) -> list[str]:
    a, b = torch.zeros(int8.form.cut.size), torch.ones(int8.form.cut.size)
    works: dict[str, Callable[[], object]] = {
        "add_": lambda: a.add_(b),
        "int8": lambda: int8.merge("avg", check=False),
        "rda": lambda: int8.merge("rda", check=True),
        "fp32": lambda: fp32.merge("avg", check=False),
    }
    fused = fused_kernel(int8, folder)
    if fused is not None:
        works["fused"] = fused
    took = interleaved(works, rounds)
    learner_parameters = len(int8.payloads) * int8.form.cut.size
    add_gbps = [12 * a.numel() / s / 1e9 for s in took["add_"]]
    int8_rate = [learner_parameters / s / 1e9 for s in took["int8"]]
    moved = (4 * len(fp32.payloads) + 16) * fp32.form.cut.size  # deltas, and two vectors before and after
    share = [100 * moved / s / 1e9 / gbps for s, gbps in zip(took["fp32"], add_gbps, strict=True)]
    lines = [row("  add_ of two float32 vectors (12 bytes an element), GB/s", add_gbps, "", None)]
    if fused is not None:
        slower = ratios(took["int8"], took["fused"])
        lines.append(row("1 int8 merge / fused C kernel, time", slower, "<= 2.5", median(slower) <= 2.5))
    scaled = 1.8 * median(add_gbps) / 20
    holds = None if fused is not None else median(int8_rate) >= scaled
    lines.append(row("1 int8 merge, G learner-parameters/s", int8_rate, f">= {scaled:.2f} (1.8 at 20 GB/s)", holds))
    lines.append(row("1 fp32 merge, bytes/s moved in % of those of add_", share, ">= 45", median(share) >= 45, 0))
    rda = ratios(took["rda"], took["int8"])
    return [*lines, row("5 RDA with checked norms / unchecked average", rda, "<= 1.35", median(rda) <= 1.35)]


def from_files(size: int, folder: Path, rounds: int) -> list[str]:
    of = bench("int8", size)
    files = [folder / f"delta{i}" for i in range(len(of.payloads))]
    for file, payload in zip(files, of.payloads, strict=True):
        file.write_bytes(payload)

    def ours() -> None:
        of.payloads = [file.read_bytes() for file in files]
        of.merge("avg", check=True)

    took = interleaved({"naive": lambda: stack_and_mean(of, files), "ours": ours}, rounds, cpu=False)
    faster = ratios(took["naive"], took["ours"])
    return [row("2 stack-and-mean / ours, from files", faster, ">= 5", median(faster) >= 5)]


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--memory"]:
        print(durable.megabytes_beyond(*map(int, sys.argv[2:])))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("\n".join(kernels(bench("int8", INT8_SIZE), bench("fp32", FP32_SIZE), folder, ROUNDS)))
        print("\n".join(from_files(FILE_SIZE, folder, 3)))
        for learners, size in MEMORY_CASES:
            words = [sys.executable, "-m", "tests.benchmarks.merge", "--memory", str(learners), str(size)]
            beyond = [float(subprocess.run(words, capture_output=True, check=True).stdout) for _ in range(3)]
            figure = f"3 MB beyond the resident part, M = {learners}, N = {size >> 20} Mi"
            print(row(figure, beyond, "<= 64", max(beyond) <= 64, 1))
        print("\n".join(durable.ingest(1 << 24, LEARNERS, folder, 5)))


if __name__ == "__main__":
    main()
