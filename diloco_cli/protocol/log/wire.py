"""Records as bytes: canonical JSON, size-capped, without NaN, without duplicate keys. Bytes from a bucket are not
trusted: every error in them raises a RecordError.

Reading and creating signed records: damage in the read is told from damage in the bucket.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, TypeVar, Union, cast

import msgspec

from diloco_cli.config.codec import MAX_DEPTH, from_plain, has_huge_integer, is_deep, to_plain
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, DilocoError
from diloco_cli.protocol.log.operations import Create, Get, Steps
from diloco_cli.protocol.log.records import RunFormat, not_consented
from diloco_cli.signing import MAX_TAIL_BYTES, Unsigned, body_of, unpacked
from diloco_cli.store.port import HOLDER_BYTES, Created

MAX_RECORD_BYTES = HOLDER_BYTES  # so the answer to a create that lost holds the whole record
MAX_BODY_BYTES = MAX_RECORD_BYTES - MAX_TAIL_BYTES  # with room for a signature
_canonical = json.JSONEncoder(  # a record has no cycles: to check for them would take a tenth of the time
    sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
).encode
_parse = msgspec.json.Decoder().decode
_MANY_DIGITS = re.compile(rb"[0-9]{39}")  # what has fewer fits into 128 bits, as tokens times parameters do
Record = TypeVar("Record")


class RecordError(DataCheckError):
    """A record in the bucket is not well formed."""

    code = "record"


def encode(record: object, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Canonical JSON: sorted keys, no spaces, ASCII; equal records give equal bytes. A lone surrogate (as in a file's
    name that is not UTF-8) is written as U+FFFD. Raises ValueError for NaN."""
    data = _line(_plain(record))
    if len(data) > max_bytes:
        raise RecordError(f"{len(data)} bytes, more than the {max_bytes} allowed in a record")
    return data


def _line(plain: Any) -> bytes:
    data = _canonical(plain).encode()
    return _canonical(_as_text(json.loads(data))).encode() if b"\\ud" in data else data


def _plain(record: object) -> Any:
    if isinstance(record, RunFormat):  # the run's settings have a codec of their own, which plans use too
        return to_plain(record)
    return record if isinstance(record, dict) else msgspec.to_builtins(record, str_keys=True)


def _as_text(value: Any) -> Any:
    """The value with lone surrogates in its strings replaced, so that a strict reader accepts it."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return value


def decode(
    kind: type[Record],
    data: bytes,
    where: str,
    schema: int | None = None,
    max_bytes: int = MAX_RECORD_BYTES,
    *,
    oldest: int = 0,
) -> Record:
    """Bytes to a record of type `kind`, or of the subclass that their tag names. Unknown keys from newer writers are
    ignored; wrong types are refused, and so is a record whose own `schema` is newer than `schema` or older than
    `oldest`."""
    plain, is_canonical = _parsed(data, where, max_bytes)
    if schema is not None:  # first: another version may write in another way
        _refuse_other_schema(plain.get("schema"), oldest, schema, where)
    _require_canonical(is_canonical, where)
    try:
        if kind is RunFormat:
            plain.pop("keyring", None)  # this process's own, whatever the bucket says
            return cast("Record", not_consented(from_plain(RunFormat, plain, strict=False)))
        return cast("Record", msgspec.convert(plain, _written_as(cast("Any", kind)), str_keys=True))
    except (DilocoError, msgspec.MsgspecError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise RecordError(f"not a {kind.__name__.lower()}: {error}", where=where) from error


def record_digest(data: bytes) -> str:
    """By which another record names this one: the same, whatever version of zlib compressed it."""
    return digest(unpacked(data))


@cache
def _written_as(kind: type[Any]) -> Any:
    """The types that a record of this kind may have: the subclasses of a base of tagged types, else the kind itself."""
    is_base = kind.__mro__[1] is msgspec.Struct and kind.__struct_config__.tag_field and kind.__subclasses__()
    return Union[tuple(kind.__subclasses__())] if is_base else kind  # noqa: UP007


def _refuse_other_schema(written: object, oldest: int, newest: int, where: str) -> None:
    if not isinstance(written, int):
        return
    if written > newest:
        raise RecordError(
            f"written with schema {written}; this version reads up to {newest}",
            where=where,
            hint="pip install --upgrade diloco",
        )
    if written < oldest:
        raise RecordError(
            f"this run was created by an older version (schema {written}); this version reads {newest} only",
            where=where,
            hint="finish or export it with the version that created it (for 0.3.x: pip install 'diloco==0.3.2')",
        )


def decode_plain(data: bytes, where: str) -> dict[str, Any]:
    """The record's object, without its signature or checksum."""
    plain, is_canonical = _parsed(data, where)
    _require_canonical(is_canonical, where)
    return plain


def _parsed(data: bytes, where: str, max_bytes: int = MAX_RECORD_BYTES) -> tuple[dict[str, Any], bool]:
    """The object, and whether its bytes are what `encode` makes of it. A parser alone would keep the last of two equal
    keys and say nothing."""
    if len(data) > max_bytes:
        raise RecordError(f"{len(data)} bytes, more than the {max_bytes} allowed in a record", where=where)
    body = body_of(data)
    try:
        plain = _parse(body)
        if not isinstance(plain, dict) or is_deep(plain):
            raise ValueError(f"not an object of at most {MAX_DEPTH} levels")
        if _MANY_DIGITS.search(body) and has_huge_integer(plain):
            raise ValueError("a whole number beyond 128 bits")
        return plain, _canonical(plain).encode() == body
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON: {error}", where=where) from error


def _require_canonical(is_canonical: bool, where: str) -> None:
    if not is_canonical:
        raise RecordError("not canonical JSON: sorted keys, each once, and no spaces", where=where)


LOOKS = 4  # reads of an object that seems damaged: the damage may be in the read


def read_signed(keyring: Unsigned, signer: str, key: str, same: int = 2) -> Steps[bytes | None]:
    """A record's bytes. Bytes that are not authentic may have been damaged in the read: they are read again until they
    are authentic, or the same `same` times in a row."""
    data: bytes | None = yield Get(key, MAX_RECORD_BYTES)
    equal = 1
    for _ in range(LOOKS - 1):
        if data is None or equal == same or keyring.authenticates(signer, key, data):
            break
        before, data = data, (yield Get(key, MAX_RECORD_BYTES))
        equal = equal + 1 if data == before else 1
    return data


def create_signed(keyring: Unsigned, signer: str, key: str, mine: bytes, same: int = 2) -> Steps[bytes]:
    """Create a record, and return the bytes that then lie under the key: `mine`, or the record that was there before.
    The bytes in the store's answer may be damaged, so others than `mine` are checked and read again. `same`: see
    read_signed."""
    answer = yield Create(key, mine)
    if isinstance(answer, Created):
        return mine
    if answer.data == mine or keyring.authenticates(signer, key, answer.data):
        return bytes(answer.data)
    return (yield from read_signed(keyring, signer, key, same)) or bytes(answer.data)
