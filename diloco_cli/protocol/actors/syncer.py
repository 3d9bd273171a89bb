"""The syncer as a state machine: it reads offers, decides, merges, and appends commits.

It holds no torch and no clock: arithmetic and evaluation come in as ports, everything else is yielded operations.
Its states are those of protocol/log/state.py.

What a syncer does when a write of its finds no room: it collects, so that the write can go on by itself.

The write waits meanwhile, and with it the syncer's turn, so this is a turn of its own. It raises no state of the
syncer: a floor that it commits takes the number of the commit that waits, and the syncer finds that out when it tries
that number. It then decides anew, or writes the same again; outcomes that the commit was to bring go with the next one.
What the run's settings promise to keep stays; readers have their grace.

A syncer that was fenced: by another syncer, which has its place, or by an operator's command, which leaves again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import inf
from typing import Any

from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, FencedError, TryAgainError
from diloco_cli.protocol.actors.collection import Housekeeper, collected, floor_in_turn
from diloco_cli.protocol.actors.evaluating import Evaluations
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.membership import JoinQueue, admission
from diloco_cli.protocol.actors.merging import Candidates, Loader, Recover, merge_commit, skip_commit, write_surely
from diloco_cli.protocol.actors.ports import Arithmetic, Evaluator, Merged, Refused
from diloco_cli.protocol.actors.progress import may_serve_again
from diloco_cli.protocol.actors.repair import Repairer
from diloco_cli.protocol.actors.requests import answer_to, is_at_rest, newest_request, pending_requests
from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.claims import claim_epoch
from diloco_cli.protocol.log.commit_log import SNAPSHOT_EVERY, append, fence, next_commit, read_log, write_snapshot
from diloco_cli.protocol.log.heartbeats import Cadence, sealed
from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key, state_key, weights_key
from diloco_cli.protocol.log.operations import MAX_BYTES_AT_ONCE, Now, Put, Steps, together
from diloco_cli.protocol.log.records import FragmentVersion, Outcome, ProcessClaim, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.state import SYNCER as SYNCER_STATES
from diloco_cli.protocol.log.state import RunPhase, RunState, SyncerState, moved
from diloco_cli.protocol.rules.divergence import response_to
from diloco_cli.protocol.rules.pacing import Pacer, pause_s, requests_every_s, watch_every_s
from diloco_cli.protocol.rules.quorum import (
    Grace,
    Pace,
    SlotFacts,
    Watch,
    alive_within_s,
    decide_slot,
    grace_window,
    next_window_s,
    patience_s,
)
from diloco_cli.signing import LOG

HEARTBEAT_EVERY_S = 3.0
OUTCOMES_WAIT_SLOTS = 2
MADE_ONCE = (commits.Evaluation, commits.Refuse, commits.Membership)  # what they tell is not found out again


class Syncer:
    """One syncer process of a run."""

    def __init__(
        self,
        run: RunFormat,
        claim: ProcessClaim,
        arithmetic: Arithmetic,
        evaluator: Evaluator,
        time_text: Callable[[], str],
        nonce: Callable[[], str],
        on_commit: Callable[[RunState, commits.Commit], None] = lambda state, commit: None,
        heartbeat_facts: Callable[[], dict[str, Any]] = dict,
        recover: Recover = lambda output: None,
        because: str = "",
    ) -> None:
        self.run, self.claim, self.because = run, claim, because
        self.arithmetic, self.evaluations = arithmetic, Evaluations(run, evaluator)
        self.time_text, self.nonce = time_text, nonce
        self.on_commit, self.heartbeat_facts, self.recover = on_commit, heartbeat_facts, recover
        self.state = RunState()
        self.epoch = 0
        self.doing = SyncerState.READING
        self.inbox, self.joins = Inbox(run), JoinQueue(run)
        self.loader = Loader(run, arithmetic, self.inbox, recover)
        self.pacer = Pacer(run)
        self.watch: Watch | None = None
        self.window_from_s = -inf  # of the slot that is due, at the earliest
        self.outcomes_since_s: float | None = None
        self.housekeeper, self.repairer = Housekeeper(run), Repairer(run, arithmetic, recover)
        self.last_snapshot = 0
        self.next_request_s = self.next_incarnations_s = 0.0
        self.cadence = Cadence(HEARTBEAT_EVERY_S)
        self.reason = ""

    @property
    def pace(self) -> Pace:
        return self.pacer.pace

    def serve(self) -> Steps[RunState]:
        """Serve until the run is finished or stopped; a stopped run is served only after `diloco resume`. Raises
        FencedError when a newer syncer has taken over."""
        try:
            try:
                return (yield from self._serve())
            except DataCheckError:
                if self.epoch > 0:
                    yield from self._notice_successor()  # a successor may have collected the missing object
                raise
        except FencedError:
            self._go(SyncerState.FENCED)
            raise

    def _go(self, to: SyncerState) -> None:
        self.doing = moved(SYNCER_STATES, self.doing, to)

    def _serve(self) -> Steps[RunState]:
        self.state = yield from read_log(self.run)
        if self.state.phase == RunPhase.FINISHED or (yield from is_at_rest(self.run, self.state)):
            self._go(SyncerState.DONE)
            return self.state
        yield from self._take_over()
        while self.state.phase == RunPhase.RUNNING:
            if self._is_trained and (yield from self._finish()):
                break
            worked = yield from self._turn()
            yield from self.housekeeper.rest(self.state, 0.0 if worked else pause_s(self.pace.slot_s))
        self._go(SyncerState.DONE)
        yield from self.send_heartbeat((yield Now()), force=True)
        return self.state

    # -- becoming the syncer ------------------------------------------------------------------------------------

    def _take_over(self) -> Steps[None]:
        self._go(SyncerState.CLAIMING)
        self.epoch = yield from claim_epoch(self.run, self.claim, self.state)
        phase = self.state.phase
        while self.state.epoch < self.epoch:
            if self.state.phase not in (phase, RunPhase.RUNNING):
                return  # it ended, or was stopped, while this syncer was starting
            outputs = (yield from self._genesis()) if self.state.n < 0 else ()
            request = None
            if phase == RunPhase.STOPPED:  # what was left open by the stop does not act now
                request = yield from newest_request(self.run, self.state)
            who = ": ".join(filter(None, [f"{self.claim.host} pid {self.claim.pid}", self.because]))
            yield from self._commit(commits.EpochStart(outputs=outputs, reason=who, request=request))
        self.last_snapshot = self.state.n
        self.evaluations.begin(self.state)
        self.inbox.open(self.state, (yield Now()))
        self.window_from_s = -inf
        self.pacer.begin(self.state.window)
        self._go(SyncerState.SERVING)

    def _genesis(self) -> Steps[tuple[FragmentVersion, ...]]:
        """Version 0 of every fragment: every learner starts from it, or from a later version."""
        outputs = []
        for fragment, merged in enumerate(self.arithmetic.initial()):
            outputs.append((yield from self._publish(fragment, merged, version=0, slot=-1)))
        return tuple(outputs)

    def _publish(self, fragment: int, merged: Merged, version: int, slot: int) -> Steps[FragmentVersion]:
        """Write state and weights surely, at the same time, BEFORE the commit that names them."""
        output = FragmentVersion(fragment, version, slot, self.epoch, digest(merged.state), digest(merged.weights))
        state = write_surely(state_key(fragment, version, self.epoch, output.state_digest), merged.state)
        key = weights_key(fragment, version, self.epoch, output.weights_digest)
        pulse = self.send_heartbeat((yield Now()))  # a model's first versions may take long
        both_bytes = 2 * (len(merged.state) + len(merged.weights))  # in memory anyway
        steps = [pulse, state, write_surely(key, merged.weights)]
        yield from together(steps, max(both_bytes, MAX_BYTES_AT_ONCE))
        return output

    def _commit(self, draft: commits.Commit) -> Steps[bool]:
        """Append one record; True if it is in the log as drafted."""
        draft, before = self.drafted(draft), self.state
        self.state, mine = yield from append(self.run, self.state, draft)
        if mine:
            self.on_commit(self.state, structs.replace(draft, n=self.state.n, previous=before.digest))
        if self.state.n - self.last_snapshot >= SNAPSHOT_EVERY:
            yield from write_snapshot(self.run, self.state)
            self.last_snapshot = self.state.n
        return mine

    def _settle(self, draft: Callable[[tuple[Outcome, ...]], commits.Commit]) -> Steps[bool]:
        """Append one record with the outcomes that wait. If a floor has its number (room.py), they wait on."""
        outcomes = self.inbox.take_outcomes()
        mine = yield from self._commit(draft(outcomes))
        if not mine:
            self.inbox.give_back(outcomes)
        return mine

    def drafted(self, draft: commits.Commit) -> commits.Commit:
        """With what this syncer adds to each of its records."""
        nonce, software = draft.nonce or self.nonce(), self.run.software
        return structs.replace(draft, epoch=self.epoch, nonce=nonce, time=self.time_text(), software=software)

    # -- one turn of the loop -----------------------------------------------------------------------------------

    def _turn(self) -> Steps[bool]:
        """Do every kind of work that is due; True if something was committed."""
        now_s: float = yield Now()
        yield from self.send_heartbeat(now_s)
        if now_s >= self.next_request_s:
            self.next_request_s = now_s + requests_every_s(self.pace.slot_s)
            yield from self._notice_successor()
            if (yield from self._carry_out_request()):
                return True
        due: commits.Commit | None = self.housekeeper.due(self.state, now_s, self.pace.slot_s)
        due = due or (yield from self.repairer.due(self.state, self.epoch, self.pace.slot_s, self.inbox, self._pulse))
        if due is not None:
            return (yield from self._carry_out(due))
        if now_s >= self.next_incarnations_s:
            self.next_incarnations_s = now_s + watch_every_s(self.pace.slot_s)
            yield from self.inbox.look_for_incarnations(self.state, now_s)
            admits = yield from admission(self.run, self.state, self.joins)
            if admits is not None:
                self.inbox.expect(island.name for island in admits.islands)
                return (yield from self._carry_out(admits))
        yield from self.inbox.poll(self.state, now_s, self.pace.slot_s)
        due = yield from self.evaluations.due(self.state, self.epoch, self._pulse)
        if due is not None:
            return (yield from self._carry_out(due))
        return (yield from self._slot(now_s))

    def _notice_successor(self) -> Steps[None]:
        """Read the next commit: otherwise an idle syncer would notice its successor only when it commits."""
        later = yield from next_commit(self.run, self.state)
        if later is not None:
            fence(later, self.epoch)
            self.state = later

    def _carry_out_request(self) -> Steps[bool]:
        """Answer the next requests, in their order (protocol/actors/requests.py)."""
        pending = yield from pending_requests(self.run, self.state)
        if pending is None:
            return False
        answer = yield from answer_to(self.run, self.state, self.epoch, pending, self._pulse)
        return (yield from self._carry_out(answer))

    def _carry_out(self, answer: commits.Commit) -> Steps[bool]:
        match answer:
            case commits.Stop():
                yield from self._refuse_all()
            case commits.Rollback() | commits.Revoke():  # loaded deltas no longer fit, or are not genuine any more
                self.loader.forget()
                self.watch = None
        if isinstance(answer, commits.Stop):
            done = yield from self._settle(lambda outcomes: structs.replace(answer, outcomes=outcomes))
        else:
            done = yield from self._commit(answer)
            while not done and isinstance(answer, MADE_ONCE):
                done = yield from self._commit(answer)
        if isinstance(answer, commits.Revoke):
            self.inbox.sort_out(self.state)  # what the key has offered gets its outcome
        return done

    def _pulse(self) -> Steps[None]:
        yield from self.send_heartbeat((yield Now()))

    def _slot(self, now_s: float) -> Steps[bool]:
        """Decide on the slot that is due. Every offer that is in the bucket when its window closes counts: so all
        mailboxes are asked once more before."""
        sync, grace = self.run.settings.sync, grace_window(
            self.run.settings.sync.overlap, self.pace, self.run.settings.sync.grace.gamma
        )  # fmt: skip
        while True:
            candidates, facts = yield from self._present(now_s)
            decision = decide_slot(facts, grace, patience_s(sync.skip_after_s, self.pace.slot_s))
            closes = decision.action != "wait" and facts.present < facts.expected
            if not (closes and (yield from self.inbox.poll(self.state, now_s, self.pace.slot_s, everywhere=True))):
                break
        self.reason = decision.reason
        if decision.action == "wait":
            yield from self.loader.look_ahead(self.state)
            return (yield from self._settle_waiting_outcomes(now_s))
        if decision.action == "skip":
            done = yield from self._settle(partial(skip_commit, self.state.slot, decision.reason))
            self.window_from_s += self.pace.slot_s
            self.inbox.sort_out(self.state)
        else:
            done = yield from self._merge(candidates, facts, grace, decision.reason)
        self.watch = None
        return done

    def _present(self, now_s: float) -> Steps[tuple[Candidates, SlotFacts]]:
        """The offers for the slot that is due, and the facts for the decision on it."""
        slot, inbox = self.state.slot, self.inbox
        self.watch = self.watch or Watch(now_s, self.window_from_s)
        candidates = yield from self.loader.candidates(self.state)
        alive, ahead = self._alive(now_s), inbox.ahead(slot)
        passed = (alive & ahead) - candidates.learners
        facts = self.watch.look(
            len(candidates.fit), len(alive), self.run.settings.sync.quorum, bool(ahead), now_s, len(passed)
        )  # fmt: skip
        return candidates, facts

    def _settle_waiting_outcomes(self, now_s: float) -> Steps[bool]:
        """Outcomes go into the next merge's commit; if no merge comes soon, they get a commit of their own: a learner
        whose offers are all refused would otherwise wait for ever."""
        if not self.inbox.outcomes:
            self.outcomes_since_s = None
            return False
        if self.outcomes_since_s is None:
            self.outcomes_since_s = now_s
        if now_s - self.outcomes_since_s < OUTCOMES_WAIT_SLOTS * self.pace.slot_s:
            return False
        self.outcomes_since_s = None
        return (yield from self._settle(lambda outcomes: commits.Refuse(outcomes=outcomes)))

    def _alive(self, now_s: float) -> set[str]:
        within_s = alive_within_s(self.pace)
        heard = (name for name, heard_s in self.inbox.heard_s.items() if now_s - heard_s <= within_s)
        return {name for name in heard if self.state.learner(name).quarantined is None}

    # -- merging ------------------------------------------------------------------------------------------------

    def _merge(self, candidates: Candidates, facts: SlotFacts, grace: Grace, reason: str) -> Steps[bool]:
        self._go(SyncerState.MERGING)
        fragment = fragment_of_slot(self.state.slot, self.run.num_fragments)
        slot, version = self.state.slot, self.state.n + 1
        offers = candidates.offers
        merged = self.arithmetic.merge(slot, [(one.delta, one.weight, one.scale) for one in candidates.fit])
        if isinstance(merged, Refused):  # the next turn decides anew on the offers that are left
            for place, why in merged.reasons.items():
                self.inbox.drop(offers[place], why)
            self._go(SyncerState.SERVING)
            return False
        output = yield from self._publish(fragment, merged, version, slot)
        opens_s = next_window_s(facts, self.pace.slot_s)
        opens_in_s = opens_s - (yield Now())
        mine = yield from self._settle(
            partial(merge_commit, candidates, merged, output, facts, grace, self.pacer.told_slot_s, opens_in_s, reason)
        )
        if mine:
            self.arithmetic.settle(fragment, output.state_digest)
            self.pacer.merged(offers, facts, (yield Now()))
            self.window_from_s = opens_s
            self.inbox.forget(offers)
            self.loader.merged(fragment)
        else:
            self.loader.forget()
        self.inbox.sort_out(self.state)
        self._go(SyncerState.SERVING)
        return True

    # -- ending, and being seen ---------------------------------------------------------------------------------

    @property
    def _is_trained(self) -> bool:
        """Whether the target is reached, by merges whose loss has not jumped."""
        reached = self.state.tokens(self.run.layout) >= self.run.settings.train.tokens
        return reached and response_to(self.state, self.run.settings.evaluation).action == "none"

    def _finish(self) -> Steps[bool]:
        """The last evaluation, then the `finish` commit that settles every offer that could be found until then. False
        if that evaluation shows that the loss has jumped: then the run goes on."""
        self._go(SyncerState.FINISHING)
        evaluation = yield from self.evaluations.last(self.state, self._pulse)
        while evaluation is not None and not (yield from self._commit(evaluation)):
            pass
        if not self._is_trained:
            self._go(SyncerState.SERVING)
            return False
        yield from self.inbox.empty(self.state, (yield Now()))
        yield from self._refuse_all()
        tokens = self.state.tokens(self.run.layout)
        reason = f"{tokens:,} of {self.run.settings.train.tokens:,} tokens"
        while not (yield from self._settle(lambda outcomes: commits.Finish(outcomes=outcomes, reason=reason))):
            pass
        yield from write_snapshot(self.run, self.state)
        return True

    def _refuse_all(self) -> Steps[None]:
        """Refuse all pending offers because the run is over; the last commit takes the outcomes that are left then."""
        self.inbox.refuse_all("run_over")
        while self.state.phase == RunPhase.RUNNING and self.inbox.outcomes_left:
            yield from self._settle(lambda outcomes: commits.Refuse(outcomes=outcomes))

    def send_heartbeat(self, now_s: float, force: bool = False) -> Steps[None]:
        """Write the syncer's heartbeat if it is due; `force`: now."""
        if not self.cadence.is_due(now_s) and not force:
            return
        self.cadence.said(now_s, self.pace.slot_s)
        facts = {
            "state": self.doing, "epoch": self.epoch, "n": self.state.n, "host": self.claim.host, "reason": self.reason,
            "heartbeats": self.cadence.count, "slowest_s": round(self.cadence.slowest_s, 1),
            "garbage": asdict(self.housekeeper.collector.backlog(now_s)), **self.heartbeat_facts(),
        }  # fmt: skip
        key = heartbeat_key(SYNCER)
        yield Put(key, sealed(self.run.keyring, LOG, key, facts))


