"""Checks of a history at its end, and while there are no faults: restarts, reasons, progress, no busy loops.

Each learner must have its first merge soon. It must take part in nearly every merge after that where these hold: the
learner's offers follow the pace of the others (`local_steps: measured`); there is a grace for slightly later offers
(`overlap: auto`); it can make two steps and an exchange in nine tenths of a round (after an adoption that drops its
progress it steps anew, and rounds differ in length); its clock is not so slow that it looks for a commit only when the
next one is about to come (which the first demand supposes too), or foresees windows over a step by a good part of a
slot too late; slots are long compared with a store call; and there is more than one fragment (a single fragment is not
offered before the outcome of its last offer is known, so that hearing of that late makes the next offer late).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_cli.errors import FencedError, RefusedError, UsageError
from diloco_cli.protocol.actors.collection import FLOORS_APART, LEAST_ROUNDS
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.operations import Get, List, Now, Operation, Result, Steps, Together
from diloco_cli.protocol.regions import TRIES_AGAIN_S
from diloco_cli.protocol.rules.pacing import SHORT_SLOT_S, next_request_s
from diloco_cli.store.retry import MAX_PAUSE_S
from tests.faulty_world import Fault
from tests.histories.client import Bucket
from tests.histories.monitor import OPERATOR, check_folded
from tests.histories.options import (
    CALLS_AN_EXCHANGE,
    GRACE_S,
    LONG_MERGES,
    LOOKS_APART_S,
    POLL_BOUNDS_S,
    SLOWEST,
    Options,
)
from tests.histories.processes import MAX_DRIFT, Process
from tests.histories.replayer import LIVENESS, Plain, Replayer, ViolationError, expect, is_poisoner, numbered

if TYPE_CHECKING:
    from tests.histories.history import History


FIRST_ROUNDS, FIRST_S, FIRST_SLOTS = 8, 10.0, 20  # a learner waits for its first merge no longer than the longest
ROUNDS_BEFORE = 2  # of a learner's steps, before its participation is counted
FEWEST_MERGES = 20  # for a demand on how often a learner takes part
LEAST_SHARE = 0.9
BUSY = 0.9  # of a round: a learner that needs more is late whenever a round is a little shorter than usual
SHORT_EXCHANGE = 1 / 3  # of a slot
FORESIGHT = 1 / 4  # of a slot: a window that is foreseen as so much too late may be missed


@dataclass
class Attendance:
    """The attendance of one process: since when it may take part, its first merge, and how often it took part since it
    kept pace."""

    since_merges: int
    since_s: float
    since_offers: int
    has_merged: bool = False
    merges: int = 0
    took_part: int = 0


class Attendances:
    """The attendance of all learner processes, from when faults have ceased."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.known: dict[str, Attendance] = {}

    def excused(self, process: Process) -> None:
        """The process's attendance until now does not count."""
        self.known.pop(process.name, None)

    def merged(self, process: Process, commit: Plain) -> None:
        """Count one more merge for a process of the run."""
        history, options = self.history, self.history.options
        merges, now_s = history.monitor.replayer.merges, history.world.now_s
        mine = self.known.get(process.name)
        if mine is None:
            mine = self.known[process.name] = Attendance(merges, now_s, process.offers)
        takes_part = any(
            (i["learner"], i["incarnation"]) == (process.role, process.incarnation) for i in commit["inputs"]
        )
        mine.has_merged |= takes_part
        if not mine.has_merged:
            self._check_first(process, mine)
        if process.offers - mine.since_offers >= ROUNDS_BEFORE * options.fragments:
            mine.merges += 1
            mine.took_part += takes_part

    def _check_first(self, process: Process, mine: Attendance) -> None:
        history, options = self.history, self.history.options
        rounds = (history.monitor.replayer.merges - mine.since_merges) / options.fragments
        waited_s = history.world.now_s - mine.since_s
        late = rounds > FIRST_ROUNDS and waited_s > FIRST_S + FIRST_SLOTS * options.slot_s * options.slowest
        stale = step_s(options, process) > options.slot_s * options.fragments  # its base may be too old for good
        text = f"{process.name} is in no merge after {rounds:.0f} rounds and {waited_s:.1f} s"
        expect(not late or stale or not self._hears_in_time(process), LIVENESS, text)

    def check_at_the_end(self) -> None:
        """Check that each honest learner that keeps pace took part in nearly every merge."""
        for process in self.history.supervisor.processes:
            mine = self.known.get(process.name)
            if mine is None or mine.merges < FEWEST_MERGES or is_poisoner(process.role):
                continue
            if not self._keeps_pace(process, mine):
                continue
            text = f"{process.name} keeps pace, and took part in {mine.took_part} of {mine.merges} merges"
            once = self.history.options.fragments  # the cost of one delay: an offer of each fragment
            expect(mine.took_part >= LEAST_SHARE * mine.merges - once, LIVENESS, text)

    def _keeps_pace(self, process: Process, mine: Attendance) -> bool:
        """Whether a process keeps pace, by the run's pace at its end, which a slow syncer makes slower than planned."""
        options, region = self.history.options, self.history.region
        if (options.local_steps, options.overlap) != ("measured", "auto"):
            return False
        if options.fragments == 1 or (region is not None and process.role in region.residents):
            return False
        exchange_s = 2 * POLL_BOUNDS_S[0] + CALLS_AN_EXCHANGE * options.latency_s
        until_s = min(process.ended_s, self.history.world.now_s)
        slot_s = (until_s - mine.since_s) / max(1, mine.merges)
        in_time = 2 * step_s(options, process) + exchange_s <= BUSY * options.fragments * min(slot_s, options.slot_s)
        short = exchange_s <= SHORT_EXCHANGE * options.slot_s
        return in_time and short and self._hears_in_time(process) and self._foresees_windows(process)

    def _hears_in_time(self, process: Process) -> bool:
        """Whether a learner polls a commit before the next one comes: both wait a slot, each on its own clock."""
        slot_s = self.history.options.slot_s
        return next_request_s(0.0, 0.0, slot_s) / process.clock_rate < slot_s / self._fastest_syncer

    def _foresees_windows(self, process: Process) -> bool:
        """Whether a learner knows at a step's beginning which windows close before its end, on the syncer's clock."""
        own_step_s = step_s(self.history.options, process) * process.clock_rate
        late_s = own_step_s * (1 - process.clock_rate / self._fastest_syncer)
        return late_s <= FORESIGHT * self.history.options.slot_s

    @property
    def _fastest_syncer(self) -> float:
        return max(p.clock_rate for p in self.history.supervisor.processes if p.serves is not None)


