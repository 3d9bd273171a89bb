"""What a preset's shape says is what is built; every preset trains; the loss under bf16; positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco_cli.config.presets import MODEL_PRESETS, VISION_DATA, ViTShape, data_of
from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.plan.model_facts import facts_from_parameters, model_facts
from diloco_cli.tasks.build import build_data, build_model, build_model_on_meta
from diloco_cli.tasks.models import build as build_vit
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.training.replica import Replica

SMALL = [name for name, shape in MODEL_PRESETS.items() if shape.num_parameters < 1_000_000]


def run_of(preset: str, precision: str = "fp32") -> RunSettings:
    train = TrainSettings(batch_tokens=128, precision=precision, inner=InnerSettings(lr=3e-3))  # type: ignore[arg-type]
    return RunSettings(
        name="x",
        model=ModelSettings(preset=preset),
        data=DataSettings(preset=data_of(MODEL_PRESETS[preset])),
        train=train,
    )


class OneBatch:
    """The same two examples at every position."""

    def __init__(self, preset: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = MODEL_PRESETS[preset]
        if isinstance(shape, ViTShape):
            self.pair = torch.randn(2, 8, 8, generator=generator), torch.tensor([3, 7])
        else:
            both = torch.randint(256, (2, shape.sequence + 1), generator=generator)
            self.pair = both[:, :-1], both[:, 1:]

    def batch(self, *_):
        return self.pair


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_built_preset_has_the_facts_that_its_shape_gives(preset):
    model = build_model_on_meta(run_of(preset))
    shape, known = MODEL_PRESETS[preset], model_facts(ModelSettings(preset=preset))
    built = facts_from_parameters(parameter_facts(model), shape.sequence)
    assert (built.parameters, built.num_tensors) == (known.parameters, known.num_tensors)
    assert (built.layers, built.embedding_parameters) == (known.layers, known.embedding_parameters)
    assert built.width == known.width
    assert known.flops_per_token == 6 * shape.active_parameters + 12 * shape.layers * shape.width * shape.sequence


@pytest.mark.parametrize("preset", SMALL)
def test_a_preset_learns_a_batch_by_heart(preset):
    run = run_of(preset)
    replica = Replica(run, build_model(run), OneBatch(preset), 0, 1)  # type: ignore[arg-type]
    losses = [replica.step(0, 128, 3e-3) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.3, losses
    assert replica.gradient_norm > 0


@pytest.mark.parametrize("preset", ["gpt-pico", "moe-pico", "vit-nano"])
def test_bf16_changes_the_loss_a_little_and_no_type_that_is_kept(preset):
    losses = {}
    for precision in ("fp32", "bf16"):
        run = run_of(preset, precision)
        replica = Replica(run, build_model(run), OneBatch(preset), 0, 1)  # type: ignore[arg-type]
        losses[precision] = [replica.step(0, 128, 1e-3) for _ in range(3)]
        kept = list(replica.model.parameters())
        kept += [p.grad for p in kept if p.grad is not None]
        kept += [state[key] for state in replica.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)


def test_a_vision_transformer_sees_every_pixel_and_cares_where_it_is():
    torch.manual_seed(0)
    model = build_model(run_of("vit-nano"))
    image = torch.randn(1, 8, 8, requires_grad=True)
    model.logits(image)[0, 0].backward()
    assert bool((image.grad != 0).all())
    shifted = image.detach().roll(2, dims=2)
    assert not torch.allclose(model.logits(shifted), model.logits(image.detach()))


def test_patches_are_cut_row_by_row():
    shape = ViTShape(layers=1, width=4, heads=1, image=4, patch=2)
    model, seen = build_vit(shape), []
    model.patch_in.register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0]))
    model.logits(torch.arange(16.0).view(1, 4, 4))
    assert seen[0][0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_sequences_longer_than_the_positions_are_refused_with_both_numbers():
    model = build_model(run_of("gpt-pico"))
    tokens = torch.zeros(1, MODEL_PRESETS["gpt-pico"].sequence + 1, dtype=torch.int64)
    with pytest.raises(UsageError, match="65 tokens are longer than the model's 64 positions"):
        model(tokens, tokens)


def test_unknown_presets_name_the_nearest():
    run = run_of("gpt-pico")
    with pytest.raises(UsageError, match=r"did you mean.*gpt-nano"):
        build_model(replace(run, model=ModelSettings(preset="gpt-nanno")))
    with pytest.raises(UsageError, match=f"did you mean {VISION_DATA}"):
        build_data(replace(run, data=DataSettings(preset="digit")))
