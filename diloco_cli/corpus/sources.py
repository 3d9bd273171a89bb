"""What a run's own data are made of: text files, or the rows of a Hugging Face dataset (the extra `datasets`).

Documents come in an order that does not change and in pieces that do not depend on where reading began, so that an
interrupted tokenization goes on and ends with the same bytes. A dataset's commit is part of its identity. Without a
network, what was loaded before is read from the cache.

$DILOCO_SHARDS names this machine's own copy of the token shards of a run: a folder or URL. It need not be trusted: the
run's format has the digest of the index.
"""

from __future__ import annotations

import glob
import os
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.config.huggingface import HUB, is_hub_name, parted
from diloco_cli.config.settings import DataSettings
from diloco_cli.digests import digest
from diloco_cli.environment import environment_flag, environment_value
from diloco_cli.errors import NotFoundError, UsageError, suggestion
from diloco_cli.paths import install_hint
from diloco_cli.store.url import real_url

PIECE_BYTES = 256 << 10  # of text that is tokenized at once; it ends at a line's end, where there is one
MAGIC = "*?["
MARKED_UP = (".json", ".jsonl")
ROWS_SUFFIXES = (".parquet", ".arrow")
CHECKED_BYTES = 4 << 20  # of a file at a time
BINARY_WITHIN_BYTES = 8000  # a zero byte there is of a binary file, as git has it


def markup_warning(names: Iterable[str]) -> str | None:
    """A warning where files hold rows of a dataset, and would be trained on as they are."""
    name = next((name for name in names if name.lower().endswith(MARKED_UP)), None)
    if name is None:
        return None
    rows = "to train on a column of its rows: diloco data tokenize --dataset FOLDER --column NAME"
    return f"warning: {name} is taken as plain text, its markup included; {rows}"


@dataclass(frozen=True)
class TextFile:
    """A file; `name` is relative to what was asked for, the same wherever that lies."""

    name: str
    path: Path
    size: int
    modified_ns: int


@dataclass(frozen=True)
class TextPiece:
    """`text` of a document, as of a file; the next piece begins at byte `end` of document number `file`. `is_last`: of
    its document."""

    file: int
    text: bytes
    end: int
    is_last: bool


class TextFiles(list[TextFile]):
    """Text files, each a document: `Documents` to tokenize."""

    def identity(self, last: int | None = None) -> str:
        """Of names, sizes and times: which files these are here, up to number `last`, without reading them."""
        known = self if last is None else self[: last + 1]
        return digest("".join(f"{source.name}\0{source.size}\0{source.modified_ns}\n" for source in known).encode())

    def pieces(self, number: int, offset: int) -> Iterator[TextPiece]:
        """All text from byte `offset` of file `number` on. A piece ends behind a line's end, or else between two
        characters of UTF-8; so the pieces from any piece's end on are the same as without a stop. Raises UsageError
        before the first piece of a file that is no text: it can be mended, and all before it remains."""
        for file in range(number, len(self)):
            refuse_no_text(self[file].path)
            with self[file].path.open("rb") as stream:
                stream.seek(offset)
                while data := stream.read(PIECE_BYTES):
                    end = len(data) if len(data) < PIECE_BYTES else end_of_piece(data)
                    offset += end
                    stream.seek(offset)
                    yield TextPiece(file, data[:end], offset, offset >= self[file].size)
            offset = 0

    def where(self, number: int) -> str:
        return str(self[number].path)

    def share(self, number: int, offset: int) -> float:
        """Of all text, how much lies before byte `offset` of file `number`."""
        sizes = [source.size for source in self]
        return (sum(sizes[:number]) + offset) / sum(sizes)


def refuse_no_text(path: Path) -> None:
    """Raises UsageError for a file that is not UTF-8 text from its beginning to its end."""
    decoder, at = getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as stream:
        while data := stream.read(CHECKED_BYTES):
            if at == 0 and (zero := data[:BINARY_WITHIN_BYTES].find(0)) >= 0:
                raise _no_text(path, f"binary: byte {zero} is 0")
            held = len(decoder.getstate()[0])  # the first bytes of a character
            try:
                decoder.decode(data)
            except UnicodeDecodeError as error:
                raise _no_text(path, f"not UTF-8 text at byte {at - held + error.start}") from error
            at += len(data)
        if held := len(decoder.getstate()[0]):
            raise _no_text(path, f"not UTF-8 text at byte {at - held}")


def _no_text(path: Path, what: str) -> UsageError:
    hint = "name the text by a pattern without this file, or write it anew in UTF-8: iconv -f latin1 -t utf-8"
    if path.suffix.lower() in ROWS_SUFFIXES:
        hint = f"its rows, if they hold text: diloco data tokenize --dataset {path.parent} -o OUT"
    return UsageError(f"is {what}", where=str(path), hint=hint)