def step_s(options: Options, process: Process) -> float:
    """How long one of its steps takes, by the world's clock."""
    slowest = options.slowest if process.role == SLOWEST else 1.0
    return options.step_s * slowest / process.clock_rate


if TYPE_CHECKING:
    from tests.histories.history import History


SETTLES_S = 20.0  # for a rival to be fenced, a process to come back and read the log, a standby to take over
SAYS_WHY_S = 15.0
CALLS_OF_EACH = 100  # per learner, while a syncer reads the offers that have come in between, or a relay carries them
FRAGMENT_ROUNDS = 12  # the longest time for which a learner that offers may leave out a fragment
IDLE_ROUNDS, IDLE_SLOTS, IDLE_S = 6, 10, 2.0  # a learner that may offer is silent for the longest of these at most
POLLS_A_SECOND = 1.5 * (1 + MAX_DRIFT) / POLL_BOUNDS_S[0]  # of a syncer, for each learner
LOOKS_S = (1 + MAX_DRIFT) * SHORT_SLOT_S  # a learner's longest pause between two looks for commits, with short slots
LOOKS_A_SECOND = (1 + MAX_DRIFT) / LOOKS_APART_S[0]  # of a learner, with short slots and without news
COLLECTS_BELOW = 0.03  # of a slot: if a store call per learner and one for the version takes less, a syncer can collect
GOOD_ENDS = (0, FencedError.exit_status)


