"""The records in the bucket: the run's format, claims, offers, and the parts of commits (commits.py). Every record is
created once and never changed.

Where two processes may write one key at once, the record has a nonce, so that each process recognises its own write.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from diloco_cli.config.settings import Link, RunSettings
from diloco_cli.layout import Layout
from diloco_cli.signing import UNSIGNED, Signing, Unsigned

SCHEMA = 7  # of records: norms, revoked keys, one key an epoch, jumps of the loss, islands that join together
FORMAT_SCHEMA = 9  # of FORMAT.json: the one that this version reads and writes
MAX_EXACT = 1 << 53  # integers beyond this are not exact everywhere

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
    `keyring`: this process's keys to write and check signatures or checksums, never written to the bucket.
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
    digest_algorithm: str = "blake3"
    members: tuple[Island, ...] = ()
    regions: tuple[RegionStore, ...] = ()
    home_url: str | None = None
    home_egress_per_gb: float = 0.0
    signing: Signing | None = None
    checksums: bool = False
    keyring: Unsigned = field(default=UNSIGNED, compare=False, repr=False, metadata={"local": True})

    def region_store(self, region: str) -> RegionStore | None:
        """The region's own bucket; None: its learners use the home bucket."""
        return next((store for store in self.regions if store.name == region), None)

    @property
    def region_urls(self) -> tuple[str, ...]:
        return tuple(region.url for region in self.regions)

    def home_of(self, url: str) -> str:
        """The run's URL in the home bucket: `url` itself, unless that is a region's bucket."""
        return self.home_url if url in self.region_urls and self.home_url is not None else url

    def url_for(self, region: str, home_url: str) -> str:
        """The URL that a learner of this region is started with."""
        own = self.region_store(region)
        return home_url if own is None else own.url

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

    `norm`: of its delta as the learner made it, before it was re-anchored or scaled. `scale`: what it was multiplied
    by, below 1 where it was clipped (protocol/rules/merging.py). `cosine`: between its delta and the merged one, from a
    sample of their values; for people, no decision depends on it."""

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
