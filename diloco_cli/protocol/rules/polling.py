"""When to ask the store again for what is expected: an offer of a learner, the next commit.

Both come once a slot. So requests are dense about the time at which the next one is due, and sparse before and after:
few requests, and a new object is found within a twentieth of a slot. Where slots are shorter than `SHORT_SLOT_S`,
latency counts for more than requests, so requests are dense until an object is late: the store may be too slow for
them. While nothing has been found yet, an eighth of a slot lies between two requests. (A syncer whose slots are short
asks all learners in each of its turns.) Pure and deterministic.
"""

from __future__ import annotations

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
