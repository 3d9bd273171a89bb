"""Memory by hand: 1.0 B parameters, 16 layers of width 2048, sequences of 2048, an embedding of 195 M."""

from __future__ import annotations

import pytest

from diloco_cli.plan.memory import host_memory_gb, memory_fit, memory_parts, syncer_memory_gb
from diloco_cli.plan.model_facts import ModelFacts, facts_from_numbers
from tests.unit.plan.fleets import MODEL

EMBEDDING = 1_000_000_000 - 12 * 16 * 2048**2


def parts(devices: int, fragments: int = 24, split: int = 1) -> dict[str, float]:
    return {part.name: part.gb for part in memory_parts(MODEL, devices, fragments, split)}


def test_the_parts_of_a_replica_add_up() -> None:
    found = parts(1)
    assert (found["weights"], found["gradients"], found["moments"]) == (4.0, 4.0, 8.0)
    assert found["activations"] == pytest.approx(34 * 2048 * 16 * 2048 / 1e9)
    assert found["logits"] == pytest.approx(6 * 2048 * EMBEDDING / 2048 / 1e9)
    assert found["exchange"] == pytest.approx(8 * EMBEDDING / 1e9)
    assert found["casts"] == 2.0
    assert "gathered layer" not in found
    assert memory_fit(MODEL, 1, 80.0, 24).needed_gb == pytest.approx(sum(found.values()))


def test_sharding_divides_the_state_and_gathers_a_layer() -> None:
    found = parts(4)
    assert (found["weights"], found["moments"]) == (1.0, 2.0)
    assert found["gathered layer"] == pytest.approx(6 / 16)
    assert "casts" not in found
    assert found["activations"] == parts(1)["activations"]


def test_in_fp32_nothing_is_cast_and_activations_are_twice_as_large() -> None:
    full = {part.name: part.gb for part in memory_parts(MODEL, 1, 24, half=False)}
    assert "casts" not in full
    assert full["activations"] == pytest.approx(2 * parts(1)["activations"])
    sharded = {part.name: part.gb for part in memory_parts(MODEL, 4, 24, half=False)}
    assert sharded["gathered layer"] == pytest.approx(8 / 16)


@pytest.mark.parametrize(
    ("devices", "memory_gb", "sharding", "fits"),
    [
        (8, 80.0, "ddp", True),
        (4, 16.0, "fsdp", True),
        (1, 16.0, "none", False),
        (64, 4.0, "fsdp", False),
    ],
)
def test_the_simplest_sharding_that_fits_is_taken(devices: int, memory_gb: float, sharding: str, fits: bool) -> None:
    fit = memory_fit(MODEL, devices, memory_gb, 24)
    assert (fit.sharding, fit.fits) == (sharding, fits)


def test_the_number_of_devices_that_would_do_is_the_smallest_one() -> None:
    needed = memory_fit(MODEL, 1, 16.0, 24).devices_needed
    assert needed is not None
    assert memory_fit(MODEL, needed, 16.0, 24).fits
    assert not memory_fit(MODEL, needed - 1, 16.0, 24).fits


def test_where_activations_alone_are_too_large_tensor_parallelism_is_suggested() -> None:
    wide = ModelFacts(7 * 10**9, 32, 4096, 4096, 400_000_000, 200)
    fit = memory_fit(wide, 128, 16.0, 24, per_node=8)
    assert not fit.fits
    assert fit.devices_needed is None
    assert fit.tensor_parallel == 2
    split = sum(part.gb for part in memory_parts(wide, 128, 24, 2))
    assert split <= 0.9 * 16.0 < sum(part.gb for part in memory_parts(wide, 128, 24))
    assert memory_fit(wide, 128, 16.0, 24, per_node=1).tensor_parallel is None


def test_host_and_syncer_memory_by_hand() -> None:
    small = facts_from_numbers(12 * 2 * 64**2, 2, 64, 32)  # no embedding: fragments of N / P
    fragment = small.parameters / 4
    assert host_memory_gb(small, fragment, 2, 16.0, 8.0) == pytest.approx(
        ((4 + 8 + 8) * small.parameters + (3 * (4 + 4 + 2) + 4 + 1) * fragment) / 1e9
    )
    assert host_memory_gb(small, fragment, 2, 16.0, 8.0) - host_memory_gb(
        small, fragment, 2, 16.0, 8.0, saved=False
    ) == pytest.approx(16 * small.parameters / 1e9)
    assert syncer_memory_gb(small, fragment, 16.0, 8.0) == pytest.approx(
        (8 * small.parameters + (8 + 8 + 1 + 2) * fragment + 64e6) / 1e9
    )


def test_a_host_whose_memory_is_unknown_is_not_refused() -> None:
    fit = memory_fit(MODEL, 4, None)
    assert fit.fits
    assert fit.available_gb is None
