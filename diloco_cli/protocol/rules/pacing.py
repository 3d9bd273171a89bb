"""The pace of a run: local steps and drift bound of a learner, what the syncer believes of stated paces, when to poll.
Pure and deterministic; aim.py chooses the slot of a learner's next offer.

Schedule: in the first `cold_start.rounds` rounds the fastest island trains alone, because models that are hardly
trained move apart fast and lose much in an average. The slot's number, which the log gives to every process, says when
it ends.

Belief: learners state their pace; the fastest participant's statement sets the slot's time, so one false statement
would be enough. But a learner makes one offer a slot, and the syncer's clock shows how often it takes part:

    claimed        takes part at, s        believed
    60 s           0, 60, 120, ...         60 s
    1e-9 s         0, 60, 120, ...         60 / MAX_FASTER = 15 s
    1e6 s          0, 60, 120, ...         60 * MAX_SLOWER = 480 s

Polling: an offer and the next commit come once a slot, so requests are dense about the time at which the next one is
due and sparse before and after. Where slots are shorter than `SHORT_SLOT_S`, latency counts for more than requests, so
they are dense until an object is late. While nothing has been found yet, an eighth of a slot lies between two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import fmean, median_low

from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.protocol.log.state import Window
from diloco_cli.protocol.rules.quorum import Pace, SlotFacts, max_exchange_s, measured_pace, patience_s, window_start_s

SLOWEST = 32  # times slower than the fastest island
EXACT_TO = 3  # decimals of H_i


def measured_local_steps(every: int, own_step_s: float, fastest_step_s: float) -> float:
    """H_i = H * fastest step / own step: every island reaches its sync at the same time as the fastest. Not rounded to
    whole steps: the rounding errors would add up until the island misses a slot.

    Never below H / SLOWEST: one learner's false speed must not drive all the others to a sync per step."""
    share = min(1.0, fastest_step_s / own_step_s)
    return round(max(1.0, every / SLOWEST, every * share), EXACT_TO)


@dataclass(frozen=True)
class StepPermit:
    """Whether a learner may step on, and if not, why."""

    allowed: bool
    reason: str = ""


def may_step(drift: int, local_steps: float, drift_rounds: int) -> StepPermit:
    """The drift bound: without news from the log a learner steps on for `drift_rounds` rounds, then pauses. `drift`:
    its steps since the newest merge that it knows of, without those that an adoption has dropped from its
    parameters."""
    if drift < drift_rounds * local_steps:
        return StepPermit(True)
    return StepPermit(False, f"no commit for {drift} own steps ({drift_rounds} rounds): the drift bound")


def fraction_of_run(
    merged_tokens: int, target_tokens: int, round_tokens: int, own_steps: int, local_steps: float, drift_rounds: int
) -> float:
    """Position on the learning-rate schedule in [0, 1]: merged tokens / target as of the newest merge heard of, plus
    the tokens that all islands process at the planned pace (`round_tokens` a round, together) during the `own_steps`
    since then, of which a learner makes `local_steps` a round. Extrapolates no further than the drift bound."""
    ahead = round_tokens * min(own_steps / local_steps, float(drift_rounds))
    return min(1.0, (merged_tokens + ahead) / target_tokens)


def beginner(run: RunFormat, slot: int) -> str | None:
    """The learner that trains until this slot is merged, while the others wait: the one planned as the fastest, with
    ties broken by name. None: all learners train."""
    if slot >= run.settings.cold_start.rounds * run.num_fragments:
        return None
    return min(run.islands, key=lambda island: (-island.tokens_per_s, island.name)).name


