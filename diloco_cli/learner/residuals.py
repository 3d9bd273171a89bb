"""Error feedback: what the upload codec rounds away of one delta is added to the next one of the same fragment.

    x = (base - own) + e        payload = encode(x)        r = x - decode(payload)

e is the r of this learner's newest offer that a merge APPLIED to the fragment, 0 if there is none. So what an offer
rounds away is owed only once that offer is in the outer parameters; what an offer held that was not applied is in the
next delta again (its learner goes on from the same parameters) or given up, and its r is dropped.

A new incarnation starts with e = 0: what its predecessor owed is lost, at most one rounding error a fragment.

Memory: one [n] float32 vector for each offer that is out and for the one applied last: at most 2 a fragment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diloco_cli.algorithm.codecs import Codec
from diloco_cli.algorithm.delta import DeltaFormat
from diloco_cli.algorithm.payload import to_bytes


class Residuals:
    """One incarnation's. With `enabled` False it only encodes. `formats`, one per fragment, make payloads that carry
    their norms; without them payloads are the codec's alone."""

    def __init__(self, codec: Codec, enabled: bool, formats: Sequence[DeltaFormat] = ()) -> None:
        self._codec, self._enabled, self._formats = codec, enabled, formats
        self.left: dict[int, dict[int, torch.Tensor]] = {}

    def encode(self, fragment: int, seq: int, applied: int | None, delta: torch.Tensor) -> bytes:
        """The payload of offer `seq` of a fragment's delta, [n] float32. `applied`: the newest offer of this
        incarnation that the log had applied to the fragment when the delta was taken; the outcome of all others was
        known by then, and they were not applied."""
        if not self._enabled:
            return self._payload(fragment, delta)
        left = {earlier: r for earlier, r in self.left.get(fragment, {}).items() if earlier == applied}
        owed = left.get(applied) if applied is not None else None
        wanted = delta if owed is None else delta + owed
        decoded = torch.empty_like(wanted)
        payload = self._payload(fragment, wanted, decoded)
        left[seq] = torch.sub(wanted, decoded, out=decoded)
        self.left[fragment] = left
        return payload

    def _payload(self, fragment: int, values: torch.Tensor, decoded: torch.Tensor | None = None) -> bytes:
        """`decoded`, if given, receives what readers will see."""
        if self._formats:
            return self._formats[fragment].encode(values, decoded)
        tensors = self._codec.encode(values)
        if decoded is not None:
            self._codec.decode(tensors, decoded)
        return to_bytes(tensors)
