"""Deltas and versions as bytes, and the arithmetic of adoption (protocol/actors/learner.py, `Wire`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, RunFormat
from diloco_cli.tensors.codecs import BLOCK, Read, blocks_of, codec, over_blocks, read_all
from diloco_cli.tensors.flat import buffers_behind
from diloco_cli.tensors.merge import DeltaFormat, WeightsFormat, delta_formats, difference


class TensorWire:
    """The wire of one incarnation; with error feedback it keeps the rounding errors."""

    def __init__(self, run: RunFormat) -> None:
        sync = run.settings.sync
        self._layout = run.layout
        self._weights = [WeightsFormat(codec(sync.weights_codec), fragment) for fragment in run.layout.fragments]
        self.residuals = Residuals(delta_formats(run.layout, sync), sync.error_feedback)

    def encode(self, fragment: int, seq: int, applied: int | None, base: torch.Tensor, values: torch.Tensor) -> bytes:
        buffers = buffers_behind(self._layout.fragments[fragment], values)
        return self.residuals.encode(fragment, seq, applied, difference(base, values), buffers)

    def decode(self, output: FragmentVersion, data: bytes) -> torch.Tensor:
        """The fragment's vector, in float32."""
        return self._weights[output.fragment].from_bytes(data)

    def mix(
        self,
        fragment: int,
        mixing: Mixing,
        merged: torch.Tensor,
        own: torch.Tensor,
        reference: torch.Tensor | None,
        last: bool = False,
    ) -> torch.Tensor:
        count = self._layout.fragments[fragment].num_parameters
        return mixed(mixing, merged, own, reference, own if last else None, count)


class Residuals:
    """Error feedback: the upload codec's rounding error of one delta is added to the next one of the same fragment.

        x = (base - own) + e        payload = encode(x)        r = x - decode(payload)

    e is the r of this learner's newest offer that a merge APPLIED to the fragment, 0 if there is none. So a rounding
    error is fed back only if its offer is in the outer parameters. The progress of an offer that was not applied is in
    the next delta again (its learner goes on from the same parameters) or dropped, and its r is dropped.

    A new incarnation starts with e = 0: its predecessor's error is lost, at most one rounding error a fragment.

    Memory: one [n] float32 vector for each offer on its way and for the newest applied one: at most 2 a fragment.
    `formats`: one per fragment; with `enabled` False they alone make the payloads.
    """

    def __init__(self, formats: Sequence[DeltaFormat], enabled: bool) -> None:
        self._formats, self._enabled = formats, enabled
        self.left: dict[int, dict[int, torch.Tensor]] = {}

    def encode(
        self, fragment: int, seq: int, applied: int | None, delta: Read, buffers: torch.Tensor | None = None
    ) -> bytes:
        """The payload of offer `seq` of a fragment's delta, and of its buffers. `applied`: the newest offer of this
        incarnation that the log had applied to the fragment when the delta was taken; all other offers had an outcome
        by then, and were not applied. Nothing of the fragment's size is made but the payload and the rounding error."""
        form = self._formats[fragment]
        if not self._enabled:
            return form.encode_blocks(delta, buffers)
        left = {earlier: r for earlier, r in self.left.get(fragment, {}).items() if earlier == applied}
        self.left[fragment] = left  # the others are let go before the next one is made
        wanted = read_all(form.cut.size, delta)
        owed = left.get(applied) if applied is not None else None
        if owed is not None:
            wanted.add_(owed)
        payload = form.encode(wanted, buffers)
        left[seq] = take_off(wanted, form.open(payload)[0])
        return payload


def take_off(values: torch.Tensor, read: Read) -> torch.Tensor:
    """`values` [n] float32 less those that are read, in place."""

    def subtract(starts: range) -> None:
        for start, block in blocks_of(values.numel(), read, starts):
            values[start : start + BLOCK].sub_(block)

    over_blocks(values.numel(), subtract)
    return values


def mixed(
    mixing: Mixing,
    merged: torch.Tensor,
    own: torch.Tensor,
    reference: torch.Tensor | None,
    into: torch.Tensor | None = None,
    num_parameters: int | None = None,
) -> torch.Tensor:
    """The fragment after adoption, from its merged version and the learner's own vector. `into`: takes a rebase; it may
    be `own`. Buffers, which lie behind the parameters, are always those that were merged.

    replace   merged; own progress since the offer is dropped (arXiv 2604.21428, algorithm 2: alpha = 0)
    rebase    merged + (own - reference): `reference` are the parameters at the beginning of the progress that the
              merged version does not hold
    """
    match mixing:
        case "replace":
            return merged
        case "rebase" if reference is not None:
            found = torch.sub(own, reference, out=into).add_(merged)
            if num_parameters is not None:
                found[num_parameters:] = merged[num_parameters:]
            return found
    raise UsageError(f"a fragment cannot be adopted by {mixing!r} here: its reference is missing")
