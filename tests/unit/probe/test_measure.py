"""What a probe makes of its measurements; the measurements themselves, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, device_name, in_catalogue
from diloco_cli.config.inventory_file import inventory_to_text, load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import Inventory, IslandSettings, Link, LocalMachine, StoreSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.probe.entry import Measurements, figures, measured, new_inventory
from diloco_cli.probe.measure import (
    MachineFacts,
    Spread,
    StoreSpeed,
    matrix_tflops,
    measure_store,
    measure_training,
    training_types,
)
from diloco_cli.store.memory import MemoryStore

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
CORES = MachineFacts(Accelerators("cpu", 1), True, None, 4, 25.2, "cpu")
CARDS = MachineFacts(Accelerators("H100-SXM", 8), True, 85.0, 96, 1000.0, "cuda:0")


def exactly(value: float) -> Spread:
    return Spread(value, 0.9 * value, 1.1 * value, 3)


CORE = {"cpu": exactly(1000.0)}


@pytest.mark.parametrize(
    ("driver", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_that_drivers_give_are_found_in_the_catalogue(driver, device):
    found = in_catalogue(device_name(driver))
    assert found is not None and found.name == device


def test_an_unknown_accelerator_keeps_its_own_name():
    assert in_catalogue(device_name("NVIDIA Wonder 9000")) is None
    assert device_name("NVIDIA Wonder 9000") == "Wonder-9000"


def run_of(*islands: IslandSettings) -> Inventory:
    return Inventory(StoreSettings("gs://bucket"), islands)


def test_only_islands_on_this_machine_are_measured():
    local = IslandSettings("local", "here", Accelerators("cpu", 2))
    far = IslandSettings("far", "here", Accelerators("cpu", 2), infra="ssh")
    card = IslandSettings("card", "here", Accelerators("H100-SXM", 8))
    entry = measured(Measurements(CORES, {}, "gpt", CORE), run_of(local, far, card))
    assert [island.tokens_per_s for island in entry.inventory.islands] == [2000.0, None, None]
    assert entry.inventory.local == LocalMachine(4)
    assert entry.comments["islands.local.tokens_per_s"] == "measured: 2 x 1000, +- 10 %"


def test_all_accelerators_of_an_island_count():
    entry = measured(
        Measurements(CARDS, {}, "gpt", {"H100-SXM": exactly(58_130.0)}),
        run_of(IslandSettings("pod", "here", Accelerators("H100-SXM", 8), nodes=2)),
    )
    assert entry.inventory.islands[0].tokens_per_s == 930_000.0  # 16 x 58,130, three digits


def test_a_measured_link_replaces_the_one_given_but_not_an_emulated_one():
    store = StoreSpeed(exactly(2e9), exactly(3e9), exactly(0.005))
    plain = IslandSettings("a", "here", Accelerators("cpu", 1))
    emulated = replace(plain, name="b", link=Link(1e8, 1e8, 0.02, emulate=True))
    entry = measured(Measurements(CORES, {}, store=store), run_of(plain, emulated))
    assert [island.link for island in entry.inventory.islands] == [Link(2e9, 3e9, 0.005), emulated.link]


def test_the_syncers_link_is_measured_where_it_is_launched(tmp_path):
    store = StoreSpeed(exactly(2e9), exactly(3e9), exactly(0.005))
    here = IslandSettings("a", "here", Accelerators("cpu", 1))
    entry = measured(Measurements(CORES, {}, store=store), run_of(here))
    assert entry.inventory.store.link == Link(2e9, 3e9, 0.005)
    (tmp_path / "i.yaml").write_text(inventory_to_text(entry.inventory, entry.comments))
    assert load_inventory(tmp_path / "i.yaml").store.link == Link(2e9, 3e9, 0.005)
    far = replace(here, infra="slurm/gpu")
    assert measured(Measurements(CORES, {}, store=store), run_of(far)).inventory.store.link == Link()


def test_the_share_of_the_peak_that_a_known_card_reaches_is_written_down(tmp_path):
    found = Measurements(CARDS, {"bf16": exactly(741.75), "fp32": exactly(50.0)})
    entry = new_inventory(found, "pod", "here", "gs://bucket/runs")
    (tmp_path / "i.yaml").write_text(inventory_to_text(entry.inventory, entry.comments, "\n".join(figures(found))))
    device = load_inventory(tmp_path / "i.yaml").devices["H100-SXM"]
    assert (device.achievable, device.bf16_tflops, device.memory_gb) == (0.75, 989, 80)  # 741.75 of 989


def test_a_strange_card_is_described_by_what_was_measured(tmp_path):
    strange = replace(CARDS, accelerators=Accelerators("Wonder-9000", 1), known=False, memory_gb=47.4)
    entry = new_inventory(Measurements(strange, {"fp32": exactly(88.8)}), "pod", "here", "gs://bucket/runs")
    (tmp_path / "i.yaml").write_text(inventory_to_text(entry.inventory, entry.comments))
    device = load_inventory(tmp_path / "i.yaml").devices["Wonder-9000"]
    assert (device.bf16_tflops, device.fp32_tflops, device.memory_gb) == (None, 88.8, 47.4)


def test_bf16_is_not_measured_where_it_would_be_emulated(monkeypatch):
    for capability, expected in (((7, 0), ["fp32"]), ((8, 6), ["bf16", "fp32"])):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device, capability=capability: capability)
        assert training_types("cuda:0") == expected


def test_figures_say_every_spread():
    said = "\n".join(figures(Measurements(CORES, {"fp32": exactly(0.05)}, "gpt", CORE)))
    assert "matrix product, fp32, one thread: 0.05 (0.045 to 0.055, n = 3) TFLOP/s" in said
    assert "gpt, on cpu: 1000 (900 to 1100, n = 3) tokens/s" in said


class CountingStore(MemoryStore):
    """Knows what was written."""

    num_created = 0

    def create(self, key, data):
        self.num_created += 1
        return super().create(key, data)


def test_a_store_is_measured_and_left_as_it_was():
    store = CountingStore("memory://probe")
    store.create("before", b"1")
    speed = measure_store(store, 0.0, payload_bytes=1000)
    assert store.list("") == ["before"]
    assert store.num_created == 1 + 3 + 1  # three payloads at least, one small object
    assert min(speed.up_bps.low, speed.down_bps.low, speed.rtt_s.low) > 0 and speed.rtt_s.num == 10


def test_a_matrix_product_is_measured_in_types_that_the_device_has():
    rate = matrix_tflops("fp32", "cpu", 0.0)
    assert rate is not None and 1e-4 < rate.median < 100


def test_a_model_trains_in_a_process_of_its_own():
    """Real inner steps of the quickstart's model: more than a thousand tokens a second on any machine."""
    run = load_run(QUICKSTART / "run.yaml")
    speed = measure_training(run, QUICKSTART, "cpu", 0.05, lambda line: None)
    assert speed.median > 1000 and speed.num == 5


def test_a_model_that_cannot_be_built_is_an_error_with_its_reason():
    run = load_run(QUICKSTART / "run.yaml", ["model={entrypoint: 'nowhere:build'}"])
    with pytest.raises(RunFailedError, match=r"the model cannot be trained here: .*nowhere"):
        measure_training(run, QUICKSTART, "cpu", 0.05, lambda line: None)
