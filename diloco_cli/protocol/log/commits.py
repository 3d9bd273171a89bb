"""The records of the log: one type per kind of commit, so that each has only the fields of its kind.

A decision makes one with the fields of its kind; the process that serves the log adds epoch, nonce, time and software,
and `append` (commit_log.py) `n` and `previous`. `kind` tells the types apart in the bucket.
"""

from __future__ import annotations

import msgspec

from diloco_cli.protocol.log.records import SCHEMA, FragmentVersion, Island, MergedOffer, Outcome


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every commit says. `previous` is the digest of the record before: the log is a hash chain.

    `request`: the newest request that this commit answers. `outcomes`: those of offers that no merge used. `nonce`: by
    it a process recognises its own write.
    """

    n: int = -1
    epoch: int = 0
    nonce: str = ""
    previous: str = ""
    time: str = ""
    software: str = ""
    reason: str = ""
    request: int | None = None
    outcomes: tuple[Outcome, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if type(self) is Commit:
            raise TypeError("a commit is of one of the kinds below")

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def inputs(self) -> tuple[MergedOffer, ...]:
        """The offers that a merge applied; there are none in other commits."""
        return ()

    @property
    def outputs(self) -> tuple[FragmentVersion, ...]:
        """The versions that this commit brings into the log."""
        return ()


class EpochStart(Commit, tag="epoch_start", frozen=True, kw_only=True):
    """A syncer begins to serve. Commit 0 brings version 0 of every fragment. `serves`: False for an epoch that a
    command claims, which answers operators and merges nothing."""

    outputs: tuple[FragmentVersion, ...] = ()
    serves: bool = True


class Merge(Commit, tag="merge", frozen=True, kw_only=True):
    """One slot's offers, at least one, became a version of its fragment, the only output.

    `grace_s`: how long this merge could wait after its quorum, of which it waited `grace_used_s`; the window of the
    next slot begins `opens_s` after this commit, that of each further one `slot_s` later.
    """

    slot: int
    inputs: tuple[MergedOffer, ...]
    outputs: tuple[FragmentVersion]
    tokens: int = 0
    quorum: int = 0
    alive: int = 0
    grace_s: float = 0.0
    grace_used_s: float = 0.0
    opens_s: float = 0.0
    slot_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("a merge has at least one input")

    @property
    def merged_tokens(self) -> int:
        """Of all inputs."""
        return sum(item.tokens for item in self.inputs)


class Skip(Commit, tag="skip", frozen=True, kw_only=True):
    """A slot passed without a merge."""

    slot: int


class Refuse(Commit, tag="refuse", frozen=True, kw_only=True):
    """Offers that no merge can use (`outcomes`), or a request that is not carried out (`reason` says why)."""


class Membership(Commit, tag="membership", frozen=True, kw_only=True):
    """Islands have joined, at least one, in the order in which they get their data shards."""

    islands: tuple[Island, ...]

    def __post_init__(self) -> None:
        if not self.islands:
            raise ValueError("a membership commit admits at least one island")


class Evaluation(Commit, tag="eval", frozen=True, kw_only=True):
    """The held-out loss, in nats per token, of the versions as of commit `evaluated`, when `tokens` were merged. None:
    the model gives no finite loss. `jumped`: it is beyond the bound that the run states; the reason says by what."""

    evaluated: int
    loss: float | None
    tokens: int
    jumped: bool = False


class Quarantine(Commit, tag="quarantine", frozen=True, kw_only=True):
    """A learner is kept out: for its bad offers, or because an operator asks for it (`request`)."""

    learner: str


class Readmit(Commit, tag="readmit", frozen=True, kw_only=True):
    """A quarantined learner may take part again."""

    learner: str


class Revoke(Commit, tag="revoke", frozen=True, kw_only=True):
    """The public key `key` (of `learner`, if it was a learner's) counts for nothing that is judged after this commit.
    What merges have used stays. What it has offered is refused, and nothing below its fingerprint is read any more."""

    key: str
    learner: str | None = None


class Rollback(Commit, tag="rollback", frozen=True, kw_only=True):
    """Every fragment is again what it was after commit `to`. `shares`, sorted: (learner, tokens x parameters of it that
    still count), as of commit `to`; a learner that is not named has none that count. `evaluated`: the syncer goes back
    because the loss of that commit had jumped."""

    to: int
    outputs: tuple[FragmentVersion, ...]
    shares: tuple[tuple[str, int], ...] = ()
    evaluated: int | None = None


class CollectionFloor(Commit, tag="gc_floor", frozen=True, kw_only=True):
    """Objects that only commits before number `floor` need may be deleted."""

    floor: int


class Stop(Commit, tag="stop", frozen=True, kw_only=True):
    """The run pauses until a later `epoch_start` resumes it. `diverged`: the syncer itself stopped it, as people must
    look at a loss that has jumped."""

    diverged: bool = False


class Finish(Commit, tag="finish", frozen=True, kw_only=True):
    """The run has merged the tokens that it was to train on."""