class Healthy:
    """The phase without faults. `free_s`: when the last effect of an earlier fault has ended; `merged_s`: when the last
    merge was committed; `takes_in_s`: how long a syncer may be busy with reading offers; `mirrored_s`: when the region
    last got a commit that it lacked when the phase began."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.since_s = self.merged_s = history.world.now_s
        self.since_n = history.monitor.replayer.n
        self.operations = {process.name: process.operations for process in history.supervisor.processes}
        for process in history.supervisor.processes:
            process.free_s = process.held_until_s()
            process.heard_s, process.heard_merges = self.since_s, history.monitor.replayer.merges
            process.offered_of.clear()
        self.attendances = Attendances(history)
        self.takes_in_s = CALLS_OF_EACH * len(history.roles) * history.options.latency_s
        history.monitor.carries_s = 0.0 if history.region is None else self.takes_in_s
        mended_s = self.since_s + history.nemesis.losses.mended_within_s()
        self.free_s = max([mended_s, *(process.free_s for process in history.supervisor.processes)])
        self.mirrored, self.mirrored_s = 0, self.since_s

    def committed(self, commit: Plain) -> None:
        """Check that every learner that may offer does so, round after round."""
        history, now_s = self.history, self.history.world.now_s
        replayer, slot_s = history.monitor.replayer, history.options.slot_s * history.options.slowest
        if commit["kind"] != "merge":
            return
        self.merged_s = now_s
        self._see_region()
        history.monitor.check_answers(self.free_s, now_s)
        for process in history.supervisor.processes:
            if process.ended or process.role not in history.roles:
                continue
            if history.options.outruns_bases and process.role == SLOWEST:
                continue
            if self._excused(process):
                process.heard_merges = replayer.merges
                process.offered_of.clear()
                self.attendances.excused(process)
            else:
                self.attendances.merged(process, commit)
            if replayer.merges - process.heard_merges <= 1:
                process.heard_s = now_s
            slots, silent_s = replayer.merges - process.heard_merges, now_s - process.heard_s
            rounds = slots / history.options.fragments
            # Slots are counted as well as timed: with many learners, or far away, they last longer than planned.
            idle = rounds > IDLE_ROUNDS and slots > IDLE_SLOTS and silent_s > IDLE_S + IDLE_SLOTS * slot_s
            text = f"{process.name} is there and offers nothing for {rounds:.0f} rounds and {silent_s:.1f} s"
            expect(not idle, LIVENESS, text)
            self._check_fragments(process)

    def _check_fragments(self, process: Process) -> None:
        """Check that a learner that offers, offers all fragments. (If learners do not follow the others' pace, or there
        is no grace, a learner half as fast may reach every second slot, and these may always be the same fragment's.
        After a long time without commits a learner with short slots looks for the next one every LOOKS_S.)"""
        merges, options = self.history.monitor.replayer.merges, self.history.options
        now_s = self.history.world.now_s
        if options.local_steps != "measured" or options.overlap == 0:
            return
        for fragment in range(options.fragments):
            offered_at, offered_s = process.offered_of.setdefault(fragment, (merges, now_s))
            if merges - offered_at <= 1:  # before the log goes on there is nothing that it could hear
                offered_s = now_s
                process.offered_of[fragment] = offered_at, now_s
            rounds, silent_s = (merges - offered_at) / options.fragments, now_s - offered_s
            missing = rounds > FRAGMENT_ROUNDS and silent_s > LOOKS_S + IDLE_SLOTS * options.slot_s
            text = f"{process.name} offers nothing of fragment {fragment} for {rounds:.0f} rounds and {silent_s:.1f} s"
            expect(not missing, LIVENESS, text)

    def _see_region(self) -> None:
        """Check that a region that lacks commits of before gets them. There may be hundreds: a mirror that died every
        second copied none."""
        region, now_s = self.history.region, self.history.world.now_s
        if region is None or self.mirrored > self.since_n:
            return
        if region.mirrored > self.mirrored:
            self.mirrored, self.mirrored_s = region.mirrored, now_s
        gap_s = now_s - max(self.mirrored_s, self.free_s)
        text = f"the region has {self.mirrored} commits of {self.since_n + 1}, and got none for {gap_s:.1f} s"
        expect(gap_s <= SETTLES_S + MAX_PAUSE_S + TRIES_AGAIN_S, LIVENESS, text)

    def _excused(self, process: Process) -> bool:
        """Whether a learner need not offer now. A region's learners depend on the mirror and the relay."""
        history, role = self.history, process.role
        replayer, free_s = history.monitor.replayer, process.free_s
        if history.region is not None and role in history.region.residents:
            if process.offered is not None and process.offered not in replayer.settled:
                return True
            if self.mirrored <= self.since_n:
                return True
            free_s = max(self.free_s, self.mirrored_s) + MAX_PAUSE_S + TRIES_AGAIN_S
        if history.world.now_s < free_s:
            return True
        if not process.incarnation:
            return role in history.nemesis.joiners  # which may wait to be admitted
        newest = max(other.incarnation for other in history.supervisor.processes if other.role == role)
        return role in replayer.kept_out or process.incarnation < newest

    def left(self, process: Process, error: BaseException | None) -> None:
        """exit: without faults no process ends with an error, except one whose place is taken or whose key is revoked,
        and an island that would join a run that is over or stopped."""
        joiner = process.role in self.history.nemesis.joiners and process.status == UsageError.exit_status
        revoked = self.history.monitor.replayer.revoked
        if process.status in GOOD_ENDS or joiner or (isinstance(error, RefusedError) and revoked):
            return
        before = self.free_s if process.role == OPERATOR else self.since_s  # a command does not wait for a mend
        excused = process.started_s < before and self.history.world.now_s < self.free_s + MAX_PAUSE_S
        expect(excused, "exit", f"{process.name} ended with status {process.status} without any fault: {error}")

    def check(self) -> None:
        """Check that the log grows by merges: a skip is no progress."""
        history, options = self.history, self.history.options
        apart_s = 0.0 if history.region is None else MAX_PAUSE_S + TRIES_AGAIN_S
        waits_s = 2 * options.skip_after_s + 20 * options.slot_s * options.slowest
        bound_s = SETTLES_S + apart_s + self.takes_in_s + waits_s
        self._see_region()
        gap_s = history.world.now_s - max(self.merged_s, self.free_s)
        expect(gap_s <= bound_s, LIVENESS, f"no merge for {gap_s:.1f} s without faults, more than {bound_s:.1f} s")
        self._check_reasons()

    def _check_reasons(self) -> None:
        """Check that the serving syncer states a reason if it has committed nothing for two rounds."""
        history, options = self.history, self.history.options
        rounds_s = 2 * options.slot_s * options.slowest * options.fragments
        for process in history.supervisor.processes:
            serves = process.serves
            mute = serves is not None and serves.doing == "SERVING" and not serves.reason
            silent_s = history.world.now_s - max(history.monitor.last_commit_s, process.started_s, process.free_s)
            if mute and not process.ended and silent_s > rounds_s + self.takes_in_s + SAYS_WHY_S:
                raise ViolationError(LIVENESS, f"{process.name} waits and gives no reason")

    def check_operations(self) -> None:
        """Check that no process makes more store operations than its polling allows. A sweep tries
        to delete again what a listing that lags still shows."""
        history, processes = self.history, self.history.supervisor.processes
        commits = history.monitor.replayer.n - self.since_n
        learners = sum(process.role in history.roles for process in processes) * (1 if history.region is None else 2)
        mailboxes = learners + 2
        for process in processes:
            spent_s = min(history.world.now_s, process.ended_s) - max(self.since_s, process.started_s)
            a_second = POLLS_A_SECOND * mailboxes if process.role == SYNCER else LOOKS_A_SECOND
            bound = a_second * max(0.0, spent_s) + (30 + 6 * learners) * (commits + 4) + 4 * history.monitor.deletions
            done = process.operations - self.operations.get(process.name, 0)
            expect(done <= bound, LIVENESS, f"{process.name} asked the store {done} times in {spent_s:.1f} s: it spins")


