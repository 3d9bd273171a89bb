"""One bad learner of three, in virtual time: its deltas are huge, tiny or no numbers, or of usual length and wrong.

    python -m tests.security.bad_deltas [NAME ...]

Each is compared with the run without that learner, at equal honest tokens; the mean of three seeds. A line an attack;
ends with status 1 if a defence does not hold.
"""

from __future__ import annotations

import sys
from statistics import mean

from tests.security.contest import ROUNDS, contest, drift
from tests.security.hostile import Strategy

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


def held(name: str, seeds: tuple[int, ...] = SEEDS, rounds: int = ROUNDS) -> tuple[bool, str]:
    """Whether the defence holds, and what was seen."""
    strategy = BAD[name]
    scores = [contest(seed, strategy, rounds) for seed in seeds]
    drifts = [drift(seed, strategy, rounds) for seed in seeds]
    applied, blamed = sum(score.applied for score in scores), sum(bool(score.blamed) for score in scores)
    told = (
        f"final loss {mean(drifts):+.2%} ({min(drifts):+.2%} to {max(drifts):+.2%}), worst merge "
        f"{max(score.worst_rise for score in scores):+.2%}, {applied} of its offers merged, quarantined in {blamed} of "
        f"{len(seeds)} runs"
    )
    return mean(drifts) <= BOUNDED.get(name, MAX_DRIFT) and all(score.reached for score in scores), told


def main() -> None:
    chosen = sys.argv[1:] or list(BAD)
    if unknown := [name for name in chosen if name not in BAD]:
        sys.exit(f"no attack {unknown[0]!r}; there are: {', '.join(BAD)}")
    seen = {name: held(name) for name in chosen}
    for name, (holds, told) in seen.items():
        print(f"{'holds ' if holds else 'BROKEN'} {name}: {told}", flush=True)
    sys.exit(0 if all(holds for holds, _ in seen.values()) else 1)


if __name__ == "__main__":
    main()
