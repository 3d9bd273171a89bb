"""The syncer as a state machine: it reads offers, decides, merges, and appends commits.

It holds no torch and no clock: arithmetic and evaluation are ports, everything else is yielded operations. Its states
are those of protocol/log/state.py. Beside its turns it evaluates the run's held-out loss and answers a jump
(`Evaluations`), publishes anew what can no longer be read (`Repairer`), and makes room for its writes (`make_room`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Any, Protocol

from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, DilocoError, FencedError, TryAgainError
from diloco_cli.layout import Layout
from diloco_cli.protocol.actors.collection import Housekeeper, collected, floor_in_turn
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.joining import fetch_weights
from diloco_cli.protocol.actors.membership import JoinQueue, admitted
from diloco_cli.protocol.actors.merging import (
    Arithmetic,
    Candidates,
    Loader,
    Merged,
    Recover,
    Refused,
    make_resident,
    merge_commit,
    write_surely,
)
from diloco_cli.protocol.actors.requests import (
    MAX_REASON,
    answer_to,
    back_to,
    is_at_rest,
    newest_request,
    pending_requests,
    published_anew,
    refuse,
    return_to,
)
from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.claims import claim_epoch
from diloco_cli.protocol.log.commit_log import (
    SNAPSHOT_EVERY,
    Pulse,
    append,
    fence,
    next_commit,
    patiently,
    read_log,
    write_snapshot,
)
from diloco_cli.protocol.log.heartbeats import MOVED_BYTES_PER_S, Cadence, sealed
from diloco_cli.protocol.log.keys import BYTES_PER_PARAMETER, SYNCER, heartbeat_key, state_key, weights_key
from diloco_cli.protocol.log.mending import Mender, heard_from_syncer, wanted_by, whole_log
from diloco_cli.protocol.log.operations import MAX_BYTES_AT_ONCE, Now, Put, Sleep, Steps, together
from diloco_cli.protocol.log.records import FragmentVersion, Outcome, ProcessClaim, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.state import SYNCER as SYNCER_STATES
from diloco_cli.protocol.log.state import RunPhase, RunState, SyncerState, moved
from diloco_cli.protocol.rules.belief import Belief
from diloco_cli.protocol.rules.divergence import evaluates_every, jump_of, response_to
from diloco_cli.protocol.rules.pacing import POLL_BOUNDS_S, Pacer, pause_s, requests_every_s, watch_every_s
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


FINAL_EVALUATION_S = 120.0  # and the time to read all states once
TRIES = 3  # of a rollback whose objects cannot be read
GO_ON = "go on from there: diloco resume"
NO_SNAPSHOTS = "the log has outgrown its snapshots: every process that starts reads all that came since the last one"
ROUNDS = 2  # without a merge, after which a fragment's weights are read
MAX_FAILED = 3  # reads in a row: a store that hides an object for a moment must not cost the learners' progress
MERGES_SEEN = 32  # the newest, which show how long a round is
MAX_REPAIRS = 3  # of a fragment that is not merged between them
SOONEST_S, MAX_PAUSE_S = 5.0, 3600.0  # between two looks at a fragment's weights
MAKES_ROOM_FOR_S = 5.0  # then the write is tried again


class Evaluator(Protocol):
    """Evaluates the outer parameters in another process, without delaying a merge. One evaluation at a time."""

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        """Start an evaluation as of commit n; False if one is still under way."""
        ...

    def result(self) -> tuple[int, float | None] | None:
        """A finished evaluation: (n, loss in nats per token). The loss is not finite where the model gives no finite
        one, None if the evaluation failed."""
        ...


class NoEvaluator:
    """The Evaluator where there is no model, or its code may not run: every evaluation fails at once."""

    def __init__(self) -> None:
        self._asked: int | None = None

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        self._asked = n
        return True

    def result(self) -> tuple[int, float | None] | None:
        asked, self._asked = self._asked, None
        return None if asked is None else (asked, None)

    def close(self) -> None:
        """There is no process to end."""


def reading_s(layout: Layout) -> float:
    """How long an evaluator may need to read the states of a model: seconds for small ones, an hour for 20 billion
    parameters."""
    return BYTES_PER_PARAMETER * layout.num_parameters / MOVED_BYTES_PER_S


class Evaluations:
    """The evaluations of one syncer process, and what answers a jump of the loss: a rollback or a stop."""

    def __init__(self, run: RunFormat, evaluator: Evaluator) -> None:
        self.run, self.settings, self.evaluator = run, run.settings.evaluation, evaluator
        self.last_slot = self.tokens = 0
        self.unreadable = 0

    def begin(self, state: RunState) -> None:
        """The slot of the newest evaluation is known from the log: often replaced syncers evaluate as often. Weights
        that were brought are evaluated first of all, so that a jump from there is found."""
        self.last_slot = state.slot - state.stability.since
        if self.run.settings.model.brought is not None and state.slot == 0 and not state.stability.good:
            self.last_slot = -evaluates_every(self.run)

    def due(self, state: RunState, epoch: int, pulse: Pulse) -> Steps[commits.Commit | None]:
        """The commit that is due now, if any."""
        finished = self.evaluator.result()
        evaluation = None if finished is None else self._evaluation(state, *finished)
        if evaluation is not None:
            return evaluation
        response = yield from self.response(state, epoch, pulse)
        if response is not None:
            return response
        if state.slot - self.last_slot >= evaluates_every(self.run):
            self._submit(state, False)
        return None

    def last(self, state: RunState, pulse: Pulse) -> Steps[commits.Evaluation | None]:
        """The run's last evaluation; None if it takes too long, or fails."""
        started_s: float = yield Now()
        submitted = False
        while (yield Now()) - started_s < FINAL_EVALUATION_S + reading_s(self.run.layout):
            yield from pulse()
            finished = self.evaluator.result()
            if submitted and finished is not None:
                return self._evaluation(state, *finished)
            submitted = submitted or self._submit(state, True)
            yield Sleep(POLL_BOUNDS_S[0])
        return None

    def _submit(self, state: RunState, final: bool) -> bool:
        submitted = self.evaluator.submit(state.n, state.outputs, final)
        if submitted:
            self.last_slot, self.tokens = state.slot, state.tokens(self.run.layout)
        return submitted

    def _evaluation(self, state: RunState, n: int, loss: float | None) -> commits.Evaluation | None:
        """None for one that failed, and for one of merges that a rollback has undone since."""
        if loss is None or n < state.base_floor:
            return None
        finite = loss if abs(loss) < inf else None
        why = jump_of(finite, state.stability.good, self.settings)
        return commits.Evaluation(evaluated=n, loss=finite, tokens=self.tokens, jumped=bool(why), reason=why)

    def response(self, state: RunState, epoch: int, pulse: Pulse) -> Steps[commits.Commit | None]:
        """The rollback or the stop that answers a jump."""
        response, jump = response_to(state, self.settings), state.stability.jump
        if response.action == "none" or jump is None:
            return None
        if response.action == "pause":
            return _pause(response.reason)
        then = yield from return_to(self.run, state, response.to, pulse)
        problem = then if isinstance(then, str) else ""
        if not isinstance(then, str):
            outputs = yield from published_anew(self.run, then.outputs, state.n + 1, state.slot - 1, epoch, pulse)
            if not isinstance(outputs, str):
                self.unreadable = 0
                return back_to(then, outputs, response.reason, evaluated=jump.n)
            problem = outputs
        self.unreadable += 1
        if self.unreadable < TRIES:
            return None
        return _pause(f"{response.reason}; no rollback to commit {response.to}: {problem}; {GO_ON}")


