"""The syncer of a fleet in virtual time: the product's decisions on offers that carry no payload."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_cli.protocol.eligibility import refusal
from diloco_cli.protocol.log import kept_versions
from diloco_cli.protocol.quorum import (
    Decision,
    Pace,
    SlotFacts,
    alive_within_s,
    decide_slot,
    grace_window,
    measured_pace,
)
from diloco_cli.protocol.records import Commit, CommitKind, Input, Offer, Output, RunFormat
from diloco_cli.protocol.schedule import fragment_of_slot
from diloco_cli.protocol.state import RunState, apply
from diloco_cli.protocol.tape import TapeMerge
from diloco_cli.protocol.weights import token_weight


@dataclass
class VirtualSyncer:
    """Collects offers, decides on the slot that is due, folds commits. `grace`: False closes the window (gamma = 0)."""

    run: RunFormat
    state: RunState
    merges: list[TapeMerge] = field(default_factory=list)
    pending: list[Offer] = field(default_factory=list)
    heard_s: dict[str, float] = field(default_factory=dict)
    slot_due_s: float = 0.0
    first_offer_s: float | None = None
    quorum_s: float | None = None

    def __post_init__(self) -> None:
        self.heard_s = {island.name: 0.0 for island in self.run.islands}
        self.pace = Pace(min(i.local_steps * i.step_s for i in self.run.islands) / self.run.num_fragments)

    def receive(self, offer: Offer, now_s: float) -> None:
        self.pending.append(offer)
        self.heard_s[offer.learner] = now_s

    def decide(self, now_s: float) -> Decision:
        present, sync = self._candidates(), self.run.settings.sync
        if present and self.first_offer_s is None:
            self.first_offer_s = now_s
        if len(present) >= sync.quorum and self.quorum_s is None:
            self.quorum_s = now_s
        self._facts = SlotFacts(
            present=len(present),
            alive=self._alive(now_s),
            quorum=sync.quorum,
            first_offer_s=self.first_offer_s,
            quorum_reached_s=self.quorum_s,
            later_offers=any(offer not in present for offer in self.pending),
            waiting_since_s=self.slot_due_s,
            now_s=now_s,
        )
        return decide_slot(self._facts, grace_window(sync.overlap, self.pace, sync.grace.gamma), sync.skip_after_s)

    def carry_out(self, decision: Decision, now_s: float) -> RunState:
        """The log's new head after a merge or a skip."""
        if decision.action == "merge":
            self._merge()
        else:
            self._commit("skip")
        self.slot_due_s, self.first_offer_s, self.quorum_s = now_s, None, None
        return self.state

    def _alive(self, now_s: float) -> int:
        within_s = alive_within_s(self.pace)
        return sum(now_s - heard_s <= within_s for heard_s in self.heard_s.values())

    def _candidates(self) -> list[Offer]:
        """The newest eligible offer per learner for the fragment that is due, sorted by learner."""
        self.pending = [
            offer for offer in self.pending if refusal(_full_claim(offer, self.run), self.state, self.run) is None
        ]
        fragment = fragment_of_slot(self.state.slot, self.run.num_fragments)
        newest: dict[str, Offer] = {}
        for offer in self.pending:
            if offer.fragment == fragment and offer.seq >= newest.get(offer.learner, offer).seq:
                newest[offer.learner] = offer
        return [newest[name] for name in sorted(newest)]

    def _merge(self) -> None:
        offers, sync = self._candidates(), self.run.settings.sync
        weights = [token_weight(offer.tokens, offer.steps, sync.weight) for offer in offers]
        slot, n = self.state.slot, self.state.n + 1
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        self._commit(
            "merge",
            inputs=tuple(_input(offer, weight) for offer, weight in zip(offers, weights, strict=True)),
            outputs=(Output(fragment, n, slot, 1, "", ""),),
        )
        inputs = tuple((offer.id, weight) for offer, weight in zip(offers, weights, strict=True))
        self.merges.append(TapeMerge(n, slot, fragment, inputs, self.state.tokens(self.run.layout)))
        self._measure(offers)
        self.pending = [offer for offer in self.pending if offer not in offers]

    def _commit(self, kind: CommitKind, inputs: tuple[Input, ...] = (), outputs: tuple[Output, ...] = ()) -> None:
        commit = Commit(
            self.state.n + 1, kind, 1, "", self.state.digest, "", self.run.software,
            slot=self.state.slot, inputs=inputs, outputs=outputs, alive=self._facts.alive,
        )  # fmt: skip
        self.state = apply(self.state, commit, str(commit.n), self.run.layout, kept_versions(self.run))

    def _measure(self, offers: list[Offer]) -> None:
        """The syncer's moving averages, from the participants' own timings; merging takes no virtual time."""
        facts = self._facts
        paces = [offer.timings.slot_s for offer in offers if offer.timings.slot_s > 0]
        reached_s = facts.now_s if facts.quorum_reached_s is None else facts.quorum_reached_s
        quorum_s = reached_s - (facts.now_s if facts.first_offer_s is None else facts.first_offer_s)
        sync_s = max(offer.timings.upload_s + offer.timings.adoption_s for offer in offers)
        self.pace = measured_pace(self.pace, min(paces, default=None), quorum_s, sync_s)


def _full_claim(offer: Offer, run: RunFormat) -> Offer:
    """The same offer as if no slice had been lost: eligibility expects a full batch at every step."""
    island = run.island(offer.learner)
    assert island is not None
    tokens = offer.steps * island.batch_tokens
    return replace(offer, tokens=tokens, data_end=offer.data_start + tokens)


def _input(offer: Offer, weight: float) -> Input:
    return Input(
        *offer.id, offer.base, offer.data_start, offer.data_end, offer.tokens, offer.steps, weight,
        offer.payload_digest, offer.payload_bytes, offer.timings.step_s,
    )  # fmt: skip
