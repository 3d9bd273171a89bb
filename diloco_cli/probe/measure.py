"""Everything `diloco inventory probe` measures, one thing after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from diloco_cli.clock import monotonic_s, seconds_of
from diloco_cli.config.codec import to_plain
from diloco_cli.config.hardware import CPU, MPS, Accelerators, device_name, in_catalogue
from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.randomness import nonce
from diloco_cli.runtime.processes import usable_cores
from diloco_cli.runtime.units import Child, end_all
from diloco_cli.store.port import Store
from diloco_cli.training.inner import runs_in_bf16

GB = 1e9
SIDES = {"cpu": 1024, "mps": 4096, "cuda": 8192}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REPEATS = 5
TERA = 1e12


@dataclass(frozen=True)
class Spread:
    """The median of `num` values, and their range."""

    median: float
    low: float
    high: float
    num: int

    @property
    def relative(self) -> float:
        """(high - low) / median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.num)


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class MachineFacts:
    """`known`: the catalogue has this device. `memory_gb` is of one accelerator, None where it is the host's."""

    accelerators: Accelerators
    known: bool
    memory_gb: float | None
    cores: int
    host_memory_gb: float
    torch_device: str


def machine_facts() -> MachineFacts:
    """The best accelerators that torch finds: CUDA (or ROCm) devices, else Apple's, else the cores."""
    host_memory_gb = psutil.virtual_memory().total / GB
    cores = usable_cores()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = device_name(properties.name)
        found = in_catalogue(name)
        accelerators = Accelerators(found.name if found else name, torch.cuda.device_count())
        memory_gb = properties.total_memory / GB
        return MachineFacts(accelerators, found is not None, memory_gb, cores, host_memory_gb, "cuda:0")
    if torch.backends.mps.is_available():
        return MachineFacts(Accelerators(MPS, 1), True, None, cores, host_memory_gb, "mps")
    return MachineFacts(Accelerators(CPU, 1), True, None, cores, host_memory_gb, "cpu")


def training_types(device: str) -> list[str]:
    """The types in which a learner can compute there, the faster one first: no bf16 where it would be emulated."""
    emulated = torch.device(device).type == "cuda" and not runs_in_bf16("auto", torch.device(device))
    return [kind for kind in TYPES if kind != "bf16" or not emulated]


def matrix_tflops(kind: str, device: str, seconds: float) -> Spread | None:
    """TFLOP/s of an n x n product in the type `kind` on one device (one thread of a CPU); None if it cannot do it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _tflops(kind, torch.device(device), seconds / REPEATS)
    except RuntimeError:  # torch raises it if the type is not implemented on this device
        return None
    finally:
        torch.set_num_threads(threads)


def _tflops(kind: str, device: torch.device, seconds: float) -> Spread:
    side = SIDES[device.type]
    left = torch.ones(side, side, dtype=TYPES[kind], device=device) / side
    right, product = left.clone(), torch.empty_like(left)
    _multiply(left, right, product, 0.0)  # the first one also finds the kernel
    return spread_of([_multiply(left, right, product, seconds) for _ in range(REPEATS)])


def _multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, seconds: float) -> float:
    """TFLOP/s over at least one product."""
    done, started_s = 0, monotonic_s()
    while not done or monotonic_s() - started_s < seconds:
        torch.mm(left, right, out=product)
        done += 1
        product[0, 0].item()  # accelerators work asynchronously: reading a number waits for them
    return 2.0 * left.shape[0] ** 3 * done / (monotonic_s() - started_s) / TERA


PAYLOAD_BYTES = 8_000_000
SMALL_BYTES = 64
NUM_SMALL = 10
MAX_PAYLOADS = 50
FEWEST_PAYLOADS = 3


@dataclass(frozen=True)
class StoreSpeed:
    """Bits per second of one object after the other, seconds of one small read."""

    up_bps: Spread
    down_bps: Spread
    rtt_s: Spread


def measure_store(store: Store, seconds: float, payload_bytes: int = PAYLOAD_BYTES) -> StoreSpeed:
    """At least `FEWEST_PAYLOADS` objects each way, no new one after `seconds`; written objects are deleted again.

    Bytes that compress or repeat could make a link look faster, so every payload is another slice of random ones.
    """
    prefix, written = f"probe-{nonce()}", []
    noise = _noise(payload_bytes + MAX_PAYLOADS)
    try:

        def write(number: int) -> None:
            written.append(f"{prefix}-{number}")
            store.create(written[-1], noise[number : number + payload_bytes])

        ups = _timed(write, seconds)
        downs = _timed(lambda number: store.get(written[number % len(ups)], payload_bytes), seconds)
        written.append(f"{prefix}-small")
        store.create(written[-1], noise[:SMALL_BYTES])
        small = [seconds_of(lambda: store.get(f"{prefix}-small", SMALL_BYTES)) for _ in range(NUM_SMALL)]
    finally:
        for key in written:
            store.delete(key)
    bits = 8.0 * payload_bytes
    return StoreSpeed(spread_of([bits / s for s in ups]), spread_of([bits / s for s in downs]), spread_of(small))


def _timed(work: Callable[[int], object], seconds: float) -> list[float]:
    """Seconds of each call."""
    started_s, took = monotonic_s(), list[float]()
    while len(took) < FEWEST_PAYLOADS or (monotonic_s() - started_s < seconds and len(took) < MAX_PAYLOADS):
        number = len(took)
        took.append(seconds_of(lambda number=number: work(number)))  # type: ignore[misc]
    return took


def _noise(num_bytes: int) -> bytes:
    """Bytes without a pattern, the same every time."""
    import numpy as np

    return np.random.default_rng(0).bytes(num_bytes)


READY_WITHIN_S = 180.0
LATE_BY_S = 60.0
ENDS_WITHIN_S = 5.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def model_name(run: RunSettings) -> str:
    return run.model.preset or run.model.huggingface or run.model.entrypoint or "the model"


def measure_training(
    run: RunSettings, folder: Path, device: str, seconds: float, say: Callable[[str], None]
) -> Spread:  # fmt: skip
    """Tokens per second of one process on `device`, REPEATS times for so many seconds. `folder`: where modules are
    looked for last."""
    threads = run.train.threads
    say(f"training {model_name(run)} on {device}, {REPEATS} times {seconds:g} s")
    worker = Child("diloco_cli.probe.worker", env=dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        worker.tell({"settings": to_plain(run), "folder": str(folder), "device": device})
        _answer(worker, READY_WITHIN_S)
        rates = []
        for _ in range(REPEATS):
            worker.tell(seconds)
            found = _answer(worker, seconds + LATE_BY_S)
            rates.append(found["tokens"] / found["wall_s"])
        return spread_of(rates)
    finally:
        end_all([worker], ENDS_WITHIN_S)


def _answer(worker: Child, within_s: float) -> dict[str, Any]:
    """A worker's answer. Raises RunFailedError if there is none in time, or if the worker reports an error."""
    try:
        found: dict[str, Any] | None = worker.answer(within_s)
    except TimeoutError:
        raise RunFailedError(f"a training process did not answer within {within_s:.0f} s") from None
    if found is None:
        ended = worker.process.wait(ENDS_WITHIN_S)
        raise RunFailedError(f"a training process ended with {ended}", hint="its last words are above")
    if "error" in found:
        raise RunFailedError(f"the model cannot be trained here: {found['error']}", hint=found["hint"])
    return found


