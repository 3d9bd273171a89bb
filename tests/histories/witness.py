"""Observes a learner from within: keeps the account of its data, and checks what the bucket cannot show."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco_cli.protocol.actors.learner import Learner, Observer, Phase
from diloco_cli.protocol.actors.progress import OfferDraft, is_over
from diloco_cli.protocol.log.records import FragmentVersion, Offer, OfferId
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import max_steps
from diloco_cli.protocol.rules.pacing import beginner
from diloco_cli.signing import learner_signer
from tests.histories.ledger import Account
from tests.histories.moments import MomentsWatch
from tests.histories.replayer import expect

if TYPE_CHECKING:
    from tests.histories.learner import SimulatedLearner


@dataclass
class Beliefs:
    """What learners believe: the bytes of every offer whose publication they saw succeed, and their adoptions (learner,
    version, bytes of its weights). `harmful`: offers whose deltas do harm (harm.py). `accounts`: the account of each
    incarnation."""

    offers: dict[OfferId, bytes] = field(default_factory=dict)
    harmful: set[OfferId] = field(default_factory=set)
    accounts: list[Account] = field(default_factory=list)
    on_adoption: Callable[[str, FragmentVersion, bytes], None] = lambda learner, output, weights: None
    on_publication: Callable[[OfferId, bytes], None] = lambda offer_id, data: None
    moments: MomentsWatch | None = None

    def published(self, offer_id: OfferId, data: bytes) -> None:
        """The offer's learner has seen the store accept it."""
        self.offers[offer_id] = data
        self.on_publication(offer_id, data)


