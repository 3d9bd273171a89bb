"""What planning learns from a model that was built."""

from __future__ import annotations

import pytest

from diloco_cli.config.models import FragmentSizes, ModelFacts, facts_from_parameters
from diloco_cli.config.settings import ModelSettings, RunSettings
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.plan.memory import model_facts
from diloco_cli.tasks.build import build_model_on_meta
from diloco_cli.tensors.flat import parameter_facts


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
