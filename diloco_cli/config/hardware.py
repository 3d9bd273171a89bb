"""The device catalogue: a name is found whole or not at all, so `L4` never means an L40S.

How an inventory writes hardware: accelerators, what starts the processes, hosts; and stores.

Hosts are Slurm's hostlists: `box[1-2,7],login` is box1, box2, box7, login; leading zeros are kept (`n[08-10]`).

`infra: loop/DATA` is an island that its owner trains with a loop of his own (`from diloco_cli import join`). DATA says
what the island's positions mean. It stands in the run's format, or in the log of an island that joined later, so that
`status` and `verify` can say it without asking the island."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, structs

from diloco_cli.config.codec import replace
from diloco_cli.config.fields import Node, Positive, Settings, SettingsReader, Text, doc, parse_yaml, plain, shown, text
from diloco_cli.errors import UsageError, similar_names, suggestion
from diloco_cli.store.url import normalise_store_url

FILE = Path(__file__).with_name("devices.yaml")
CPU = "cpu"
MPS = "mps"
BACKENDS = ("cpu", "cuda", "mps")  # of torch, on which learners train
VENDORS = re.compile(r"^(?:(?:NVIDIA|Tesla|Quadro|GeForce|AMD|Instinct|Radeon)[ -]+)+", re.IGNORECASE)
PACKAGING = re.compile(r"-OAM$", re.IGNORECASE)
SLICE = re.compile(r"(.+)-([1-9]\d{0,5})")


class Accelerators(Settings, frozen=True):
    """`H100-SXM:8` is Accelerators("H100-SXM", 8); also cpu:N and mps."""

    name: str
    count: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes of a node that has these, unless the inventory says otherwise."""
        return 1 if self.name.lower() == "cpu" else self.count


class Device(Settings, frozen=True):
    """One accelerator. Peaks are dense TFLOP/s: bf16, or fp16 and fp32 where there is no bf16."""

    name: str
    memory_gb: Annotated[Positive | None, doc("null: shared with the host")] = None
    bf16_tflops: Positive | None = None
    fp16_tflops: Positive | None = None
    fp32_tflops: Positive | None = None
    gbps: Annotated[Positive | None, doc("memory bandwidth in GB/s")] = None
    achievable: Annotated[
        Annotated[float, Meta(ge=0.01, le=1)] | None, doc("share of the peak that large matrix products reach")
    ] = None
    mfu: Annotated[
        Annotated[float, Meta(ge=0.01, le=1)] | None,
        doc("share of the peak that public training runs of large models reach"),
    ] = None
    nvlink: Annotated[
        Annotated[int, Meta(ge=2, le=5)] | None, doc("its generation, where it joins all devices of a node")
    ] = None
    pcie: Annotated[Annotated[int, Meta(ge=3, le=5)] | None, doc("its generation, of 16 lanes")] = None
    network_gbps: Annotated[Positive | None, doc("Gbit/s of the network between nodes that one device has")] = None
    unit: Annotated[Text | None, doc("what one entry counts: chip, gpu, device")] = None
    check: Annotated[bool, doc("the figures are not from a primary source")] = False
    note: Text | None = None
    backend: Annotated[
        Literal["cpu", "cuda", "mps", "xla", "neuron", "hpu"] | None,
        doc("torch's name for devices of this kind; learners train on cpu, cuda and mps"),
    ] = None


HOST_DEVICES = {  # their speed depends on the machine: `plan` guesses it and says so, or takes tokens_per_s
    CPU: Device(CPU, memory_gb=None, unit="core", note="memory is the host's", backend="cpu"),
    MPS: Device(MPS, memory_gb=None, unit="device", note="memory is the host's", backend="mps"),
}


NVLINK_GBPS = {2: 1200.0, 3: 2400.0, 4: 3600.0, 5: 7200.0}  # by generation; one way, of one device
PCIE_GBPS = {3: 126.0, 4: 252.0, 5: 504.0}
ETHERNET_GBPS = 100.0  # of a node: usual in data centres
FabricKind = Literal["nvlink", "pcie", "ethernet"]
FABRIC_KINDS: tuple[FabricKind, ...] = ("nvlink", "pcie", "ethernet")


