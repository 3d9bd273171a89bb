"""The device catalogue: a name is found whole or not at all, so `L4` never means an L40S."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.config.fields import Settings, SettingsReader
from diloco_cli.config.settings import Accelerators, Device
from diloco_cli.config.yaml_tree import parse_yaml
from diloco_cli.errors import UsageError, similar_names

FILE = Path(__file__).with_name("devices.yaml")
CPU = "cpu"
MPS = "mps"
BACKENDS = ("cpu", "cuda", "mps")  # of torch, on which learners train
HOST_DEVICES = {  # their speed depends on the machine: `plan` guesses it and says so, or takes tokens_per_s
    CPU: Device(CPU, memory_gb=None, unit="core", note="memory is the host's", backend="cpu"),
    MPS: Device(MPS, memory_gb=None, unit="device", note="memory is the host's", backend="mps"),
}
SLICE = re.compile(r"(.+)-([1-9]\d{0,5})")


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
    return {name: _completed(device, in_catalogue(name)) for name, device in given.items()}


def _completed(own: Device, known: Device | None) -> Device:
    if known is None:
        return own
    given = {key: value for key, value in structs.asdict(own).items() if value not in (None, False)}
    return replace(known, **given)
