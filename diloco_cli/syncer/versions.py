"""Committed versions of the outer parameters: from the bucket into tensors, and into a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, TryAgainError
from diloco_cli.layout import Fragment
from diloco_cli.protocol.log.keys import max_fragment_bytes, state_key
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.tensors.flat import flatten, unflatten
from diloco_cli.tensors.payload import Blank, Spec, views


def state_spec(num_parameters: int) -> Spec:
    """What a state object holds: float32 parameters and outer momentum, [n] each."""
    return {"parameters": (torch.float32, (num_parameters,)), "momentum": (torch.float32, (num_parameters,))}


def first_state(fragment: Fragment, tensors: Mapping[str, torch.Tensor]) -> Blank:
    """A fragment's first version: these values, in float32, and no momentum."""
    blank = Blank(state_spec(fragment.num_parameters))
    blank.tensors["parameters"].copy_(flatten(fragment, tensors))
    return blank


def load_versions(
    run: RunFormat, outputs: Iterable[FragmentVersion], store: Store, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy the named versions into `tensors`. Raises DataCheckError if one is missing or damaged."""
    for output in outputs:
        fragment = run.layout.fragments[output.fragment]
        key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
        data = store.get(key, max_fragment_bytes(run.layout, output.fragment))
        if data is None or digest(data) != output.state_digest:
            raise DataCheckError("a committed state is missing or has other bytes than the log says", where=key)
        unflatten(fragment, views(data, state_spec(fragment.num_parameters))["parameters"], tensors)


def outer_parameters(run: RunFormat, state: RunState, store: Store) -> dict[str, torch.Tensor]:
    """Every trained parameter by its name, float32, as of the head of the log."""
    if not state.outputs:
        raise TryAgainError(f"run {run.name} has no committed version yet", hint="diloco status")
    tensors = {t.name: torch.empty(t.shape) for fragment in run.layout.fragments for t in fragment.tensors}
    load_versions(run, state.outputs, store, tensors)
    return tensors


def export(run: RunFormat, state: RunState, store: Store, path: Path) -> int:
    """The newest committed parameters as one file; returns its size in bytes.

    It holds the trained parameters, which are all that a run exchanges. Buffers and frozen parameters stay as the
    model's code builds them: build the model by its own code, then load the file over it with `strict=False`.
    """
    metadata = {"run": run.name, "run_id": run.run_id, "commit": str(state.n), "format": "pt"}
    return save_parameters(outer_parameters(run, state, store), path, metadata)


def save_parameters(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> int:
    """Tensors by name as one safetensors file, which appears whole or not at all; returns its size in bytes."""
    temporary = path.with_name(f".{path.name}.partial")
    save_file(tensors, temporary, metadata=metadata)
    temporary.replace(path)
    return path.stat().st_size
