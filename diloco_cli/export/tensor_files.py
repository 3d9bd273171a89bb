"""Safetensors files whose tensors come piece by piece, in any order: memory holds no more than a piece.

Names, types and shapes are known before the first value, so headers are written first, and each piece at its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diloco_cli.errors import DataCheckError, UsageError
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
    flat = values.detach().contiguous().reshape(-1)
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
