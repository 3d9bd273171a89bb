"""A Hugging Face dataset as documents, one a row: through the package `datasets`, which the extra `datasets` brings.

A dataset is a folder with files that `datasets` reads (parquet, arrow, json, csv; or what `save_to_disk` wrote), or a
name on the Hub, NAME@REVISION for a revision of it. Its commit is part of what the shards are made of, so that an
interrupted command never goes on with other rows. Without a network, what was loaded before is read from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_cli.config.hub import is_hub_name, parted
from diloco_cli.corpus.text import PIECE_BYTES, TextPiece, end_of_piece
from diloco_cli.digests import digest
from diloco_cli.environment import environment_flag
from diloco_cli.errors import NotFoundError, UsageError, suggestion
from diloco_cli.paths import install_hint

ROWS = 1000  # that are read together
SAVED = "state.json"  # what `save_to_disk` writes beside a dataset; beside several, `dataset_dict.json`
SAVED_SPLITS = "dataset_dict.json"
TEXT = frozenset({"string", "large_string"})


class DatasetRows:
    """The texts in one column of a dataset whose rows have numbers; empty ones are left out. `name`: with its commit,
    where it has one. Raises UsageError for a streaming dataset, and for a column that holds no text."""

    def __init__(self, dataset: Any, column: str, name: str) -> None:
        if not hasattr(dataset, "num_rows") or not hasattr(dataset, "cache_files"):
            raise UsageError(
                f"{type(dataset).__name__} has no numbered rows: a streaming dataset cannot be gone on with",
                where=name,
                hint="convert it first: load it without streaming=True, or write it with to_parquet(FILE)",
            )
        _refuse_no_text(dataset, column, name)
        self.name, self.num_rows = name, int(dataset.num_rows)
        self._column, self._rows = column, dataset.select_columns([column]).with_format(None)

    def identity(self) -> str:
        paths = [Path(file["filename"]) for file in self._rows.cache_files]
        facts = [("/".join(path.parts[-4:]), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return digest(repr((facts, self._column, self.num_rows)).encode())

    def pieces(self, number: int, offset: int) -> Iterator[TextPiece]:
        for first in range(number, self.num_rows, ROWS):
            texts = self._rows[first : first + ROWS][self._column]
            for row, text in enumerate(texts, first):
                yield from _of_row(row, (text or "").encode(), offset if row == number else 0)

    def where(self, number: int) -> str:
        return f"{self.name}, row {number}"

    def share(self, number: int, offset: int) -> float:
        """By rows."""
        return number / max(1, self.num_rows)


def open_dataset(name: str, config: str | None, split: str, column: str) -> DatasetRows:
    """The rows of a dataset in a folder or on the Hub. Raises NotFoundError where it is not found, UsageError for what
    it does not have."""
    if name and Path(name).is_dir():
        return DatasetRows(_of_folder(Path(name), config, split), column, name)
    if not is_hub_name(name):
        hint = "give a folder with parquet or json files, or a name on the Hub: OWNER/NAME@REVISION or hf://NAME"
        raise NotFoundError(f"no folder {name!r}", where="--dataset", hint=hint)
    bare, revision = parted(name)
    found = _loaded(name, bare, config, split, revision)
    commit = _commit_of(found)
    if _is_offline() and revision not in (None, commit):  # then `datasets` takes the newest that it has
        raise UsageError(
            f"no revision {revision} was loaded here before, and the Hub cannot be asked: the newest is {commit}",
            where=name,
            hint=f"unset HF_HUB_OFFLINE, or --dataset {bare}@{commit}",
        )
    return DatasetRows(found, column, f"{bare}@{commit}")


def _of_row(row: int, text: bytes, offset: int) -> Iterator[TextPiece]:
    while offset < len(text):
        data = text[offset : offset + PIECE_BYTES]
        if offset + len(data) < len(text):
            data = data[: end_of_piece(data)]
        offset += len(data)
        yield TextPiece(row, data, offset, offset == len(text))


def _refuse_no_text(dataset: Any, column: str, name: str) -> None:
    texts = [key for key, feature in dataset.features.items() if getattr(feature, "dtype", "") in TEXT]
    if column not in texts:
        holds = getattr(dataset.features.get(column), "dtype", None)
        what = f"column {column!r} holds {holds}, not text" if holds else f"there is no column {column!r}"
        raise UsageError(
            f"{what}; columns of text: {', '.join(texts) or 'none'}{suggestion(column, texts)}",
            where=name,
            hint=f"--column {texts[0]}" if texts else "write the text into a column of strings",
        )


def _of_folder(folder: Path, config: str | None, split: str) -> Any:
    saved, several = (folder / SAVED).is_file(), (folder / SAVED_SPLITS).is_file()
    if not saved and not several:
        return _loaded(str(folder), str(folder), config, split, None)
    if several and not (folder / split).is_dir():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise UsageError(f"no split {split!r}; there are: {', '.join(splits)}", where=str(folder), hint="--split NAME")
    try:
        return _datasets().load_from_disk(str(folder / split if several else folder))
    except Exception as error:
        raise _unloadable(str(folder), error) from error


def _loaded(name: str, place: str, config: str | None, split: str, revision: str | None) -> Any:
    datasets = _datasets()
    try:
        return datasets.load_dataset(place, config, split=split, revision=revision)
    except ConnectionError as error:  # also where HF_HUB_OFFLINE is set
        raise NotFoundError(
            f"no dataset {name!r}: no folder of that name here, the Hub cannot be reached"
            f"{' (HF_HUB_OFFLINE is set)' if _is_offline() else ''}, and it was not loaded here before",
            where="--dataset",
            hint="load it once where there is a network, or give a folder with its parquet files",
        ) from error
    except Exception as error:  # the package raises many kinds for what is not there
        raise _unloadable(name, error) from error


def _unloadable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"datasets cannot load it: {type(error).__name__}: {error}",
        where=name,
        hint="--split and --config choose a part; what needs code of its own must be converted to parquet first",
    )


def _commit_of(dataset: Any) -> str:
    """`datasets` keeps what it has prepared in a folder named after the commit."""
    return Path(dataset.cache_files[0]["filename"]).parent.name if dataset.cache_files else "no commit known"


def _is_offline() -> bool:
    return environment_flag("HF_HUB_OFFLINE") or environment_flag("HF_DATASETS_OFFLINE")


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError("datasets is not installed here", where="--dataset", hint=install_hint("datasets")) from error
    return datasets