@dataclass(frozen=True)
class Measurements:
    """All measurements. `matrix` in TFLOP/s by type; `trained` names model, batch and threads; `speeds`: tokens
    per second of one process on one accelerator of that name, or on a core."""

    machine: MachineFacts
    matrix: dict[str, Spread]
    trained: str = ""
    speeds: dict[str, Spread] = field(default_factory=dict)
    store: StoreSpeed | None = None


@dataclass(frozen=True)
class Probe:
    """What to measure. `run`: its model is trained, with modules of `folder`; `inventory`: on the accelerators of its
    islands that start here; without one, on the best accelerators there are. `seconds`: of each measurement."""

    seconds: float
    say: Callable[[str], None]
    run: RunSettings | None = None
    folder: Path = Path()
    inventory: Inventory | None = None
    store_url: str | None = None

    def measure(self) -> Measurements:
        """Takes about seconds x (1 for each type and direction, 5 for the training)."""
        machine = machine_facts()
        return Measurements(
            machine=machine,
            matrix=self._matrix(machine),
            trained=self._trained(),
            speeds=self._speeds(machine),
            store=self._store(),
        )

    def _matrix(self, machine: MachineFacts) -> dict[str, Spread]:
        found = {}
        for kind in training_types(machine.torch_device):
            self.say(f"matrix product in {kind} on {machine.torch_device}, {self.seconds:g} s")
            rate = matrix_tflops(kind, machine.torch_device, self.seconds)
            if rate is not None:
                found[kind] = rate
        return found

    def _trained(self) -> str:
        if self.run is None:
            return ""
        threads, each = self.run.train.threads, self.run.train.batch_tokens
        return f"{model_name(self.run)}, steps of {each} tokens, {threads} thread{'s' if threads > 1 else ''}"

    def _speeds(self, machine: MachineFacts) -> dict[str, Spread]:
        if self.run is None:
            return {}
        devices = {machine.accelerators.name: machine.torch_device, CPU: "cpu"}
        return {
            name: measure_training(self.run, self.folder, device, self.seconds, self.say)
            for name, device in devices.items()
            if self._has_local(name, machine)
        }

    def _has_local(self, name: str, machine: MachineFacts) -> bool:
        """Whether an island starts here on these accelerators; without an inventory, on the best ones."""
        if self.inventory is None:
            return machine.accelerators.name == name
        islands = self.inventory.islands
        return any(island.infra == "local" and island.accelerators.name == name for island in islands)

    def _store(self) -> StoreSpeed | None:
        if self.store_url is None:
            return None
        from diloco_cli.store.open import open_store

        self.say(f"store {self.store_url}: up and down, {self.seconds:g} s each")
        return measure_store(open_store(self.store_url, create=True), self.seconds)
