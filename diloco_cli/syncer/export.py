"""The newest committed outer parameters as one safetensors file.

It holds the trained parameters, which are all that a run exchanges. Buffers and frozen parameters stay as the model's
code builds them: build the model by its own code, then load the file over it with `strict=False`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from diloco_cli.errors import TryAgainError
from diloco_cli.protocol.records import RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.syncer.versions import load_versions


def outer_parameters(run: RunFormat, state: RunState, store: Store) -> dict[str, torch.Tensor]:
    """Every trained parameter by its name, float32, as of the head of the log."""
    if not state.outputs:
        raise TryAgainError(f"run {run.name} has no committed version yet", hint="diloco status")
    tensors = {t.name: torch.empty(t.shape) for fragment in run.layout.fragments for t in fragment.tensors}
    load_versions(run, state.outputs, store, tensors)
    return tensors


def export(run: RunFormat, state: RunState, store: Store, path: Path) -> int:
    """Write `path`; returns its size in bytes."""
    metadata = {"run": run.name, "run_id": run.run_id, "commit": str(state.n), "format": "pt"}
    return save_parameters(outer_parameters(run, state, store), path, metadata)


def save_parameters(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> int:
    """Tensors by name as one safetensors file, which appears whole or not at all; returns its size in bytes."""
    temporary = path.with_name(f".{path.name}.partial")
    save_file(tensors, temporary, metadata=metadata)
    temporary.replace(path)
    return path.stat().st_size
