"""Deltas and versions as bytes, and what a learner does with a merged fragment (protocol/ports.py, `Wire`)."""

from __future__ import annotations

import torch

from diloco_cli.algorithm.codecs import codec
from diloco_cli.algorithm.delta import delta_formats
from diloco_cli.errors import UsageError
from diloco_cli.learner.residuals import Residuals
from diloco_cli.protocol.records import Mixing, Output, RunFormat


class TensorWire:
    """Of one incarnation: with error feedback it keeps what was rounded away."""

    def __init__(self, run: RunFormat) -> None:
        sync = run.settings.sync
        self._layout, self._blend = run.layout, sync.blend
        self._broadcast = codec(sync.broadcast)
        self.residuals = Residuals(codec(sync.codec), sync.error_feedback, delta_formats(run.layout, sync))

    def encode(
        self, fragment: int, seq: int, applied: int | None, base: torch.Tensor, values: torch.Tensor
    ) -> bytes:  # fmt: skip
        return self.residuals.encode(fragment, seq, applied, base - values)

    def decode(self, output: Output, data: bytes) -> torch.Tensor:
        """[n] float32."""
        return self._broadcast.from_bytes(data, self._layout.fragments[output.fragment].num_parameters)

    def mix(
        self, mixing: Mixing, merged: torch.Tensor, own: torch.Tensor, reference: torch.Tensor | None
    ) -> torch.Tensor:
        return mixed(mixing, merged, own, reference, self._blend)


def mixed(
    mixing: Mixing, merged: torch.Tensor, own: torch.Tensor, reference: torch.Tensor | None, blend: float | None = None
) -> torch.Tensor:
    """The fragment after adoption, [n] float32, from its merged version and the learner's own parameters.

    replace   merged; the own progress of the flight is given up (arXiv 2604.21428, algorithm 2: alpha = 0)
    blend     blend * own + (1 - blend) * merged, blend in [0, 1] (Streaming DiLoCo, arXiv 2501.18512, calls it alpha)
    rebase    merged + (own - reference): `reference` are the parameters as they were when the progress began that the
              merged version does not hold
    """
    match mixing:
        case "replace":
            return merged
        case "blend" if blend is not None:
            return torch.lerp(merged, own, blend)
        case "rebase" if reference is not None:
            return merged + (own - reference)
    raise UsageError(f"a fragment cannot be adopted by {mixing!r} here: its reference or its share is missing")
