"""Devices are found whole or not at all; other spellings have one stated meaning.

`infra: loop/DATA`: an island that its owner's own loop trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.hardware import (
    DATA_CLASSES,
    Accelerators,
    Device,
    catalogue,
    data_class_of,
    find_device,
    infra_of,
    resolve,
    with_catalogue_facts,
)
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.errors import UsageError

# (bf16 TFLOP/s, else fp16, else fp32; GB) as the vendors' data sheets have them, typed again from those
SHEETS = {
    "V100-SXM2-16GB": (125, 16), "V100-SXM2-32GB": (125, 32), "V100-PCIe-16GB": (112, 16),
    "V100-PCIe-32GB": (112, 32), "T4": (65, 16), "L4": (121, 24), "A10": (125, 24),
    "A10G": (70, 24), "A40": (149.7, 48), "RTX-A6000": (154.8, 48), "A100-40GB": (312, 40), "A100-80GB-SXM": (312, 80),
    "A100-80GB-PCIe": (312, 80), "L40S": (362, 48), "H100-SXM": (989, 80), "H100-PCIe": (756, 80),
    "H100-NVL": (835, 94), "H200": (989, 141), "H200-NVL": (835, 141), "GH200-96GB": (989, 96),
    "GH200-141GB": (989, 141), "B200": (2250, 180), "GB200": (2500, 186), "B300": (2250, 288),
    "RTX-3090": (71, 24), "RTX-4090": (165.2, 24),
    "RTX-5090": (209.5, 32), "MI250X": (191.5, 64), "MI300X": (1307, 192), "MI325X": (1307, 256),
    "MI355X": (2500, 288), "TPU-v4": (275, 32), "TPU-v5e": (197, 16), "TPU-v5p": (459, 95), "TPU-v6e": (918, 32),
    "TPU-v7": (2307, 192), "Trainium1": (190, 32), "Trainium2": (667, 96), "Trainium3": (671, 144),
    "Gaudi2": (432, 96), "Gaudi3": (1677, 128), "Apple-M1-Max": (10.6, None), "Apple-M2-Ultra": (27.2, None),
    "Apple-M4-Max": (18.4, None),
}  # fmt: skip
ACHIEVABLE = {
    "A100-80GB-SXM": 0.87, "H100-SXM": 0.80, "GH200-96GB": 0.84, "GH200-141GB": 0.84, "B200": 0.78, "GB200": 0.73,
    "MI300X": 0.51, "MI325X": 0.60, "MI355X": 0.68, "Gaudi2": 0.97, "Gaudi3": 0.74,
}  # fmt: skip


def test_the_catalogue_holds_these_devices_and_figures():
    found = {
        name: (device.bf16_tflops or device.fp16_tflops or device.fp32_tflops, device.memory_gb)
        for name, device in catalogue().devices.items()
    }
    assert found == SHEETS
    assert {n: d.achievable for n, d in catalogue().devices.items() if d.achievable} == ACHIEVABLE


@pytest.mark.parametrize("name", ["V100-SXM2-32GB", "V100-PCIe-16GB", "T4"])
def test_devices_without_bf16_say_so_and_have_an_fp16_peak(name):
    device = find_device(name, {})
    assert (device.bf16_tflops, device.note) == (None, "no bf16") and device.fp16_tflops


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
        ("H1000", "H100"),
        ("V100-SXM2", "V100-SXM2-16GB"),
        ("TPUv5e", "TPU-v5e"),
        ("tpu-v5e-zero", "tpu-v5e-8"),
    ],
)
def test_unknown_and_ambiguous_names_are_refused_with_the_nearest(name, nearest):
    with pytest.raises(UsageError) as caught:
        find_device(name, {})
    assert nearest in caught.value.message
    assert "devices:" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "count", "meant"),
    [
        ("A100", 8, Accelerators("A100-40GB", 8)),
        ("A100-80GB", 8, Accelerators("A100-80GB-SXM", 8)),
        ("H100", 8, Accelerators("H100-SXM", 8)),
        ("V100", 4, Accelerators("V100-SXM2-16GB", 4)),
        ("GH200", 1, Accelerators("GH200-96GB", 1)),
        ("CPU", 4, Accelerators("cpu", 4)),
        ("tpu-v5e-8", 1, Accelerators("TPU-v5e", 8)),
        ("tpu-v5litepod-4", 1, Accelerators("TPU-v5e", 4)),
        ("tpu-v6e-1", 1, Accelerators("TPU-v6e", 1)),
        ("tpu-v4-16", 1, Accelerators("TPU-v4", 8)),  # the number counts TensorCores, two on a chip
        ("tpu-v5p-8", 1, Accelerators("TPU-v5p", 4)),
    ],
)
def test_names_as_skypilot_writes_them_are_resolved(name, count, meant):
    assert resolve(Accelerators(name, count), {}) == meant


def test_an_inventory_may_correct_the_catalogue_and_keeps_the_rest_of_it():
    own = with_catalogue_facts({"h100-sxm": Device("h100-sxm", bf16_tflops=500), "Mine": Device("Mine", 24, 120)})
    corrected = find_device("H100-SXM", own)
    assert (corrected.bf16_tflops, corrected.memory_gb, corrected.gbps) == (500, 80, 3350)
    assert find_device("mine", own) == Device("Mine", 24, 120)


def test_every_spelling_means_a_device_of_the_catalogue_and_says_what():
    known = catalogue()
    for spelling in (*known.aliases.values(), *known.slices.values()):
        assert spelling.device in known.devices and len(spelling.meaning) > 10
    assert not {name.lower() for name in known.aliases} & {name.lower() for name in known.devices}


TEXT = "version: 1\nstore: {{url: bucket}}\nislands:\n  - {{name: a, region: here, accelerators: 'cpu:1', infra: {}}}\n"


def infra_in(folder: Path, infra: str) -> str:
    path = folder / "inventory.yaml"
    path.write_text(TEXT.format(infra))
    return load_inventory(path).islands[0].infra


@pytest.mark.parametrize("data", DATA_CLASSES)
def test_an_inventory_names_the_class_of_data(tmp_path: Path, data: str) -> None:
    assert infra_in(tmp_path, f"loop/{data}") == infra_of(data) == f"loop/{data}"
    assert data_class_of(f"loop/{data}") == data


@pytest.mark.parametrize(
    ("infra", "words"),
    [
        ("loop/extern", r"inventory.yaml:4: .*must be one of addressed, .*, not 'extern'; did you mean external\?"),
        ("loop", "loop/addressed"),
    ],
)
def test_another_word_is_refused_with_its_place(tmp_path: Path, infra: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        infra_in(tmp_path, infra)


@pytest.mark.parametrize("infra", ["local", "slurm/loop", "loop", "loop/new"])
def test_any_other_island_has_no_loop_of_its_own(infra: str) -> None:
    assert data_class_of(infra) is None


def test_torchs_name_for_a_gpu_is_no_model_of_one() -> None:
    with pytest.raises(UsageError) as caught:
        find_device("cuda", {})
    assert "RTX-4090:1" in (caught.value.hint or "")
