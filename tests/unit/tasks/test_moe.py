"""Mixture of experts: routing, the mixture against a slow reference, the balance loss, what is reported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from diloco_cli.config.presets import MODEL_PRESETS, MoEShape
from diloco_cli.tasks.build import losses_of
from diloco_cli.tasks.models import BALANCE_COEFFICIENT, MoEBlock, MoEGPT, balance_loss, build, route

SHAPE = MoEShape(layers=2, width=16, heads=2, sequence=8, experts=5, active_experts=2, expert_width=12)


def block(seed: int = 0) -> MoEBlock:
    torch.manual_seed(seed)
    return MoEBlock(SHAPE).double()


def tokens_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(256, (3, SHAPE.sequence + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(2, 8), st.integers(0, 2**31), st.floats(0.1, 50.0))
def test_weights_of_the_chosen_experts_sum_to_one_and_they_are_the_likeliest(n, experts, seed, scale):
    logits = scale * torch.randn(n, experts, generator=torch.Generator().manual_seed(seed))
    chosen, weights, probabilities = route(logits, 2)
    assert torch.allclose(weights.sum(dim=1), torch.ones(n)) and bool((weights >= 0).all())
    least = logits.gather(1, chosen).min(dim=1).values
    assert int((logits > least[:, None]).sum()) <= n, "besides the two chosen, nobody is above the second"
    shares = probabilities.gather(1, chosen)
    torch.testing.assert_close(weights, shares / shares.sum(dim=1, keepdim=True))


def test_a_mixture_is_the_weighted_sum_of_its_experts_token_by_token():
    layer = block()
    tokens = torch.randn(7, SHAPE.width, dtype=torch.float64)
    chosen, weights, _ = route(layer.router(tokens), 2)
    expected = torch.stack(
        [sum(w * layer.experts[e](t) for e, w in zip(es, ws, strict=True))
         for t, es, ws in zip(tokens, chosen.tolist(), weights, strict=True)]
    )  # fmt: skip
    torch.testing.assert_close(layer.mix(tokens, chosen, weights), expected, rtol=1e-12, atol=1e-12)


def test_an_expert_that_nobody_chose_is_no_trouble_and_gets_no_gradient():
    layer = block()
    tokens = torch.randn(4, SHAPE.width, dtype=torch.float64)
    chosen = torch.tensor([[0, 1]] * 4)
    layer.mix(tokens, chosen, torch.full((4, 2), 0.5, dtype=torch.float64)).sum().backward()
    assert layer.experts[0].mlp_in.weight.grad.abs().sum() > 0
    idle = layer.experts[3].mlp_in.weight.grad
    assert idle is None or float(idle.abs().sum()) == 0.0


def test_renaming_the_experts_changes_nothing():
    layer, renamed = block(), block()
    order = [3, 0, 4, 1, 2]
    with torch.no_grad():
        renamed.router.weight.copy_(layer.router.weight[order])
        for new, old in enumerate(order):
            renamed.experts[new].load_state_dict(layer.experts[old].state_dict())
    x = torch.randn(2, 8, SHAPE.width, dtype=torch.float64)
    for found, expected in zip(renamed(x), layer(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the router works in float32


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8))
def test_balanced_routing_is_the_minimum_where_choices_follow_the_probabilities(raw):
    """With f = P the loss is E * sum p^2, at least 1 (Cauchy-Schwarz), and 1 for the uniform p alone."""
    counts = [max(1, round(1000 * share / sum(raw))) for share in raw]
    chosen = torch.cat([torch.full((count, 1), expert) for expert, count in enumerate(counts)])
    p = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    loss = float(balance_loss(chosen, p.expand(len(chosen), -1)))
    assert loss == pytest.approx(len(raw) * float((p**2).sum()), rel=1e-9)
    beyond = len(raw) * float(((p - 1 / len(raw)) ** 2).sum())  # 0 for the uniform p alone
    assert loss == pytest.approx(1.0 + beyond, rel=1e-9)


def test_the_balance_loss_of_one_crowded_expert_by_hand():
    """All four tokens choose expert 0 of two, with probability 0.75: f = (1, 0), P = (0.75, 0.25), E f.P = 1.5."""
    probabilities = torch.tensor([[0.75, 0.25]] * 4)
    assert float(balance_loss(torch.zeros(4, 1, dtype=torch.int64), probabilities)) == 1.5


def test_the_balance_loss_pushes_away_from_the_crowded_expert():
    logits = torch.tensor([[2.0, 0.0, -1.0]] * 6, requires_grad=True)
    chosen, _, probabilities = route(logits, 1)
    balance_loss(chosen, probabilities).backward()
    assert bool((logits.grad[:, 0] > 0).all()) and bool((logits.grad[:, 1:] < 0).all())


def test_the_gradient_of_the_loss_alone_reaches_every_router():
    torch.manual_seed(0)
    model = build(SHAPE)
    loss, _ = model(*tokens_and_targets())
    loss.backward()
    for layer in model.blocks:
        assert float(layer.router.weight.grad.abs().sum()) > 0


def test_the_balance_term_is_trained_on_and_never_reported():
    torch.manual_seed(0)
    model = build(SHAPE)
    assert isinstance(model, MoEGPT)
    reported, objective = losses_of(model(*tokens_and_targets()))
    model.eval()
    plain = model(*tokens_and_targets())
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(reported, plain)
    assert float((objective - reported).detach()) >= 0.5 * BALANCE_COEFFICIENT


def test_the_router_works_in_float32_under_bf16(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    layer, seen = MoEBlock(SHAPE), []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: seen.append(linear(*a)) or seen[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(2, 8, SHAPE.width))
    router = [out for out in seen if out.shape[-1] == SHAPE.experts]
    assert [out.dtype for out in router] == [torch.float32]
    assert any(out.dtype == torch.bfloat16 for out in seen), "the experts themselves are in bfloat16"


@pytest.mark.parametrize("preset", [name for name in MODEL_PRESETS if name.startswith("moe")])
def test_active_parameters_are_counted_from_the_model(preset):
    shape = MODEL_PRESETS[preset]
    with torch.device("meta"):
        model = build(shape)
    idle_a_layer = sum(p.numel() for p in model.blocks[0].experts[0].parameters())
    total = sum(p.numel() for p in model.parameters())
    idle = shape.layers * (shape.experts - shape.active_experts) * idle_a_layer
    assert (shape.num_parameters, shape.active_parameters) == (total, total - idle)
