"""Memory by hand: 1.0 B parameters, 16 layers of width 2048, sequences of 2048, an embedding of 195 M, fragments of up
to 46 M; and how many sequences a device takes at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.models import MODEL_PRESETS, FragmentSizes, ModelFacts, facts_from_parameters
from diloco_cli.config.settings import (
    InnerSettings,
    Inventory,
    MachineSettings,
    ModelSettings,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.plan.islands import form_islands
from diloco_cli.plan.memory import (
    HOST_WORKING_GB,
    USABLE,
    WORKING_MARGIN,
    Computing,
    Fit,
    computing,
    fit_with_micro_batch,
    host_bytes,
    host_memory_gb,
    layer_bytes,
    memory_fit,
    memory_parts,
    model_facts,
    syncer_memory_gb,
    with_micro_batch,
)
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.log.operations import MAX_BYTES_AT_ONCE
from diloco_cli.tasks.build import build_model, build_model_on_meta
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.training.inner import build_optimizer
from tests.unit.plan.fleets import FAST, IOWA, MODEL, OLD, RUN, fleet, island

EMBEDDING = 1_000_000_000 - 12 * 16 * 2048**2

HOW = Computing(num_fragments=24)
LARGEST = MODEL.fragments(24).largest


def parts(ranks: int, how: Computing = HOW) -> dict[str, float]:
    return {part.name: part.gb for part in memory_parts(MODEL, how, ranks)}


def fit(ranks: int, memory_gb: float | None) -> Fit:
    return memory_fit(MODEL, HOW, ranks, memory_gb)


def test_the_parts_of_a_replica_add_up() -> None:
    found = parts(1)
    assert (found["weights"], found["gradients"], found["moments"]) == (4.0, 4.0, 8.0)
    assert found["activations"] == pytest.approx((20 + 4 * 4) * 2048 * (16 + 0.5) * 2048 / 1e9)
    assert found["logits"] == pytest.approx(12 * 2048 * EMBEDDING / 2048 / 1e9)
    assert found["exchange"] == pytest.approx(8 * LARGEST / 1e9)
    assert found["casts"] == 2.0
    assert "gathered" not in found
    assert fit(1, 80.0).needed_gb == pytest.approx(sum(found.values()))


def test_sharding_divides_the_state_and_gathers_a_layer() -> None:
    found = parts(4)
    assert (found["weights"], found["moments"]) == (1.0, 2.0)
    layer, logits = 12 * 12 * 2048**2, 12 * EMBEDDING
    assert found["gathered"] == pytest.approx((4 * EMBEDDING + max(0, 4 * EMBEDDING + layer - logits)) / 1e9)
    assert "casts" not in found
    assert found["activations"] == parts(1)["activations"]
    assert found["exchange"] == pytest.approx(8 * LARGEST / 1e9), "the rank that commands has whole fragments"


def test_in_fp32_nothing_is_cast_and_activations_are_nearly_twice_as_large() -> None:
    full = Computing(half=False, num_fragments=24)
    assert "casts" not in parts(1, full)
    assert parts(1, full)["activations"] == pytest.approx(64 / 36 * parts(1)["activations"])
    small = replace(MODEL, embedding_parameters=0)
    (gathered,) = (part.gb for part in memory_parts(small, full, 4) if part.name == "gathered")
    assert gathered == pytest.approx(20 * 1.0 / 16)


def test_checkpointing_keeps_a_layers_input_and_computes_one_layer_again_where_the_logits_were() -> None:
    again = replace(HOW, checkpointing=True)
    found = parts(1, again)
    assert found["activations"] == pytest.approx(4 * 16 * 2048 * 2048 / 1e9)
    assert {**found, "activations": 0.0} == {**parts(1), "activations": 0.0}
    few = replace(MODEL, embedding_parameters=256 * 2048)
    layer, logits = 1.5 * layer_bytes(few, again) * 2048, 12 * 256
    sizes = {part.name: part.gb for part in memory_parts(few, again, 4)}
    assert sizes["activations"] + sizes["logits"] == pytest.approx((4 * 16 * 2048 + layer) * 2048 / 1e9)
    assert layer > logits and sizes["gathered"] == pytest.approx((8 * 256 * 2048 + 12 * (1e9 - 256 * 2048) / 16) / 1e9)


def test_sgd_keeps_no_moments() -> None:
    assert "moments" not in parts(1, replace(HOW, moment_bytes=0))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("preset", ["gpt-pico", "gpt-micro", "moe-nano", "vit-nano"])
def test_the_planned_moments_are_those_that_the_optimizer_keeps(preset: str, name: str) -> None:
    run = RunSettings(name="a", model=ModelSettings(preset=preset), train=TrainSettings(inner=InnerSettings(name=name)))
    model, facts = build_model(run), model_facts(run.model)
    optimizer = build_optimizer(model, run.train.inner)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(t.numel() * t.itemsize for state in optimizer.state.values() for t in state.values() if t.dim())
    (planned,) = (p.gb for p in memory_parts(facts, computing(run, facts, False, 1, False)) if p.name == "moments")
    assert planned == pytest.approx(kept / 1e9)
    built = facts_from_parameters(parameter_facts(model), facts.sequence)
    assert built.hidden_parameters == facts.hidden_parameters > 0


def test_tokens_that_meet_wider_or_several_mlps_keep_more() -> None:
    """Per layer and width: 32 + 8 h bytes in fp32, 16 more with experts, as torch's hooks on saved tensors counted."""
    full = Computing(half=False)
    for preset, kept in (("gpt-nano", 64.0), ("moe-nano", 80.0)):
        assert layer_bytes(model_facts(ModelSettings(preset=preset)), full) == pytest.approx(kept, rel=0.02)


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
    found = fit(devices, memory_gb)
    assert (found.sharding, found.fits) == (sharding, fits)


