"""What the commit of a merge says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_cli.protocol.actors.ports import Merged
from diloco_cli.protocol.log.commits import Merge
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, Offer, OfferId, Outcome
from diloco_cli.protocol.rules.mixing import as_logged
from diloco_cli.protocol.rules.quorum import Grace, SlotFacts, window_start_s


def merge_commit(
    offers: Sequence[Offer], weights: Mapping[OfferId, float], merged: Merged, output: FragmentVersion,
    facts: SlotFacts, grace: Grace, slot_s: float, opens_in_s: float, reason: str, outcomes: tuple[Outcome, ...],
) -> Merge:  # fmt: skip
    """`opens_in_s`: from now until the next slot's window begins, at the earliest."""
    scales = merged.scales or [1.0] * len(offers)
    return Merge(
        slot=output.slot,
        inputs=tuple(_input(o, weights[o.id], scale) for o, scale in zip(offers, scales, strict=True)),
        outputs=(output,),
        outcomes=outcomes,
        tokens=sum(offer.tokens for offer in offers),
        quorum=facts.quorum,
        alive=facts.alive,
        grace_s=round(grace.seconds, 6),
        grace_used_s=round(facts.now_s - window_start_s(facts), 6),
        opens_s=round(opens_in_s, 6),
        slot_s=round(slot_s, 6),
        agreement=as_logged(merged.agreement),
        reason=reason,
    )


def _input(offer: Offer, weight: float, scale: float) -> MergedOffer:
    return MergedOffer(
        offer.learner, offer.incarnation, offer.seq, offer.base, offer.data_start, offer.data_end,
        offer.tokens, offer.steps, weight, offer.payload_digest, offer.payload_bytes,
        offer.timings.step_s, scale,
    )  # fmt: skip
