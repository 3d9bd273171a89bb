"""The offers for the slot that is due: their payloads are read, and then judged together by their norms.

Nothing is refused for its norm before the slot's commit: who else offers decides on it too (protocol/rules/norms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diloco_cli.protocol.actors.inbox import Inbox, in_order
from diloco_cli.protocol.actors.merging import Recover, load_delta, make_resident
from diloco_cli.protocol.actors.ports import Arithmetic, LoadedDelta, Merged
from diloco_cli.protocol.log.commits import Merge, Skip
from diloco_cli.protocol.log.directions import flipping_of, logged_cosine, opposes
from diloco_cli.protocol.log.norms import NOTHING, logged_norm
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    MergedOffer,
    Offer,
    OfferId,
    Outcome,
    RunFormat,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.together import together
from diloco_cli.protocol.rules.eligibility import offered_weight, refusal, round_steps
from diloco_cli.protocol.rules.merging import as_logged
from diloco_cli.protocol.rules.norms import JudgedDelta, judge
from diloco_cli.protocol.rules.quorum import Grace, SlotFacts, window_start_s

REASONS_TOLD = 3  # in one commit
AHEAD_BYTES = 1 << 30  # of payloads that wait for later slots: on the syncer's disk
MAX_AHEAD = 256  # of them: each is an open file
AHEAD_AT_ONCE_BYTES = 64 << 20  # that one turn reads, for which the due slot may have to wait; larger ones are not


@dataclass(frozen=True)
class FitOffer:
    """An offer that may be merged, with all that its merge needs and the log states."""

    offer: Offer
    delta: LoadedDelta
    norm: float
    weight: float
    scale: float


@dataclass(frozen=True)
class Candidates:
    """A slot's `offers` with sound payloads, sorted by learner: those that `fit`, and the outcomes of those that are
    refused if the slot is merged now; `reasons` says why. `step`: the factor by which the merge is shortened. `alone`:
    those that are refused if the slot is skipped, for which nobody else's delta counts, with their reasons. `agrees`:
    of those that fit, once they have been compared, by values that `nonce` chose."""

    offers: tuple[Offer, ...] = ()
    fit: tuple[FitOffer, ...] = ()
    refused: tuple[Outcome, ...] = ()
    reasons: tuple[str, ...] = ()
    step: float = 1.0
    alone: tuple[tuple[Outcome, str], ...] = ()
    agrees: tuple[float, ...] = ()
    nonce: str = ""

    @property
    def learners(self) -> set[str]:
        """Of those that fit."""
        return {one.offer.learner for one in self.fit}

    @property
    def unfit(self) -> list[Offer]:
        """The offers that are refused."""
        fit = self.learners
        return [offer for offer in self.offers if offer.learner not in fit]

    @property
    def unfit_alone(self) -> list[Offer]:
        """The offers that are refused if the slot is skipped."""
        names = {outcome.learner for outcome, _ in self.alone}
        return [offer for offer in self.offers if offer.learner in names]


def told(reason: str, reasons: tuple[str, ...]) -> str:
    """The reason of the slot's commit, with those of the refusals."""
    more = len(reasons) - REASONS_TOLD
    return "; ".join((reason, *reasons[:REASONS_TOLD], *([f"and {more} more"] if more > 0 else [])))