class Turn:
    """Whether one learner may train yet in a cold start. It waits for the beginner's merges for a limited time, because
    the beginner may be dead or slow to start; after that it trains."""

    def __init__(self, run: RunFormat, learner: str) -> None:
        self._run, self._learner, self._quiet_since_s, self._is_mine = run, learner, inf, False
        slot_s = max(island.local_steps * island.step_s for island in run.islands) / run.num_fragments
        self._patience_s = patience_s(run.settings.sync.skip_after_s, slot_s)

    def held(self, head: int) -> str | None:
        """The reason why the learner may not step yet; None: it may."""
        first = None if self._is_mine else beginner(self._run, head)
        if first in (None, self._learner):
            return None
        until = self._run.settings.cold_start.rounds * self._run.num_fragments
        return f"cold start: {first} alone until slot {until}, now {head}"

    def heard(self) -> None:
        """The log has a newer merge."""
        self._quiet_since_s = inf

    def waited(self, now_s: float) -> None:
        self._quiet_since_s = min(self._quiet_since_s, now_s)
        self._is_mine |= now_s - self._quiet_since_s > self._patience_s


TIMES_SEEN = 32
MAX_FASTER = 4.0  # than it takes part: it may have to wait for slower learners
MAX_SLOWER = 8.0  # than it takes part, without the grace, which its own statement makes longer


@dataclass(frozen=True)
class Gap:
    """The time between two merges that a learner took part in, on the syncer's clock: `whole_s`, and `seconds` without
    the grace that passed in between. `waited`: the syncer waited for the second merge's quorum."""

    whole_s: float
    seconds: float
    waited: bool


def believed_slot_s(claimed_s: float, seen: Sequence[Gap], compared: Sequence[Gap]) -> float:
    """`claimed_s`, limited by the gaps between the last merges that its learner took part in.

    The lower limit uses the median of the gaps `seen`, because one long outage must not count. The upper limit uses the
    mean of the gaps `compared`: offers that piled up in an outage are merged as fast as the syncer can, and such gaps
    do not show the learners' pace. A grace lasts for one slot at most, so half of a whole gap can always be a slot."""
    least_s = median_low(gap.seconds for gap in seen) / MAX_FASTER
    max_s = max(fmean(gap.seconds for gap in compared) * MAX_SLOWER, median_low(gap.whole_s for gap in compared) / 2)
    return min(max(claimed_s, least_s), max_s)


class Pacer:
    """The pace of one syncer process. It begins with its predecessor's pace, or with the pace planned at the launch: a
    guess, which may be wrong by any factor. The first statement that can be compared with the clock replaces the guess;
    until then commits state no pace."""

    def __init__(self, run: RunFormat) -> None:
        self.pace = Pace(min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments)
        self._is_guess = True
        self._stale_after_slots = run.settings.sync.staleness_rounds * run.num_fragments
        self._grace_s = 0.0
        self._took_part: dict[str, deque[tuple[float, float, bool]]] = {}

    def begin(self, window: Window | None) -> None:
        """`window`: the window of the log's newest merge."""
        if window is not None and window.slot_s > 0:
            self._measured(window.slot_s)

    @property
    def told_slot_s(self) -> float:
        """Seconds per slot as commits state it; 0: the pace is not known yet."""
        return 0.0 if self._is_guess else self.pace.slot_s

    def _measured(self, slot_s: float) -> None:
        self.pace, self._is_guess = replace(self.pace, slot_s=slot_s), False

    def merged(self, offers: Sequence[Offer], facts: SlotFacts, now_s: float) -> None:
        """Moving averages from the participants' own timings and from this syncer's clock."""
        reached_s = window_start_s(facts)
        self._grace_s += facts.now_s - reached_s
        for offer in offers:
            merges = self._took_part.setdefault(offer.learner, deque(maxlen=TIMES_SEEN + 1))
            merges.append((now_s, self._grace_s, reached_s > facts.waiting_since_s))
        claimed_s = max(o.timings.upload_s + o.timings.adoption_s for o in offers)
        sync_s = now_s - facts.now_s + min(claimed_s, max_exchange_s(self.pace, self._stale_after_slots))
        slot_s = self._slot_s(offers)
        if self._is_guess and slot_s is not None:
            self._measured(slot_s)
        self.pace = measured_pace(self.pace, slot_s, facts.quorum_took_s, sync_s)

    def _slot_s(self, offers: Sequence[Offer]) -> float | None:
        """The fastest believed pace; None: no participant states one, or none has a gap to compare it with."""
        believed = []
        for offer in offers:
            seen = self._seen(offer.learner)
            compared = self._to_compare(seen)
            if compared and offer.timings.slot_s > 0:
                believed.append(believed_slot_s(offer.timings.slot_s, seen, compared))
        return min(believed, default=None)

    def _seen(self, learner: str) -> list[Gap]:
        return [
            Gap(later_s - earlier_s, later_s - earlier_s - (grace_s - grace_before_s), waited)
            for (earlier_s, grace_before_s, _), (later_s, grace_s, waited) in pairwise(self._took_part[learner])
        ]

    def _to_compare(self, seen: Sequence[Gap]) -> Sequence[Gap]:
        """The gaps in which the syncer waited for the quorum. Where it never waited, the syncer is the slowest process
        and all gaps count; so they do at the beginning of a run, when no offers can have piled up."""
        waited = [gap for gap in seen if gap.waited]
        return waited or (seen if self._is_guess or len(seen) == TIMES_SEEN else [])