def test_the_number_of_devices_that_would_do_is_the_smallest_one() -> None:
    needed = fit(1, 16.0).devices_needed
    assert needed is not None
    assert fit(needed, 16.0).fits
    assert not fit(needed - 1, 16.0).fits


def test_host_and_syncer_memory_by_hand() -> None:
    plain = RunSettings(name="a", train=TrainSettings(inner=InnerSettings(name="sgd")))
    assert [host_bytes(run, MODEL) for run in (plain, RunSettings(name="a"))] == [4, 20]
    assert host_bytes(replace(plain, sync=SyncSettings(error_feedback=True)), MODEL) == 12
    assert host_memory_gb(20, 1000, 2, 16.0, 8.0, 100.0) == pytest.approx((20_000 + (3 * 10 + 4 + 1) * 100) / 1e9)
    read_back, not_read_back = (syncer_memory_gb(1000, 100.0, 16.0, 8.0, 3, back, 8) for back in (True, False))
    assert read_back == pytest.approx((8000 + (2 * 9 + 3 * 2) * 100 + 64e6) / 1e9)
    assert read_back - not_read_back == pytest.approx(9 * 100 / 1e9)
    many = syncer_memory_gb(1000, 100.0, 16.0, 8.0, 1 << 30, True, 8)
    assert many - read_back == pytest.approx((MAX_BYTES_AT_ONCE - 600) / 1e9), "no more than go at once"


def test_a_host_whose_memory_is_unknown_is_not_refused() -> None:
    found = fit(4, None)
    assert found.fits
    assert found.available_gb is None


AUTO = TrainSettings()
WORKING_GB = 2048 * (36 * 16.5 * 2048 + 12 * (MODEL.embedding_parameters / 2048)) / 1e9  # of one sequence, in bf16
STATE_GB = (4 + 4 + 8 + 2) * 1.0 + 8 * LARGEST / 1e9


def asked(tokens: int) -> TrainSettings:
    return TrainSettings(micro_batch_tokens=tokens)


def chosen(train: TrainSettings, memory_gb: float | None, sequences: int = 256, devices: int = 1) -> Fit:
    return fit_with_micro_batch(train, MODEL, sequences * 2048, HOW, devices, memory_gb)


def planned(train: TrainSettings, *islands) -> Plan:  # type: ignore[no-untyped-def]
    return make_plan(replace(RUN, train=replace(train, tokens=10**11)), fleet(*islands), MODEL)


def test_the_largest_power_of_two_is_taken_that_the_memory_holds_with_the_margin() -> None:
    held = int((0.9 * 80 - STATE_GB) / (WORKING_MARGIN * WORKING_GB))
    assert held == 7
    found = chosen(AUTO, 80.0)
    assert found.sequences == 4
    assert found.needed_gb == pytest.approx(STATE_GB + 4 * WORKING_GB)
    assert {part.name: part.gb for part in found.parts} == pytest.approx(
        {part.name: part.gb for part in memory_parts(MODEL, HOW, sequences=4)}
    )


def test_what_is_set_is_taken_up_to_the_batch() -> None:
    assert chosen(asked(2048), 80.0).sequences == 1
    assert chosen(asked(3 * 2048), 80.0).sequences == 3
    assert chosen(asked(10**9), 1000.0).sequences == 256, "the whole batch"
    assert chosen(asked(10**9), 1000.0, devices=8).sequences == 32


