"""The syncer's numbers: deltas in, a fragment's new version out. Deterministic, on one thread."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from diloco_cli.algorithm.codecs import codec
from diloco_cli.algorithm.flat import gather, parameter_facts
from diloco_cli.algorithm.merge import merge
from diloco_cli.algorithm.outer import outer_step
from diloco_cli.algorithm.payload import PayloadError, from_bytes, to_bytes
from diloco_cli.digests import digest
from diloco_cli.errors import UsageError
from diloco_cli.layout import balanced_layout
from diloco_cli.protocol.ports import Merged
from diloco_cli.protocol.records import Offer, RunFormat
from diloco_cli.syncer.norms import NormCap
from diloco_cli.syncer.versions import state_spec
from diloco_cli.tasks.build import build_model


@dataclass
class FragmentState:
    """One version's [n] float32 parameters and momentum, and the digest of their bytes."""

    digest: str
    parameters: torch.Tensor
    momentum: torch.Tensor


class TorchArithmetic:
    """Implements protocol.ports.Arithmetic."""

    def __init__(self, run: RunFormat, *, check_norms: bool = True) -> None:
        self.run, self.check_norms = run, check_norms
        self.sync = run.settings.sync
        self.upload, self.broadcast = codec(self.sync.codec), codec(self.sync.broadcast)
        self._current: dict[int, FragmentState] = {}
        self._candidates: dict[int, FragmentState] = {}
        self._norms = NormCap()

    def initial(self) -> list[Merged]:
        """Every fragment of the seeded model, with zero momentum. Raises UsageError if the model has another layout."""
        model = build_model(self.run.settings)
        layout = balanced_layout(parameter_facts(model), self.run.settings.sync.fragments)
        if layout.digest != self.run.layout.digest:
            raise UsageError("the model built here has other tensors than the run's layout", where="FORMAT.json")
        tensors = dict(model.named_parameters())
        versions = []
        for index, fragment in enumerate(layout.fragments):
            parameters = gather(fragment, tensors)
            versions.append(self._version(index, parameters, torch.zeros_like(parameters)))
        return versions

    def holds(self, fragment: int, state_digest: str) -> bool:
        self.settle(fragment, state_digest)
        current = self._current.get(fragment)
        return current is not None and current.digest == state_digest

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None:
        tensors = from_bytes(state, state_spec(self.run.layout.fragments[fragment].num_parameters))
        self._current[fragment] = FragmentState(state_digest, tensors["parameters"], tensors["momentum"])

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> torch.Tensor | str:
        """[n] float32; re-anchored on the current version if the base is an older one:
        delta_current = delta_base + (Theta_current - Theta_base)."""
        size = self.run.layout.fragments[offer.fragment].num_parameters
        try:
            delta = self.upload.from_bytes(payload, size)
            if decoded_base is not None:
                base = self.broadcast.from_bytes(decoded_base, size)
                delta.add_(self._current[offer.fragment].parameters).sub_(base)
        except PayloadError:
            return "bad_payload"
        norm = float(torch.linalg.vector_norm(delta, dtype=torch.float64))
        if not isfinite(norm):
            return "non_finite"
        return delta if not self.check_norms or self._norms.admits(offer.fragment, norm) else "norm_cap"

    def merge(self, fragment: int, deltas: list[tuple[torch.Tensor, float]]) -> Merged | str:
        layout = self.run.layout.fragments[fragment]
        tensors, weights = [delta for delta, _ in deltas], [weight for _, weight in deltas]
        rule = self.sync.embedding_merge if layout.embedding else self.sync.merge
        merged = merge(rule, self.sync.granularity, layout, tensors, weights)
        current = self._current[fragment]
        parameters, momentum = outer_step(self.run.settings.outer, current.parameters, current.momentum, merged)
        if not isfinite(float(parameters.sum(dtype=torch.float64) + momentum.sum(dtype=torch.float64))):
            return "non_finite"  # finite deltas can overflow together
        return self._version(fragment, parameters, momentum)

    def _version(self, fragment: int, parameters: torch.Tensor, momentum: torch.Tensor) -> Merged:
        state = to_bytes({"parameters": parameters, "momentum": momentum})
        self._candidates[fragment] = FragmentState(digest(state), parameters, momentum)
        return Merged(state, self.broadcast.to_bytes(parameters))

    def settle(self, fragment: int, state_digest: str) -> None:
        candidate = self._candidates.get(fragment)
        if candidate is not None and candidate.digest == state_digest:
            self._current[fragment] = candidate
            del self._candidates[fragment]
