"""The newest committed versions of a run's fragments into files, one fragment in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from diloco_cli.export.folder import copy_tokenizer, whole_folder
from diloco_cli.export.huggingface import Described, write_configs
from diloco_cli.export.naming import Naming, spec_of
from diloco_cli.export.tensor_files import INDEX, TensorFiles, files_in, index_of
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.syncer.versions import committed, read_parameters
from diloco_cli.tensors.payload import Spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_file(
    run: RunFormat, state: RunState, store: Store, path: Path, naming: Naming, dtype: torch.dtype = torch.float32
) -> int:
    """One safetensors file, which appears whole or not at all; returns its size in bytes. Raises DataCheckError if a
    version is missing or damaged, UsageError if a value does not fit `dtype`."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        _write(run, state, store, {temporary: spec_of(naming, run.layout, dtype)}, naming)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def export_folder(
    run: RunFormat, state: RunState, store: Store, folder: Path, described: Described, dtype: torch.dtype,
    max_shard_bytes: int | None, tokenizer: Path | None,
) -> tuple[int, list[str]]:  # fmt: skip
    """A folder for transformers; returns its size in bytes and the names of its files. It raises what `export_file`
    does."""
    with whole_folder(folder) as begun:
        files = files_in(begun, spec_of(described.naming, run.layout, dtype), max_shard_bytes)
        _write(run, state, store, files, described.naming)
        if len(files) > 1:
            (begun / INDEX).write_bytes(index_of(files))
        write_configs(described, begun)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, begun)
        found = sorted(begun.iterdir())
        size_bytes = sum(path.stat().st_size for path in found)
    return size_bytes, [path.name for path in found]


def _write(run: RunFormat, state: RunState, store: Store, files: dict[Path, Spec], naming: Naming) -> None:
    outputs = committed(run, state)
    metadata = {"run": run.name, "run_id": run.run_id, "commit": str(state.n), "format": "pt"}
    written = TensorFiles(files, metadata)
    for name, tensor in naming.beside.items():
        written.write(name, tensor)
    for output in outputs:
        _write_fragment(run, output, store, written, naming)
    written.check_whole()


def _write_fragment(
    run: RunFormat, output: FragmentVersion, store: Store, written: TensorFiles, naming: Naming
) -> None:  # fmt: skip
    flat = read_parameters(run, output, store)
    for slot in run.layout.fragments[output.fragment].tensors:
        values = flat[slot.start : slot.start + slot.num_elements].view(slot.piece_shape)
        first_row = 0 if slot.rows is None else slot.rows[0]
        for target in naming.targets[slot.name]:
            if target.transposed:
                written.write_columns(target.name, values.T, first_row)
            else:
                written.write(target.name, values, first_row)
