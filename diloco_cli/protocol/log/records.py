"""The records in the bucket: the run's format, claims, offers, and the parts of commits (commits.py); and their bytes.

Every record is created once and never changed. Where two processes may write one key at once, the record has a nonce,
so that each process recognises its own write. Its bytes are canonical JSON, size-capped, without NaN, without duplicate
keys. Bytes from a bucket are not trusted: every error in them raises a RecordError.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import median_low
from typing import Any, Literal, TypeVar, Union, cast

import msgspec

from diloco_cli.config.codec import MAX_DEPTH, from_plain, has_huge_integer, is_deep, to_plain
from diloco_cli.config.settings import Link, RunSettings
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, DilocoError
from diloco_cli.layout import Layout
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.operations import Create, Get, Steps
from diloco_cli.signing import MAX_TAIL_BYTES, UNSIGNED, Authenticator, Signing, body_of, unpacked
from diloco_cli.store.port import HOLDER_BYTES, Created

SCHEMA = 7  # of records: norms, revoked keys, one key an epoch, jumps of the loss, islands that join together
FORMAT_SCHEMA = 9  # of FORMAT.json: the one that this version reads and writes
MAX_EXACT = 1 << 53  # integers beyond this are not exact everywhere
COMMITS_KEPT = 128  # in the memory of each process that reads the log

RequestKind = Literal["stop", "resume", "quarantine", "readmit", "rollback", "gc", "revoke"]


def fragment_of_slot(slot: int, num_fragments: int) -> int:
    """Merges are numbered slots k = 0, 1, ...; slot k belongs to fragment k mod P, so that each fragment is due once a
    round of H steps, on its own offset (arXiv 2604.21428, algorithm 1: t mod H = t_p, offsets spread evenly)."""
    return slot % num_fragments


@dataclass(frozen=True)
class Island:
    """What a learner needs to know about its island. Steps are inner steps, times are seconds as planned.
    `micro_batch_tokens`: of one forward and backward pass of one rank (None: of older versions, the whole batch).
    `num_accelerators`, `ranks`: of all its `nodes`. `sharding`: of the model over the ranks: a copy on each (`ddp`), or
    each tensor divided (`fsdp`)."""

    name: str
    region: str
    batch_tokens: int
    local_steps: int
    tokens_per_s: float
    step_s: float
    accelerator: str = "cpu"
    num_accelerators: int = 1
    infra: str = "local"
    slowdown: float = 1.0
    link: Link = field(default_factory=Link)
    micro_batch_tokens: int | None = None
    nodes: int = 1
    ranks: int = 1
    sharding: Literal["none", "ddp", "fsdp"] = "none"


@dataclass(frozen=True)
class RegionStore:
    """A region whose learners have a bucket of their own: the run's URL there, and what leaving the region costs."""

    name: str
    url: str
    egress_per_gb: float = 0.0


