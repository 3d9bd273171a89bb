"""How many sequences a device takes at once: by hand for a model of 1.0 B parameters, as properties for any."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.presets import MODEL_PRESETS
from diloco_cli.config.settings import (
    Accelerators,
    Inventory,
    MachineSettings,
    ModelSettings,
    StoreSettings,
    TrainSettings,
)
from diloco_cli.plan.islands import form_islands
from diloco_cli.plan.memory import (
    HOST_WORKING_GB,
    USABLE,
    WORKING_MARGIN,
    Computing,
    Fit,
    fit_with_micro_batch,
    memory_parts,
    with_micro_batch,
)
from diloco_cli.plan.model_facts import ModelFacts, model_facts
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.planner import make_plan
from tests.unit.plan.fleets import FAST, IOWA, MODEL, OLD, RUN, fleet, island

AUTO = TrainSettings()
HOW = Computing(num_fragments=24)
WORKING_GB = 2048 * (36 * 16.5 * 2048 + 12 * (MODEL.embedding_parameters / 2048)) / 1e9  # of one sequence, in bf16
STATE_GB = (4 + 4 + 8 + 2) * 1.0 + 8 * MODEL.embedding_parameters / 1e9


def asked(tokens: int) -> TrainSettings:
    return TrainSettings(micro_batch_tokens=tokens)


def fit(train: TrainSettings, memory_gb: float | None, sequences: int = 256, devices: int = 1) -> Fit:
    return fit_with_micro_batch(train, MODEL, sequences * 2048, HOW, devices, memory_gb)


def planned(train: TrainSettings, *islands) -> Plan:  # type: ignore[no-untyped-def]
    return make_plan(replace(RUN, train=replace(train, tokens=10**11)), fleet(*islands), MODEL)


def test_the_largest_power_of_two_is_taken_that_the_memory_holds_with_the_margin() -> None:
    held = int((0.9 * 80 - STATE_GB) / (WORKING_MARGIN * WORKING_GB))
    assert held == 7
    found = fit(AUTO, 80.0)
    assert found.sequences == 4
    assert found.needed_gb == pytest.approx(STATE_GB + 4 * WORKING_GB)
    assert {part.name: part.gb for part in found.parts} == pytest.approx(
        {part.name: part.gb for part in memory_parts(MODEL, HOW, sequences=4)}
    )


@pytest.mark.parametrize(
    ("sequences", "devices", "taken"), [(256, 64, 4), (7, 1, 7), (8, 1, 4), (5, 2, 3), (1, 1, 1), (1, 8, 1)]
)
def test_a_device_takes_its_whole_part_of_the_batch_if_that_fits(sequences: int, devices: int, taken: int) -> None:
    assert fit(AUTO, 80.0, sequences, devices).sequences == taken


def test_a_sharded_model_leaves_room_for_more_sequences() -> None:
    wide, narrow = fit(AUTO, 24.0, devices=16), fit(AUTO, 24.0, devices=2)
    assert (wide.shards, wide.sequences) == ("fsdp over 16", 2)
    assert (narrow.shards, narrow.sequences) == ("fsdp over 2", 1)


def test_where_one_sequence_just_fits_one_is_taken() -> None:
    found = fit(AUTO, (STATE_GB + WORKING_GB) / USABLE * 1.001)
    assert found.fits and found.sequences == 1


def test_what_is_set_is_taken_up_to_the_batch() -> None:
    assert fit(asked(2048), 80.0).sequences == 1
    assert fit(asked(3 * 2048), 80.0).sequences == 3
    assert fit(asked(10**9), 1000.0).sequences == 256, "the whole batch"
    assert fit(asked(10**9), 1000.0, devices=8).sequences == 32


def test_what_is_set_and_does_not_fit_is_sharded_or_left_out_with_the_way_out() -> None:
    assert fit(asked(12 * 2048), 80.0).fits is False
    assert fit(asked(12 * 2048), 80.0, devices=8).shards == "fsdp over 8"
    lonely = island("lonely", count=1)
    plan = planned(asked(12 * 2048), IOWA, lonely)
    (left,) = plan.excluded
    assert left.name == "lonely" and "smaller micro-batches: --set train.micro_batch_tokens=auto" in left.suggestions
    assert [i.micro_batch_tokens for i in plan.islands] == [12 * 2048]
    assert "lonely" in {i.name for i in planned(AUTO, IOWA, lonely).islands}


def test_without_room_even_for_one_sequence_no_micro_batch_is_a_way_out() -> None:
    tiny = island("tiny", "T4", count=1)
    (left,) = planned(asked(2 * 2048), IOWA, tiny).excluded
    assert not any("micro-batches" in way for way in left.suggestions)


def test_machines_that_do_not_hold_the_micro_batch_that_is_set_form_no_island() -> None:
    machines = (MachineSettings("here", Accelerators("A100-40GB"), name="m", nodes=2, link=FAST),)
    inventory = Inventory(StoreSettings("gs://bucket"), machines=machines)
    for train, formed in ((AUTO, 2), (asked(2 * 2048), 2), (asked(8 * 2048), 0)):
        forming = form_islands(replace(RUN, train=train), inventory, MODEL)
        assert (len(forming.formed), len(forming.excluded)) == (formed, int(not formed))


@pytest.mark.parametrize("preset", sorted(MODEL_PRESETS))
def test_on_a_cpu_the_default_batch_takes_no_gigabytes(preset: str) -> None:
    """Cores of one process share a micro-batch, however many there are."""
    model = model_facts(ModelSettings(preset=preset))
    found = fit_with_micro_batch(AUTO, model, AUTO.batch_tokens, Computing(half=False))
    one = with_micro_batch(found, 1).working_gb
    assert found.fits and (found.sequences == 1 or found.working_gb <= HOST_WORKING_GB)
    assert 2 * found.sequences * one > HOST_WORKING_GB, "twice as many would be too many"
    assert found.sequences * model.sequence == {
        "gpt-pico": 8192, "gpt-nano": 8192, "gpt-micro": 4096, "gpt-small": 1024,
        "moe-pico": 8192, "moe-nano": 8192, "moe-micro": 4096, "vit-nano": 8192,
    }[preset]  # fmt: skip


FACTS = st.builds(
    ModelFacts,
    parameters=st.integers(10**6, 10**11),
    layers=st.integers(1, 100),
    width=st.integers(16, 16_384),
    sequence=st.integers(1, 32_768),
    embedding_parameters=st.integers(0, 10**6),
    num_tensors=st.integers(3, 500),
)


@settings(max_examples=300, deadline=None)
@given(FACTS, st.integers(1, 5000), st.integers(1, 64), st.floats(1, 1000), st.booleans())
def test_what_is_chosen_fits_and_twice_as_much_would_not(
    model: ModelFacts, sequences: int, devices: int, memory_gb: float, half: bool
) -> None:
    found = fit_with_micro_batch(
        AUTO, model, sequences * model.sequence, Computing(half, num_fragments=8), devices, memory_gb
    )
    share = -(-sequences // devices)
    assert 1 <= found.sequences <= share
    if not found.fits:
        assert found.sequences == 1
        return
    assert found.needed_gb <= USABLE * memory_gb * (1 + 1e-9)
    state_gb = found.needed_gb - found.working_gb
    if found.sequences < share:
        assert found.sequences & (found.sequences - 1) == 0
        assert state_gb + 2 * WORKING_MARGIN * found.working_gb > USABLE * memory_gb * (1 - 1e-9)
    if found.sequences > 1:
        assert state_gb + WORKING_MARGIN * found.working_gb <= USABLE * memory_gb * (1 + 1e-9)


def test_a_device_without_bf16_is_planned_in_fp32_as_it_trains() -> None:
    """The learner has no fp16: activations of a V100 are of four bytes."""
    (old,) = planned(AUTO, OLD).islands
    parts = {part.name: part.gb for part in old.memory_parts}
    assert parts["activations"] == pytest.approx(64 * 2048 * 16.5 * 2048 / 1e9)
    assert old.micro_batch_tokens == 2048
