"""Devices are found whole or not at all."""

from __future__ import annotations

import pytest

from diloco_cli.config.devices import ALIASES, catalogue, find_device
from diloco_cli.config.settings import Device
from diloco_cli.errors import UsageError


@pytest.mark.parametrize("name", ["L4", "l4", "L40S", "A10", "A10G", "h100-sxm", "RTX4090", "V100-32GB", "cpu", "mps"])
def test_names_and_aliases_are_found_in_any_case(name):
    assert find_device(name, {}).name


def test_similar_names_are_different_devices():
    assert find_device("L4", {}).bf16_tflops == 121
    assert find_device("L40S", {}).bf16_tflops == 362
    assert find_device("A10G", {}).bf16_tflops == 70


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("L40", "L40S"),
        ("H100", "H100-NVL"),
        ("GH200", "GH200-141GB"),
        ("V100-SXM2", "V100-SXM2-16GB"),
        ("TPUv5e", "TPU-v5e"),
    ],
)
def test_unknown_and_ambiguous_names_are_refused_with_the_nearest(name, nearest):
    with pytest.raises(UsageError) as caught:
        find_device(name, {})
    assert nearest in caught.value.message
    assert "devices:" in caught.value.hint


def test_an_inventory_may_correct_the_catalogue():
    own = {"H100-SXM": Device("H100-SXM", memory_gb=80, bf16_tflops=500)}
    assert find_device("h100-sxm", own).bf16_tflops == 500


def test_every_device_of_the_catalogue_has_a_peak_and_every_alias_a_device():
    for device in catalogue().values():
        assert device.bf16_tflops or device.fp16_tflops or device.fp32_tflops
    assert set(ALIASES.values()) <= set(catalogue())
    assert not {alias.lower() for alias in ALIASES} & {name.lower() for name in catalogue()}
