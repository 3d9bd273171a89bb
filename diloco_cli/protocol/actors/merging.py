"""The offers of the due slot, from payloads to a merge.

Payloads are read, checked, judged together by their norms, and handed to the arithmetic, which is a port (torch in the
product, integers in the histories); the new version is written, and read back where the store does not check uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.inbox import Inbox, in_order
from diloco_cli.protocol.log.commits import Merge
from diloco_cli.protocol.log.health import NOTHING, logged_norm
from diloco_cli.protocol.log.keys import delta_key, max_fragment_bytes, state_key, weights_key
from diloco_cli.protocol.log.operations import Create, Get, Steps, together
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    MergedOffer,
    Offer,
    OfferId,
    Outcome,
    RunFormat,
    counted_steps,
    fragment_of_slot,
    get_named,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.belief import proven
from diloco_cli.protocol.rules.merging import JudgedDelta, judge, offered_weight, refusal
from diloco_cli.protocol.rules.quorum import Grace, SlotFacts, window_start_s
from diloco_cli.store.port import Created

REASONS_TOLD = 3  # in one commit
READS = 3  # of a payload, before it is called damaged
Recover = Callable[[FragmentVersion], bytes | None]
"""The bytes of a lost state, made anew from older versions and the deltas that the log names; None: not possible."""


@dataclass(frozen=True)
class Merged:
    """A fragment's new version as bytes: the state that syncers read, and the weights that learners adopt.

    `cosines`: between each delta, in their order, and the weighted sum of the others, from a sample of their values; of
    a merge."""

    state: bytes
    weights: bytes
    cosines: tuple[float, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A merge that gave no version: which deltas must be left out, by their place in the list, and why. The others may
    be merged without them."""

    reasons: dict[int, str]


class LoadedDelta(Protocol):
    """A delta as the arithmetic holds it, ready to merge. `norm`: of the delta as its learner made it, before it was
    re-anchored; by the norms that its payload claims, or as measured."""

    @property
    def norm(self) -> float: ...


Weighed = tuple[Any, float, float, int]
"""A delta, its weight, its scale, and how many of its tokens are believed."""


class Arithmetic(Protocol):
    """The numerical work. Deterministic: the same inputs in the same order give the same bytes."""

    def initial(self) -> Iterable[Merged]:
        """Every fragment's first version, in order. Each is made when it is asked for: all of them at a time would take
        the memory of the model twice."""
        ...

    def holds(self, fragment: int, state_digest: str) -> bool:
        """Whether this version's parameters and momentum are in memory."""
        ...

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None: ...

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> LoadedDelta | str:
        """A delta ready to merge, re-anchored if the base's weights are given; or the reason of its refusal."""
        ...

    def merge(self, slot: int, deltas: list[Weighed]) -> Merged | Refused:
        """The next version of this slot's fragment; or those deltas that only the merge shows to be unfit."""
        ...

    def settled(self, fragment: int) -> Merged:
        """The version in memory, as the bytes that were published."""
        ...

    def settle(self, fragment: int, state_digest: str) -> None:
        """The merged version with this digest is committed: it is the fragment's version now."""
        ...


@dataclass(frozen=True)
class FitOffer:
    """An offer that may be merged, with all that its merge needs and the log states. `believed`: of its tokens."""

    offer: Offer
    delta: LoadedDelta
    believed: int
    norm: float
    weight: float
    scale: float

    @property
    def weighed(self) -> Weighed:
        return self.delta, self.weight, self.scale, min(self.believed, self.offer.tokens)