class Witness(Observer):
    """Keeps the account of one incarnation, apart from the books of the product's code. `stepped_at`: where its steps
    ended, in tokens; `since_news`: how many steps since the learner last read a merge in the log; `local_steps`: H_i
    at that merge; `versions`: each fragment's last adopted version; `offered`: each fragment's newest offer."""

    def __init__(self, learner: SimulatedLearner, seen: Beliefs) -> None:
        self.learner, self.seen = learner, seen
        self.account: Account | None = None
        self.stepped_at: list[int] = []
        self.is_saving = False
        self.since_news = 0
        self.local_steps = 1.0
        self.versions: dict[int, FragmentVersion] = {}
        self.offered: dict[int, OfferDraft] = {}
        self._merges = self._floor = 0
        self._kept_out = self._went_back = False

    def began(self, learner: Learner) -> None:
        start, fragments = learner.joined.data_start, learner.run.num_fragments
        self.account = Account(
            learner.name, learner.joined.incarnation, [start] * fragments, [start] * fragments,
            public=learner.run.keyring.public(learner_signer(learner.name)),
        )  # fmt: skip
        self.seen.accounts.append(self.account)
        self._kept_out = self._must_wait()
        if self.seen.moments is not None:
            restored = self.learner.integers.restored
            self.seen.moments.restored(learner.name, learner.joined.incarnation, restored)
            self.seen.moments.began(learner.name, learner.joined.incarnation, start)
        self._check_moments(learner.state.n)

    def _check_moments(self, head: int) -> None:
        if self.seen.moments is not None:
            self.seen.moments.fitting(self.learner.name, head, self.learner.integers.as_of)

    def rolled_back(self, learner: Learner, to: int) -> None:
        self._went_back = True
        self._check_moments(learner.state.n)

    def took(self, phase: Phase, seconds: float) -> None:
        """Training never waits for the store, except for moments after a rollback, and waits for news only at its
        bounds."""
        learner, sync = self.learner, self.learner.run.settings.sync
        kept_out, self._kept_out = self._kept_out, self._must_wait()
        went_back, self._went_back = self._went_back, False
        if phase == "hear":
            self.local_steps = learner.progress.local_steps
        if phase == "step" or seconds <= 0:
            return
        bound = phase == "wait" and (
            self.since_news >= sync.drift_rounds * self.local_steps or kept_out or self._kept_out
        )
        may_wait = bound or (phase == "hear" and went_back)
        expect(may_wait, "pace", f"{learner.name} waits for {seconds:.2f} s, in {phase}, and might step on")

    def _must_wait(self) -> bool:
        """Whether the learner must wait: in quarantine, while another learner begins the run alone (cold start), or
        because it holds as much as an offer can."""
        learner = self.learner
        first = beginner(learner.run, learner.state.slot)
        is_held = first not in (None, learner.name) or learner.progress.quarantined is not None
        return is_held or self._drifted() >= max_steps(learner.run)

    def _drifted(self) -> int:
        """Its steps that are in no version, of the fragment with the most."""
        assert self.account is not None
        return len(self.stepped_at) - bisect_right(self.stepped_at, min(self.account.held))

    def stepped(self, position: int, tokens: int) -> None:
        assert self.account is not None
        self.account.stepped(position, position + tokens)
        self.stepped_at.append(position + tokens)
        self.local_steps = self.learner.progress.local_steps
        self._check_drift(self.learner.state)
        self._check_saves()

    def _check_saves(self) -> None:
        """Check that the age of saved moments, and so a restart's loss, is bounded. While a save is on its way no other
        is made; the next step after it makes one."""
        learner, training = self.learner, self.learner.integers
        was_saving, self.is_saving = self.is_saving, learner.uploaded_at < learner.saved_at
        if was_saving or self.is_saving:
            return
        most = learner.run.settings.train.inner.save_every * learner.progress.island.local_steps
        unsaved = training.optimizer_steps - training.saved_at
        text = f"{learner.name} has stepped {unsaved} times without saving its moments"
        expect(unsaved <= most or not most, "loss", text)

    def _check_drift(self, state: RunState) -> None:
        """Check that progress that is in no version stays within the drift bound."""
        if (state.merges, state.base_floor) != (self._merges, self._floor):
            self._merges, self._floor, self.since_news = state.merges, state.base_floor, 0
        self.since_news += 1
        sync = self.learner.run.settings.sync
        steps, most = min(self.since_news, self._drifted()), sync.drift_rounds * sync.every
        expect(steps <= most, "drift", f"{self.learner.name} has stepped {steps} times without news, more than {most}")

    def sent(self, draft: OfferDraft) -> None:
        assert self.account is not None
        who, fragment = f"{self.learner.name}, offer {draft.seq}", draft.fragment
        adopted, floor = self.versions[fragment].version, self.learner.state.base_floor
        expect(draft.base.version == adopted, "6", f"{who} is based on {adopted}, and names {draft.base.version}")
        expect(adopted >= floor, "6", f"{who} is based on {adopted}, which is void since commit {floor}")
        applied = self.learner.state.learner(self.learner.name).applied.get(fragment)
        end = 0 if applied is None else applied.data_end
        expect(draft.data_start >= end, "2", f"{who} begins at {draft.data_start}, and data up to {end} is merged")
        self.offered[fragment] = draft
        self.account.sent(draft.fragment, draft.seq, draft.data_start, draft.data_end)

    def published(self, offer: Offer, data: bytes) -> None:
        steps = bisect_right(self.stepped_at, offer.data_end) - bisect_right(self.stepped_at, offer.data_start)
        text = f"{self.learner.name}, offer {offer.seq}, says {offer.steps} steps, and has made {steps}"
        expect(offer.steps == steps, "4", text)
        self.seen.published(offer.id, data)

    def adopted(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        before = self.versions.get(output.fragment)
        newer = before is None or output.version > before.version
        expect(newer, "6", f"{self.learner.name} adopted version {output.version} where it had a newer one")
        self.versions[output.fragment] = output
        self.seen.on_adoption(self.learner.name, output, self.learner.weights.pop(output))
        if self.account is not None and since is not None:
            self.account.kept(output.fragment, since.data_end)

    def gave_up(self, fragment: int, reason: str) -> None:
        assert self.account is not None
        self.account.gave_up(fragment, reason, self.learner.progress.position)

    def left(self) -> None:
        """Check that a learner that leaves in order knows the outcome of its offers, if there was time."""
        state, learner = self.learner.state, self.learner
        if not learner.leaves() or is_over(state, learner.joined.state.n) or not learner.may_drain():
            return
        known = state.learner(learner.name)
        for draft in self.offered.values():
            settled = (
                draft.slot < state.slot or draft.base.version < state.base_floor
                or known.floor > learner.joined.incarnation or known.has_outcome(draft.seq)
            )  # fmt: skip
            expect(settled, "loss", f"{learner.name} left, and did not wait for what became of its offer {draft.seq}")
