"""The syncer of a fleet in virtual time: the product's decisions on offers that carry no payload."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_cli.protocol.inbox import Inbox
from diloco_cli.protocol.log import kept_versions
from diloco_cli.protocol.quorum import (
    Decision,
    Pace,
    Watch,
    alive_within_s,
    decide_slot,
    grace_window,
    late_offers_count_after_s,
    measured_pace,
)
from diloco_cli.protocol.records import Commit, CommitKind, Input, Offer, OfferId, Output, RunFormat
from diloco_cli.protocol.schedule import fragment_of_slot
from diloco_cli.protocol.state import RunState, apply
from diloco_cli.protocol.tape import TapeMerge
from diloco_cli.protocol.weights import token_weight


@dataclass
class VirtualSyncer:
    """Collects offers, decides on the slot that is due, folds commits; `merges` is what a tape tells of them."""

    run: RunFormat
    state: RunState
    merges: list[TapeMerge] = field(default_factory=list)
    claimed: dict[OfferId, Offer] = field(default_factory=dict)
    watch: Watch = field(default_factory=lambda: Watch(0.0))

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.run)
        self.inbox.heard_s = {island.name: 0.0 for island in self.run.islands}
        self.pace = Pace(min(i.local_steps * i.step_s for i in self.run.islands) / self.run.num_fragments)

    def receive(self, offer: Offer, now_s: float) -> None:
        self.claimed[offer.id] = offer
        self.inbox.deliver(_full_claim(offer, self.run))
        self.inbox.heard_s[offer.learner] = now_s

    def decide(self, now_s: float) -> Decision:
        slot, sync = self.state.slot, self.run.settings.sync
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        self.inbox.sort_out(self.state)
        self._facts = self.watch.look(
            slot, [offer.slot for offer in self.inbox.candidates(fragment)], self._alive(now_s), sync.quorum,
            self.inbox.waits_for_later(fragment), late_offers_count_after_s(self.pace, sync.skip_after_s), now_s,
        )  # fmt: skip
        return decide_slot(self._facts, grace_window(sync.overlap, self.pace, sync.grace.gamma), sync.skip_after_s)

    def carry_out(self, decision: Decision, now_s: float) -> RunState:
        """The log's new head after a merge or a skip."""
        if decision.action == "merge":
            self._merge()
        else:
            self._commit("skip")
        self.watch = Watch(now_s)
        return self.state

    def _alive(self, now_s: float) -> int:
        within_s = alive_within_s(self.pace)
        return sum(now_s - heard_s <= within_s for heard_s in self.inbox.heard_s.values())

    @property
    def skips_at_s(self) -> float:
        """When a slot that nobody makes mergeable may be skipped."""
        return self.watch.due_s + self.run.settings.sync.skip_after_s

    def _merge(self) -> None:
        slot, n, sync = self.state.slot, self.state.n + 1, self.run.settings.sync
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        present = self.inbox.candidates(fragment)
        self.inbox.forget(present)
        offers = [self.claimed.pop(offer.id) for offer in present]
        weights = [token_weight(offer.tokens, offer.steps, sync.weight) for offer in offers]
        self._commit(
            "merge",
            inputs=tuple(_input(offer, weight) for offer, weight in zip(offers, weights, strict=True)),
            outputs=(Output(fragment, n, slot, 1, "", ""),),
        )
        inputs = tuple((offer.id, weight) for offer, weight in zip(offers, weights, strict=True))
        self.merges.append(TapeMerge(n, slot, fragment, inputs, self.state.tokens(self.run.layout)))
        self._measure(offers)

    def _commit(self, kind: CommitKind, inputs: tuple[Input, ...] = (), outputs: tuple[Output, ...] = ()) -> None:
        commit = Commit(
            self.state.n + 1, kind, 1, "", self.state.digest, "", self.run.software,
            slot=self.state.slot, inputs=inputs, fates=self.inbox.take_fates(), outputs=outputs,
            alive=self._facts.alive,
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