def find_sources(patterns: Iterable[str]) -> TextFiles:
    """The files that these name: paths, patterns (** for any folders), or folders with all that is in them, save what
    begins with a dot. Sorted by name; empty files are left out. Raises NotFoundError where one names no text,
    UsageError where one leads out of its fixed folder, to which a machine may have consented."""
    found = TextFiles()
    for pattern in patterns:
        root, paths = _matching(pattern)
        _refuse_outside(pattern, paths)
        sources = [_source(path, root) for path in paths if path.is_file()]
        sources = [source for source in sources if source.size]
        if not sources:
            what = "holds no text" if paths else "matches no file"
            raise NotFoundError(f"{pattern!r} {what}", hint="quote a pattern for many folders: 'corpus/**/*.txt'")
        found += sorted(sources, key=lambda source: source.name)
    return found


def fixed_folder(pattern: str) -> Path:
    """The folder or file that a pattern names before its first *, ? or [."""
    parts = Path(pattern).parts
    fixed = next((n for n, part in enumerate(parts) if any(mark in part for mark in MAGIC)), len(parts))
    return Path(*parts[:fixed])


def end_of_piece(data: bytes) -> int:
    """Where to cut: behind the last line's end, or else between two characters."""
    line = data.rfind(b"\n") + 1
    if line:
        return line
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:  # continues a character
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else len(data)


def _matching(pattern: str) -> tuple[Path, list[Path]]:
    """What names are relative to, and the files."""
    if Path(pattern).is_dir():
        found = (Path(folder, name) for folder, below, names in os.walk(pattern) for name in names)
        shown = [path for path in found if not any(part[0] == "." for part in path.relative_to(pattern).parts)]
        return Path(pattern), shown
    if not any(mark in pattern for mark in MAGIC):
        return Path(pattern).parent, [Path(pattern)] if Path(pattern).exists() else []
    return fixed_folder(pattern), [Path(path) for path in glob.glob(pattern, recursive=True)]


def _refuse_outside(pattern: str, paths: list[Path]) -> None:
    fixed = fixed_folder(pattern)
    if ".." in Path(pattern).parts[len(fixed.parts) :]:
        raise UsageError(f"{pattern!r} has '..' behind a wildcard", hint="write the pattern without it")
    inside = os.path.realpath(fixed)
    real = {path: Path(os.path.realpath(path)) for path in paths if path.is_file()}
    outside = next((path for path in real if not real[path].is_relative_to(inside)), None)
    if outside is not None:
        raise UsageError(
            f"{pattern!r} leads out of {fixed}: {outside} is, or lies behind, a symbolic link",
            hint="name where the text itself lies, or copy it",
        )


def _source(path: Path, root: Path) -> TextFile:
    status = path.stat()
    return TextFile(path.relative_to(root).as_posix(), path, status.st_size, status.st_mtime_ns)


ROWS = 1000  # that are read together
SAVED = "state.json"  # what `save_to_disk` writes beside a dataset; beside several, `dataset_dict.json`
SAVED_SPLITS = "dataset_dict.json"
TEXT = frozenset({"string", "large_string"})


class DatasetRows:
    """The texts in one column of a dataset whose rows have numbers; empty ones are left out. `name`: with its commit,
    where it has one. Raises UsageError for a column that holds no text."""

    def __init__(self, dataset: Any, column: str, name: str) -> None:
        _refuse_no_text(dataset, column, name)
        self.name, self.num_rows = name, int(dataset.num_rows)
        self._column, self._rows = column, dataset.select_columns([column]).with_format(None)

    def identity(self, last: int | None = None) -> str:
        """Of all rows, whatever the `last` that was read."""
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
    items = getattr(getattr(dataset.features.get(column), "feature", None), "dtype", "")
    if "int" in items:
        raise UsageError(
            f"column {column!r} holds lists of {items}: tokens, not text",
            where=name,
            hint="write them as they are, numpy.save('OUT/0.npy', numpy.concatenate(rows['"
            f"{column}']).astype('uint32')), then: diloco data index OUT",
        )
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


SHARDS_VARIABLE = "DILOCO_SHARDS"


def shards_here() -> str | None:
    return environment_value(SHARDS_VARIABLE)


def data_places(data: DataSettings) -> tuple[str, ...]:
    """The URLs of all that is read because the settings name it, as they are without symbolic links and `..`."""
    if data.args.get("digest") and shards_here():
        return ()
    if data.tokens:
        return (real_url(data.tokens),)
    if not data.text:
        return ()
    return (real_url(str(fixed_folder(data.text))), *([_place_of(data.tokenizer)] if data.tokenizer else []))


def _place_of(tokenizer: str) -> str:
    """A name on the Hub is looked for in the working directory first."""
    on_hub = is_hub_name(tokenizer) and not Path(tokenizer).is_dir()
    return f"{HUB}{tokenizer.removeprefix(HUB)}" if on_hub else real_url(tokenizer)
