"""The pace of a run: local steps and drift bound of a learner, the time of a slot, when to poll.
Pure and deterministic; aim.py chooses the slot of a learner's next offer.

Schedule: in the first `cold_start.rounds` rounds the fastest island trains alone, because models that are hardly
trained move apart fast and lose much in an average. The slot's number, which the log gives to every process, says when
it ends.

Pace: a round lasts as long as the islands need for their planned steps, the median of them, of two the slower one.
What counts is what the syncer's clock shows: how far each island's data stream has moved between its offers. So no
statement, and no single one of three islands, makes the slots shorter or longer. Each island makes as many steps in a
round as fit into it at its own speed: nobody's steps depend on what another one says.

Polling: an offer and the next commit come once a slot, so requests are dense about the time at which the next one is
due and sparse before and after. Where slots are shorter than `SHORT_SLOT_S`, latency counts for more than requests, so
they are dense until an object is late. While nothing has been found yet, an eighth of a slot lies between two; while
the slot's time is a guess, an eighth of the time waited so far, as the guess may be too long by any factor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median_low

from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.protocol.log.state import RunState, Window
from diloco_cli.protocol.rules.quorum import (
    Pace,
    SlotFacts,
    alive_within_s,
    max_exchange_s,
    measured_pace,
    patience_s,
)

SLOWEST = 32  # times slower than `sync.every` steps a round
EXACT_TO = 3  # decimals of H_i


def measured_local_steps(every: int, own_step_s: float, round_s: float) -> float:
    """H_i: the steps that an island makes in a round of the run's pace, so that every island reaches its sync at the
    same time. Not rounded to whole steps: the rounding errors would add up until the island misses a slot. Within
    bounds: a wrong pace must drive nobody to a sync per step, nor beyond the run's drift bound."""
    return round(max(1.0, every / SLOWEST, min(every, round_s / own_step_s)), EXACT_TO)


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
    return StepPermit(False, f"no merge for {drift} own steps ({drift_rounds} rounds): the drift bound")


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


ROUNDS_SEEN = 3
MAX_FASTER = 4.0  # than merges come: where the syncer is behind, learners must not aim at slots that it cannot reach


class Observed:
    """What one learner's offers show of its speed. `last_s`: when the newest one came."""

    def __init__(self, num_fragments: int) -> None:
        self.last_s = -inf
        self._came: deque[tuple[float, int]] = deque(maxlen=num_fragments + 1)  # when, and how far its data stream was
        self._token_s: deque[float] = deque(maxlen=ROUNDS_SEEN * num_fragments)  # seconds a token, over a round each
        self._step_tokens = 0.0
        self._incarnation = 0

    @property
    def of_a_round(self) -> bool:
        """Whether a whole round is seen: over less of it, times are not exact."""
        return len(self._came) == self._came.maxlen

    def offered(self, offer: Offer, now_s: float, waited: bool) -> None:
        """Offers for which the syncer has not waited show no pace: they had come before. Neither does the time between
        two incarnations: nobody worked then, perhaps for hours."""
        self.last_s = now_s
        if offer.incarnation != self._incarnation or (self._came and offer.data_end < self._came[-1][1]):
            self._came.clear()
            self._incarnation = offer.incarnation
        elif self._came and not waited:
            self._came.pop()
        self._came.append((now_s, offer.data_end))
        first_s, first = self._came[0]
        if waited and offer.data_end > first:
            self._token_s.append((now_s - first_s) / (offer.data_end - first))
        if offer.steps > 0:
            self._step_tokens = offer.tokens / offer.steps

    def stood_still(self) -> None:
        """Until now this learner may have paused."""
        self._came.clear()

    def step_s(self) -> float:
        """Of a step as it is now; one outage does not count. 0: not known yet."""
        return median_low(self._token_s) * self._step_tokens if self._token_s else 0.0


