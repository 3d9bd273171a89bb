"""Tokens per second of an island: measured if the inventory says so, else peak x MFU over FLOPs per token.

Islands of one machine share its cores, and so its speed. Every thread that trains uses a whole core. Of k awake threads
on c < k cores, r = k mod c cores hold one thread more than the others. Threads that never sleep are moved between cores
by the system and get c / k each over time. A thread that slept (an emulated slowdown is sleep) wakes on some core and
shares it with the threads there, for the short time of a step: the thread that woke last is on a fuller core, the other
k - 1 are spread evenly.

    fuller   1 / ceil(k / c)                                     share of a core for a thread on a fuller core
    other    (c - fuller) / (k - 1)                              the mean of all threads but the last one
    sleeper  fuller / m + other x (m - 1) / m                    m of the k sleep now and then, each may be the last

A slowdown of s sleeps (s - 1) times as long as the step took, for steps of any length: its island is awake for exactly
1 / s of the time, and only then competes with other islands for cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Literal

from diloco_cli.config.devices import CPU, HOST_DEVICES, find_device
from diloco_cli.config.settings import Device, Inventory, IslandSettings, LocalMachine
from diloco_cli.errors import UsageError
from diloco_cli.formulas import formula
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Assumption

GUESSED_MFU = 0.40  # of the peak; well-tuned dense training reaches 0.35-0.50 on data-centre accelerators
MFU_OF_ACHIEVABLE = 0.5  # of the rate of large matrix products, on devices where even these miss the peak
CPU_GFLOPS_PER_WIDTH = 0.7  # one core, float32: small matrices starve it, so its rate grows with the width
MAX_CPU_GFLOPS = 120.0
MPS_GFLOPS = 1000.0
TERA, GIGA = 1e12, 1e9
Precision = Literal["auto", "fp32", "bf16"]  # as in `train.precision`
SERVICE_CORES = 0.2  # syncer, evaluator and supervisor; measured beside the quickstart's learners
MAX_SLEEPERS = 64  # up to which every combination is weighed; beyond it the mean number awake is used


def num_devices(island: IslandSettings) -> int:
    return island.accelerators.count * island.nodes


def island_speed(
    island: IslandSettings, inventory: Inventory, model: ModelFacts, precision: Precision
) -> tuple[float, Assumption]:
    """Tokens per second of an island alone, with its emulated slowdown, and the source of that figure. `precision`: the
    run's. Raises UsageError for a device whose peak in that type is not known, unless its speed is measured."""
    if island.tokens_per_s:
        text = f"{island.name}: {island.tokens_per_s:g} tokens/s, from the inventory"
        return measured_rate(island.tokens_per_s, island.slowdown), Assumption(text, "measured")
    device, count = find_device(island.accelerators.name, inventory.devices), num_devices(island)
    if device.name in HOST_DEVICES:
        gflops = host_gflops(device.name, model)
        what = f"a core at width {model.width}" if device.name == CPU else f"on {device.name}"
        text = f"{island.name}: {gflops:.0f} GFLOP/s {what}; tokens_per_s replaces it"
        rate = host_rate(count, gflops, model.flops_per_token, island.slowdown)
        return rate, Assumption(text, "guessed")
    tflops, kind = peak_tflops(device, precision)
    mfu, given = island.mfu or default_mfu(device), "given" if island.mfu else "guessed"
    doubt = " (to be checked)" if device.check else ""
    text = f"{island.name}: {count} x {tflops:g} TFLOP/s {kind}{doubt}, MFU {mfu:.2f} (MFU {given})"
    rate = peak_rate(count, tflops, mfu, model.flops_per_token, island.slowdown)
    return rate, Assumption(text, "catalogue" if island.mfu else "guessed")


@formula("island", "tokens/s undisturbed", "tokens/s")
def peak_rate(accelerators: int, tflops: float, mfu: float, flops_per_token: float, slowdown: float) -> float:
    return accelerators * tflops * TERA * mfu / flops_per_token / slowdown


@formula("island", "tokens/s undisturbed", "tokens/s")
def host_rate(cores: int, gflops: float, flops_per_token: float, slowdown: float) -> float:
    return cores * gflops * GIGA / flops_per_token / slowdown


@formula("island", "tokens/s undisturbed", "tokens/s")
def measured_rate(measured: float, slowdown: float) -> float:
    return measured / slowdown


def host_gflops(name: str, model: ModelFacts) -> float:
    """GFLOP/s of one core, or of the host's own accelerator, in training."""
    return min(CPU_GFLOPS_PER_WIDTH * model.width, MAX_CPU_GFLOPS) if name == CPU else MPS_GFLOPS


def peak_tflops(device: Device, precision: Precision) -> tuple[float, str]:
    """The dense peak in the type that the learner uses: bf16 if the device has it and the run allows it, else
    fp32. Raises UsageError where it is not known."""
    for kind in ("fp32",) if precision == "fp32" else ("bf16", "fp32"):
        tflops: float | None = getattr(device, f"{kind}_tflops")
        if tflops is not None:
            return tflops, kind
    raise UsageError(
        f"the {precision} peak of the device {device.name} is not known",
        hint=f"measure it (tokens_per_s), or describe it: devices: {{{device.name}: {{fp32_tflops: 30}}}}",
    )


