"""A user's model or data that cannot train is refused before anything starts, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.tasks.build import build_data, build_model, check_task, is_worth_a_try

HERE = __name__
CHOSEN: dict[str, str] = {}


class Model(nn.Module):
    """Right in every respect but the one that CHOSEN names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 8)

    def forward(self, tokens, targets):
        each = nn.functional.cross_entropy(
            self.out(self.embedding(tokens)).flatten(0, 1), targets.flatten(), reduction="none"
        )
        loss = each.mean()
        results = {
            "per_token": each, "nan": loss * float("nan"), "detached": loss.detach(), "integer": loss.long(),
            "number": 2.0, "three": (loss, loss, loss), "auxiliary": (loss, 0.1 * loss),
        }  # fmt: skip
        if CHOSEN["model"] == "raises":
            raise RuntimeError("mat1 and mat2")
        if CHOSEN["model"] == "held_out_nan" and not self.training:
            return loss * float("inf")
        return results.get(CHOSEN["model"], loss)


class TokenStream:
    def __init__(self) -> None:
        self.draws = 0

    def batch(self, shard, num_shards, position, batch_tokens):
        self.draws += 1
        tokens = torch.full((batch_tokens // 4, 4), 1)
        wrong = {
            "one_tensor": tokens, "lists": ([1], [2]), "lengths": (tokens, tokens[1:]),
            "empty": (tokens[:0], tokens[:0]), "forgets": (tokens + self.draws % 2, tokens),
            "vocabulary": (tokens + 8, tokens),
        }  # fmt: skip
        if CHOSEN["data"] == "raises":
            raise KeyError("shard")
        return wrong.get(CHOSEN["data"], (tokens, tokens))

    def held_out(self, num_sequences):
        if CHOSEN["data"] != "no_held_out":
            yield torch.full((num_sequences, 4), 2), torch.full((num_sequences, 4), 3)


def build_stream():
    return TokenStream()


def build_right_model():
    return Model()


def no_parameters():
    return nn.Identity()


def frozen():
    return Model().requires_grad_(False)


def no_data():
    return object()


def run_of(model: str = "build_right_model", data: str = "build_stream") -> RunSettings:
    return RunSettings(
        name="x", model=ModelSettings(entrypoint=f"{HERE}:{model}"), data=DataSettings(entrypoint=f"{HERE}:{data}")
    )


@pytest.fixture(autouse=True)
def nothing_wrong():
    CHOSEN.update(model="", data="")


@pytest.mark.parametrize("kind", ["", "auxiliary"])
def test_what_keeps_the_contract_is_accepted(kind):
    CHOSEN["model"] = kind
    check_task(run_of(), batch_tokens=16)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("per_token", r"must return the mean loss.* not a tensor \[8\] of float32"),
        ("integer", r"not a tensor \[\] of int64"),
        ("number", "not float"),
        ("three", r"not \(a tensor"),
        ("nan", "the first loss is nan"),
        ("held_out_nan", "the first held-out loss is inf"),
        ("detached", "the loss has no gradient"),
        ("raises", r"forward on a batch \(tokens \[2, 4\] int64 from 1 to 1.*raised RuntimeError: mat1 and mat2"),
    ],
)
def test_a_model_that_breaks_the_contract_is_refused(kind, reason):
    CHOSEN["model"] = kind
    with pytest.raises(UsageError, match=reason):
        check_task(run_of(), batch_tokens=16)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("one_tensor", r"must give \(tokens, targets\), two tensors, not Tensor"),
        ("lists", "two tensors, not tuple"),
        ("lengths", r"gave \[4, 4\] and \[3, 4\]"),
        ("empty", r"gave \[0, 4\] and \[0, 4\]"),
        ("forgets", "other tensors for the same position"),
        ("no_held_out", "held_out.* gives no batch"),
        ("raises", "of 16 tokens raised KeyError"),
        ("vocabulary", r"tokens \[2, 4\] int64 from 9 to 9.* raised IndexError"),
    ],
)
def test_data_that_breaks_the_contract_are_refused(kind, reason):
    CHOSEN["data"] = kind
    with pytest.raises(UsageError, match=reason):
        check_task(run_of(), batch_tokens=16)


@pytest.mark.parametrize("function", ["no_parameters", "frozen"])
def test_a_model_without_parameters_is_refused_where_it_is_built(function):
    with pytest.raises(UsageError, match=f"{function} returned a model without parameters to train"):
        build_model(run_of(model=function))


def test_data_without_the_two_methods_are_refused_where_they_are_built():
    with pytest.raises(UsageError, match="returned a object without batch and held_out"):
        build_data(run_of(data="no_data"))


def test_data_that_are_only_evaluated_need_no_batches():
    with pytest.raises(UsageError, match="returned a object without held_out"):
        build_data(run_of(data="no_data"), uses=("held_out",))


def test_presets_and_large_models_are_not_tried():
    presets = RunSettings(name="x", model=ModelSettings(preset="gpt-nano"), data=DataSettings(preset="python-stdlib"))
    assert not is_worth_a_try(presets, 1000)
    assert is_worth_a_try(run_of(), 1000) and not is_worth_a_try(run_of(), 10**9)