class Fabric(Settings, frozen=True):
    """What joins an island's accelerators: a kind, or `gbps`: Gbit/s one way of the narrowest link on a ring around
    them all, which is a node's network, or within one node an accelerator's link to the others."""

    kind: FabricKind | None = None
    gbps: Positive | None = None

    def rate_gbps(self, device: Device) -> float | None:
        """Gbit/s; None where the device's generation of it is not known."""
        if self.kind == "nvlink":
            return NVLINK_GBPS[device.nvlink] if device.nvlink else None
        if self.kind == "pcie":
            return PCIE_GBPS[device.pcie] if device.pcie else None
        return ETHERNET_GBPS if self.kind == "ethernet" else self.gbps


def fabric_kind(name: str | None) -> FabricKind | None:
    """Of machines' fabric that is called as a kind is."""
    return next((kind for kind in FABRIC_KINDS if kind == name), None)


class Alias(Settings, frozen=True):
    """Another spelling of one device, and the device that it means."""

    device: str
    meaning: str


class Slice(Settings, frozen=True):
    """A family of names `NAME-N`, each a whole slice; `per_chip` of what N counts are on one chip."""

    device: str
    per_chip: int
    meaning: str


class Catalogue(Settings, frozen=True):
    """The packaged file."""

    devices: dict[str, Device]
    aliases: dict[str, Alias]
    slices: dict[str, Slice]


