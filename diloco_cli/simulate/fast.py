"""The same learners by events alone: failures of the whole fleet as one Poisson process, steady state skipped.

It shares no code with the walk through every step but the facts about slices, so that each checks the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diloco_cli.simulate.chips import MS, Learner
from diloco_cli.simulate.stepwise import FAR_MS, Slices
from diloco_cli.simulate.timeline import Timeline, timeline


def leap(learners: Sequence[Learner], horizon_ms: int, rng: np.random.Generator) -> list[Timeline]:
    """One timeline per learner; the cost grows with failures, not with chips or steps."""
    rates = np.array([learner.slices * learner.failures_per_s for learner in learners])
    count = int(rng.poisson(rates.sum() * horizon_ms / MS))
    times = np.sort(rng.integers(0, horizon_ms, count))
    whose = rng.choice(len(learners), count, p=rates / rates.sum()) if count else np.zeros(0, dtype=np.int64)
    which = rng.random(count)
    made = []
    for index, learner in enumerate(learners):
        mine = whose == index
        hits = (which[mine] * learner.slices).astype(np.int64)
        made.append(_leap_one(learner, horizon_ms, times[mine].tolist(), hits.tolist(), rng))
    return made


def _leap_one(
    learner: Learner, horizon_ms: int, times: list[int], hits: list[int], rng: np.random.Generator
) -> Timeline:
    """`times[i]`: a failure of slice `hits[i]`, which counts if the learner steps then and has such a slice."""
    slices, step_ms, up_ms = Slices(learner, rng), learner.step_ms, learner.up_ms
    stretches: list[tuple[int, int, int]] = []
    times.append(FAR_MS)
    hits.append(-1)
    now_ms = i = 0
    while now_ms < horizon_ms:
        active = slices.active
        while times[i] < now_ms:
            i += 1
        next_failure = i  # those before it hit slices that are away, unless one comes back first
        while hits[next_failure] >= active:
            next_failure += 1
        steps_before = (times[next_failure] - now_ms) // step_ms
        failed_ms = now_ms + (steps_before + 1) * step_ms
        joins_ms = now_ms + -((now_ms - slices.next_return_ms) // step_ms) * step_ms
        end_ms = min(failed_ms, joins_ms)
        if end_ms > horizon_ms:
            stretches.append((now_ms, (horizon_ms - now_ms) // step_ms, active))
            break
        if failed_ms <= joins_ms:
            stretches.append((now_ms, steps_before, active))
            hit = set()
            while times[i] < failed_ms:
                if hits[i] < active:
                    hit.add(hits[i])
                i += 1
            now_ms = slices.fail(len(hit), failed_ms)
            stretches.append((failed_ms - step_ms, 1, active - len(hit)))
        else:
            stretches.append((now_ms, (joins_ms - now_ms) // step_ms, active))
            now_ms = slices.take_in(joins_ms + up_ms)
    return timeline(learner, horizon_ms, stretches, slices.failures)