def _pause(reason: str) -> commits.Stop:
    return commits.Stop(reason=reason[:MAX_REASON], diverged=True)


@dataclass
class _Watched:
    """A fragment's newest version: when its weights were last read, the pause after that, and how many reads in a row
    failed. `repairs`: since its newest merge. `told`: the log says that the syncer can do nothing about it."""

    version: int
    looked_s: float
    pause_s: float = 0.0
    failed: int = 0
    repairs: int = 0
    told: bool = False


class Repairer:
    """Publishes committed weights anew that can no longer be read.

    Usually the next merge supersedes such a version: learners go on from their older version. This fails after a
    rollback, because no older version may be a base, and when all learners are dead, because a new incarnation starts
    from committed versions alone. So the syncer reads the weights of each fragment that has not been merged for ROUNDS
    rounds, at intervals that grow until a new incarnation comes. A round is as long as its merges show, not as the
    fastest learner's pace says: models are large, and a merge must not wait for such a read. A version that could not
    be read MAX_FAILED times in a row is superseded by a rollback to the newest commit itself: all fragments are
    published again from their states, under new keys. No object is overwritten and no merge is lost, but progress in
    flight is. After MAX_REPAIRS repairs without a merge the log says that a person must look into the bucket."""

    def __init__(self, run: RunFormat, arithmetic: Arithmetic, recover: Recover) -> None:
        self.run, self.arithmetic, self.recover = run, arithmetic, recover
        self._watched: dict[int, _Watched] = {}
        self._suspected: set[int] = set()
        self._heard: set[tuple[str, int]] = set()
        self._merges_s: deque[float] = deque(maxlen=MERGES_SEEN)

    def suspect(self, fragment: int) -> None:
        """The newest weights of this fragment cannot be read where learners read them, such as in a region's bucket.
        They are published anew, as if they could not be read at home."""
        self._suspected.add(fragment)

    def hear(self, incarnations: Collection[tuple[str, int]]) -> None:
        """Whose offers the syncer asks for: a new one needs the weights of all fragments, so grown pauses end."""
        if not self._heard.issuperset(incarnations):
            for seen in self._watched.values():
                seen.pause_s = 0.0
        self._heard = set(incarnations)

    def due(self, state: RunState, epoch: int, slot_s: float, pulse: Pulse) -> Steps[commits.Commit | None]:
        """The commit that supersedes an unreadable version, or says that nothing can be done; None if there is none to
        make. One call reads one version at most, so that merges do not wait long for it."""
        now_s: float = yield Now()
        skip_after_s = self.run.settings.sync.skip_after_s
        watched = [self._watch(state, output, now_s) for output in state.outputs]
        usual_s = ROUNDS * self.run.num_fragments * max(slot_s, self._between_merges_s()) + skip_after_s
        for output, seen in zip(state.outputs, watched, strict=True):
            if output.fragment in self._suspected:
                self._suspected.discard(output.fragment)
                return (yield from self._supersede(state, output, seen, epoch, pulse))
            pause_s = max(SOONEST_S, skip_after_s) if 0 < seen.failed < MAX_FAILED else max(usual_s, seen.pause_s)
            if now_s >= seen.looked_s + pause_s:
                yield from self._look(output, seen, usual_s, pulse)
                if seen.failed < MAX_FAILED:
                    return None
                return (yield from self._supersede(state, output, seen, epoch, pulse))
        return None

    def _watch(self, state: RunState, output: FragmentVersion, now_s: float) -> _Watched:
        """A merge resets all; after a rollback, which may be a repair in vain, the pause goes on growing."""
        seen = self._watched.setdefault(output.fragment, _Watched(output.version, now_s))
        if seen.version != output.version:
            self._suspected.discard(output.fragment)
            merged = output.version > state.base_floor
            self._merges_s.extend([now_s] if merged else [])
            kept = replace(seen, version=output.version, looked_s=now_s, failed=0, told=False)
            seen = self._watched[output.fragment] = _Watched(output.version, now_s) if merged else kept
        return seen

    def _between_merges_s(self) -> float:
        """The mean time between merges on this process's clock; 0: it has seen too few."""
        times_s = self._merges_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else 0.0

    def _look(self, output: FragmentVersion, seen: _Watched, usual_s: float, pulse: Pulse) -> Steps[None]:
        readable = yield from is_readable(self.run, output, pulse)
        seen.looked_s = yield Now()
        seen.failed = 0 if readable else seen.failed + 1
        if readable or seen.failed >= MAX_FAILED:
            seen.pause_s = max(usual_s, min(MAX_PAUSE_S, 2 * max(usual_s, seen.pause_s)))

    def _supersede(
        self, state: RunState, bad: FragmentVersion, seen: _Watched, epoch: int, pulse: Pulse
    ) -> Steps[commits.Commit | None]:
        what = f"version {bad.version} of fragment {bad.fragment} cannot be read"
        if seen.repairs >= MAX_REPAIRS:
            answer = refuse(f"{what}, though made anew {seen.repairs} times since it was merged: look into the bucket")
        else:
            answer = yield from self._made_anew(state, what, epoch, pulse)
        if isinstance(answer, commits.Refuse):
            told, seen.told = seen.told, True
            return None if told else answer
        for one in self._watched.values():
            one.repairs += 1
        return answer

    def _made_anew(self, state: RunState, what: str, epoch: int, pulse: Pulse) -> Steps[commits.Commit]:
        """Publish all fragments anew. Nothing is written before all states were read; a failure is retried later."""
        try:
            for output in state.outputs:
                yield from pulse()
                yield from self._settled(output)
            outputs = []
            for output in state.outputs:
                yield from pulse()
                made = yield from self._settled(output)
                anew = replace(output, version=state.n + 1, slot=state.slot - 1, epoch=epoch)
                names = (output.fragment, anew.version, epoch)
                yield from write_surely(state_key(*names, output.state_digest), made.state)
                yield from write_surely(weights_key(*names, output.weights_digest), made.weights)
                outputs.append(anew)
        except DataCheckError as error:
            return refuse(f"{what}, nor made anew: {error}")
        return back_to(state, tuple(outputs), f"{what}: all made anew")

    def _settled(self, output: FragmentVersion) -> Steps[Merged]:
        """The version's bytes, from its state. Raises DataCheckError if they cannot be made from it."""
        yield from make_resident(self.run, self.arithmetic, output, self.recover)
        made = self.arithmetic.settled(output.fragment)
        if digest(made.weights) != output.weights_digest:
            raise DataCheckError("its state gives other bytes here", where=f"fragment {output.fragment}")
        return made


