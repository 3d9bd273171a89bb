"""Codecs on one thread: speed of int8 encoding beside whole-tensor torch code and torchao (if it is installed), and
every codec's error on the deltas of a small GPT that has trained for 30 steps, beside the 4-bit float E3M0 of Streaming
DiLoCo (arXiv 2501.18512): python -m tests.benchmarks.codecs

Goals: int8 encoding at least 4 times as fast as whole-tensor code, 3 times as fast as torchao; int4 at most 4.3 bits
with scales at no more than 0.6 times E3M0's error.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.layout import balanced_layout
from diloco_cli.methods import CODECS
from diloco_cli.plan.link import CODEC_BITS
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.flat import flatten, parameter_facts
from diloco_cli.training.replica import Replica
from tests.benchmarks.measure import interleaved, machine, ratios, row

SIZE, ROUNDS = 1 << 27, 5
STEPS, BATCH_TOKENS, SEEDS = 30, 1024, (0, 1, 2)
E3M0_BLOCK = 256
MAGNITUDES = torch.tensor([0.0, *(2.0**-exponent for exponent in reversed(range(7)))])  # 3 bits; the fourth is the sign


def whole_tensor_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What one writes first; absmax per 256, as the product's."""
    rows = values.view(-1, 256)
    scales = rows.abs().amax(dim=1, keepdim=True) / 127
    return (rows / scales.clamp(min=1e-38)).round().clamp(-127, 127).to(torch.int8), scales


def torchao_int8() -> Callable[[torch.Tensor], object] | None:
    """torchao's blockwise symmetric int8 quantisation; None where torchao is not installed."""
    try:
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine
    except ImportError:
        return None

    def encode(values: torch.Tensor) -> object:
        rows, block = values.view(-1, 256), (1, 256)
        found = choose_qparams_affine(rows, MappingType.SYMMETRIC, block, torch.int8)
        return quantize_affine(rows, block, found[0], found[1], torch.int8)

    return encode


def e3m0(values: torch.Tensor) -> torch.Tensor:
    """Round trip through sign and 3 bits of exponent, absmax per 256 (4.06 bits with a 16-bit scale)."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % E3M0_BLOCK)).view(-1, E3M0_BLOCK)
    scale = padded.abs().amax(dim=1, keepdim=True).clamp(min=1e-38)
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    nearest = MAGNITUDES[torch.bucketize(padded.abs() / scale, middles)]
    return (nearest * padded.sign() * scale).view(-1)[: values.numel()]


def trained_delta(seed: int, steps: int = STEPS) -> torch.Tensor:
    """Old minus new of every parameter of gpt-nano after so many AdamW steps from its start, as one vector."""
    inner = InnerSettings(lr=1e-3, warmup_steps=10)
    settings = RunSettings(
        name="delta",
        model=ModelSettings(preset="gpt-nano"),
        data=DataSettings(preset="python-stdlib"),
        train=TrainSettings(batch_tokens=BATCH_TOKENS, seed=seed, inner=inner),
    )
    replica = Replica(settings, build_model(settings), build_data(settings), 0, 1)
    fragment = balanced_layout(parameter_facts(replica.model), 1).fragments[0]
    before = flatten(fragment, replica.tensors)
    for step in range(steps):
        replica.step(step * BATCH_TOKENS, BATCH_TOKENS, inner.lr * min(1.0, (step + 1) / inner.warmup_steps))
    return before - flatten(fragment, replica.tensors)


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - true) / torch.linalg.vector_norm(true))


def speed(size: int, rounds: int) -> list[str]:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    works: dict[str, Callable[[], object]] = {
        "whole": lambda: whole_tensor_int8(values),
        **{name: lambda each=codec(name): each.to_bytes(values) for name in CODECS},  # type: ignore[misc]
    }
    torchao = torchao_int8()
    if torchao is not None:
        works["torchao"] = lambda: torchao(values)
    took = interleaved(works, rounds)
    faster = ratios(took["whole"], took["int8"])
    lines = [row("6 whole-tensor torch / ours, int8 encoding, time", faster, ">= 4", median(faster) >= 4)]
    if torchao is not None:
        against = ratios(took["torchao"], took["int8"])
        lines.append(row("6 torchao / ours, int8 encoding, time", against, ">= 3", median(against) >= 3))
    for name in CODECS:
        rate = [size / seconds / 1e9 for seconds in took[name]]
        lines.append(row(f"  {name} encoding, G parameters/s", rate, "", None))
    return lines


def errors(deltas: list[torch.Tensor]) -> list[str]:
    float4 = [relative_error(e3m0(delta), delta) for delta in deltas]
    lines = [row("  error of E3M0 (4.06 bits), relative L2", float4, "", None, 4)]
    for name in CODECS:
        each = codec(name)
        found = [relative_error(each.from_bytes(each.to_bytes(delta), delta.numel()), delta) for delta in deltas]
        lines.append(row(f"  error of {name} ({CODEC_BITS[name]:g} bits), relative L2", found, "", None, 4))
        if name == "int4":
            share = ratios(found, float4)
            lines.append(row("7 error of int4 / error of E3M0", share, "<= 0.6", median(share) <= 0.6, 3))
    payload = [8 * len(codec("int4").to_bytes(delta)) / delta.numel() for delta in deltas]
    return [
        *lines,
        row("7 bits per parameter of an int4 payload, header included", payload, "<= 4.3", max(payload) <= 4.3),
    ]


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    print("\n".join(speed(SIZE, ROUNDS)))
    print("\n".join(errors([trained_delta(seed) for seed in SEEDS])))


if __name__ == "__main__":
    main()