def test_what_is_set_and_does_not_fit_is_sharded_or_left_out_with_the_way_out() -> None:
    assert chosen(asked(12 * 2048), 80.0).fits is False
    assert chosen(asked(12 * 2048), 80.0, devices=8).shards == "fsdp over 8"
    lonely = island("lonely", count=1)
    plan = planned(asked(12 * 2048), IOWA, lonely)
    (left,) = plan.excluded
    assert left.name == "lonely" and "smaller micro-batches: --set train.micro_batch_tokens=auto" in left.suggestions
    assert [i.micro_batch_tokens for i in plan.islands] == [12 * 2048]
    assert "lonely" in {i.name for i in planned(AUTO, IOWA, lonely).islands}


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


@settings(max_examples=300)
@given(FACTS, st.integers(1, 5000), st.integers(1, 64), st.floats(1, 1000), st.booleans())
def test_what_is_chosen_fits_and_neither_the_whole_part_nor_twice_as_much_would(
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
        more = min(2, share / found.sequences)
        assert state_gb + more * WORKING_MARGIN * found.working_gb > USABLE * memory_gb * (1 - 1e-9)
    if found.sequences > 1:
        assert state_gb + WORKING_MARGIN * found.working_gb <= USABLE * memory_gb * (1 + 1e-9)


def test_a_device_without_bf16_is_planned_in_fp32_as_it_trains() -> None:
    """The learner has no fp16: activations of a V100 are of four bytes."""
    (old,) = planned(AUTO, OLD).islands
    parts = {part.name: part.gb for part in old.memory_parts}
    assert parts["activations"] == pytest.approx(64 * 2048 * 16.5 * 2048 / 1e9)
    assert old.micro_batch_tokens == 2048


def test_size_is_counted_and_layers_and_width_are_guessed_from_names_and_shapes():
    parameters = [ParameterFact("embedding.weight", (100, 8), True)]
    parameters += [ParameterFact(f"blocks.{i}.mlp.weight", (32, 8), False) for i in range(3)]
    parameters += [ParameterFact("norm.weight", (8,), False)]
    facts = facts_from_parameters(parameters, sequence=16)
    assert facts.parameters == 800 + 3 * 256 + 8
    assert (facts.layers, facts.width, facts.sequence) == (3, 32, 16)
    assert (facts.embedding_parameters, facts.num_tensors) == (800, 5)


def test_a_model_without_matrices_or_numbers_still_has_facts():
    facts = facts_from_parameters([ParameterFact("bias", (4,), False)], sequence=1)
    assert (facts.parameters, facts.layers, facts.width) == (4, 1, 1)


@pytest.mark.parametrize("wanted", [1, 4, 12, 24, 96])
@pytest.mark.parametrize("preset", ["gpt-pico", "gpt-nano", "gpt-small"])
def test_planned_fragments_are_those_of_the_layout(preset: str, wanted: int) -> None:
    """From six numbers: but for the table of positions, which counts as rows of the embedding, they are the same."""
    model = ModelSettings(preset=preset)
    built = balanced_layout(parameter_facts(build_model_on_meta(RunSettings("run", model=model))), wanted)
    sizes = [fragment.num_parameters for fragment in built.fragments]
    planned = model_facts(model).fragments(wanted)
    assert planned.count == len(sizes)
    assert planned.largest == pytest.approx(max(sizes), rel=0.04)
    assert planned.mean == pytest.approx(sum(size**2 for size in sizes) / sum(sizes), rel=0.01)


def test_the_mean_fragment_is_that_of_a_parameter_chosen_at_random() -> None:
    """One matrix of 12 rows and one of 4, both 50 wide, the second an embedding: 4 fragments are even, 2 are not."""
    model = ModelFacts(parameters=800, layers=1, width=50, sequence=1, embedding_parameters=200, num_tensors=2)
    assert model.fragments(4) == FragmentSizes(4, 200.0, 200.0)
    two = model.fragments(2)
    assert (two.count, two.largest) == (2, 600.0)
    assert two.mean == pytest.approx((600 * 600 + 200 * 200) / 800)
    assert model.fragments(1) == FragmentSizes(1, 800.0, 800.0)


def test_there_are_no_more_fragments_than_rows() -> None:
    model = ModelFacts(parameters=800, layers=1, width=50, sequence=1, embedding_parameters=200, num_tensors=2)
    assert model.fragments(100).count == 16
