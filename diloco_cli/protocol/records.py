"""What lies in the bucket: the run's format, claims, offers, commits. Every record is created once and never changed.

Writers put a nonce into what two processes might write at once, so that each recognises its own write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from diloco_cli.config.settings import Link, RunSettings
from diloco_cli.layout import Layout

SCHEMA = 1
MOST = 1 << 53  # integers beyond this are not exact everywhere

CommitKind = Literal["epoch_start", "merge", "skip", "refuse", "eval", "stop", "finish"]


@dataclass(frozen=True)
class Island:
    """What a learner needs to know about its island. Steps are inner steps, times are seconds as planned."""

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


@dataclass(frozen=True)
class RunFormat:
    """FORMAT.json: everything that never changes during a run. Any process needs this and nothing else to take part."""

    run_id: str
    name: str
    created_at: str
    settings: RunSettings
    islands: tuple[Island, ...]
    layout: Layout
    software: str
    home_region: str | None = None
    schema: int = SCHEMA
    digest_algorithm: str = "blake3"

    def island(self, name: str) -> Island | None:
        return next((island for island in self.islands if island.name == name), None)

    @property
    def num_fragments(self) -> int:
        return len(self.layout.fragments)


@dataclass(frozen=True)
class ProcessClaim:
    """Which process claims an epoch (of the syncer) or an incarnation (of a learner)."""

    number: int
    nonce: str
    host: str
    pid: int
    started_at: str
    software: str


@dataclass(frozen=True)
class Timings:
    """A learner's own moving averages, seconds on its own clock: one inner step, between its slots, to upload a delta,
    and from a commit's appearance to its adoption."""

    step_s: float = 0.0
    slot_s: float = 0.0
    upload_s: float = 0.0
    adoption_s: float = 0.0


EventKind = Literal["steps", "heard", "adopted", "dropped", "saved", "sent"]


@dataclass(frozen=True)
class Event:
    """One thing that shaped a learner's parameters, in the order of happening (see protocol/tape.py).

    steps     `count` inner steps on batches of `batch_tokens`
    heard     the log up to commit `n`; from here on this learner takes `local_steps` steps a round
    adopted   `version` of `fragment`; `since`: the seq of the send after which own progress was kept (None: adoption)
    dropped   the progress on `fragment` made since the last adoption
    saved     the inner optimizer's moments
    sent      offer number `seq`: `fragment` for `slot`
    """

    kind: EventKind
    count: int = 0
    batch_tokens: int = 0
    n: int = 0
    local_steps: int = 0
    fragment: int = 0
    version: int = 0
    since: int | None = None
    seq: int = 0
    slot: int = 0


@dataclass(frozen=True)
class Offer:
    """A learner offers the delta (old minus new) of one fragment, made since it adopted version `base`.

    [data_start, data_end) is the range of its data stream, in tokens, that the delta was trained on.
    `inner` names the newest saved inner-optimizer state; `adopted` what was adopted since the offer before.
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
    adopted: tuple[tuple[int, int, str], ...] = ()
    schema: int = SCHEMA

    @property
    def id(self) -> OfferId:
        return (self.learner, self.incarnation, self.seq)


OfferId = tuple[str, int, int]


@dataclass(frozen=True)
class Input:
    """An offer that a merge applied, with the weight it got. Carries all that a replay needs."""

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


@dataclass(frozen=True)
class Fate:
    """What became of an offer that no merge used."""

    learner: str
    incarnation: int
    seq: int
    fragment: int
    reason: str


@dataclass(frozen=True)
class Output:
    """A version of a fragment. The version is the number of the commit that produced it, so it is never reused."""

    fragment: int
    version: int
    slot: int
    epoch: int
    state_digest: str
    cast_digest: str


@dataclass(frozen=True)
class Commit:
    """One record of the log. `previous` is the digest of the record before: the log is a hash chain."""

    n: int
    kind: CommitKind
    epoch: int
    nonce: str
    previous: str
    time: str
    software: str
    slot: int | None = None
    inputs: tuple[Input, ...] = ()
    fates: tuple[Fate, ...] = ()
    outputs: tuple[Output, ...] = ()
    tokens: int = 0
    quorum: int = 0
    alive: int = 0
    grace_s: float = 0.0
    grace_used_s: float = 0.0
    reason: str = ""
    loss: float | None = None
    evaluated: int | None = None
    request: int | None = None
    schema: int = SCHEMA


@dataclass(frozen=True)
class Request:
    """An operator's intent, carried out by the syncer as a commit that names it. `resume` withdraws a stop that was
    asked for and not carried out yet."""

    number: int
    kind: Literal["stop", "resume"]
    nonce: str
    time: str
    reason: str = ""