@dataclass(frozen=True)
class Candidates:
    """A slot's offers with sound payloads, sorted by learner. `reasons`: why some of them are clipped."""

    fit: tuple[FitOffer, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def offers(self) -> list[Offer]:
        return [one.offer for one in self.fit]

    @property
    def believed(self) -> dict[str, int]:
        """Tokens, by learner."""
        return {one.offer.learner: one.believed for one in self.fit}

    @property
    def learners(self) -> set[str]:
        return {one.offer.learner for one in self.fit}


def told(reason: str, reasons: tuple[str, ...]) -> str:
    """The reason of the slot's commit, with those of the clipped deltas."""
    more = len(reasons) - REASONS_TOLD
    return "; ".join((reason, *reasons[:REASONS_TOLD], *([f"and {more} more"] if more > 0 else [])))


@dataclass
class Loader:
    """Reads the candidates' payloads, each once, and keeps them until the slot is decided."""

    run: RunFormat
    arithmetic: Arithmetic
    inbox: Inbox
    recover: Recover
    loaded: dict[OfferId, LoadedDelta] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inbox.beside = self.early

    def early(self, state: RunState, offer: Offer) -> list[Steps[None]]:
        """Reads the payload of an offer for the slot that is due as soon as the offer is found, if its fragment's
        version is resident. One that is not sound is read again with the others."""
        if offer.slot != state.slot or offer.id in self.loaded or refusal(offer, state, self.run):
            return []
        resident = self.arithmetic.holds(offer.fragment, state.outputs[offer.fragment].state_digest)
        return [self._read_early(state, offer)] if resident else []

    def _read_early(self, state: RunState, offer: Offer) -> Steps[None]:
        delta = yield from load_delta(self.run, self.arithmetic, state, offer)
        if not isinstance(delta, str):
            self.loaded[offer.id] = delta

    def candidates(self, state: RunState, believed: Callable[[Offer], int]) -> Steps[Candidates]:
        """Of the slot that is due; offers whose payload is not sound are dropped from the inbox. `believed`: how many
        of an offer's tokens are."""
        offers = yield from self.load(state)
        left = {offer.id for offer in self.inbox.pending()}
        self.loaded = {known: delta for known, delta in self.loaded.items() if known in left}
        return judged(self.run, state, offers, self.loaded, believed)

    def forget(self) -> None:
        """The fragment that is due has another version, or what was read does not count any more."""
        self.loaded = {}

    def load(self, state: RunState) -> Steps[list[Offer]]:
        """The offers whose payloads are there and sound."""
        offers = self.inbox.candidates(state.slot)
        missing = [offer for offer in offers if offer.id not in self.loaded]
        if missing:
            yield from make_resident(self.run, self.arithmetic, state.outputs[missing[0].fragment], self.recover)
        deltas = yield from together([load_delta(self.run, self.arithmetic, state, offer) for offer in missing])
        for offer, delta in zip(missing, deltas, strict=True):
            if isinstance(delta, str):
                self.inbox.drop(offer, delta)
            else:
                self.loaded[offer.id] = delta
        return [offer for offer in offers if offer.id in self.loaded]


def judged(
    run: RunFormat,
    state: RunState,
    offers: Sequence[Offer],
    loaded: Mapping[OfferId, LoadedDelta],
    believed: Callable[[Offer], int],
) -> Candidates:
    """The offers judged together, by the very norms that the log will state."""
    run, counted = state.with_members(run), [believed(offer) for offer in offers]
    known = state.norms.get(fragment_of_slot(state.slot, run.num_fragments), NOTHING)
    deltas = [
        JudgedDelta(
            learner=offer.learner,
            steps=counted_steps(offer.steps, offer.tokens, tokens),
            stated=offer.steps,
            norm=logged_norm(loaded[offer.id].norm),
            weight=offered_weight(run, offer.learner, offer.tokens, offer.steps, tokens),
        )
        for offer, tokens in zip(offers, counted, strict=True)
    ]
    verdicts = judge(known, deltas, run.settings.sync.clip)
    fit = tuple(
        FitOffer(offer, loaded[offer.id], tokens, delta.norm, verdict.weight, verdict.scale)
        for offer, tokens, delta, verdict in zip(offers, counted, deltas, verdicts, strict=True)
    )
    return Candidates(fit, tuple(verdict.reason for verdict in verdicts if verdict.reason))


def merge_commit(
    run: RunFormat,
    state: RunState,
    candidates: Candidates,
    merged: Merged,
    output: FragmentVersion,
    facts: SlotFacts,
    grace: Grace,
    slot_s: float,
    opens_in_s: float,
    reason: str,
    outcomes: tuple[Outcome, ...],
) -> Merge:
    """`state`: before it. `opens_in_s`: from now until the next slot's window begins, at the earliest."""
    inputs = tuple(map(_input, candidates.fit, merged.cosines))
    return Merge(
        slot=output.slot,
        inputs=proven(state.with_members(run), state.learners, output.fragment, inputs),
        outputs=(output,),
        outcomes=in_order(outcomes),
        tokens=sum(one.believed for one in candidates.fit),
        quorum=facts.quorum,
        alive=facts.alive,
        grace_s=round(grace.seconds, 6),
        grace_used_s=round(facts.now_s - window_start_s(facts), 6),
        opens_s=round(opens_in_s, 6),
        slot_s=round(slot_s, 6),
        reason=told(reason, candidates.reasons),
    )


def _input(one: FitOffer, cosine: float) -> MergedOffer:
    offer = one.offer
    return MergedOffer(
        learner=offer.learner,
        incarnation=offer.incarnation,
        seq=offer.seq,
        base=offer.base,
        data_start=offer.data_start,
        data_end=offer.data_end,
        tokens=offer.tokens,
        steps=offer.steps,
        weight=one.weight,
        payload_digest=offer.payload_digest,
        payload_bytes=offer.payload_bytes,
        step_s=offer.timings.step_s,
        scale=one.scale,
        norm=one.norm,
        cosine=round(cosine, 4),
        believed=one.believed if one.believed != offer.tokens else None,
    )


def load_delta(run: RunFormat, arithmetic: Arithmetic, state: RunState, offer: Offer) -> Steps[LoadedDelta | str]:
    """An offer's delta, ready to merge at this head, whose version of the fragment is resident; or the reason of its
    refusal."""
    current = state.outputs[offer.fragment]
    payload = yield from read_payload(offer)
    if isinstance(payload, str):
        return payload
    base_weights: bytes | None = None
    if offer.base != current.version:
        base = state.version(offer.fragment, offer.base)
        if base is None:
            return "unknown_base"
        key = weights_key(base.fragment, base.version, base.epoch, base.weights_digest)
        found = yield from get_named(key, base.weights_digest, max_fragment_bytes(run.layout, base.fragment))
        if isinstance(found, str):
            return "unknown_base"
        base_weights = found
    return arithmetic.read_delta(offer, payload, base_weights)


def read_payload(offer: Offer) -> Steps[bytes | str]:
    """The bytes that the offer names, or the reason why they cannot be read. Other bytes than those are read again
    first, because a read may damage them, and the learner must not be blamed for that. At most the size that the offer
    states is read, which was checked against the layout before (see protocol/rules/merging.py)."""
    reason = "missing_payload"
    for _ in range(READS):
        payload: bytes | None = yield Get(delta_key(*offer.id, offer.payload_digest), offer.payload_bytes)
        if payload is None:
            return "missing_payload"
        if len(payload) != offer.payload_bytes:
            reason = "wrong_size"
        elif digest(payload) != offer.payload_digest:
            reason = "digest_mismatch"
        else:
            return payload
    return reason


def make_resident(run: RunFormat, arithmetic: Arithmetic, output: FragmentVersion, recover: Recover) -> Steps[None]:
    """Bring a committed version into memory. `recover` may compute its bytes from older versions and the deltas that
    the log names; raises DataCheckError if neither the bucket nor `recover` has them."""
    if arithmetic.holds(output.fragment, output.state_digest):
        return
    key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
    data = yield from get_named(key, output.state_digest, max_fragment_bytes(run.layout, output.fragment))
    if isinstance(data, str):
        problem, made = data, recover(output)
        if made is None or digest(made) != output.state_digest:
            raise DataCheckError(f"the committed state of fragment {output.fragment} {problem}", where=key)
        data = made
    arithmetic.restore(output.fragment, output.state_digest, data)


def write_surely(key: str, data: bytes) -> Steps[None]:
    """Create an object, and read its bytes back where the store does not check them itself: a commit that named a
    damaged object would stop the run for good."""
    answer = yield Create(key, data)
    if isinstance(answer, Created) and answer.checked:
        return
    seen = yield from get_named(key, digest(data), len(data))
    if not isinstance(answer, Created) or isinstance(seen, str):
        raise DataCheckError("the store holds other bytes than were written", where=key, hint="diloco doctor URL")