MAKES_FOR_S = 5.0  # then the write is tried again
WHY = "no space is left"


def make_room(syncer: Syncer) -> Steps[bool]:
    """Delete for a while; where nothing is left to delete, raise the floor as far as the settings allow. False if
    neither can be done now. Without an epoch, only what lies behind the log's floor goes."""
    run, collector = syncer.run, syncer.housekeeper.collector
    if syncer.state.n < 0:
        return False
    state = yield from read_log(run, syncer.state)
    now_s: float = yield Now()
    collector.look(state, now_s)
    if (yield from collector.work(state, now_s, MAKES_FOR_S)):
        return True
    floor = floor_in_turn(run, state, idle=True)
    if floor is None or state.epoch != syncer.epoch or not collector.is_done(state):
        return False
    _, mine = yield from append(run, state, syncer.drafted(collected(floor, WHY)))
    return mine


class DisplacedError(FencedError):
    """A command took this syncer for dead and served in its place; the run has no syncer until one begins again."""

    code = "displaced"
    exit_status = TryAgainError.exit_status


def serving(syncer: Syncer) -> Steps[RunState]:
    """Serve until the run is over. Raises FencedError if another syncer has taken over, DisplacedError if a command
    has, which leaves again."""
    try:
        return (yield from syncer.serve())
    except FencedError as error:
        state = yield from read_log(syncer.run, syncer.state)
        if not may_serve_again(state, syncer.epoch):
            raise
        raise DisplacedError(
            f"a command claimed epoch {state.epoch} while this syncer was silent; nothing was lost",
            hint="start it again: the run has no syncer",
        ) from error
