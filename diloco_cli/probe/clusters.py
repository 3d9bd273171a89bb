"""What clusters and hosts say of their own nodes, as entries of an inventory: by sinfo, kubectl, nvidia-smi.

Pure but for `ask`, which runs these commands: their text in, `Pool`s out, and of these the inventory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import CPU, Accelerators, device_name, expand_hostlist, find_device, resolve
from diloco_cli.config.settings import Inventory, MachineSettings, RegionSettings, StoreSettings
from diloco_cli.engines.slurm import OUT
from diloco_cli.engines.tool import run_tool
from diloco_cli.errors import TryAgainError, UsageError, escaped
from diloco_cli.probe.entry import MachineEntry, island_name

ANSWERS_S = 15.0
SINFO = ("sinfo", "-h", "-o", "%P|%a|%T|%D|%G|%c|%N")
NODES = ("get", "nodes", "--output=json")
SMI = (  # which prints its failures to stdout, too
    *("sh", "-c"),
    'names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null) && echo "$names"; nproc',
)
STARTS_NOW = re.compile("(?:idle|mixed)[~#-]?")  # also a node that is switched on for it
SHARED = re.compile("-SHARED$")  # one of the shares into which Kubernetes cuts a GPU's time
SYSTEM_CORES = 0.5  # of each node: for pods of the cluster itself, which ask for cores of what is allocatable
REGION = "topology.kubernetes.io/region"
GPUS = {  # of Kubernetes: the resource, and the labels that name the device
    "nvidia.com/gpu": ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator"),
    "amd.com/gpu": ("amd.com/gpu.product-name", "amd.com/gpu.device-id"),
}


class Gpus(NamedTuple):
    """Those of a node that an island takes; `others`: in words, those that it does not."""

    name: str
    number: int
    others: str

    @property
    def without(self) -> str:
        return f", without {self.others}" if self.others else ""


def alike(counts: Counter[str]) -> Gpus:
    """An island's GPUs are of one kind: of those that the catalogue knows, else of all, the kind with the most."""
    name = max(counts, key=lambda name: (known_device(name)[0] != "", counts[name]), default="")
    others = ", ".join(f"{number} x {escaped(other) or 'GPU'}" for other, number in counts.items() if other != name)
    return Gpus(name, counts[name], others)


@dataclass(frozen=True)
class Partition:
    """A line of sinfo: nodes of a partition that are alike. `gpu`: as Slurm calls it, "" without a name."""

    name: str
    is_default: bool
    up: str
    state: str
    number: str
    gres: str
    cores: int
    nodes: str

    @property
    def starts(self) -> bool:
        """Whether a job starts there now."""
        return self.up == "up" and STARTS_NOW.fullmatch(self.state) is not None

    @property
    def told(self) -> str:
        gpus = f" {self.gres}" if self.gres.startswith("gpu") else ""
        return f"{self.number} {self.state}{gpus}{f' partition {self.up}' * (self.up != 'up')}"

    @property
    def gpus(self) -> Gpus:
        counts = Counter[str]()
        for name, number in re.findall(r"\bgpu:(?:([\w.-]*[^\W\d][\w.-]*):?)?(\d+)?", self.gres):
            counts[name] += int(number or 1)
        return alike(counts)


@dataclass(frozen=True)
class Pool:
    """Nodes that are alike. `infra`: by which they are reached; `gpu`: as their cluster calls it; `gpus`, `cores`: of
    each; `told`: how they are."""

    infra: str
    nodes: int
    gpu: str
    gpus: int
    cores: int
    told: str
    region: str = ""


def read_sinfo(said: str) -> list[Partition]:
    """Lines of another form are warnings of a site."""
    found = []
    for line in said.splitlines():
        columns = line.strip().split("|")
        if len(columns) == 7 and (cores := re.match(r"\d+", columns[5])):
            name, up, state, number, gres, _, nodes = columns
            found.append(Partition(name.rstrip("*"), name.endswith("*"), up, state, number, gres, int(cores[0]), nodes))
    return found


def known_device(written: str) -> tuple[str, str]:
    """The catalogue's name of what a cluster calls so, and ""; or "", and why not: with the nearest."""
    try:
        return resolve(Accelerators(device_name(SHARED.sub("", written.replace("_", " ")))), {}).name, ""
    except UsageError as error:
        return "", error.message


def slurm_pools(lines: Iterable[Partition]) -> tuple[list[Pool], list[str]]:
    """A pool for each kind of nodes of a partition, the default one first: nodes that lie in several count once. And
    what was left out, in words."""
    kinds: dict[tuple[str, Gpus, int], list[Partition]] = {}
    places, left = dict[str, str](), []
    for line in sorted(lines, key=lambda one: not one.is_default):
        hosts = _hosts(line.nodes)
        counted = hosts & places.keys()
        new = int(line.number) - len(counted)
        if line.up != "up" or OUT.search(line.state) or line.state.endswith("*"):
            left.append(f"{line.name}: {line.number} {line.state}{f', partition {line.up}' * (line.up != 'up')}")
            continue
        if counted:
            elsewhere = ", ".join(sorted({places[host] for host in counted}))
            left.append(f"{line.name}: {f'{len(counted)} of ' if new > 0 else ''}{line.nodes}, counted in {elsewhere}")
        if new > 0:
            places |= dict.fromkeys(hosts - counted, line.name)
            kinds.setdefault((line.name, line.gpus, line.cores), []).append(replace(line, number=str(new)))
    pools = []
    for (name, gpus, cores), group in kinds.items():
        told = ", ".join(f"{line.number} {line.state}" for line in group) + gpus.without
        pools.append(Pool(f"slurm/{name}", sum(int(line.number) for line in group), *gpus[:2], cores, told))
        if gpus.others:  # a job that names no kind may get any
            by_kind = f'{{partition: {name}, gpus-per-node: "{gpus.name}:{gpus.number}"}}'
            site = f"sites: {{{name}: {{engine: slurm, options: {by_kind}}}}}"
            left.append(f"{name}: {gpus.others} beside {gpus.number} x {gpus.name} (to be given the latter: {site})")
    return pools, left


