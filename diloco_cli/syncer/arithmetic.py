"""The syncer's arithmetic: makes a fragment's new version from deltas. The same bits on any number of threads.

It keeps each fragment's newest parameters and outer buffers in memory (with Nesterov 8 bytes a parameter), as the same
bytes as in the bucket. During a merge it also holds the fragment's next version and its weights, and both as read back
where the store does not check uploads. Encoded payloads of deltas wait on disk if there is a spool; beyond that a merge
needs memory for the payloads that are being fetched (at most 400 MB, or one) and three blocks of at most 4 MiB a
thread, for any number of learners and parameters.

Beside it: committed versions, from the bucket into tensors and into a safetensors file.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, RefusedError, TryAgainError, UsageError
from diloco_cli.layout import Fragment
from diloco_cli.methods import OUTER_OPTIMIZERS
from diloco_cli.protocol.actors.merging import Merged, Refused, Weighed
from diloco_cli.protocol.log.keys import max_fragment_bytes, state_key
from diloco_cli.protocol.log.records import LOOKS, FragmentVersion, Offer, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.tasks.build import build_model
from diloco_cli.tasks.weights import Values
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.flat import bare_tensors, buffers_behind, flatten, layout_like, unflatten
from diloco_cli.tensors.merge import (
    BUFFERS,
    BuffersOffer,
    DeltaSource,
    Merging,
    WeightsFormat,
    anchored_anew,
    apply_merge,
    are_finite,
    buffers_spec,
    delta_formats,
    measured_norms,
    merge_buffers,
    rule_of,
    vector_of,
)
from diloco_cli.tensors.payload import Blank, PayloadError, Spec, views

SMALLEST_BYTES = 1 << 18  # smaller payloads stay in memory
MOST_FILES = 1 << 16  # that this process asks to hold open at a time


def state_spec(num_parameters: int, outer: str) -> Spec:
    """What a state object holds: float32 parameters and the outer optimizer's buffers, [n] each."""
    names = ("parameters", *OUTER_OPTIMIZERS[outer].buffers)
    return dict.fromkeys(names, (torch.float32, (num_parameters,)))


def version_spec(fragment: Fragment, outer: str) -> Spec:
    """The same of a fragment, with the bytes of the model's buffers in it."""
    return {**state_spec(fragment.num_parameters, outer), **buffers_spec(fragment)}


def first_state(fragment: Fragment, tensors: Mapping[str, torch.Tensor], outer: str) -> Blank:
    """A fragment's first version: these values, in float32, and buffers of zeros."""
    blank, flat = Blank(version_spec(fragment, outer)), flatten(fragment, tensors)
    blank.tensors["parameters"].copy_(flat[: fragment.num_parameters])
    if fragment.buffers:
        blank.tensors[BUFFERS].copy_(buffers_behind(fragment, flat))
    return blank


