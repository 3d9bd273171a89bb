"""The codecs, the inner and the outer optimizers: each is one record here, and its arithmetic one object elsewhere.

Settings, templates, schemas, plans and simulations read these records. The arithmetic is loaded when it is used; this
module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from diloco_cli.errors import UsageError
from diloco_cli.layout import ParameterFact

FLOAT_BYTES = 4  # of a float32: parameters, moments and buffers


@dataclass(frozen=True)
class CodecRecord:
    """`bits`: of one parameter, scales included. `quality_cost`: the share of the tokens that its rounding costs, as
    far as published comparisons tell; the plan's search weighs it. `rounds`: whether anything is lost, so that error
    feedback has something to add to the next delta. `arithmetic`: MODULE:NAME of a tensors.codecs.Codec."""

    bits: float
    doc: str
    arithmetic: str
    quality_cost: float = 0.0
    rounds: bool = True


@dataclass(frozen=True)
class InnerRecord:
    """`moments`: the float32 tensors that it keeps beside each parameter, by the names in torch's optimizer state;
    `of_matrices`: beside those of hidden matrices, if it has another rule for these (`hidden_matrices`). `outer`: the
    outer learning rate and momentum that fit it in a run of many rounds (`fitting_outer`). `torch`: the oldest that
    has it. `arithmetic`: MODULE:NAME of a function (parameter groups, InnerSettings) -> torch.optim.Optimizer; the
    group of hidden matrices comes first."""

    doc: str
    arithmetic: str
    moments: tuple[str, ...] = ()
    of_matrices: tuple[str, ...] | None = None
    outer: tuple[float, float] = (0.4, 0.9)
    torch: tuple[int, int] = (2, 4)

    def state_bytes(self, hidden: float) -> float:
        """Of one parameter in the mean, without the parameter itself. `hidden`: the share in hidden matrices."""
        of_matrices = self.moments if self.of_matrices is None else self.of_matrices
        return FLOAT_BYTES * (hidden * len(of_matrices) + (1 - hidden) * len(self.moments))


@dataclass(frozen=True)
class OuterRecord:
    """`buffers`: the float32 tensors of a fragment's size that a version keeps beside its parameters; they begin as
    zeros. `arithmetic`: MODULE:NAME of a tensors.merge.OuterStep."""

    doc: str
    arithmetic: str
    buffers: tuple[str, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Of one parameter, with the parameter itself."""
        return FLOAT_BYTES * (1 + len(self.buffers))


CODECS: dict[str, CodecRecord] = {
    "fp32": CodecRecord(32, "exact", "diloco_cli.tensors.codecs:FP32", rounds=False),
    "bf16": CodecRecord(16, "8 bits of mantissa", "diloco_cli.tensors.codecs:BF16"),
    "int8": CodecRecord(
        8 + 32 / 256,
        "127 steps to a block's largest value, 256 values a block",
        "diloco_cli.tensors.codecs:INT8",
        quality_cost=0.005,
    ),
    "int4": CodecRecord(
        4 + 16 / 64,
        "7 steps to a block's largest value, 64 values a block; too coarse for weights",
        "diloco_cli.tensors.codecs:INT4",
        quality_cost=0.02,  # loss +0.09 % (arXiv 2604.21428)
    ),
}
INNER_OPTIMIZERS: dict[str, InnerRecord] = {
    "adamw": InnerRecord("AdamW", "diloco_cli.training.inner:adamw", ("exp_avg", "exp_avg_sq")),
    "muon": InnerRecord(
        "hidden matrices by Muon, all else by AdamW, at AdamW's learning rates; needs torch 2.9",
        "diloco_cli.training.inner:muon",
        ("exp_avg", "exp_avg_sq"),
        ("momentum_buffer",),
        outer=(0.7, 0.8),
        torch=(2, 9),
    ),
    "sgd": InnerRecord("plain gradient descent", "diloco_cli.training.inner:sgd"),
}
FEW_ROUNDS = ((30, 0.4, 0.5), (80, 0.7, 0.5))
"""With fewer rounds than that, whatever the inner optimizer is: this outer learning rate and momentum. A momentum of
.9 needs some tens of rounds to reach its speed: .7 / .9 costs 9 % in 20 rounds (examples/ablations)."""
OUTER_OPTIMIZERS: dict[str, OuterRecord] = {
    "nesterov": OuterRecord(
        "SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105)", "diloco_cli.tensors.merge:nesterov", ("momentum",)
    ),
    "sgd": OuterRecord("SGD without momentum", "diloco_cli.tensors.merge:sgd"),
}
if TYPE_CHECKING:
    CodecName: TypeAlias = str
    InnerName: TypeAlias = str
    OuterName: TypeAlias = str
else:
    CodecName, InnerName, OuterName = (Literal[tuple(found)] for found in (CODECS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS))


def arithmetic_of(record: CodecRecord | InnerRecord | OuterRecord) -> Any:
    """The object that computes; imports its module."""
    module, _, name = record.arithmetic.partition(":")
    return getattr(import_module(module), name)


def fitting_outer(inner: str, rounds: float) -> tuple[float, float]:
    """The outer learning rate and momentum that fit the length of a run (`outer: auto`), as measured: from 80 rounds on
    those of its inner optimizer, with AdamW .4 / .9 and with Muon .7 / .8."""
    few = (outer for below, *outer in FEW_ROUNDS if rounds < below)
    lr, momentum = next(few, INNER_OPTIMIZERS[inner].outer)
    return lr, momentum


def hidden_matrices(name: str, facts: Sequence[ParameterFact]) -> list[str]:
    """The parameters for which the inner optimizer `name` has a rule of its own: matrices in blocks. Raises
    UsageError if it has one and there are none, or if the torch here is too old for it."""
    record, here = INNER_OPTIMIZERS[name], version("torch")
    wrong = None
    hidden = [fact.name for fact in facts if fact.hidden]
    if tuple(int(part) for part in here.split(".")[:2]) < record.torch:
        wrong = f"{name} needs torch {'.'.join(map(str, record.torch))} or newer; here is torch {here}"
    elif record.of_matrices is not None and not hidden:
        wrong = f"{name} is for hidden matrices, and this model has none: no nn.Linear in blocks of an nn.ModuleList"
    if wrong:
        allowed = ", ".join(other for other, of in INNER_OPTIMIZERS.items() if of.of_matrices is None)
        raise UsageError(
            f"{wrong}; allowed here: {allowed}", where="train.inner.name", hint="--set train.inner.name=adamw"
        )
    return [] if record.of_matrices is None else hidden


def choices_text(records: Mapping[str, CodecRecord | InnerRecord | OuterRecord]) -> str:
    """For templates and help: every name with what it is."""
    return "; ".join(f"{name}: {record.doc}" for name, record in records.items())