@dataclass(frozen=True)
class RunFormat:
    """FORMAT.json: everything that never changes during a run. Any process needs this and nothing else to take part.

    `members`: islands that joined since, in the order of the log (RunState.with_members); FORMAT.json has none.
    `regions`: those with a bucket of their own, sorted by name; where there are any, `home_url` is the run's URL in the
    home bucket, and `home_egress_per_gb` the price of traffic that leaves the home region.
    `signing`: how records are signed, if they are; `checksums`: whether records of an unsigned run end with a checksum;
    `plan`: the digest of the plan that it was launched from.
    `keyring`: this process's keys to write and check signatures or checksums; `kept`: the records that it could put
    back (mending.py). Neither is ever written to the bucket.
    """

    run_id: str
    name: str
    created_at: str
    settings: RunSettings
    islands: tuple[Island, ...]
    layout: Layout
    software: str
    home_region: str | None = None
    schema: int = FORMAT_SCHEMA
    members: tuple[Island, ...] = ()
    regions: tuple[RegionStore, ...] = ()
    home_url: str | None = None
    home_egress_per_gb: float = 0.0
    signing: Signing | None = None
    checksums: bool = False
    plan: str = ""
    keyring: Authenticator = field(default=UNSIGNED, compare=False, repr=False, metadata={"local": True})
    kept: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False, metadata={"local": True})

    def keep(self, key: str, data: bytes) -> None:
        """Hold a genuine record of the log, of which the newest COMMITS_KEPT stay, or the format."""
        self.kept[key] = data
        if len(self.kept) > COMMITS_KEPT + 1:
            oldest = min(one for one in list(self.kept) if one != FORMAT_KEY)
            self.kept.pop(oldest, None)  # a mirror's thread keeps, too

    @property
    def format_digest(self) -> str:
        """By which commit 0 names FORMAT.json; empty where this process has not seen its bytes."""
        data = self.kept.get(FORMAT_KEY)
        return "" if data is None else record_digest(data)

    @property
    def region_urls(self) -> tuple[str, ...]:
        return tuple(region.url for region in self.regions)

    def home_of(self, url: str) -> str:
        """The run's URL in the home bucket: `url` itself, unless that is a region's bucket."""
        return self.home_url if url in self.region_urls and self.home_url is not None else url

    def url_for(self, region: str, home_url: str) -> str:
        """The URL that a learner of this region is started with: of its own bucket, else of the home bucket."""
        return next((own.url for own in self.regions if own.name == region), home_url)

    def island(self, name: str) -> Island | None:
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Island]:
        return {island.name: island for island in self.all_islands}

    @cached_property
    def all_islands(self) -> tuple[Island, ...]:
        """All islands of the run: those of the launch, then those that joined."""
        return self.islands + self.members

    def grown(self, members: tuple[Island, ...]) -> RunFormat:
        """The run with these islands that have joined. The newest answer is remembered: it is asked for once an offer,
        and there may be thousands of islands."""
        if members is self.members:
            return self
        newest = self._grown[0]
        if newest is None or newest.members is not members:
            newest = self if members == self.members else replace(self, members=members)
            self._grown[0] = newest
        return newest

    @cached_property
    def _grown(self) -> list[RunFormat | None]:
        return [None]

    @cached_property
    def launched(self) -> frozenset[str]:
        """The names of the islands of the launch."""
        return frozenset(island.name for island in self.islands)

    @cached_property
    def most_local_steps(self) -> int:
        """Of an island of the launch, in a round."""
        return max(island.local_steps for island in self.islands)

    @cached_property
    def largest_batch_tokens(self) -> int:
        """Of an island of the launch."""
        return max(island.batch_tokens for island in self.islands)

    @cached_property
    def usual_tokens_per_s(self) -> float:
        """Of an island of the launch while it trains, as planned; 0: nothing is planned."""
        return median_low([i.batch_tokens / i.step_s for i in self.islands if i.step_s > 0] or [0.0])

    @property
    def num_shards(self) -> int:
        """The number of streams that the data is divided into; it never changes."""
        return self.settings.data.shards or len(self.islands)

    def shard_of(self, name: str) -> int:
        """The stream that an island reads; no other island reads it."""
        return [island.name for island in self.all_islands].index(name)

    @cached_property
    def num_fragments(self) -> int:
        return len(self.layout.fragments)

    @cached_property
    def round_tokens(self) -> int:
        """What all islands of the launch process together in one round, as planned."""
        return sum(island.local_steps * island.batch_tokens for island in self.islands)


def not_consented(run: RunFormat) -> RunFormat:
    """The run as it came from outside: none of the code that it names may run."""
    return replace(run, settings=run.settings.with_consent(False))


@dataclass(frozen=True)
class ProcessClaim:
    """Which process claims an epoch (of the syncer) or an incarnation (of a learner). `ranks`: how many train in it, of
    which this is the one that commands; it may be another number than the run's island has."""

    number: int
    nonce: str
    host: str
    pid: int
    started_at: str
    software: str
    ranks: int = 1


@dataclass(frozen=True)
class Timings:
    """A learner's own moving averages, seconds on its own clock: one inner step, between its slots, to upload a delta,
    and from a commit's appearance to its adoption."""

    step_s: float = 0.0
    slot_s: float = 0.0
    upload_s: float = 0.0
    adoption_s: float = 0.0


Mixing = Literal["replace", "rebase"]


@dataclass(frozen=True)
class Offer:
    """A learner offers the delta (old minus new) of one fragment, made since it adopted version `base`.

    It is merged with those of its slot, or not at all. [data_start, data_end) is the range of its data stream, in
    tokens, that the delta was trained on, in `steps` steps: of full batches, or smaller ones while a part of the island
    was gone.
    `inner` names the newest saved inner-optimizer state. With error feedback, `feeds_back` is the seq of the
    earlier offer whose rounding error this delta makes up for.
    """

    learner: str
    incarnation: int
    seq: int
    slot: int
    fragment: int
    base: int
    base_digest: str
    data_start: int
    data_end: int
    tokens: int
    steps: int
    payload_digest: str
    payload_bytes: int
    nonce: str
    timings: Timings = field(default_factory=Timings)
    loss: float | None = None
    inner: str | None = None
    feeds_back: int | None = None
    schema: int = SCHEMA

    @property
    def id(self) -> OfferId:
        return (self.learner, self.incarnation, self.seq)