def load_versions(
    run: RunFormat, outputs: Iterable[FragmentVersion], store: Store, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy the named versions into `tensors`. Raises DataCheckError if one is missing or damaged."""
    for output in outputs:
        unflatten(run.layout.fragments[output.fragment], read_version(run, output, store), tensors)


def read_version(run: RunFormat, output: FragmentVersion, store: Store) -> torch.Tensor:
    """One version's vector, in float32, read-only. Raises DataCheckError if it is missing or damaged."""
    key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
    reads = (store.get(key, max_fragment_bytes(run.layout, output.fragment)) for _ in range(LOOKS))
    data = next((data for data in reads if data is None or digest(data) == output.state_digest), None)
    if data is None:
        raise DataCheckError("a committed state is missing or has other bytes than the log says", where=key)
    tensors = views(data, version_spec(run.layout.fragments[output.fragment], run.settings.outer.name))
    return vector_of(tensors["parameters"], tensors)


def committed(run: RunFormat, state: RunState) -> tuple[FragmentVersion, ...]:
    """The newest version of every fragment. Raises TryAgainError before there is one."""
    if not state.outputs:
        raise TryAgainError(f"run {run.name} has no committed version yet", hint="diloco status")
    return state.outputs


class Spool:
    """Keeps bytes in files without a name, mapped for reading. They vanish with the last view on them, and with the
    process however it ends. No other process can open them, so the bytes cannot change after they were checked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        _allow_files()

    def keep(self, data: bytes) -> bytes | memoryview:
        """The same bytes, on disk if they are at least SMALLEST_BYTES. If the disk is full they stay in memory: the
        merge then needs more memory, but is made."""
        if len(data) < SMALLEST_BYTES:
            return data
        with suppress(OSError):
            return self._written(data)
        return data

    def _written(self, data: bytes) -> memoryview:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=self._directory)
        try:
            os.unlink(path)
            with os.fdopen(os.dup(descriptor), "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            return memoryview(mmap.mmap(descriptor, len(data), access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)


def _allow_files() -> None:
    """Raise this process's limit of open files as far as it may: each payload on disk needs one or two, and the usual
    limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass
class FragmentState:
    """One version's [n] float32 parameters, outer buffers and the model's, as views on its bytes, and their digest."""

    digest: str
    data: bytes
    tensors: dict[str, torch.Tensor]

    @property
    def parameters(self) -> torch.Tensor:
        return self.tensors["parameters"]


class TorchArithmetic:
    """Implements protocol.actors.merging.Arithmetic."""

    def __init__(self, run: RunFormat, *, spool: Spool | None = None, values: Values | None = None) -> None:
        self.run, self.spool, self.values = run, spool, values
        self.sync, self.outer = run.settings.sync, run.settings.outer.name
        self.weights_codec = codec(self.sync.weights_codec)
        self._current: dict[int, FragmentState] = {}
        self._candidates: dict[int, FragmentState] = {}
        self._weights = [WeightsFormat(self.weights_codec, fragment) for fragment in run.layout.fragments]
        self._formats = delta_formats(run.layout, self.sync)

    def initial(self) -> Iterator[Merged]:
        """Every fragment of the values that were given, or else of the seeded model, with buffers of zeros. Of that
        model what has been passed on is let go, so that a run begins in the memory that it needs later. Raises
        UsageError if the model has another layout, RefusedError if the run begins with values that are not here."""
        if self.values is not None:
            return self._first(self.values, lambda name: None)
        seeded = dict(self._seeded())
        return self._first(seeded, seeded.pop)

    def _first(self, tensors: Values, let_go: Callable[[str], object]) -> Iterator[Merged]:
        fragments = self.run.layout.fragments
        parts = [(*fragment.tensors, *fragment.buffers) for fragment in fragments]
        last = {slot.name: index for index, slots in enumerate(parts) for slot in slots}
        for index, fragment in enumerate(fragments):
            version = self._version(index, first_state(fragment, tensors, self.outer))
            for name in {slot.name for slot in parts[index] if last[slot.name] == index}:
                let_go(name)
            yield version

    def _seeded(self) -> Values:
        brought = self.run.settings.model.brought
        if brought is not None:
            raise RefusedError(
                f"run {self.run.name} begins with the values of {brought}, which are not here",
                hint="diloco launch RUN.yaml on the machine that has them: it writes the run's first commit",
            )
        model = build_model(self.run.settings)
        if layout_like(self.run.layout, model, self.sync).digest != self.run.layout.digest:
            raise UsageError("the model built here has other tensors than the run's layout", where="FORMAT.json")
        tensors = bare_tensors(model)
        del model
        gc.collect()  # modules may refer to each other in circles, and would hold what is let go of
        return tensors

    def holds(self, fragment: int, state_digest: str) -> bool:
        self.settle(fragment, state_digest)
        current = self._current.get(fragment)
        return current is not None and current.digest == state_digest

    def parameters(self, fragment: int) -> torch.Tensor:
        """The fragment's settled version, [n] float32. Not a copy: for reading only."""
        return self._current[fragment].parameters

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None:
        self._current[fragment] = self._state(fragment, state_digest, state)

    def _state(self, fragment: int, state_digest: str, state: bytes) -> FragmentState:
        spec = version_spec(self.run.layout.fragments[fragment], self.outer)
        return FragmentState(state_digest, state, views(state, spec))

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> DeltaSource | str:
        """The delta as it lies in its payload; re-anchored on the current version if the base is an older one:
        delta_current = delta_base + (Theta_current - Theta_base)."""
        form, current = self._formats[offer.fragment], self._current[offer.fragment]
        try:
            kept = self._kept(payload)
            (read, norms), buffers = form.open(kept), form.buffers(kept)
            made, own = None, read
            if decoded_base is not None:
                spec = self._weights[offer.fragment].spec
                base = self.weights_codec.reader(views(self._kept(decoded_base), spec))
                made = float(np.linalg.norm(measured_norms(form.cut, read)))
                read, norms = anchored_anew(read, base, current.parameters), None
        except PayloadError:
            return "bad_payload"
        found = measured_norms(form.cut, read) if norms is None else norms
        source = DeltaSource(read, found, claimed=norms is not None, made=made, own=own, buffers=buffers)
        if not np.isfinite(source.norms).all() or not isfinite(source.norm):
            return "non_finite"
        if buffers is not None and not are_finite(form.fragment, buffers):
            return "non_finite"
        return "bad_norms" if (source.norms < 0).any() else source

    def _kept(self, data: bytes) -> bytes | memoryview:
        return data if self.spool is None else self.spool.keep(data)

    def merge(self, slot: int, deltas: list[Weighed]) -> Merged | Refused:
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        form, layout, current = self._formats[fragment], self.run.layout.fragments[fragment], self._current[fragment]
        sources = [replace(source, scale=scale) for source, _, scale, _ in deltas]
        weights = [weight for _, weight, _, _ in deltas]
        merging = Merging(rule_of(layout, self.sync), form.cut, sources, weights)
        blank = Blank(version_spec(layout, self.outer))
        finite = apply_merge(self.run.settings.outer, merging, current.tensors, blank.tensors)
        if merging.unsound:
            return Refused(merging.unsound)
        if not finite:
            return Refused(dict.fromkeys(range(len(deltas)), "non_finite"))  # finite deltas can overflow together
        if layout.buffers:
            offers = [BuffersOffer(one.buffers, weight, scale, tokens) for one, weight, scale, tokens in deltas]
            merge_buffers(layout, current.tensors[BUFFERS], offers, blank.tensors[BUFFERS])
        return replace(self._version(fragment, blank), cosines=merging.cosines())

    def _version(self, fragment: int, blank: Blank) -> Merged:
        weights = self._weights[fragment].to_bytes(blank.tensors)
        state = blank.seal()
        self._candidates[fragment] = self._state(fragment, digest(state), state)
        return Merged(state, weights)

    def settled(self, fragment: int) -> Merged:
        current = self._current[fragment]
        return Merged(current.data, self._weights[fragment].to_bytes(current.tensors))

    def settle(self, fragment: int, state_digest: str) -> None:
        candidate = self._candidates.get(fragment)
        if candidate is not None and candidate.digest == state_digest:
            self._current[fragment] = candidate
            del self._candidates[fragment]
