"""Tapes as files: one JSON object, gzipped if the name ends in .gz. Read strictly: its source is not trusted."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import from_plain, parse_object, to_plain
from diloco_cli.digests import digest
from diloco_cli.errors import DilocoError, NoSpaceError, UsageError
from diloco_cli.protocol.log.keys import is_name
from diloco_cli.protocol.log.records import not_consented
from diloco_cli.protocol.log.tape import TAPE_SCHEMA, Tape
from diloco_cli.runtime.files import NO_SPACE_ERRNOS
from diloco_cli.tapes.needs import needs_of

MAX_TAPE_BYTES = 1 << 30  # unpacked
MAX_PACKED = 200  # largest compression ratio: honest tapes have 10 to 30, a decompression bomb a thousand
ALWAYS_UNPACKED_BYTES = 8 << 20
PIECE_BYTES = 1 << 20
KIND = "diloco tape"
HINT = "write one with: diloco export RUN --tape FILE"


def write_tape(tape: Tape, path: Path) -> int:
    """Write the file atomically; equal tapes give equal bytes. Returns the file's size in bytes."""
    data = _as_json({"kind": KIND, **to_plain(tape)})
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        kind = NoSpaceError if error.errno in NO_SPACE_ERRNOS else UsageError
        raise kind(f"cannot write: {error.strerror}", where=str(path)) from error
    return len(data)


def tape_digest(tape: Tape) -> str:
    """Equal for equal tapes, and for them alone."""
    return digest(_as_json(to_plain(tape)))


def read_tape(path: Path) -> Tape:
    """A tape that can be played, or UsageError with the reason: torn, foreign, newer, or contradicting itself."""
    plain = _read_plain(path)
    if plain.pop("kind", None) != KIND:
        raise UsageError("this is not a tape", where=str(path), hint=HINT)
    schema = plain.get("schema")
    if schema != TAPE_SCHEMA:
        older = isinstance(schema, int) and schema < TAPE_SCHEMA
        raise UsageError(
            f"written with tape schema {schema!r}; this version reads {TAPE_SCHEMA} only",
            where=str(path),
            hint="play it with the version that wrote it (for 0.3.x: pip install 'diloco==0.3.2')"
            if older
            else "pip install --upgrade diloco",
        )
    try:
        tape = from_plain(Tape, plain)
        tape = replace(tape, run=not_consented(tape.run))
        _check_names(tape)
        needs_of(tape)
    except UsageError as error:
        raise UsageError(error.message, where=str(path), hint=error.hint or HINT) from error
    except (DilocoError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"not a tape that can be played: {error}", where=str(path), hint=HINT) from error
    return tape


def _as_json(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _read_plain(path: Path) -> dict[str, Any]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        most = min(MAX_TAPE_BYTES, max(ALWAYS_UNPACKED_BYTES, MAX_PACKED * path.stat().st_size))
        with opened(path, "rb") as stream:
            data = _read_at_most(stream, most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"not a whole gzip file: {error}", where=str(path), hint=HINT) from error
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror or error}", where=str(path), hint=HINT) from error
    try:
        return parse_object(data, most)
    except ValueError as error:
        raise UsageError(f"not a whole tape: not valid JSON: {error}", where=str(path), hint=HINT) from error


def _read_at_most(stream: io.BufferedIOBase, most: int) -> bytes:
    """Read in pieces: asked for `most` bytes at once, a reader would allocate them even for a small file."""
    pieces: list[bytes] = []
    while most > 0 and (piece := stream.read(min(most, PIECE_BYTES))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _check_names(tape: Tape) -> None:
    for name in (tape.run.name, *(island.name for island in tape.run.all_islands)):
        if not is_name(name):
            raise UsageError(f"{name!a} is not a name")
