"""When to ask the store again for what is expected: an offer of a learner, the next commit.

Both come once a slot. So the asking is dense about the time at which the next one is due, and thin before and after it:
few requests, and what has come is found within a twentieth of a slot. Where slots are shorter than `SHORT_SLOT_S`,
latency counts for more than requests: there the asking is dense all the time. Pure and deterministic.
"""

from __future__ import annotations

SHORT_SLOT_S = 1.5
DENSE = 1 / 20  # of a slot, between two requests about the expected time; what latency may cost
EARLY = 0.88  # of a slot after the last find: the first request
ON_TIME = 1.05  # what comes until then is on time; with what lies beyond the pauses grow
GROWTH = 1.5
UNKNOWN = 1 / 8  # of a slot, between two requests while nothing is known
MAX_PAUSE = 1.0  # slots: the longest pause
DENSE_BOUNDS_S = (0.02, 0.075)
MAX_REQUESTS = 8  # in any stretch of one slot, for one learner, at slots from SHORT_SLOT_S on
WATCH_BOUNDS_S = (1.0, 10.0)
SHORTEST_FENCE_CHECK_S = 5.0
OPERATORS_WAIT_S = 2.0
POLL_BOUNDS_S = (0.02, 0.5)
POLLS_A_SLOT = 20


def pause_s(slot_s: float) -> float:
    """Between two turns of a syncer or a relay that found nothing to do: what waits for it is seen within so much."""
    low, high = POLL_BOUNDS_S
    return min(high, max(low, slot_s / POLLS_A_SLOT))


def next_request_s(found_s: float | None, asked_s: float, slot_s: float) -> float:
    """When to ask again after having asked in vain at `asked_s`; `found_s`: when the last one was found, None if none
    was. All on one clock, which need not be anybody else's."""
    if slot_s < SHORT_SLOT_S:
        shortest_s, max_s = DENSE_BOUNDS_S
        return asked_s + min(max_s, max(shortest_s, slot_s * DENSE))
    if found_s is None:
        return asked_s + slot_s * UNKNOWN
    first_s = found_s + slot_s * EARLY
    if asked_s < first_s:
        return first_s
    slots = (asked_s - found_s) / slot_s
    return asked_s + slot_s * min(MAX_PAUSE, max(DENSE, GROWTH * (slots - ON_TIME)))


def expected_slot_s(claimed_s: float, usual_s: float) -> float:
    """The time between a learner's offers, in its own words, as far as they can be true beside the others' pace."""
    return min(max(claimed_s, usual_s / 2), usual_s * 4) if claimed_s > 0 else usual_s


def watch_every_s(slot_s: float) -> float:
    """Between two looks for what comes rarely and unannounced: incarnations, fences. About once a slot."""
    shortest_s, max_s = WATCH_BOUNDS_S
    return min(max_s, max(shortest_s, slot_s))


def fence_check_every_s(slot_s: float) -> float:
    """Between a learner's two looks for its successor. Its claims are fenced anyway: this ends it sooner."""
    return max(SHORTEST_FENCE_CHECK_S, watch_every_s(slot_s))


def requests_every_s(slot_s: float) -> float:
    """Between two looks for an operator's request, and for a successor: people wait for the answer."""
    return min(OPERATORS_WAIT_S, watch_every_s(slot_s))
