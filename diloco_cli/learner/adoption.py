"""What a learner does with a merged fragment: the arithmetic alone, for the training loop and for a tape's player."""

from __future__ import annotations

import torch

from diloco_cli.errors import UsageError
from diloco_cli.protocol.records import Mixing


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