def _hosts(nodes: str) -> set[str]:
    try:
        return set(expand_hostlist(nodes))
    except UsageError:  # in a form that is not read here
        return set()


def kubernetes_pools(text: str, context: str) -> tuple[list[Pool], list[str]]:
    """A pool for each kind of nodes that take pods without a toleration, or have GPUs; and what was left out."""
    try:
        items: list[dict[str, Any]] = json.loads(text[text.index("{") :])["items"]
    except (ValueError, LookupError, TypeError):
        raise TryAgainError(f"kubectl printed no list of nodes: {escaped(text)[:200]}") from None
    kinds, left = Counter[Pool](), []
    for item in items:
        meta, spec, room = item["metadata"], item.get("spec", {}), item.get("status", {}).get("allocatable", {})
        labels, resource = meta.get("labels", {}), next((name for name in GPUS if room.get(name, "0") != "0"), "")
        why = _why_not(item, spec, bool(resource))
        if why:
            left.append(f"{meta['name']}: {why}")
            continue
        gpu = next((labels[label] for label in GPUS.get(resource, ()) if label in labels), "")
        cpu = str(room.get("cpu", "1"))
        cores = int((int(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)) - SYSTEM_CORES)
        if cores < 1 and not resource:
            left.append(f"{meta['name']}: cpu {cpu}: no core beside the cluster's own pods")
            continue
        region = island_name(labels[REGION]) if labels.get(REGION) else ""
        kinds[Pool(f"kubernetes/{context}", 1, gpu, int(room.get(resource, 0)), max(1, cores), "", region)] += 1
    pools = [replace(pool, nodes=n, told=f"{n} ready{_so_far(pool)}") for pool, n in kinds.items()]
    return pools, left


def _so_far(pool: Pool) -> str:
    if not pool.gpus:
        return ", without the cores of the cluster's own pods"
    return ", each of its GPUs a share of one" * bool(SHARED.search(pool.gpu))


def _why_not(item: dict[str, Any], spec: dict[str, Any], has_gpus: bool) -> str:
    conditions = item.get("status", {}).get("conditions", [])
    if not any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
        return "not ready"
    if spec.get("unschedulable"):
        return "cordoned"
    taints = [one["key"] for one in spec.get("taints", []) if one.get("effect") in ("NoSchedule", "NoExecute")]
    others = [key for key in taints if not (has_gpus and key in GPUS)]
    return f"tainted: {', '.join(others)}" if others else ""


def ssh_pool(said: str, host: str) -> Pool:
    """Of what SMI prints there: a line for each GPU, then the cores."""
    *names, cores = list(filter(None, said.split("\n"))) or [""]
    if not cores.isdigit():
        raise UsageError(f"ssh {host}: it does not say what it has: {escaped(said)[:200]}")
    gpus = alike(Counter(names))
    return Pool(f"ssh/{host}", 1, gpus.name, gpus.number, int(cores), f"by nvidia-smi and nproc{gpus.without}")


def ask(words: Sequence[str], via: str | None = None) -> str:
    return run_tool(words, within_s=ANSWERS_S, refusal=UsageError, via=via)


def entry_of(pools: Sequence[Pool], region: str, store_url: str, tell: Callable[[str], None]) -> MachineEntry:
    """As `machines:`, of which `plan` forms islands. What is not known trains on cores, until somebody names it."""
    machines, comments = list[MachineSettings](), dict[str, str]()
    several = Counter(pool.infra for pool in pools)
    for pool in pools:
        device, why = known_device(pool.gpu) if pool.gpu else ("", "no name of its GPUs" if pool.gpus else "")
        accelerators = Accelerators(device, pool.gpus) if device else Accelerators(CPU, pool.cores)
        place = pool.infra.partition("/")[2]
        name = _free(island_name(f"{place}-{accelerators.name}" if several[pool.infra] > 1 else place), machines)
        machines.append(
            MachineSettings(pool.region or region, accelerators, name=name, nodes=pool.nodes, infra=pool.infra)
        )
        if why:
            tell(f"{name}: {pool.gpus} x {escaped(pool.gpu) or 'GPU'}: {why}: cores, until you name it")
        comments[f"machines.{name}.accelerators"] = f"{pool.told}; {_speed(device) if not why else escaped(why)}"
    regions = {machine.region: RegionSettings() for machine in machines}
    return MachineEntry(
        Inventory(
            StoreSettings(store_url, region), machines=tuple(machines), regions={region: RegionSettings(), **regions}
        ),
        comments,
    )


def _speed(device: str) -> str:
    """Where the speed comes from that `plan` takes."""
    if not device:
        return "speed guessed: diloco inventory probe there measures it"
    known = find_device(device, {})
    kind = next(kind for kind in ("bf16", "fp16", "fp32") if getattr(known, f"{kind}_tflops"))
    return f"speed of the catalogue, {getattr(known, f'{kind}_tflops'):g} TFLOP/s {kind}: not measured"


def _free(name: str, others: Sequence[MachineSettings]) -> str:
    taken = {one.name for one in others}
    return next(each for each in (name, *(f"{name[:58]}-{number}" for number in range(2, 10_000))) if each not in taken)