def computes_in_half(device: Device, precision: Precision) -> bool:
    """Whether the built-in learner's matrix products run in bf16: weights are cast, activations are half as large;
    `bf16` also where that is emulated. It has no fp16: that would need loss scaling."""
    has_it = device.name not in HOST_DEVICES and device.bf16_tflops is not None
    return precision == "bf16" or (precision == "auto" and has_it)


def default_mfu(device: Device) -> float:
    if device.achievable is None:
        return GUESSED_MFU
    return min(GUESSED_MFU, MFU_OF_ACHIEVABLE * device.achievable)


def shares_cores(island: IslandSettings, region: str | None) -> bool:
    """Whether `launch --region REGION` (None: all) starts this island on cores of the machine it runs on."""
    on_cpu = island.accelerators.name.lower() == CPU
    return on_cpu and island.infra == "local" and region in (None, island.region)


def busy_cores(islands: Sequence[IslandSettings], region: str | None) -> float:
    """How many cores the islands use on average: an emulated slowdown is sleep."""
    return sum(num_devices(island) / island.slowdown for island in islands if shares_cores(island, region))


def share_of_cores(islands: Sequence[IslandSettings], region: str | None, cores: int) -> dict[str, float]:
    """By island: the share of its planned speed that the others leave, 1 for islands that start elsewhere."""
    return {island.name: 1.0 for island in islands} | _shares(islands, region, LocalMachine(cores), 0.0)


def shares_of_the_local_machine(inventory: Inventory) -> dict[str, float]:
    """By island: the share of its speed that is left if the inventory describes the machine that the local islands
    share with one another and with the run's services; empty if it does not (`launch` then counts its own cores)."""
    if inventory.local is None:
        return {}
    return _shares(inventory.islands, None, inventory.local, SERVICE_CORES)


def _shares(
    islands: Sequence[IslandSettings], region: str | None, local: LocalMachine, services: float
) -> dict[str, float]:
    """Islands that are alike have the same share."""
    here = [island for island in islands if shares_cores(island, region)]
    known: dict[tuple[int, float], float] = {}
    for island in here:
        kind = (num_devices(island), island.slowdown)
        if kind not in known:
            known[kind] = mean_share(tuple(states_of(island, here, local, services)))
    return {island.name: known[num_devices(island), island.slowdown] for island in here}


@formula("island", "shared cores")
def mean_share(states: Sequence[tuple[float, float]]) -> float:
    """`states`: of the machine, with this island awake."""
    return sum(probability * speed for probability, speed in states)


def states_of(
    island: IslandSettings, here: Sequence[IslandSettings], local: LocalMachine, services: float
) -> Iterator[tuple[float, float]]:
    """(probability, speed) in every state of the machine in which `island`, one of those `here`, is awake. The speed of
    one of its threads relative to a thread alone: seat x contention x the share that the run's services leave."""
    sleeps = island.slowdown > 1
    own = num_devices(island)
    steady = sum(num_devices(other) for other in here if other.slowdown == 1 and other is not island)
    others = [other for other in here if other.slowdown > 1 and other is not island]
    for probability, woken in woken_threads(others):
        awake, sleepers = steady + woken + own, woken + (own if sleeps else 0)
        speed = (
            seat(awake, sleepers, local.cores, sleeps) * contention(local, awake) * left(awake, local.cores, services)
        )
        yield probability, speed


def woken_threads(sleepers: Sequence[IslandSettings]) -> Iterator[tuple[float, int]]:
    """(probability, number of awake threads) of islands that sleep now and then, independently; the probabilities add
    up to 1."""
    if len(sleepers) > MAX_SLEEPERS:
        yield 1.0, round(sum(num_devices(island) / island.slowdown for island in sleepers))
        return
    chances = {0: 1.0}
    for island in sleepers:
        later: dict[int, float] = {}
        for woken, chance in chances.items():
            more = woken + num_devices(island)
            later[woken] = later.get(woken, 0.0) + chance * (1 - 1 / island.slowdown)
            later[more] = later.get(more, 0.0) + chance / island.slowdown
        chances = later
    yield from ((chance, woken) for woken, chance in sorted(chances.items()))


def seat(awake: int, sleepers: int, cores: int, sleeps: bool) -> float:
    """The share of a core of a thread that sleeps now and then (`sleeps`), or of another one, over the even share."""
    if awake <= cores or awake % cores == 0 or sleepers == 0:
        return 1.0
    fuller = 1 / ceil(awake / cores)
    other = (cores - fuller) / (awake - 1)
    mine = fuller / sleepers + other * (sleepers - 1) / sleepers if sleeps else other
    return mine * awake / cores


def left(awake: int, cores: int, services: float) -> float:
    """The share that the run's services leave: they take what they need, first from idle cores."""
    wanted = min(awake, cores)
    return max(0.0, min(wanted, cores - services)) / wanted


def contention(local: LocalMachine, awake: int) -> float:
    """The speed of one of `awake` threads relative to one alone: as measured; beyond the largest measured number, and
    without a measurement, by dividing the cores."""
    known = local.crowding
    if awake <= len(known):
        return known[awake - 1]
    most = max(1, len(known))
    even = min(1.0, local.cores / awake) / min(1.0, local.cores / most)
    return (known[-1] if known else 1.0) * even