SHORT_SLOT_S = 1.5
DENSE = 1 / 20  # of a slot, between two requests about the expected time; what latency may cost
EARLY = 0.88  # of a slot after the last find: the first request
ON_TIME = 1.05  # slots after the last find; beyond that the pauses grow
GROWTH = 1.5
LATE = 3 / 4  # of the time by which an object is late: the next pause, where slots are short
UNKNOWN = 1 / 8  # of a slot, between two requests while nothing is known
MAX_PAUSE = 1.0  # slots: the longest pause, where slots are not short; there it is SHORT_SLOT_S
DENSE_BOUNDS_S = (0.02, 0.075)
MAX_REQUESTS = 8  # in any stretch of one slot, for one learner, at slots from SHORT_SLOT_S on
WATCH_BOUNDS_S = (1.0, 10.0)
SHORTEST_FENCE_CHECK_S = 5.0
OPERATORS_WAIT_S = 2.0
POLL_BOUNDS_S = (0.02, 0.5)
POLLS_A_SLOT = 20


def pause_s(slot_s: float) -> float:
    """The pause of a syncer or a relay that found nothing to do: the longest time for which new work goes unseen."""
    low, high = POLL_BOUNDS_S
    return min(high, max(low, slot_s / POLLS_A_SLOT))


def next_request_s(found_s: float | None, asked_s: float, slot_s: float) -> float:
    """When to ask again after a request in vain at `asked_s`; `found_s`: when the last object was found, None if none
    was. All times are on the clock of the process that asks."""
    if slot_s < SHORT_SLOT_S:
        shortest_s, max_s = DENSE_BOUNDS_S
        dense_s = min(max_s, max(shortest_s, slot_s * DENSE))
        if found_s is None:
            return asked_s + max(dense_s, slot_s * UNKNOWN)
        return asked_s + max(dense_s, min(SHORT_SLOT_S, LATE * (asked_s - found_s - slot_s * ON_TIME)))
    if found_s is None:
        return asked_s + slot_s * UNKNOWN
    first_s = found_s + slot_s * EARLY
    if asked_s < first_s:
        return first_s
    slots = (asked_s - found_s) / slot_s
    return asked_s + slot_s * min(MAX_PAUSE, max(DENSE, GROWTH * (slots - ON_TIME)))


def expected_slot_s(claimed_s: float, usual_s: float) -> float:
    """The time between a learner's offers as the learner states it, limited by the run's usual pace."""
    return min(max(claimed_s, usual_s / 2), usual_s * 4) if claimed_s > 0 else usual_s


def watch_every_s(slot_s: float) -> float:
    """The time between two requests for what comes rarely: new incarnations, fences. About one slot."""
    shortest_s, max_s = WATCH_BOUNDS_S
    return min(max_s, max(shortest_s, slot_s))


def fence_check_every_s(slot_s: float) -> float:
    """The time between two checks of a learner for its successor. They only end a replaced learner sooner."""
    return max(SHORTEST_FENCE_CHECK_S, watch_every_s(slot_s))


def requests_every_s(slot_s: float) -> float:
    """The time between two checks for operators' requests and for a successor: people wait for the answer."""
    return min(OPERATORS_WAIT_S, watch_every_s(slot_s))