OfferId = tuple[str, int, int]


@dataclass(frozen=True)
class MergedOffer:
    """An offer that a merge applied, with the weight it got. Carries all that a replay needs.

    `believed`: how many of its stated tokens count; None: all. More than all: so many that were doubted before count as
    well. `proven`: its learner's tokens/s that count as proven
    after this merge (protocol/rules/belief.py); 0: what is planned.
    `norm`: of its delta as the learner made it, before it was re-anchored or scaled. `scale`: what it was multiplied
    by, below 1 where it was clipped (protocol/rules/merging.py). `cosine`: between its delta and the weighted sum
    of the merge's other deltas, from a sample of their values; 0 where there is no other. By it a speed is proven."""

    learner: str
    incarnation: int
    seq: int
    base: int
    data_start: int
    data_end: int
    tokens: int
    steps: int
    weight: float
    payload_digest: str
    payload_bytes: int
    step_s: float = 0.0
    scale: float = 1.0
    norm: float = field(kw_only=True)
    cosine: float = 0.0
    believed: int | None = None
    proven: float = 0.0

    @property
    def counted(self) -> int:
        """The tokens that count."""
        return self.tokens if self.believed is None else self.believed

    @property
    def own_counted(self) -> int:
        """Those of its own: without what was doubted before."""
        return min(self.counted, self.tokens)

    @property
    def counted_steps(self) -> int:
        """The steps that count: as large a part of the stated ones, and at least one."""
        return counted_steps(self.steps, self.tokens, self.counted)


def counted_steps(steps: int, tokens: int, believed: int) -> int:
    """How many of an offer's steps count if so many of its tokens are believed."""
    return steps if believed >= tokens else max(1, -(-steps * believed // tokens))


@dataclass(frozen=True)
class Outcome:
    """What became of an offer that no merge used."""

    learner: str
    incarnation: int
    seq: int
    fragment: int
    reason: str


@dataclass(frozen=True)
class FragmentVersion:
    """A version of a fragment. The version is the number of the commit that produced it, so it is never reused."""

    fragment: int
    version: int
    slot: int
    epoch: int
    state_digest: str
    weights_digest: str


@dataclass(frozen=True)
class Request:
    """An operator's request, answered by the syncer with a commit that names it. `resume` withdraws a stop that was
    requested and not carried out yet; `quarantine` keeps `learner` out and `readmit` ends that; `rollback` brings the
    parameters back to those after commit `to`; `gc` raises the floor, to commit `to` at the most; `revoke` ends what
    the public key `key` counts for."""

    number: int
    kind: RequestKind
    nonce: str
    time: str
    reason: str = ""
    learner: str | None = None
    to: int | None = None
    key: str | None = None


@dataclass(frozen=True)
class Join:
    """An island asks the syncer of `epoch` to take part. No later syncer answers: its writer may be gone by then, and
    asks anew if it still waits. `number` tells its requests to one syncer apart."""

    island: Island
    epoch: int
    number: int
    nonce: str
    time: str


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
            for name in ("keyring", "kept"):  # this process's own, whatever the bucket says
                plain.pop(name, None)
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
            hint="take a newer diloco from where this one came; this one: diloco --version",
        )
    if written < oldest:
        raise RecordError(
            f"this run was created by an older version (schema {written}); this version reads {newest} only",
            where=where,
            hint="finish or export it with the version that created it",
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


def read_signed(keyring: Authenticator, signer: str, key: str, same: int = 2) -> Steps[bytes | None]:
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


def get_named(key: str, named: str, max_bytes: int) -> Steps[bytes | str]:
    """The bytes under the key that have this digest, or what is wrong. Others may be damaged in the read, and are
    read again first."""
    for _ in range(LOOKS):
        data: bytes | None = yield Get(key, max_bytes)
        if data is None:
            return "is missing"
        if digest(data) == named:
            return data
    return "has other bytes than the log says"


def create_signed(keyring: Authenticator, signer: str, key: str, mine: bytes, same: int = 2) -> Steps[bytes]:
    """Create a record, and return the bytes that then lie under the key: `mine`, or the record that was there before.
    The bytes in the store's answer may be damaged, so others than `mine` are checked and read again. `same`: see
    read_signed."""
    answer = yield Create(key, mine)
    if isinstance(answer, Created):
        return mine
    if answer.data == mine or keyring.authenticates(signer, key, answer.data):
        return bytes(answer.data)
    return (yield from read_signed(keyring, signer, key, same)) or bytes(answer.data)
