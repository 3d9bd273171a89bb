"""Checks of each learner while there are no faults: its first merge soon, and a part in nearly every merge after it.

The second is demanded only under these conditions: the learner's offers follow the pace of the others (`local_steps:
measured`, `adoption: on_arrival`); there is a grace for slightly later offers (`overlap: auto`); it can make two steps
and an exchange in nine tenths of a round (after an adoption that drops its progress it steps anew, and rounds differ in
length); its clock is not so slow that it looks for a commit only when the next one is about to come (which the first
demand supposes too), or foresees windows over a step by a good part of a slot too late; slots are long compared with a
store call; and there is more than one fragment (a single fragment is not offered before the outcome of its last offer
is known, so that hearing of that late makes the next offer late).
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.protocol.rules.polling import next_request_s
from tests.histories.options import CALLS_AN_EXCHANGE, POLL_BOUNDS_S, SLOWEST, Options
from tests.histories.processes import Process
from tests.histories.replayer import LIVENESS, Plain, expect, is_poisoner
from tests.histories.scene import Scene

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

    def __init__(self, history: Scene) -> None:
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
        if (options.local_steps, options.adoption, options.overlap) != ("measured", "on_arrival", "auto"):
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
