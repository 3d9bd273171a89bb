"""Committed versions of the outer parameters: from the bucket into tensors, and into a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, TryAgainError
from diloco_cli.layout import Fragment
from diloco_cli.methods import OUTER_OPTIMIZERS
from diloco_cli.protocol.log.keys import max_fragment_bytes, state_key
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.tensors.flat import flatten, unflatten
from diloco_cli.tensors.payload import Blank, Spec, views


def state_spec(num_parameters: int, outer: str) -> Spec:
    """What a state object holds: float32 parameters and the outer optimizer's buffers, [n] each."""
    names = ("parameters", *OUTER_OPTIMIZERS[outer].buffers)
    return dict.fromkeys(names, (torch.float32, (num_parameters,)))


def first_state(fragment: Fragment, tensors: Mapping[str, torch.Tensor], outer: str) -> Blank:
    """A fragment's first version: these values, in float32, and buffers of zeros."""
    blank = Blank(state_spec(fragment.num_parameters, outer))
    blank.tensors["parameters"].copy_(flatten(fragment, tensors))
    return blank


def load_versions(
    run: RunFormat, outputs: Iterable[FragmentVersion], store: Store, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy the named versions into `tensors`. Raises DataCheckError if one is missing or damaged."""
    for output in outputs:
        unflatten(run.layout.fragments[output.fragment], read_parameters(run, output, store), tensors)


def read_parameters(run: RunFormat, output: FragmentVersion, store: Store) -> torch.Tensor:
    """One version's parameters, [n] float32, read-only. Raises DataCheckError if it is missing or damaged."""
    key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
    data = store.get(key, max_fragment_bytes(run.layout, output.fragment))
    if data is None or digest(data) != output.state_digest:
        raise DataCheckError("a committed state is missing or has other bytes than the log says", where=key)
    spec = state_spec(run.layout.fragments[output.fragment].num_parameters, run.settings.outer.name)
    return views(data, spec)["parameters"]


def committed(run: RunFormat, state: RunState) -> tuple[FragmentVersion, ...]:
    """The newest version of every fragment. Raises TryAgainError before there is one."""
    if not state.outputs:
        raise TryAgainError(f"run {run.name} has no committed version yet", hint="diloco status")
    return state.outputs


def save_parameters(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> int:
    """Tensors by name as one safetensors file, which appears whole or not at all; returns its size in bytes."""
    temporary = path.with_name(f".{path.name}.partial")
    save_file(tensors, temporary, metadata=metadata)
    temporary.replace(path)
    return path.stat().st_size
