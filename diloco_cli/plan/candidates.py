"""Islands by themselves: speed, what their ranks lose by waiting for each other, step, memory, whatever does not depend
on other islands or on the schedule.

Tokens per second are measured if the inventory says so, else peak x MFU over FLOPs per token. Islands of one machine
share its cores, and so its speed. A slowdown of s is sleep: its island is awake for 1 / s of the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from diloco_cli.config.hardware import BACKENDS, CPU, HOST_DEVICES, Accelerators, Device, Fabric, find_device
from diloco_cli.config.models import ModelFacts, newton_schulz_flops
from diloco_cli.config.settings import Inventory, IslandSettings, Link, LocalMachine, RunSettings, TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.formulas import formula
from diloco_cli.methods import INNER_OPTIMIZERS
from diloco_cli.plan.link import GUESSED_MACHINE, Need, machine_of, moment_bytes, to_store
from diloco_cli.plan.memory import Computing, Fit, Precision, fit_of_nodes, how_on
from diloco_cli.plan.plan import Assumption, Excluded
from diloco_cli.protocol.rules.capacity import SyncerMachine

GUESSED_MFU = 0.40  # of the peak, of a large model on a device of which the catalogue knows no training run
MFU_OF_ACHIEVABLE = 0.5  # of the rate of large matrix products, on devices where even these miss the peak
HALF_SPEED_PER_TFLOPS = 140_000  # parameters of a model that is too small for more than half of that MFU
# Of the speed in print, which is of compiled or fused kernels; both as tests/studies/speeds.csv has it.
UNCOMPILED = 0.86
CPU_GFLOPS_PER_WIDTH = 0.7  # one core, float32: small matrices starve it, so its rate grows with the width
MAX_CPU_GFLOPS = 120.0
MPS_GFLOPS = 1000.0
TERA, GIGA = 1e12, 1e9
SERVICE_CORES = 0.2  # syncer, evaluator and supervisor; measured beside the quickstart's learners
BACKWARD_SHARE = 2 / 3  # of a step, its end: gradients appear, and can travel, during it
SUMMED_BITS = 32  # of a parameter: gradients are summed in float32
REACHED = 0.8
"""Of a link's rate, by large sums: 230 to 250 of 300 GB/s on eight A100-SXM, 35 to 45 of 63 on cards (nccl-tests, in
https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests). No island of diloco was measured."""
CUDA = "cuda"


def num_devices(island: IslandSettings) -> int:
    return island.accelerators.count * island.nodes


def island_speed(
    island: IslandSettings, inventory: Inventory, model: ModelFacts, train: TrainSettings
) -> tuple[float, Assumption]:
    """Tokens per second of an island alone, with its emulated slowdown, and the source of that figure. Raises
    UsageError for a device whose peak in the run's type is not known, unless its speed is measured."""
    if island.tokens_per_s:
        text = f"{island.name}: {island.tokens_per_s:g} tokens/s, from the inventory"
        return island.tokens_per_s / island.slowdown, Assumption(text, "measured")
    device, count = find_device(island.accelerators.name, inventory.devices), num_devices(island)
    flops = model.flops_per_token
    if INNER_OPTIMIZERS[train.inner.name].of_matrices is not None:
        batch_tokens = island.batch_tokens or train.batch_tokens
        flops += newton_schulz_flops(model.hidden_parameters, model.width, batch_tokens)
    if device.name in HOST_DEVICES:
        gflops = min(CPU_GFLOPS_PER_WIDTH * model.width, MAX_CPU_GFLOPS) if device.name == CPU else MPS_GFLOPS
        what = f"a core at width {model.width}" if device.name == CPU else f"on {device.name}"
        text = f"{island.name}: {gflops:.0f} GFLOP/s {what}; tokens_per_s replaces it"
        rate = host_rate(count, gflops, flops, island.slowdown)
        return rate, Assumption(text, "guessed")
    tflops, kind = peak_tflops(device, train.precision)
    doubt = " (to be checked)" if device.check else ""
    mfu, origin = island.mfu or usual_mfu(device, tflops, model, train), "MFU given" if island.mfu else "MFU guessed"
    public = not island.mfu and has_public_runs(device, train.precision)
    if public:
        origin = f"as public runs: {device.mfu:.2f} of large models, compiled"
    text = f"{island.name}: {count} x {tflops:g} TFLOP/s {kind}{doubt}, MFU {mfu:.{2 if mfu > 0.1 else 4}f} ({origin})"
    rate = peak_rate(count, tflops, mfu, flops, island.slowdown)
    return rate, Assumption(text, "catalogue" if island.mfu or public else "guessed")