class Pacer:
    """The pace of one syncer process. It begins with its predecessor's pace, or with the pace planned at the launch: a
    guess, which may be wrong by any factor. The first islands that are seen at work replace the guess; until then
    commits state no pace."""

    def __init__(self, run: RunFormat) -> None:
        self.run = run
        self._guess_s = min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments
        self.pace, self._is_guess, self._since_s = Pace(self._guess_s), True, 0.0
        self._stale_after_slots = run.settings.sync.staleness_rounds * run.num_fragments
        self._observed: dict[str, Observed] = {}
        self._took_part: dict[str, int] = {}  # learners in merges of this syncer's, with their last incarnation there
        self._merged_s: deque[float] = deque(maxlen=ROUNDS_SEEN * run.num_fragments + 1)

    def begin(self, window: Window | None, now_s: float) -> None:
        """`window`: the window of the log's newest merge."""
        self._since_s = now_s
        if window is not None and window.slot_s > 0:
            self._guess_s = window.slot_s
            self._measured(window.slot_s)

    @property
    def told_slot_s(self) -> float:
        """Seconds per slot as commits state it; 0: the pace is not known yet."""
        return 0.0 if self._is_guess else self.pace.slot_s

    def _measured(self, slot_s: float) -> None:
        self.pace, self._is_guess = replace(self.pace, slot_s=slot_s), False

    def offered(self, offer: Offer, now_s: float, waited: bool) -> None:
        """An offer is found; `waited`: the syncer has looked in vain since the one before."""
        self._observed.setdefault(offer.learner, Observed(self.run.num_fragments)).offered(offer, now_s, waited)

    def merged(self, state: RunState, offers: Sequence[Offer], facts: SlotFacts, now_s: float) -> None:
        """Moving averages from this syncer's clock, and from the participants' word on their links."""
        claimed_s = max(o.timings.upload_s + o.timings.adoption_s for o in offers)
        self._leave_out_wait(offers, now_s)
        self._merged_s.append(now_s)
        sync_s = now_s - facts.now_s + min(claimed_s, max_exchange_s(self.pace, self._stale_after_slots))
        slot_s = self._slot_s(state, facts.alive, now_s)
        if self._is_guess and slot_s is not None:
            self._measured(slot_s)
        self.pace = measured_pace(self.pace, slot_s, facts.quorum_took_s, sync_s)

    def _leave_out_wait(self, offers: Sequence[Offer], now_s: float) -> None:
        """Where there is no quorum without newcomers, the others waited for these, perhaps for hours, at the drift
        bound. Then the time since the offers of those that waited for longer than a slot shows no pace."""
        met = sum(self._took_part.get(offer.learner) == offer.incarnation for offer in offers)
        self._took_part |= {offer.learner: offer.incarnation for offer in offers}
        if met < self.run.settings.sync.quorum:
            self._merged_s.clear()
            for seen in self._observed.values():
                if now_s - seen.last_s > self.pace.slot_s:
                    seen.stood_still()

    def _slot_s(self, state: RunState, num_alive: int, now_s: float) -> float | None:
        """The median over the islands that are alive and not kept out; None: none is seen at work yet. One that is not
        seen yet counts with the time for which it was not, up to the guess: so no fast island sets the pace before the
        others come."""
        run, within_s = state.with_members(self.run), alive_within_s(self.pace)
        found = [
            (seen.of_a_round, island.local_steps * step_s)
            for name, seen in self._observed.items()
            if now_s - seen.last_s <= within_s
            and state.learner(name).quarantined is None
            and (step_s := seen.step_s()) > 0
            and (island := run.island(name)) is not None
        ]
        if not found:
            return None
        of_rounds = [round_s for of_a_round, round_s in found if of_a_round]
        unseen_s = run.num_fragments * min(self._guess_s, now_s - self._since_s)
        rounds_s = [round_s for _, round_s in found] + [unseen_s] * (num_alive - len(found))
        rounds_s = of_rounds if 2 * len(of_rounds) > num_alive else rounds_s
        if 2 * len(found) > num_alive:
            self._guess_s = _usual(rounds_s) / run.num_fragments
        gaps_s = [later_s - earlier_s for earlier_s, later_s in pairwise(self._merged_s)]
        least_s = median_low(gaps_s) / MAX_FASTER if gaps_s else 0.0
        return max(least_s, _usual(rounds_s) / run.num_fragments)


def _usual(rounds_s: Sequence[float]) -> float:
    """Of an even number the faster of the two in the middle: where half of the machines are slow, the others keep their
    own pace."""
    return max(rounds_s) if len(rounds_s) == 2 else median_low(rounds_s)


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


def guessed_request_s(since_s: float, asked_s: float, slot_s: float) -> float:
    """The same where `slot_s` is a guess; `since_s`: when the last object was found, or the wait for one began."""
    return asked_s + min(slot_s * UNKNOWN, max(DENSE_BOUNDS_S[1], (asked_s - since_s) * UNKNOWN))


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
