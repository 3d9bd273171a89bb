"""The newest committed parameters as safetensors files, in a folder that appears whole or not at all.

Names, types and shapes are known before the first value, so headers are written first and each piece of a tensor at
its place, in any order: memory holds one fragment at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote

import torch

from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.export.naming import TOKENIZER_FILES, Described, Naming, spec_of, write_configs
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import committed, read_version
from diloco_cli.tensors.flat import buffers_behind, unpack_buffers
from diloco_cli.tensors.payload import Spec, header_bytes

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes begin."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def size_of(spec: Spec) -> int:
    """Bytes of all tensors."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in spec.values())


def shards(spec: Spec, max_bytes: int | None) -> list[Spec]:
    """In the given order, each of at most `max_bytes` of tensors; a larger tensor is a shard of its own."""
    found: list[Spec] = [{}]
    for name, entry in spec.items():
        if max_bytes is not None and found[-1] and size_of(found[-1]) + size_of({name: entry}) > max_bytes:
            found.append({})
        found[-1][name] = entry
    return found


class TensorFiles:
    """Files under construction. `names`: of the files, each with its tensors."""

    def __init__(self, files: Mapping[Path, Spec], metadata: dict[str, str]) -> None:
        self._places = dict(_places(files, metadata))
        self._missing = {name: torch.Size(place.shape).numel() for name, place in self._places.items()}
        for path, spec in files.items():
            path.write_bytes(header_bytes(spec, metadata))

    def write(self, name: str, values: torch.Tensor, first_row: int = 0) -> None:
        """Rows [rows, ...] of a tensor, or the whole of it. Raises UsageError if a value does not fit its type."""
        place, values = self._places[name], self._cast(name, values)
        row_bytes = torch.Size(place.shape[1:]).numel() * place.dtype.itemsize
        with place.path.open("r+b") as file:
            file.seek(place.start + first_row * row_bytes)
            file.write(_bytes_of(values))

    def write_columns(self, name: str, values: torch.Tensor, first_column: int = 0) -> None:
        """Columns [rows, n] of a matrix."""
        place, values = self._places[name], self._cast(name, values)
        rows, columns = place.shape
        if values.shape[1] == columns:
            at_once = [(0, values)]
        else:
            at_once = [(row * columns + first_column, values[row]) for row in range(rows)]
        with place.path.open("r+b") as file:
            for offset, part in at_once:
                file.seek(place.start + offset * place.dtype.itemsize)
                file.write(_bytes_of(part))

    def check_whole(self) -> None:
        """Raises DataCheckError if some value was never written."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise DataCheckError(f"the log's versions do not hold {missing[0]} (of {len(missing)} such tensors)")

    def _cast(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self._missing[name] -= values.numel()
        cast = values.to(self._places[name].dtype)
        if cast.dtype == torch.float16 and not torch.equal(cast.isfinite(), values.isfinite()):
            raise UsageError(
                f"{name} has values beyond float16's largest, {torch.finfo(torch.float16).max:g}",
                where="--dtype",
                hint="--dtype bfloat16",
            )
        return cast


def _places(files: Mapping[Path, Spec], metadata: dict[str, str]) -> Iterator[tuple[str, _Place]]:
    for path, spec in files.items():
        start = len(header_bytes(spec, metadata))
        for name, (dtype, shape) in spec.items():
            yield name, _Place(path, start, dtype, shape)
            start += size_of({name: (dtype, shape)})


def _bytes_of(values: torch.Tensor) -> memoryview:
    whole = values.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a lone element of a column keeps the column's stride
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def index_of(folder_files: Mapping[Path, Spec]) -> bytes:
    """model.safetensors.index.json: which file holds which tensor."""
    size = sum(map(size_of, folder_files.values()))
    weight_map = {name: path.name for path, spec in folder_files.items() for name in spec}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode() + b"\n"


def files_in(folder: Path, spec: Spec, max_shard_bytes: int | None) -> dict[Path, Spec]:
    """The tensors' files, named as transformers does."""
    parts = shards(spec, max_shard_bytes)
    if len(parts) == 1:
        return {folder / MODEL: parts[0]}
    return {folder / f"model-{n:05}-of-{len(parts):05}.safetensors": part for n, part in enumerate(parts, 1)}


WRITTEN = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")


def refuse_folder(folder: Path, overwrite: bool) -> None:
    """Before the work begins: raises UsageError unless the folder is new or empty, or an earlier export that may be
    overwritten. A folder with other files in it is never replaced."""
    if not folder.parent.is_dir():
        raise UsageError(f"no directory {folder.parent}", hint=f"mkdir -p {quote(str(folder.parent))}")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="give another folder: -o FOLDER")
    found = sorted(folder.iterdir())
    foreign = [path.name for path in found if not path.is_file() or not _is_ours(path.name)]
    if foreign:
        raise UsageError(
            f"{folder} holds what no export has written: {foreign[0]}", hint="give another folder: -o FOLDER"
        )
    if found and not overwrite:
        raise UsageError(f"{folder} exists already", hint="give another folder, or -y to overwrite it")


def _is_ours(name: str) -> bool:
    return name in TOKENIZER_FILES or any(fnmatch(name, pattern) for pattern in WRITTEN)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the name when the block ends. What stood under the name goes only then; what a
    killed export left beside it goes at once."""
    folder = folder.resolve()
    begun, earlier = (folder.with_name(f".{folder.name}.{what}") for what in ("partial", "earlier"))
    for left in (begun, earlier):
        shutil.rmtree(left, ignore_errors=True)
    begun.mkdir()
    try:
        yield begun
        if folder.exists():
            folder.rename(earlier)
        begun.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def copy_tokenizer(source: Path, into: Path) -> list[str]:
    """The names of the tokenizer's files that were copied."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, into / name)
    return found


def export_file(
    run: RunFormat, state: RunState, store: Store, path: Path, naming: Naming, dtype: torch.dtype | None = None
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
    run: RunFormat,
    state: RunState,
    store: Store,
    folder: Path,
    described: Described,
    dtype: torch.dtype,
    max_shard_bytes: int | None,
    tokenizer: Path | None,
) -> tuple[int, list[str]]:
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
) -> None:
    fragment, flat = run.layout.fragments[output.fragment], read_version(run, output, store)
    for slot, values in unpack_buffers(fragment, buffers_behind(fragment, flat)):
        for target in naming.targets[slot.name]:
            written.write(target.name, values)
    for slot in fragment.tensors:
        values = flat[slot.start : slot.start + slot.num_elements].view(slot.piece_shape)
        first_row = 0 if slot.rows is None else slot.rows[0]
        for target in naming.targets[slot.name]:
            if target.transposed:
                written.write_columns(target.name, values.T, first_row)
            else:
                written.write(target.name, values, first_row)
