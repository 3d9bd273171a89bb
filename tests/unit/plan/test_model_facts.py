"""What planning learns from a model that was built."""

from __future__ import annotations

from diloco_cli.layout import ParameterFact
from diloco_cli.plan.model_facts import facts_from_parameters


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