def check_bucket(history: History) -> None:
    """Unneeded objects are deleted: the number of objects is bounded by what is kept, by how often the floor moves, by
    the commits since the last good evaluation, and by the readers' grace, which each syncer process waits anew.
    Demanded only of long histories whose syncer has time between its merges."""
    options, fragments = history.options, history.options.fragments
    kept = max(LEAST_ROUNDS, options.kept_rounds) * fragments
    busy = options.latency_s * (len(history.roles) + 1) > COLLECTS_BELOW * options.slot_s
    if (
        busy or options.merges < LONG_MERGES[0] or Fault.FULL in options.calls
    ):  # there a full store alone moves the floor
        return
    syncers = sum(process.role == SYNCER for process in history.supervisor.processes)
    grace_slots = syncers * (2 * GRACE_S + 2.0) / options.slot_s
    commits = 1.5 * (kept + options.evaluates_every * fragments) + 2 * FLOORS_APART + grace_slots + 10
    offers = len(history.roles) * (commits + 4 * fragments)
    most = {"state": commits + fragments, "delta": offers, "offer": offers}
    for kind, bound in most.items():
        there = sum(key.startswith(f"{kind}/") for key in history.bucket.objects)
        expect(there <= bound, "bucket", f"{there} objects of the kind {kind} are there, more than {bound:.0f}")


