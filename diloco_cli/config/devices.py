"""The device catalogue: a name is found whole or not at all, so `L4` never means an L40S."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from diloco_cli.config.build import Builder
from diloco_cli.config.nearest import nearest
from diloco_cli.config.settings import Device
from diloco_cli.config.yaml_tree import parse_yaml
from diloco_cli.errors import UsageError

CATALOGUE = Path(__file__).with_name("devices.yaml")
CPU = "cpu"
MPS = "mps"
HOST_DEVICES = {  # their speed depends on the machine: `plan` guesses it and says so, or takes tokens_per_s
    CPU: Device(CPU, memory_gb=None, unit="core", note="memory is the host's"),
    MPS: Device(MPS, memory_gb=None, unit="device", note="memory is the host's"),
}
ALIASES = {  # other spellings of exactly one device
    "V100-16GB": "V100-SXM2-16GB",
    "V100-32GB": "V100-SXM2-32GB",
    "A6000": "RTX-A6000",
    "RTXA6000": "RTX-A6000",
    "A100-40GB-SXM": "A100-40GB",
    "A100-SXM-80GB": "A100-80GB-SXM",
    "A100-SXM4-80GB": "A100-80GB-SXM",
    "A100-PCIe-80GB": "A100-80GB-PCIe",
    "H100-SXM5": "H100-SXM",
    "H100-80GB-SXM": "H100-SXM",
    "H200-SXM": "H200",
    "RTX3090": "RTX-3090",
    "RTX4090": "RTX-4090",
    "RTX5090": "RTX-5090",
    "tpu-v5-lite": "TPU-v5e",
    "tpu-v5-litepod": "TPU-v5e",
}


def find_device(name: str, own: Mapping[str, Device]) -> Device:
    """The inventory's own devices first, then the catalogue; upper and lower case do not matter."""
    wanted = name.lower()
    described = _by_lower_case({**HOST_DEVICES, **own})
    if wanted in described:  # without reading the catalogue
        return described[wanted]
    if wanted in _catalogue_by_lower_case():
        return _catalogue_by_lower_case()[wanted]
    names = nearest(name, [*own, *catalogue(), *HOST_DEVICES, *ALIASES])
    likely = f"; nearest: {', '.join(names)}" if names else ""
    own_entry = f"devices: {{{name}: {{bf16_tflops: 120, memory_gb: 24}}}}"
    raise UsageError(f"unknown device '{name}'{likely}", hint=f"name a known device, or describe yours: {own_entry}")


@cache
def catalogue() -> dict[str, Device]:
    """Every device of the packaged file, by its name."""
    tree = parse_yaml(CATALOGUE.read_text(encoding="utf-8"), CATALOGUE.name)
    return Builder({}).build_named(Device, tree, "devices")


@cache
def _catalogue_by_lower_case() -> dict[str, Device]:
    devices = _by_lower_case(catalogue())
    return {**devices, **{alias.lower(): devices[name.lower()] for alias, name in ALIASES.items()}}


def _by_lower_case(devices: Mapping[str, Device]) -> dict[str, Device]:
    return {name.lower(): device for name, device in devices.items()}