def has_public_runs(device: Device, precision: Precision) -> bool:
    """Whether the catalogue's MFU was read from runs of this type: all of them are in bf16."""
    return device.mfu is not None and device.bf16_tflops is not None and precision != "fp32"


def usual_mfu(device: Device, tflops: float, model: ModelFacts, train: TrainSettings) -> float:
    """What training runs reach on such a device; a guess where the catalogue has none."""
    large, compiled = device.mfu, 1.0 if device.mfu is None or train.compile else UNCOMPILED
    if large is None:
        large = GUESSED_MFU if device.achievable is None else min(GUESSED_MFU, MFU_OF_ACHIEVABLE * device.achievable)
    return mfu_of(large, compiled, share_of_size(model.parameters - model.idle_parameters, tflops))


@formula("island", "MFU")
def mfu_of(mfu_of_large_models: float, left_uncompiled: float, for_the_size: float) -> float:
    """Those in print are of compiled kernels: `train.compile: true`."""
    return mfu_of_large_models * left_uncompiled * for_the_size


@formula("island", "MFU for the model's size")
def share_of_size(parameters: int, tflops: float) -> float:
    """The faster a device, the larger a model must be to keep it busy (tests/studies/speeds.csv)."""
    return parameters / (parameters + HALF_SPEED_PER_TFLOPS * tflops)


@formula("island", "tokens/s undisturbed", "tokens/s")
def peak_rate(accelerators: int, tflops: float, mfu: float, flops_per_token: float, slowdown: float) -> float:
    return accelerators * tflops * TERA * mfu / flops_per_token / slowdown


@formula("island", "tokens/s undisturbed", "tokens/s")
def host_rate(cores: int, gflops: float, flops_per_token: float, slowdown: float) -> float:
    return cores * gflops * GIGA / flops_per_token / slowdown


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


def shares_cores(island: IslandSettings, region: str | None) -> bool:
    """Whether `launch --region REGION` (None: all) starts this island on cores of the machine it runs on."""
    on_cpu = island.accelerators.name.lower() == CPU
    return on_cpu and island.infra == "local" and region in (None, island.region)


def busy_cores(islands: Sequence[IslandSettings], region: str | None) -> float:
    """How many cores the islands use on average: an emulated slowdown is sleep."""
    return sum(num_devices(island) / island.slowdown for island in islands if shares_cores(island, region))


def share_of_cores(
    islands: Sequence[IslandSettings], region: str | None, local: LocalMachine, services: float = 0.0
) -> dict[str, float]:
    """By island: the share of its speed that is left where islands, and `services` cores' worth of other processes,
    share one machine's cores; 1 for islands that start elsewhere."""
    here = [island for island in islands if shares_cores(island, region)]
    busy = math.fsum(num_devices(island) / island.slowdown for island in here)
    shares = {island.name: 1.0 for island in islands}
    for island in here:
        own = num_devices(island)
        shares[island.name] = shared_cores(local, busy - own / island.slowdown + own, services)
    return shares