def check_gave_way(history: History, process: Process) -> None:
    """exit: a process is fenced only if it has a successor, with faults or without."""
    bucket, own = history.bucket, process.incarnation
    if process.role == SYNCER:
        own = 0 if process.serves is None else process.serves.epoch
        numbers = [int(key[6:16]) for key in bucket.objects if key.startswith("epoch/") and key not in bucket.forged]
    else:
        if history.region is not None and process.role in history.region.residents:
            bucket = history.region.bucket
        claims = [key for key in bucket.objects if key.startswith(f"incarnation/{process.role}/")]
        numbers = [numbered(key)[1] for key in claims if key not in bucket.forged]
    there = max(numbers, default=0) > own
    expect(there or not own, "exit", f"{process.name} gave way to a successor of {own}, and there is none")


def check_restart(history: History, replayer: Replayer) -> None:
    """10: a restarted process folds the same state, twice from the newest snapshot and once from commit 0."""
    for objects in (history.bucket.objects, history.bucket.objects, _without_hints(history.bucket.objects)):
        copy = Bucket()
        copy.objects = objects
        whole = read_from(copy, read_log(history.run))
        check_folded(whole, replayer, history.run)


def read_from(bucket: Bucket, steps: Steps[Result]) -> Result:
    """Perform steps that only read, without faults."""
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        alone = not isinstance(operation, Together)
        answers = [_read(bucket, one) for one in ([operation] if alone else operation.operations)]
        answer = answers[0] if alone else answers


def _read(bucket: Bucket, operation: Operation) -> Any:
    match operation:
        case Get(key, max_bytes):
            return bucket.get(key, max_bytes)
        case List(prefix, after, limit):
            return bucket.list(prefix, after, limit)
    assert type(operation) is Now, operation
    return 0.0


def _without_hints(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in objects.items() if not key.startswith("hint/")}
