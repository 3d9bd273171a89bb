"""A user's model or data that cannot train is refused before anything starts, with the reason; and odd modules, of
torch's own, are carried exactly or refused by their names."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings, SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.layout import make_layout, shapes_of, with_buffers
from diloco_cli.tasks.build import tried
from diloco_cli.tensors.flat import bare_parameters, bare_tensors, buffer_facts, flatten, parameter_facts, unflatten
from diloco_cli.training.trial import check_task

WIDTH, VOCABULARY = 8, 16
ODD: list[str] = []
Make = Callable[[nn.Module], object]
Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """`body` maps [examples, tokens, WIDTH] to the same shape, or gives that first of several results."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body, self.out = nn.Embedding(VOCABULARY, WIDTH), body, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = self.body(self.embedding(tokens))
        hidden = found[0] if isinstance(found, tuple) else found
        return F.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())


class Own(nn.Module):
    """What `make` registers and `use` computes."""

    def __init__(self, make: Make, use: Use) -> None:
        super().__init__()
        make(self)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def parameter(values: torch.Tensor) -> Make:
    return lambda self: self.register_parameter("p", nn.Parameter(values))


def by_channel(norm: nn.Module) -> nn.Module:
    return Own(lambda self: self.add_module("norm", norm), lambda self, x: self.norm(x.mT).mT)


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pair[1].weight = pair[0].weight
    return pair


def in_one_memory() -> nn.Module:
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pair[1].weight = nn.Parameter(pair[0].weight.data)
    return pair


def halves_of_one_memory() -> nn.Module:
    both = torch.randn(WIDTH, 2 * WIDTH)

    def make(self: nn.Module) -> None:
        self.p, self.q = nn.Parameter(both[:, :WIDTH]), nn.Parameter(both[:, WIDTH:])

    return Own(make, lambda self, x: x @ self.p @ self.q)


def add_to(name: str, step: float = 1) -> Use:
    def use(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            getattr(self, name).data.add_(step)
        return x

    return use


def made_anew(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.p = nn.Parameter(self.p.detach().clone())
    return x * self.p


def buffer(persistent: bool) -> Make:
    return lambda self: self.register_buffer("b", torch.zeros(2), persistent=persistent)


def statistic(values: torch.Tensor) -> Make:
    return lambda self: self.register_buffer("b", values)


def replaced(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.b = 0.9 * self.b + 1
    return x


def grown(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.b = torch.zeros(3 if self.b is None else len(self.b) + 1)
    return x


def shared_statistic() -> nn.Module:
    pair = nn.Sequential(*(Own(buffer(persistent=True), add_to("b")) for _ in range(2)))
    pair[1].b = pair[0].b
    return pair


def frozen(self: nn.Module) -> None:
    self.p = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(WIDTH, WIDTH)), {nn.Linear})


def observed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.FakeQuantize()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


CARRIED: dict[str, Callable[[], nn.Module]] = {  # one of each kind of tensor
    "gru": lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True),
    "batch-norm-untracked": lambda: by_channel(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "tied": tied,
    "columns-of-one-memory": halves_of_one_memory,
    "column-major": lambda: Own(parameter(torch.randn(WIDTH, WIDTH).t()), lambda self, x: x @ self.p),
    "scalar": lambda: Own(parameter(torch.tensor(1.0)), lambda self, x: x * self.p),
    "empty": lambda: Own(parameter(torch.empty(0, 3)), lambda self, x: x + self.p.sum()),
    "unused": lambda: Own(parameter(torch.ones(3)), lambda self, x: x),
    "frozen": lambda: Own(frozen, lambda self, x: x + self.p),
    "bfloat16": lambda: Own(parameter(torch.ones(WIDTH, dtype=torch.bfloat16)), lambda self, x: x * self.p),
    "cache": lambda: Own(buffer(persistent=False), add_to("b")),
    "constant-buffer": lambda: Own(buffer(persistent=True), lambda self, x: x + self.b[0]),
    "quantised-and-frozen": quantised,
}  # fmt: skip
BUFFERS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "batch-norm": (
        lambda: by_channel(nn.BatchNorm1d(WIDTH)),
        ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]),
    "tracked-instance-norm": (
        lambda: by_channel(nn.InstanceNorm1d(WIDTH, track_running_stats=True)),
        ["norm.running_mean", "norm.running_var"]),
    "spectral-norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        ["parametrizations.weight.0._u", "parametrizations.weight.0._v"]),
    "observed": (
        observed,
        ["activation_post_process.max_val", "activation_post_process.min_val", "scale", "zero_point"]),
    "statistic": (lambda: Own(buffer(persistent=True), add_to("b")), ["b"]),
    "replaced-statistic": (lambda: Own(buffer(persistent=True), replaced), ["b"]),
    "shared-statistic": (shared_statistic, ["0.b"]),
    "float64-statistic": (lambda: Own(statistic(torch.zeros(3).double()), add_to("b")), ["b"]),
    "counter": (lambda: Own(statistic(torch.tensor(2**40)), add_to("b")), ["b"]),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex-statistic": (lambda: Own(statistic(torch.zeros(2) + 0j), add_to("b")), r"changes body\.b,"),
    "growing-statistic": (lambda: Own(buffer(persistent=True), grown), r"changes body\.b,"),
    "infinite-statistic": (lambda: Own(statistic(torch.tensor(1e38)), add_to("b", 1e39)), r"body\.b is not finite"),
    "late-statistic": (lambda: Own(lambda self: self.register_buffer("b", None), grown), r"changes body\.b,"),
    "moving-frozen": (lambda: Own(frozen, add_to("p")), r"changes body\.p,"),
    "extra-state": (Counted, r"changes body\._extra_state,"),
    "sparse": (
        lambda: Own(
            lambda self: self.add_module("e", nn.Embedding(2, WIDTH, sparse=True)),
            lambda self, x: x + self.e(torch.zeros(x.shape[:2], dtype=torch.int64))),
        r"body\.e\.weight gets sparse gradients"),
    "lazy": (lambda: nn.LazyLinear(WIDTH), r"body\.weight has no shape"),
    "lazy-batch-norm": (lambda: by_channel(nn.LazyBatchNorm1d()), r"body\.norm\.weight has no shape"),
    "float64": (
        lambda: Own(parameter(torch.ones(WIDTH).double()), lambda self, x: x * self.p.float()), r"body\.p is float64"),
    "complex": (
        lambda: Own(parameter(torch.ones(WIDTH) + 0j), lambda self, x: (x * self.p).real), r"body\.p is complex64"),
    "expanded": (
        lambda: Own(parameter(torch.ones(1).expand(WIDTH)), lambda self, x: x * self.p), r"body\.p repeats"),
    "two-in-one-memory": (in_one_memory, r"body\.\d\.weight shares memory"),
    "made-anew": (lambda: Own(parameter(torch.ones(WIDTH)), made_anew), r"body\.p is made anew"),
}  # fmt: skip
EVERY = CARRIED | {name: body for name, (body, _) in {**REFUSED, **BUFFERS}.items()}


