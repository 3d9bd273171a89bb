"""One bad learner of three, in virtual time: its deltas are huge, tiny or no numbers, or of usual length and wrong.

Each is compared with the run without that learner, at equal honest tokens; the mean of three seeds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from tests.security.attacks.hostile import Strategy
from tests.security.attacks.stage import AttackSeen
from tests.security.contest import ROUNDS, contest, drift

SEEDS = (0, 1, 2)
MAX_DRIFT = 0.02  # of the final loss, where the defence is to hold
BAD = {
    "huge": Strategy(scale=1e4, direction="aligned"),
    "huge-noise": Strategy(scale=1e4, direction="random"),
    "huge-flipped": Strategy(scale=1e4),
    "huge-and-many-steps": Strategy(scale=1e4, direction="random", claims=8.0),
    "tiny": Strategy(scale=1e-4, direction="aligned"),
    "nan": Strategy(direction="nan"),
    "noise": Strategy(direction="random"),
    "flipped": Strategy(),
}
BOUNDED = {"noise": 0.05, "flipped": 0.1, "huge-flipped": 0.1}  # what nobody prevents: merged at usual length


def seen(name: str, directory: Path | None = None, seeds: tuple[int, ...] = SEEDS, rounds: int = ROUNDS) -> AttackSeen:
    strategy = BAD[name]
    scores = [contest(seed, strategy, rounds) for seed in seeds]
    drifts = [drift(seed, strategy, rounds) for seed in seeds]
    applied, blamed = sum(score.applied for score in scores), sum(bool(score.blamed) for score in scores)
    told = (
        f"final loss {mean(drifts):+.2%} ({min(drifts):+.2%} to {max(drifts):+.2%}), worst merge "
        f"{max(score.worst_rise for score in scores):+.2%}, {applied} of its offers merged, quarantined in {blamed} of "
        f"{len(seeds)} runs"
    )
    holds = mean(drifts) <= BOUNDED.get(name, MAX_DRIFT) and all(score.reached for score in scores)
    return AttackSeen(holds, told)
