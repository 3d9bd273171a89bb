"""Tokens that are drawn from logits: greedy, among the likeliest, the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_cli.config.codec import replace
from diloco_cli.config.models import MODEL_PRESETS, GPTShape
from diloco_cli.config.settings import ModelSettings, RunSettings
from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.inference.generation import Causal, Draw, choose, sample
from diloco_cli.tasks.models import build

OWN = RunSettings(name="x", model=ModelSettings(preset=None, entrypoint="a:b", sequence=4))
PICO = RunSettings(name="x", model=ModelSettings(preset="gpt-pico"))


class Successor(nn.Module):
    """After token t comes t + 1, of ten; `seen` are the lengths that it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(1)), list[int]()

    def logits(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        return 9.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10) * self.weight


class LossAlone(nn.Linear):
    """A model of the contract that every run has."""


def pico() -> Causal:
    torch.manual_seed(0)
    return Causal(PICO, build(MODEL_PRESETS["gpt-pico"]).eval())


def test_without_temperature_the_likeliest_token_comes_and_the_model_sees_its_context_alone() -> None:
    model = Successor()
    assert list(sample(Causal(OWN, model), [3], 9, Draw(temperature=0))) == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert max(model.seen) == 4 and model.seen[:4] == [1, 2, 3, 4]


def test_a_seed_gives_its_text_again_and_another_seed_another() -> None:
    texts = [list(sample(pico(), [1, 2], 20, Draw(seed=seed))) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_a_text_may_be_longer_than_the_positions_of_the_model() -> None:
    shape = MODEL_PRESETS["gpt-pico"]
    assert isinstance(shape, GPTShape)
    assert len(list(sample(pico(), [1] * 2 * shape.sequence, 3, Draw()))) == 3


def test_top_k_leaves_the_likeliest_and_allowed_the_first() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    drawn = {choose(logits, Draw(temperature=5.0, top_k=2), generator) for _ in range(60)}
    assert drawn == {1, 3}
    assert {choose(logits, Draw(temperature=5.0), generator) for _ in range(200)} == {0, 1, 2, 3}
    assert set(sample(Causal(OWN, Successor()), [3], 30, Draw(temperature=50.0), allowed=3)) == {0, 1, 2}


def test_chances_are_those_of_the_softmax_at_that_temperature() -> None:
    logits, generator = torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0)
    share = sum(choose(logits, Draw(temperature=0.5), generator) for _ in range(4000)) / 4000
    assert share == pytest.approx(float((logits / 0.5).softmax(0)[1]), abs=0.02)
    assert choose(logits, Draw(temperature=5e-324), generator) == 1


@pytest.mark.parametrize("preset", ["gpt-pico", "moe-pico"])
def test_the_loss_of_a_preset_is_that_of_its_logits(preset: str) -> None:
    model = build(MODEL_PRESETS[preset]).eval()
    tokens, targets = torch.randint(256, (2, 3, 16), generator=torch.Generator().manual_seed(1))
    logits: Tensor = model.logits(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


@pytest.mark.parametrize(
    ("run", "model", "why"),
    [
        (OWN, LossAlone(2, 2), "LossAlone gives a loss alone"),
        (RunSettings(name="x", model=ModelSettings(preset="vit-nano")), nn.Linear(2, 2), "reads images"),
    ],
)
def test_a_model_without_logits_is_refused(run: RunSettings, model: nn.Module, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Causal(run, model)


@pytest.mark.parametrize("wrong", [torch.zeros(1, 10), torch.zeros(2, 1, 10), "no tensor"])
def test_logits_of_another_shape_are_refused(wrong: Any) -> None:
    model = Successor()
    model.logits = lambda tokens: wrong
    with pytest.raises(UsageError, match="logits must be"):
        list(sample(Causal(OWN, model), [1], 1, Draw()))


def test_logits_that_are_not_finite_end_the_text() -> None:
    model = Successor()
    model.weight.data[:] = torch.nan
    with pytest.raises(DataCheckError, match="not finite"):
        list(sample(Causal(OWN, model), [1], 1, Draw()))


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    model = Causal(OWN, Successor())
    model.check([0, 9])
    with pytest.raises(UsageError, match="token 10, and the model has 10"):
        model.check([1, 10])


def test_a_model_of_ones_own_sees_what_its_run_trains_on() -> None:
    assert Causal(OWN, Successor()).context == 4
    assert Causal(replace(OWN, model=replace(OWN.model, sequence=None)), Successor()).context == 128
