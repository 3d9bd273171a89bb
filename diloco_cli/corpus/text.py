"""Text files of this machine, in an order of their own names, read in pieces that do not depend on where one began."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.digests import digest
from diloco_cli.errors import NotFoundError, UsageError

PIECE_BYTES = 256 << 10  # of text that is tokenized at once; it ends at a line's end, where there is one
MAGIC = "*?["
MARKED_UP = (".json", ".jsonl", ".parquet")


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

    def identity(self) -> str:
        return digest_of_sources(self)

    def pieces(self, number: int, offset: int) -> Iterator[TextPiece]:
        return pieces(self, number, offset)

    def where(self, number: int) -> str:
        return str(self[number].path)

    def share(self, number: int, offset: int) -> float:
        """Of all text, how much lies before byte `offset` of file `number`."""
        sizes = [source.size for source in self]
        return (sum(sizes[:number]) + offset) / sum(sizes)


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


def digest_of_sources(sources: Iterable[TextFile]) -> str:
    """Of names, sizes and times: which files these are on this machine, without reading them."""
    lines = (f"{source.name}\0{source.size}\0{source.modified_ns}\n" for source in sources)
    return digest("".join(lines).encode())


def pieces(sources: list[TextFile], file: int = 0, offset: int = 0) -> Iterator[TextPiece]:
    """All text from byte `offset` of file number `file` on. A piece ends behind a line's end, or else between two
    characters of UTF-8; so the pieces from any piece's end on are the same as without a stop."""
    for number in range(file, len(sources)):
        with sources[number].path.open("rb") as stream:
            stream.seek(offset)
            while data := stream.read(PIECE_BYTES):
                end = len(data) if len(data) < PIECE_BYTES else end_of_piece(data)
                offset += end
                stream.seek(offset)
                yield TextPiece(number, data[:end], offset, offset >= sources[number].size)
        offset = 0


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