def build() -> nn.Module:
    return Around(EVERY[ODD[-1]]())


class FewTokens:
    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(position))
        return drawn[:, :-1], drawn[:, 1:]

    def held_out(self, num_sequences: int):  # type: ignore[no-untyped-def]
        yield self.batch(0, 1, 1, 8)


def tokens() -> FewTokens:
    return FewTokens()


RUN = RunSettings(
    name="x", model=ModelSettings(entrypoint=f"{__name__}:build"), data=DataSettings(entrypoint=f"{__name__}:tokens")
)


@pytest.mark.parametrize("name", [*CARRIED, *BUFFERS])
def test_an_odd_module_is_carried_exactly(name: str) -> None:
    ODD.append(name)
    found, buffers = check_task(RUN, batch_tokens=8), [f"body.{at}" for at in BUFFERS.get(name, (None, []))[1]]
    assert sorted(found) == buffers
    torch.manual_seed(1)
    one = build().train()
    for position in range(3):
        one(*tokens().batch(0, 1, position, 8))
    torch.manual_seed(2)
    other = build()
    layout = make_layout(parameter_facts(one), SyncSettings(fragments=3))
    layout = with_buffers(layout, buffer_facts(one, found))
    for fragment in layout.fragments:
        unflatten(fragment, flatten(fragment, bare_tensors(one)), bare_tensors(other))
    assert shapes_of(layout).keys() == bare_parameters(one).keys() - frozen_in(one) | set(buffers)
    assert all(torch.equal(bare_tensors(other)[at], bare_tensors(one)[at]) for at in shapes_of(layout))


def frozen_in(model: nn.Module) -> set[str]:
    return {name for name, value in bare_parameters(model).items() if not value.requires_grad}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_by_its_name(name: str) -> None:
    ODD.append(name)
    with pytest.raises(UsageError, match=REFUSED[name][1]):
        check_task(RUN, batch_tokens=8)


# -- what keeps the contract, and what does not ----------------------------------------------------------------------

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


class SetAside:
    def held_out(self, num_sequences):
        yield torch.full((5, 4), 1), torch.full((5, 4), 1)


def build_held_out():
    return SetAside()


def build_right_model():
    model = Model()
    if CHOSEN["model"] == "one_argument":
        model.forward = lambda tokens: tokens
    return model


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
        ("one_argument", r"forward\(tokens, targets\): too many positional arguments"),
        ("raises", r"forward on a batch \(tokens \[2, 4\] int64 from 1 to 1.*raised RuntimeError: mat1 and mat2"),
    ],
)
def test_a_model_that_breaks_the_contract_is_refused(kind, reason):
    CHOSEN["model"] = kind
    with pytest.raises(UsageError, match=reason):
        check_task(run_of(), batch_tokens=16)
    with pytest.raises(UsageError, match=reason.replace("a batch", "(a batch|held-out data)")):
        check_task(run_of(data="build_held_out"), batch_tokens=16, by_own_loops=True)


@pytest.mark.parametrize("kind", ["uint16", "complex64"])
def test_data_of_a_kind_that_torch_cannot_order_are_evaluated_on(kind):
    batch = torch.zeros(2, 3).to(getattr(torch, kind)), torch.zeros(2, 3)
    model = Model()
    model.forward = lambda tokens, targets: float("x") if len(tokens) > 2 else targets.sum()
    assert tried(model, batch, "a batch") == 0
    with pytest.raises(UsageError, match=rf"tokens \[3, 3\] {kind}, targets.*raised ValueError"):
        tried(model, (torch.zeros(3, 3).to(getattr(torch, kind)), torch.zeros(3, 3)), "a batch")


def test_own_loops_need_only_held_out_data_and_the_model_is_tried_on_these():
    check_task(run_of(data="build_held_out"), batch_tokens=16, by_own_loops=True)
    with pytest.raises(UsageError, match="returned a SetAside without batch"):
        check_task(run_of(data="build_held_out"), batch_tokens=16)


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