def shared_cores(local: LocalMachine, awake: float, services: float) -> float:
    """The speed of one of `awake` threads relative to one alone, in the mean: an emulated slowdown is sleep, so its
    threads count for the time that they are awake."""
    wanted = min(awake, float(local.cores))
    left = max(0.0, min(wanted, local.cores - services)) / wanted
    return min(1.0, local.cores / max(1, round(awake))) * left


def obstacle(island: IslandSettings, batch_tokens: int, inventory: Inventory, model: ModelFacts) -> Excluded | None:
    """Why this island cannot train whatever its memory is, and what would let it; None if it can."""
    ranks, sequences = island.num_ranks, batch_tokens // model.sequence
    backend = find_device(island.accelerators.name, inventory.devices).backend
    if ranks > 1 and backend == "mps":
        reason = f"{ranks} ranks cannot work together on {island.accelerators.name}"
        return Excluded(island.name, reason, (f"an island for each: accelerators: {island.accelerators.name}:1",))
    if sequences < ranks:
        reason = f"a batch of {sequences} sequences cannot be divided over {ranks} ranks"
        return Excluded(island.name, reason, (f"batch_tokens: {ranks * model.sequence} or more", "fewer ranks"))
    return None


def not_launched(island: IslandSettings, inventory: Inventory) -> tuple[str, str] | None:
    """(why `launch` cannot run this island, what would help); None if it can."""
    backend = find_device(island.accelerators.name, inventory.devices).backend
    if backend is None:
        described = f"devices: {{{island.accelerators.name}: {{backend: cuda}}}}"
        return "what torch calls this device is not known", f"{described}, if it is one that torch drives as CUDA"
    if backend not in BACKENDS:
        return f"learners do not train on torch's {backend} devices, only on {', '.join(BACKENDS)}", "leave it out"
    if island.infra == "local" and island.nodes > 1:
        return f"infra: local is one machine, not {island.nodes} nodes", "infra: ssh with hosts, or nodes: 1"
    return None


GUESSED_RESTART_S = 240.0
RECOMPUTING = 0.9  # in print (tests/studies/speeds.csv): a forward pass more, but in larger micro-batches


@dataclass(frozen=True)
class Crossing:
    """For an island whose region has a bucket of its own: the price of a GB from the home bucket to the region's, and
    from the region's to the home bucket."""

    region: str
    home_per_gb: float
    per_gb: float


@dataclass(frozen=True)
class Candidate:
    """An island with its values that do not depend on other islands. `link`: what its process has of its link to the
    store. `assumption`: the source of its speed; `busy`: the share of its accelerators that a batch of whole
    sequences keeps busy; `share`: the part of its speed that other islands on the same machine leave; `egress_per_gb`:
    the price of the data that it sends, `download_per_gb` of what it reads; `moment_bytes`: those that it saves, of a
    parameter, in a round; `recomputing`: the part of its speed that is left where the backward pass computes
    activations again, `beside_fabric` where its ranks wait for each other, on `ring`; `obstacle`: why it cannot train;
    `syncer`: the machine that merges all deltas."""

    island: IslandSettings
    link: Link
    assumption: Assumption
    batch_tokens: int
    fit: Fit
    availability: float
    tokens_per_s: float
    step_s: float
    busy: float = 1.0
    share: float = 1.0
    egress_per_gb: float = 0.0
    download_per_gb: float = 0.0
    moment_bytes: float = 0.0
    crossing: Crossing | None = None
    recomputing: float = 1.0
    beside_fabric: float = 1.0
    ring: Ring | None = None
    obstacle: Excluded | None = None
    syncer: SyncerMachine = GUESSED_MACHINE

    @property
    def rtt_s(self) -> float:
        """Of a call to its store, stated or guessed."""
        return self.link.rtt_s or 0.0

    @property
    def link_is_faster(self) -> bool:
        """Whether its link could carry more than its process moves."""
        own = self.island.link
        return (own.up_bps, own.down_bps) != (self.link.up_bps, self.link.down_bps)

    @cached_property
    def can_train(self) -> bool:
        return self.obstacle is None and self.fit.fits

    def up_s(self, bits: float) -> float:
        """On its way to the store; 0 where the rate is not known."""
        return bits / self.link.up_bps if self.link.up_bps else 0.0

    def carries(self, load: Need, round_s: float) -> bool:
        """Whether its link carries a round's bytes in a round (or in its own step, if that is longer)."""
        return load.shortest_round_s(self.link) <= max(round_s, self.step_s)

    def least_every(self, load: Need, fastest_step_s: float) -> int:
        """The smallest H at which its link carries the round; 1 if any does."""
        shortest_s = load.shortest_round_s(self.link)
        if shortest_s <= self.step_s:
            return 1
        return max(1, math.ceil(shortest_s / fastest_step_s * (1 - 1e-12)))