@dataclass
class Loader:
    """Reads the candidates' payloads, each once, and keeps them until the slot is decided. While a slot waits, it reads
    those for later slots, of other fragments. `ahead`: offers whose payloads it has looked for so."""

    run: RunFormat
    arithmetic: Arithmetic
    inbox: Inbox
    recover: Recover
    nonce: Callable[[], str]
    loaded: dict[OfferId, LoadedDelta] = field(default_factory=dict)
    measured: set[OfferId] = field(default_factory=set)
    ahead: dict[OfferId, int] = field(default_factory=dict)

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

    def candidates(self, state: RunState) -> Steps[Candidates]:
        """Of the slot that is due; offers whose payload is not sound are dropped from the inbox."""
        offers = yield from self.load(state)
        self._keep(self.inbox.pending())
        self.measured &= self.loaded.keys()
        found = judged(self.run, state, offers, self.loaded)
        while self._drop_false_claims(found):
            found = judged(self.run, state, [offer for offer in offers if offer.id in self.loaded], self.loaded)
        return found

    def compared(self, state: RunState, found: Candidates) -> Candidates:
        """With the directions of those that fit; judged once more if one of them flips. A merge alone needs that, since
        nobody is refused for a direction."""
        fragment, nonce = fragment_of_slot(state.slot, self.run.num_fragments), self.nonce()
        cosines = self.arithmetic.agreements(fragment, [one.delta for one in found.fit], nonce)
        agrees = tuple(map(logged_cosine, cosines))
        flipping = flipping_of(dict(zip((one.offer.learner for one in found.fit), agrees, strict=False)))
        if flipping:
            found = judged(self.run, state, found.offers, self.loaded, flipping)
        return replace(found, agrees=agrees, nonce=nonce)

    def _keep(self, offers: Iterable[Offer]) -> None:
        left = {offer.id for offer in offers}
        self.loaded = {known: delta for known, delta in self.loaded.items() if known in left}
        self.ahead = {known: size for known, size in self.ahead.items() if known in left}

    def merged(self, fragment: int) -> None:
        """The fragment has a new version, on which no delta that was read before can be merged."""
        self._keep(offer for offer in self.inbox.pending() if offer.fragment != fragment)

    def forget(self) -> None:
        """Every fragment has another version, or what was read does not count any more."""
        self.loaded, self.ahead = {}, {}
        self.measured.clear()

    def look_ahead(self, state: RunState) -> Steps[None]:
        """Read some of the payloads for the next slots. One that is not sound is read again when its slot is due."""
        chosen = self._coming(state)
        deltas = yield from together([load_delta(self.run, self.arithmetic, state, offer) for offer in chosen])
        for offer, delta in zip(chosen, deltas, strict=True):
            self.ahead[offer.id] = 0 if isinstance(delta, str) else offer.payload_bytes
            if not isinstance(delta, str):
                self.loaded[offer.id] = delta

    def _coming(self, state: RunState) -> list[Offer]:
        """The newest offer of each learner for each of the next slots, as many as may be read now; none for a fragment
        whose version is not resident yet."""
        newest: dict[tuple[int, str], Offer] = {}
        for offer in self.inbox.pending():
            if state.slot < offer.slot < state.slot + self.run.num_fragments:
                rival = newest.setdefault((offer.slot, offer.learner), offer)
                newest[offer.slot, offer.learner] = max(rival, offer, key=lambda o: (o.incarnation, o.seq))
        left = min(AHEAD_AT_ONCE_BYTES, AHEAD_BYTES - sum(self.ahead.values()))
        chosen: list[Offer] = []
        for _, offer in sorted(newest.items()):
            resident = self.arithmetic.holds(offer.fragment, state.outputs[offer.fragment].state_digest)
            if offer.id in self.ahead or not resident:
                continue
            left -= offer.payload_bytes
            if left < 0 or len(self.ahead) + len(chosen) >= MAX_AHEAD:
                break
            chosen.append(offer)
        return chosen

    def _drop_false_claims(self, found: Candidates) -> bool:
        """Of offers that would be refused for their norm: nobody has measured it yet, and the log will remember it."""
        unmeasured = [offer for offer in found.unfit if offer.id not in self.measured]
        for offer in unmeasured:
            self.measured.add(offer.id)
            reason = self.arithmetic.false_claim(offer.fragment, self.loaded[offer.id])
            if reason is not None:
                self.inbox.drop(offer, reason)
                del self.loaded[offer.id]
        return any(offer.id not in self.loaded for offer in unmeasured)

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
    run: RunFormat, state: RunState, offers: Sequence[Offer], loaded: Mapping[OfferId, LoadedDelta],
    flipping: Collection[str] = (),
) -> Candidates:  # fmt: skip
    """The offers judged together, by the very norms that the log will state, and by the learners whose deltas flip."""
    sync = run.settings.sync
    known = state.norms.get(fragment_of_slot(state.slot, run.num_fragments), NOTHING)
    run = state.with_members(run)
    deltas = [
        JudgedDelta(
            o.learner, o.steps, logged_norm(loaded[o.id].norm), offered_weight(run, o.learner, o.tokens, o.steps),
            round_steps=round_steps(run, o.learner),
            opposes=opposes(state.opposition, o.learner) or o.learner in flipping,
        )
        for o in offers
    ]  # fmt: skip
    judgement = judge(known, deltas, sync)
    fit, refused, reasons, alone = [], [], [], []
    for offer, delta, verdict in zip(offers, deltas, judgement.verdicts, strict=True):
        if verdict.refused:
            outcome = Outcome(*offer.id, offer.fragment, "norm_cap", delta.norm, delta.steps)
            refused.append(outcome)
            reasons.append(verdict.refused)
            by_memory = judge(known, [delta], sync).verdicts[0].refused
            alone += [(outcome, by_memory)] if by_memory else []
        else:
            if delta.opposes:
                reasons.append(f"{delta.learner}'s deltas point against the others': it weighs next to nothing")
            fit.append(FitOffer(offer, loaded[offer.id], delta.norm, verdict.weight, verdict.scale))
    return Candidates(tuple(offers), tuple(fit), tuple(refused), tuple(reasons), judgement.step, tuple(alone))


def merge_commit(
    candidates: Candidates, merged: Merged, output: FragmentVersion, facts: SlotFacts, grace: Grace,
    slot_s: float, opens_in_s: float, reason: str, outcomes: tuple[Outcome, ...],
) -> Merge:  # fmt: skip
    """`opens_in_s`: from now until the next slot's window begins, at the earliest."""
    return Merge(
        slot=output.slot,
        nonce=candidates.nonce,
        inputs=tuple(map(_input, candidates.fit, candidates.agrees or [None] * len(candidates.fit))),
        outputs=(output,),
        outcomes=in_order(outcomes + candidates.refused),
        tokens=sum(one.offer.tokens for one in candidates.fit),
        quorum=facts.quorum,
        alive=facts.alive,
        grace_s=round(grace.seconds, 6),
        grace_used_s=round(facts.now_s - window_start_s(facts), 6),
        opens_s=round(opens_in_s, 6),
        slot_s=round(slot_s, 6),
        agreement=as_logged(merged.agreement),
        step=candidates.step,
        reason=told(reason, candidates.reasons),
    )


def skip_commit(candidates: Candidates, slot: int, reason: str, outcomes: tuple[Outcome, ...]) -> Skip:
    return Skip(
        slot=slot,
        reason=told(reason, tuple(why for _, why in candidates.alone)),
        outcomes=in_order(outcomes + tuple(outcome for outcome, _ in candidates.alone)),
    )


def _input(one: FitOffer, agrees: float | None) -> MergedOffer:
    offer = one.offer
    return MergedOffer(
        offer.learner, offer.incarnation, offer.seq, offer.base, offer.data_start, offer.data_end,
        offer.tokens, offer.steps, one.weight, offer.payload_digest, offer.payload_bytes,
        offer.timings.step_s, one.scale, norm=one.norm, agrees=agrees,
    )  # fmt: skip
