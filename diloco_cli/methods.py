"""The codecs, the inner and the outer optimizers: each is one record here, and its arithmetic one object elsewhere.

Settings, templates, schemas, plans and simulations read these records. The arithmetic is loaded when it is used; this
module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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
    """`moments`: the float32 tensors that it keeps beside each parameter, by the names in torch's optimizer state.
    `arithmetic`: MODULE:NAME of a function (parameter groups, InnerSettings) -> torch.optim.Optimizer."""

    doc: str
    arithmetic: str
    moments: tuple[str, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Of one parameter, without the parameter itself."""
        return FLOAT_BYTES * len(self.moments)


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
    "sgd": InnerRecord("plain gradient descent", "diloco_cli.training.inner:sgd"),
}
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


def choices_text(records: Mapping[str, CodecRecord | InnerRecord | OuterRecord]) -> str:
    """For templates and help: every name with what it is."""
    return "; ".join(f"{name}: {record.doc}" for name, record in records.items())