def candidates(run: RunSettings, inventory: Inventory, model: ModelFacts) -> list[Candidate]:
    """Every island of the inventory, fastest step first, names breaking ties."""
    shares = share_of_cores(inventory.islands, None, inventory.local, SERVICE_CORES) if inventory.local else {}
    fit_of = cache(partial(fit_of_nodes, run=run, inventory=inventory, model=model))
    found = [candidate_of(i, run, inventory, model, shares.get(i.name, 1.0), fit_of) for i in inventory.islands]
    return sorted(found, key=lambda candidate: (candidate.step_s, candidate.island.name))


def candidate_of(
    island: IslandSettings,
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    share: float,
    fit_of: Callable[[Accelerators, int, int, int], Fit],
) -> Candidate:
    batch_tokens = island.batch_tokens or run.train.batch_tokens
    if batch_tokens % model.sequence:
        whole = max(1, round(batch_tokens / model.sequence)) * model.sequence
        wrong = f"a batch of {batch_tokens} tokens is no whole number of sequences of {model.sequence}"
        raise UsageError(f"{island.name}: {wrong}", hint=f"set batch_tokens to {whole}")
    undisturbed, assumption = island_speed(island, inventory, model, run.train)
    busy = _busy(island, batch_tokens // model.sequence)
    recomputing = RECOMPUTING if run.train.checkpointing and not island.tokens_per_s else 1.0
    fit = fit_of(island.accelerators, island.nodes, island.num_ranks, batch_tokens)
    ring = ring_of(island, find_device(island.accelerators.name, inventory.devices))
    beside_fabric = 1.0
    if ring is not None:
        alone, how = undisturbed * busy * share * recomputing, how_on(island.accelerators, run, inventory, model)
        beside_fabric = share_of_computing(ring, fit, how, model, batch_tokens, alone)
        text = f"{assumption.text}; {ring.words}, leaves {100 * beside_fabric:.0f} % of it"
        assumption = Assumption(text, assumption.mark)
    tokens_per_s = rate_in_the_fleet(undisturbed, busy, share, recomputing, beside_fabric)
    return Candidate(
        island=island,
        link=to_store(island.link, inventory.store.url),
        assumption=assumption,
        batch_tokens=batch_tokens,
        fit=fit,
        availability=availability_of(island),
        tokens_per_s=tokens_per_s,
        step_s=step_of(batch_tokens, tokens_per_s),
        busy=busy,
        share=share,
        recomputing=recomputing,
        beside_fabric=beside_fabric,
        ring=ring,
        egress_per_gb=egress_per_gb(island, inventory),
        download_per_gb=download_per_gb(island, inventory),
        moment_bytes=moment_bytes(run.train.inner, model),
        crossing=crossing_of(island, inventory),
        obstacle=obstacle(island, batch_tokens, inventory, model),
        syncer=machine_of(inventory.store),
    )


def egress_per_gb(island: IslandSettings, inventory: Inventory) -> float:
    """The price of a GB that the island sends, its own or else its region's: 0 to a bucket of its own region, because
    no data leaves the region."""
    region, price = inventory.regions.get(island.region), island.egress_per_gb
    if price is None and region is not None:
        price = region.egress_per_gb
    return price or 0.0 if leaves_its_region(island, inventory) else 0.0


def download_per_gb(island: IslandSettings, inventory: Inventory) -> float:
    """What the home bucket's region charges for a GB that an island of another region reads; 0 if it has no price."""
    home = inventory.regions.get(inventory.store.region or "")
    return (home and home.egress_per_gb) or 0.0 if leaves_its_region(island, inventory) else 0.0


def crossing_of(island: IslandSettings, inventory: Inventory) -> Crossing | None:
    """The prices of an island's traffic; None if it uses the home bucket. A region without a price has its island's."""
    own, home = inventory.regions.get(island.region), inventory.regions.get(inventory.store.region or "")
    if own is None or own.store in (None, inventory.store.url):
        return None
    home_per_gb = (home and home.egress_per_gb) or 0.0
    own_per_gb = island.egress_per_gb if own.egress_per_gb is None else own.egress_per_gb
    return Crossing(island.region, home_per_gb, own_per_gb or 0.0)


def leaves_its_region(island: IslandSettings, inventory: Inventory) -> bool:
    """Whether its bucket is in another region; a region's own bucket is taken to be in that region."""
    return crossing_of(island, inventory) is None and island.region != inventory.store.region


def _busy(island: IslandSettings, sequences: int) -> float:
    """Whole sequences over n accelerators: the accelerator with the most decides how long a step takes. A measured
    speed includes this, and the cores of a CPU share a sequence."""
    if island.tokens_per_s or island.accelerators.name.lower() in HOST_DEVICES:
        return 1.0
    count = num_devices(island)
    return busy_accelerators(sequences, count)


@formula("island", "accelerators busy")
def busy_accelerators(sequences: int, accelerators: int) -> float:
    return sequences / (accelerators * math.ceil(sequences / accelerators))


@formula("island", "tokens/s", "tokens/s")
def rate_in_the_fleet(
    undisturbed: float, accelerators_busy: float, shared_cores: float, checkpointing: float, left_beside_fabric: float
) -> float:
    return undisturbed * accelerators_busy * shared_cores * checkpointing * left_beside_fabric


@formula("island", "step", "s")
def step_of(batch_tokens: int, tokens_per_s: float) -> float:
    return batch_tokens / tokens_per_s


computing_of = step_of.named("computing of a step")


def restart_s(island: IslandSettings) -> float:
    return GUESSED_RESTART_S if island.restart_s is None else island.restart_s


def availability_of(island: IslandSettings) -> float:
    """MTBF / (MTBF + restart); 1 if the inventory gives no failures."""
    return 1.0 if island.mtbf_s is None else share_of_time(island.mtbf_s, restart_s(island))


@formula("island", "availability")
def share_of_time(mtbf_s: float, restart_s: float) -> float:
    return mtbf_s / (mtbf_s + restart_s)


@dataclass(frozen=True)
class Ring:
    """The narrowest link on it, one way, in Gbit/s; `words`: where that is known from."""

    gbps: float
    words: str


def ring_of(island: IslandSettings, device: Device) -> Ring | None:
    """None: nothing is known of it, or an island's given speed has it in it. NVLink and PCIe join the accelerators of a
    node: between nodes they are not what decides."""
    fabric = island.fabric
    if island.tokens_per_s:
        return None
    if fabric is not None and (island.nodes == 1 or fabric.kind in (None, "ethernet")):
        gbps = fabric.rate_gbps(device)
        if gbps is None:
            return None
        name = {None: "", "ethernet": "Ethernet of ", "nvlink": "NVLink of ", "pcie": "PCIe of "}[fabric.kind]
        return Ring(gbps, f"{name}{gbps:,g} Gbps")
    if island.nodes == 1 or (island.mfu and fabric is None) or device.backend != CUDA:
        return None
    if device.network_gbps is None:
        gbps = Fabric("ethernet").rate_gbps(device) or math.inf
        return Ring(gbps, f"Ethernet of {gbps:,g} Gbps between nodes, guessed")
    gbps = device.network_gbps * island.accelerators.count
    return Ring(gbps, f"a network of {gbps:,g} Gbps between nodes, as usual for {device.name}")


def share_of_computing(
    ring: Ring, fit: Fit, how: Computing, model: ModelFacts, batch_tokens: int, tokens_per_s: float
) -> float:
    """The part of their speed, `tokens_per_s`, that is left when an island's ranks wait for each other.

    Ranks form a ring, and the narrowest link on it decides: of what is gathered or summed into shards each link carries
    (n - 1) / n, of what is summed on all ranks twice that. As diloco's ranks train (training/ranks.py, sharding.py):

        copies (DDP)    once a step float32 gradients are summed on all ranks, during the last micro-batch's backward
                        pass
        shards (FSDP)   in each micro-batch parameters are gathered during the forward pass; and gathered again, and
                        float32 gradients summed into shards, during the backward pass

    A pass takes the longer of its computing and of what travels meanwhile. The time from link to link, which grows with
    the number of ranks, is not counted. A measured speed has all of it in it, and so has an `mfu` that is given without
    a fabric. The catalogue's MFU is of runs on networks that hold none of them up (tests/studies/speeds.py)."""
    if fit.sharding == "none":
        return 1.0
    computing_s = computing_of(batch_tokens, tokens_per_s)
    passes = math.ceil(batch_tokens / (model.sequence * fit.ranks * fit.sequences))
    if fit.sharding == "ddp":
        summed_s = sum_on_all_s(fit.ranks, model.parameters, ring.gbps)
        waiting_s = waiting_of_copies_s(summed_s, computing_s, passes)
    else:
        bits = 16 if how.half and how.gathers_half else 32
        gathered_s = gather_s(fit.ranks, model.parameters, bits, ring.gbps)
        summed_s = sum_into_shards_s(fit.ranks, model.parameters, ring.gbps)
        waiting_s = waiting_of_shards_s(gathered_s, summed_s, computing_s, passes)
    return left_beside_fabric(computing_s, waiting_s)


@formula("island", "gradients summed on all ranks (all-reduce)", "s")
def sum_on_all_s(ranks: int, parameters: int, fabric_gbps: float) -> float:
    return 2 * (ranks - 1) / ranks * parameters * SUMMED_BITS / (REACHED * fabric_gbps * GIGA)


@formula("island", "parameters gathered once (all-gather)", "s")
def gather_s(ranks: int, parameters: int, parameter_bits: int, fabric_gbps: float) -> float:
    return (ranks - 1) / ranks * parameters * parameter_bits / (REACHED * fabric_gbps * GIGA)


@formula("island", "gradients summed into shards (reduce-scatter)", "s")
def sum_into_shards_s(ranks: int, parameters: int, fabric_gbps: float) -> float:
    return (ranks - 1) / ranks * parameters * SUMMED_BITS / (REACHED * fabric_gbps * GIGA)


@formula("island", "waiting for the fabric in a step", "s")
def waiting_of_copies_s(all_reduce_s: float, computing_s: float, micro_batches: int) -> float:
    return max(0.0, all_reduce_s - BACKWARD_SHARE * computing_s / micro_batches)


@formula("island", "waiting for the fabric in a step", "s")
def waiting_of_shards_s(gather_s: float, scatter_s: float, computing_s: float, micro_batches: int) -> float:
    forward_s = max(0.0, gather_s - (1 - BACKWARD_SHARE) * computing_s / micro_batches)
    backward_s = max(0.0, gather_s + scatter_s - BACKWARD_SHARE * computing_s / micro_batches)
    return micro_batches * (forward_s + backward_s)


@formula("island", "left beside the fabric")
def left_beside_fabric(computing_s: float, waiting_s: float) -> float:
    return computing_s / (computing_s + waiting_s)