def device_name(driver_name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> RTX-4090: one word without the vendor; the catalogue's aliases match the rest."""
    return PACKAGING.sub("", VENDORS.sub("", driver_name.strip()).replace(" ", "-")) or "accelerator"


def find_device(name: str, own: Mapping[str, Device]) -> Device:
    """The inventory's own devices first, then the catalogue; upper and lower case do not matter."""
    wanted = name.lower()
    described = _by_lower_case({**HOST_DEVICES, **own})
    if wanted in described:  # without reading the catalogue
        return described[wanted]
    if wanted in _catalogue_by_lower_case():
        return _catalogue_by_lower_case()[wanted]
    known = catalogue()
    slices = [f"{family}-8" for family in known.slices]
    names = similar_names(name, [*own, *known.devices, *HOST_DEVICES, *known.aliases, *slices])
    likely = f"; nearest: {', '.join(names)}" if names else ""
    if wanted.split(":")[0] == "cuda":
        hint = "name the GPU's model, as in RTX-4090:1; diloco init finds it on this machine"
        raise UsageError(f"'{name}' names no device", hint=hint)
    own_entry = f"devices: {{{name}: {{bf16_tflops: 120, memory_gb: 24}}}}"
    raise UsageError(f"unknown device '{name}'{likely}", hint=f"name a known device, or describe yours: {own_entry}")


def resolve(accelerators: Accelerators, own: Mapping[str, Device]) -> Accelerators:
    """The same accelerators by the device's own name: `h100:8` is H100-SXM:8, `tpu-v5p-8` is TPU-v5p:4.

    Raises UsageError for an unknown device, and for a count beside the name of a slice.
    """
    whole = _slice_of(accelerators.name, own)
    if whole is None:
        return Accelerators(find_device(accelerators.name, own).name, accelerators.count)
    if accelerators.count != 1:
        each = f"{whole.name}:{whole.count * accelerators.count}"
        raise UsageError(
            f"'{accelerators.name}' is a whole slice of {whole.count} chips and takes no count",
            hint=f"for {accelerators.count} slices list {accelerators.count} islands, or write {each}",
        )
    return whole


@cache
def catalogue() -> Catalogue:
    """Every device and spelling of the packaged file."""
    tree = parse_yaml(FILE.read_text(encoding="utf-8"), FILE.name)
    return SettingsReader(FILE.parent).read(Catalogue, tree)


def in_catalogue(name: str) -> Device | None:
    """The device of this name or alias, or None."""
    return _catalogue_by_lower_case().get(name.lower())


def _slice_of(name: str, own: Mapping[str, Device]) -> Accelerators | None:
    """The accelerators of a Cloud TPU name such as `tpu-v5p-8`; None if it is no such name."""
    match = SLICE.fullmatch(name.lower())
    if match is None or match[1] not in catalogue().slices or name.lower() in _by_lower_case(own):
        return None
    kind, number = catalogue().slices[match[1]], int(match[2])
    if number % kind.per_chip:
        raise UsageError(
            f"'{name}' is no whole number of chips; {kind.meaning}",
            hint=f"write {match[1]}-{number + 1}, or the chips themselves: {kind.device}:{number // 2 + 1}",
        )
    return Accelerators(kind.device, number // kind.per_chip)


@cache
def _catalogue_by_lower_case() -> dict[str, Device]:
    known = catalogue()
    devices = _by_lower_case(known.devices)
    return {**devices, **{name.lower(): devices[alias.device.lower()] for name, alias in known.aliases.items()}}


def _by_lower_case(devices: Mapping[str, Device]) -> dict[str, Device]:
    return {name.lower(): device for name, device in devices.items()}


def with_catalogue_facts(given: Mapping[str, Device]) -> dict[str, Device]:
    """Own devices, with the catalogue's figures for values that they leave out, if the catalogue has the device."""
    found = {}
    for name, own in given.items():
        stated = {key: value for key, value in structs.asdict(own).items() if value not in (None, False)}
        known = in_catalogue(name)
        found[name] = replace(known, **stated) if known else own
    return found


LOOP = "loop"
DataClass = Literal["addressed", "stateful", "external"]
DATA_CLASSES: dict[str, DataClass] = {"addressed": "addressed", "stateful": "stateful", "external": "external"}
MEANS: dict[DataClass, str] = {
    "addressed": "its loop draws each position of its shard once",
    "stateful": "its loader goes on from a saved state, and skips what was offered since",
    "external": "positions not checked: its loader may repeat samples",
}
LOCAL_INFRA = ("local", "ssh")
EngineKind = Literal["ssh", "slurm", "kubernetes"]  # to which `launch` submits
NAMED_INFRA = {"ssh": "HOST", "slurm": "PARTITION", "kubernetes": "CONTEXT", "skypilot": "CLOUD", LOOP: "addressed"}
SITE_KEYS: dict[EngineKind, set[str]] = {  # of an entry of `sites:`, by its engine
    "ssh": {"via", "directory", "setup", "install"},
    "slurm": {"via", "directory", "setup", "install", "account", "options"},
    "kubernetes": {"image", "context", "options"},
}
INFRA_FORMS = ", ".join([*LOCAL_INFRA, *(f"{kind}/{what}" for kind, what in NAMED_INFRA.items())])
VIA = r"^ssh [A-Za-z0-9][A-Za-z0-9._:@%+-]*$"
WHEEL = r"^wheel(\[[a-z]+(,[a-z]+)*\])?$"
FABRIC = r"^[\w.-]{1,63}$"
MAX_FABRIC_GBPS = 1_000_000
MAX_ACCELERATORS = 100_000
WRITTEN_ACCELERATORS = re.compile(r"([A-Za-z][\w.-]*)(?::([1-9]\d{0,5}))?")
MAX_SLOWDOWN = 1000
ACCELERATORS = {"type": "string", "pattern": f"^{WRITTEN_ACCELERATORS.pattern}$"}
HOSTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
FABRIC_FORM = {
    "anyOf": [
        {"enum": list(FABRIC_KINDS)},
        {"type": "object", "properties": {"gbps": {"type": "number", "exclusiveMinimum": 0}}, "required": ["gbps"]},
    ]
}
EMULATE = {
    "type": "object", "properties": {"slowdown": {"type": "number", "minimum": 1}}, "required": ["slowdown"],
}  # fmt: skip
MAX_HOSTS = 10_000
MAX_HOST = 253  # characters: the domain name system allows no more
MAX_SHOWN = 200
ENTRY = re.compile(r"([A-Za-z0-9_.@:-]*)(?:\[([0-9,-]+)\]([A-Za-z0-9_.:-]*))?")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
COUNTED = re.compile(r"(.*?)(\d{1,9})(\D*)")
FORM = "write for example box[1-4], n[08-10,12] or a,b"


def data_class_of(infra: str) -> DataClass | None:
    """How an own loop reads its data; None for an island that `diloco learner` trains."""
    kind, _, data = infra.partition("/")
    return DATA_CLASSES.get(data) if kind == LOOP else None


def infra_of(data: DataClass) -> str:
    return f"{LOOP}/{data}"


def data_class(text: str, where: str) -> DataClass:
    """Raises UsageError for another word."""
    if text not in DATA_CLASSES:
        raise UsageError(
            f"must be one of {', '.join(DATA_CLASSES)}, not {text!r}{suggestion(text, DATA_CLASSES)}", where=where
        )
    return DATA_CLASSES[text]


def read_infra(node: Node, folder: Path) -> str:
    kind, slash, target = text(node).partition("/")
    if kind == LOOP and target:
        return infra_of(data_class(target, node.where))
    if (kind in LOCAL_INFRA and not slash) or (kind in NAMED_INFRA and target):
        return node.text
    likely = "" if kind in NAMED_INFRA else suggestion(kind, [*LOCAL_INFRA, *NAMED_INFRA])
    hint = f"say which: infra: {kind}/{NAMED_INFRA[kind]}" if kind in NAMED_INFRA else None
    raise UsageError(f"must be one of {INFRA_FORMS}, not '{node.text}'{likely}", where=node.where, hint=hint)


def read_options(node: Node, folder: Path) -> dict[str, Any]:
    found = plain(node)
    if not isinstance(found, dict):
        raise UsageError(f"must be a mapping, not {shown(node)}", where=node.where)
    return found


def read_accelerators(node: Node, folder: Path) -> dict[str, Any]:
    """NAME:COUNT."""
    match = WRITTEN_ACCELERATORS.fullmatch(node.text) if isinstance(node.value, str) else None
    if match is None or int(match[2] or 1) > MAX_ACCELERATORS:
        raise UsageError(f"must be NAME:COUNT such as H100-SXM:8 or cpu:1, not {shown(node)}", where=node.where)
    return {"name": match[1], "count": int(match[2] or 1)}


def read_fabric(node: Node, folder: Path) -> dict[str, Any]:
    """A kind, or {gbps: NUMBER}."""
    found = plain(node)
    if isinstance(found, str) and fabric_kind(found):
        return {"kind": found}
    allowed = f"allowed: {', '.join(FABRIC_KINDS)}, or its rate in Gbit/s such as {{gbps: 400}}"
    if not isinstance(found, dict):
        raise UsageError(
            f"{shown(node)} is no kind of fabric{suggestion(node.text, FABRIC_KINDS)}; {allowed}", where=node.where
        )
    if set(found) != {"gbps"}:
        written = f"a mapping of {', '.join(found)}" if found else "an empty mapping"
        raise UsageError(f"must be {{gbps: NUMBER}}, not {written}; {allowed}", where=node.where)
    if type(found["gbps"]) not in (int, float) or not 0 < found["gbps"] <= MAX_FABRIC_GBPS:
        problem = f"gbps must be a number above 0 and at most {MAX_FABRIC_GBPS:,}, in Gbit/s, not {found['gbps']}"
        raise UsageError(problem, where=node.where, hint="leave `fabric` out where its rate is not known")
    return found


def read_store_url(node: Node, folder: Path) -> str:
    """A store URL of a file in `folder`."""
    try:
        return normalise_store_url(text(node), folder)
    except UsageError as error:
        raise UsageError(error.message, where=node.where, hint=error.hint) from None


def read_slowdown(node: Node, folder: Path) -> float:
    """`emulate: {slowdown: 2.0}`: this island takes twice as long for every step."""
    found = plain(node)
    if not isinstance(found, dict) or set(found) != {"slowdown"}:
        written = f"a mapping of {', '.join(found)}" if isinstance(found, dict) and found else shown(node)
        raise UsageError(f"must be {{slowdown: NUMBER}}, not {written}", where=node.where)
    factor = found["slowdown"]
    if type(factor) not in (int, float) or not 1 <= factor <= MAX_SLOWDOWN:
        raise UsageError(f"slowdown must be from 1 to {MAX_SLOWDOWN}, not {factor}", where=node.where)
    return float(factor)


def read_hosts(node: Node, folder: Path) -> list[str]:
    """A hostlist, or a list of these."""
    found: list[str] = []
    for entry in node.value if isinstance(node.value, list) else [node]:
        written = text(entry)
        try:
            found += expand_hostlist(written)
        except UsageError as error:
            raise UsageError(error.message, where=entry.where) from None
    twice = next((host for host in found if found.count(host) > 1), None) if len(set(found)) < len(found) else None
    if twice is not None:
        raise UsageError(f"the host '{twice}' is named twice", where=node.where)
    return found


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Every host once, in the order written."""
    hosts: list[str] = []
    for entry in _entries(text):
        hosts += _expand(entry.strip(), _shortened(text), MAX_HOSTS - len(hosts))
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"the hostlist '{_shortened(text)}' names a host twice")
    return tuple(hosts)


def _entries(text: str) -> Iterator[str]:
    """The entries between commas outside of brackets."""
    start, inside = 0, False
    for at, character in enumerate(text):
        inside = character == "[" or (inside and character != "]")
        if character == "," and not inside:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _shortened(text: str) -> str:
    """The text for an error, cut to a line."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _expand(entry: str, text: str, room: int) -> list[str]:
    match = ENTRY.fullmatch(entry)
    if not entry or entry.startswith(("-", "@")) or match is None:
        raise UsageError(f"the hostlist '{text}' cannot be read at '{_shortened(entry)}'; {FORM}")
    prefix, ranges, suffix = match.groups()
    if len(prefix) + len(suffix or "") > MAX_HOST:
        raise UsageError(f"the hostlist '{text}' holds a name longer than {MAX_HOST} characters")
    if ranges is None:
        if room < 1:
            raise UsageError(f"the hostlist '{text}' names more than {MAX_HOSTS} hosts")
        return [entry]
    numbers: list[str] = []
    for part in ranges.split(","):
        numbers += _numbers(part, text, room - len(numbers))
    return [f"{prefix}{number}{suffix}" for number in numbers]


def _numbers(part: str, text: str, room: int) -> list[str]:
    match = RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f"the hostlist '{text}' cannot be read at '[{part}]'; {FORM}")
    first, last = match[1], match[2] or match[1]
    count = int(last) - int(first) + 1
    if count < 1:
        raise UsageError(f"the hostlist '{text}' counts backwards at '[{part}]'; {FORM}")
    if count > room:
        raise UsageError(f"the hostlist '{text}' names more than {MAX_HOSTS} hosts")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def compress_hostlist(hosts: Iterable[str]) -> str:
    """The short form of many hosts, in their order: box1, box2, box3, login is `box[1-3],login`."""
    pieces = []
    for _, run in groupby(enumerate(hosts), key=_place_in_a_run):
        names = [host for _, host in run]
        match = COUNTED.fullmatch(names[0])
        if match is None or len(names) == 1:
            pieces += names
        else:
            last = COUNTED.fullmatch(names[-1])
            pieces.append(f"{match[1]}[{match[2]}-{last[2] if last else ''}]{match[3]}")
    return ",".join(pieces)


def _place_in_a_run(item: tuple[int, str]) -> tuple[str, ...]:
    """A key that is equal for hosts with consecutive numbers: the text around the number, its digits, its distance."""
    index, host = item
    match = COUNTED.fullmatch(host)
    if match is None:
        return (host, str(index))
    return (match[1], match[3], str(int(match[2]) - index), str(len(match[2])) if match[2].startswith("0") else "")