def is_readable(run: RunFormat, output: FragmentVersion, pulse: Pulse) -> Steps[bool]:
    yield from pulse()
    return (yield from fetch_weights(run, output)) is not None


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
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run, self.claim, self.because = run, claim, because
        self.mender = Mender(run, tell)
        self.arithmetic, self.evaluations = arithmetic, Evaluations(run, evaluator)
        self.time_text, self.nonce = time_text, nonce
        self.on_commit, self.heartbeat_facts, self.recover = on_commit, heartbeat_facts, recover
        self.state = RunState()
        self.epoch = 0
        self.doing = SyncerState.READING
        self.inbox, self.joins = Inbox(run), JoinQueue(run)
        self.loader = Loader(run, arithmetic, self.inbox, recover)
        self.pacer, self.belief = Pacer(run), Belief(run)
        self.inbox.found = self.pacer.offered
        self.watch: Watch | None = None
        self.window_from_s = -inf  # of the slot that is due, at the earliest
        self.outcomes_since_s: float | None = None
        self.housekeeper, self.repairer = Housekeeper(run), Repairer(run, arithmetic, recover)
        self.last_snapshot = 0
        self.fits, self.remark = True, ""  # the state, into a snapshot; what the log is to say next
        self.next_request_s = self.next_incarnations_s = 0.0
        self.cadence = Cadence(HEARTBEAT_EVERY_S)
        self.reason = ""
        self.wants: tuple[str, ...] = ()  # records that cannot be read
        self.heard_n = -1  # the head of the log, by the syncer before

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
        self.state = yield from patiently(lambda: whole_log(self.run), self._ask_for)
        self.wants, self.reason = (), ""
        if self.state.phase == RunPhase.FINISHED or (yield from is_at_rest(self.run, self.state)):
            self._go(SyncerState.DONE)
            return self.state
        yield from self._take_over()
        while self.state.phase == RunPhase.RUNNING:
            if self._is_trained and (yield from self._finish()):
                break
            worked = yield from self._turn()
            yield from self.housekeeper.rest(self.state, 0.0 if worked else pause_s(self.pace.slot_s))
        yield from self.mender.mend(self.state, tuple(self.run.kept))  # soon no process holds these records
        self._go(SyncerState.DONE)
        yield from self.send_heartbeat((yield Now()), force=True)
        return self.state

    def _ask_for(self, error: DilocoError) -> Steps[None]:
        """Tell those who may hold it what cannot be read, in place of the heartbeat of the syncer before."""
        said = yield from heard_from_syncer(self.run, self.state)
        self.heard_n = max(self.heard_n, -1 if said is None else said.n)
        self.wants = wanted_by(error)
        self.reason = str(error)
        yield from self.send_heartbeat((yield Now()), force=True)
        yield from self.mender.mend(self.state, wanted=self.wants)  # it may have stood by, and read them

    # -- becoming the syncer ------------------------------------------------------------------------------------

    def _take_over(self) -> Steps[None]:
        self._go(SyncerState.CLAIMING)
        self.epoch = yield from claim_epoch(self.run, self.claim, self.state)
        phase = self.state.phase
        while self.state.epoch < self.epoch:
            if self.state.phase not in (phase, RunPhase.RUNNING):
                return  # it ended, or was stopped, while this syncer was starting
            outputs = (yield from self._genesis()) if self.state.n < 0 else ()
            format, request = self.run.format_digest if self.state.n < 0 else "", None
            if phase == RunPhase.STOPPED:  # what was left open by the stop does not act now
                request = yield from newest_request(self.run, self.state)
            who = ": ".join(filter(None, [f"{self.claim.host} pid {self.claim.pid}", self.because]))
            yield from self._commit(commits.EpochStart(outputs=outputs, reason=who, request=request, format=format))
        self.last_snapshot = self.state.n
        self.evaluations.begin(self.state)
        self.inbox.open(self.state, (yield Now()))
        self.window_from_s = -inf
        self.pacer.begin(self.state.window, (yield Now()))
        self.belief.begin(self.state, (yield Now()))
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
            written = yield from write_snapshot(self.run, self.state)
            self.last_snapshot = self.state.n
            if self.fits and not written:
                self.fits, self.remark = False, NO_SNAPSHOTS
        return mine

    def _settle(self, draft: Callable[[tuple[Outcome, ...]], commits.Commit]) -> Steps[bool]:
        """Append one record with the outcomes that wait. If a floor has its number (make_room), they wait on."""
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
        yield from self.mender.serve(self.state, now_s)
        if now_s >= self.next_request_s:
            self.next_request_s = now_s + requests_every_s(self.pace.slot_s)
            yield from self._notice_successor()
            if (yield from self._carry_out_request()):
                return True
        if self.remark:
            remark, self.remark = refuse(self.remark), ""
            return (yield from self._carry_out(remark))
        due: commits.Commit | None = self.housekeeper.due(self.state, now_s, self.pace.slot_s)
        due = due or (yield from self.repairer.due(self.state, self.epoch, self.pace.slot_s, self._pulse))
        if due is not None:
            return (yield from self._carry_out(due))
        if now_s >= self.next_incarnations_s:
            self.next_incarnations_s = now_s + watch_every_s(self.pace.slot_s)
            yield from self.inbox.look_for_incarnations(self.state, now_s)
            self.repairer.hear(self.inbox.mailboxes.keys())
            found = yield from self.joins.look(self.state)
            admits = admitted(self.run, self.state, [one.island for one in found])
            if admits is not None:
                self.inbox.expect(island.name for island in admits.islands)
                self.belief.met((island.name for island in admits.islands), now_s)
                return (yield from self._carry_out(admits))
        yield from self.inbox.poll(self.state, now_s, self.pace.slot_s, is_guess=self.pacer.told_slot_s == 0)
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
        sync = self.run.settings.sync
        grace = grace_window(sync.overlap, self.pace, sync.grace.gamma)
        while True:
            candidates, facts = yield from self._present(now_s)
            decision = decide_slot(facts, grace, patience_s(sync.skip_after_s, self.pace.slot_s))
            closes = decision.action != "wait" and facts.present < facts.expected
            if not (closes and (yield from self.inbox.poll(self.state, now_s, self.pace.slot_s, everywhere=True))):
                break
        self.reason = decision.reason
        if decision.action == "wait":
            return (yield from self._settle_waiting_outcomes(now_s))
        if decision.action == "skip":
            skip = commits.Skip(slot=self.state.slot, reason=decision.reason)
            done = yield from self._settle(lambda outcomes: structs.replace(skip, outcomes=outcomes))
            self.window_from_s += self.pacer.told_slot_s
            self.inbox.sort_out(self.state)
        else:
            done = yield from self._merge(candidates, facts, grace, decision.reason)
        self.watch = None
        return done

    def _present(self, now_s: float) -> Steps[tuple[Candidates, SlotFacts]]:
        """The offers for the slot that is due, and the facts for the decision on it."""
        slot, inbox = self.state.slot, self.inbox
        self.watch = self.watch or Watch(now_s, self.window_from_s)
        candidates = yield from self.loader.candidates(
            self.state, lambda offer: self.belief.of(self.state, offer, now_s)
        )
        alive, ahead = self._alive(now_s), inbox.ahead(slot)
        passed, beside = (alive & ahead) - candidates.learners, candidates.learners - alive
        quorum, counts = self.run.settings.sync.quorum, (len(passed), len(beside))
        facts = self.watch.look(len(candidates.fit), len(alive), quorum, bool(ahead), now_s, *counts)
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
        slot, version, before = self.state.slot, self.state.n + 1, self.state
        offers = candidates.offers
        merged = self.arithmetic.merge(slot, [one.weighed for one in candidates.fit])
        if isinstance(merged, Refused):  # the next turn decides anew on the offers that are left
            for place, why in merged.reasons.items():
                self.inbox.drop(offers[place], why)
            self._go(SyncerState.SERVING)
            return False
        output = yield from self._publish(fragment, merged, version, slot)
        opens_s = next_window_s(facts, self.pacer.told_slot_s)
        opens_in_s = opens_s - (yield Now())
        told_slot_s, given = self.pacer.told_slot_s, (self.run, before, candidates, merged, output, facts, grace)
        mine = yield from self._settle(partial(merge_commit, *given, told_slot_s, opens_in_s, reason))
        if mine:
            self.belief.merged(before, fragment, candidates.believed, facts.now_s)
            self.arithmetic.settle(fragment, output.state_digest)
            self.pacer.merged(before, offers, facts, (yield Now()))
            self.window_from_s = opens_s
            self.inbox.forget(offers)
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
            "state": self.doing,
            "epoch": self.epoch,
            "n": max(self.state.n, self.heard_n),
            "host": self.claim.host,
            "reason": self.reason,
            "wants": self.wants or self.mender.wants,
            "heartbeats": self.cadence.count,
            "slowest_s": round(self.cadence.slowest_s, 1),
            "garbage": asdict(self.housekeeper.collector.backlog(now_s)),
            **self.heartbeat_facts(),
        }
        key = heartbeat_key(SYNCER)
        yield Put(key, sealed(self.run.keyring, LOG, key, facts))


def make_room(syncer: Syncer) -> Steps[bool]:
    """Collect while a write of the syncer finds no room; where nothing is left to delete, raise the floor as far as the
    settings allow. False if neither can be done now.

    The write waits meanwhile, and with it the syncer's turn, so this raises no state of the syncer: a floor that it
    commits takes the number of the commit that waits, and the syncer finds that out when it tries that number. It then
    decides anew, or writes the same again. Without an epoch, only what lies behind the log's floor goes."""
    run, collector = syncer.run, syncer.housekeeper.collector
    if syncer.state.n < 0:
        return False
    state = yield from read_log(run, syncer.state)
    now_s: float = yield Now()
    collector.look(state, now_s)
    if (yield from collector.work(state, now_s, MAKES_ROOM_FOR_S)):
        return True
    floor = floor_in_turn(run, state, idle=True)
    if floor is None or state.epoch != syncer.epoch or not collector.is_done(state):
        return False
    _, mine = yield from append(run, state, syncer.drafted(collected(floor, "no space is left")))
    return mine


class DisplacedError(FencedError):
    """A command took this syncer for dead and served in its place; the run has no syncer until one begins again."""

    code = "displaced"
    exit_status = TryAgainError.exit_status


def serving(syncer: Syncer) -> Steps[RunState]:
    """Serve until the run is over. Raises FencedError if another syncer has taken over, DisplacedError if a command
    has, which merges nothing and leaves again."""
    try:
        return (yield from syncer.serve())
    except FencedError as error:
        state = yield from read_log(syncer.run, syncer.state)
        if state.epoch <= syncer.epoch or state.served or state.phase != RunPhase.RUNNING:
            raise
        raise DisplacedError(
            f"a command claimed epoch {state.epoch} while this syncer was silent; nothing was lost",
            hint="start it again: the run has no syncer",
        ) from error
