"""What bad deltas do in company, and what deltas of usual size do: python -m tests.security.poisons [--only many|usual]

`many`: 4 broken learners of 16, and 8 of 64. `usual`: one learner of three, and 4 of 16, whose deltas are as long as
honest ones: sign flip, stale deltas, label noise. Both against the run without these learners, at equal honest tokens,
with the product's syncer, judging and arithmetic in virtual time. Prints the rows of the tables in README.md.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from statistics import mean

from tests.security.attacks.hostile import Strategy
from tests.security.contest import ROUNDS, THREE, Score, contest

MAX_RISE, MAX_DRIFT = 0.02, 0.01
SEEDS = (0, 1, 2)
MANY = ((12, 4), (56, 8))
BROKEN = {
    "noise, 100 times as long": Strategy(scale=100.0, direction="random"),
    "flipped, 8 times as long": Strategy(scale=7.9),
    "flipped, 1,000 times, 4 offers a slot": Strategy(scale=1e3, copies=4),
    "flipped, 1,000 times, every other slot": Strategy(scale=1e3, honest_between=1),
    "left while no syncer lives, 10,000 times": Strategy(
        scale=1e4, in_silence=True, waits=False, ahead=3, restart_every=16, outage_slots=3.0
    ),
}
USUAL = {
    "sign flip": Strategy(),
    "stale by a round": Strategy(direction="stale", stale_rounds=1),
    "stale by five rounds": Strategy(direction="stale"),
    "noise": Strategy(direction="random"),
}
LABEL_NOISE = "label noise (targets are random bytes)"


@cache
def clean(seed: int, islands: tuple[int, int], restart_every: int, outage_slots: float, rounds: int) -> Score:
    return contest(seed, None, restart_every, outage_slots, rounds, islands)


def compared(
    strategy: Strategy | None, seed: int, islands: tuple[int, int], rounds: int = ROUNDS
) -> tuple[Score, float]:
    """The score, and by how much the final loss is above that of the run without the bad learners; `strategy` None:
    they train on noisy labels."""
    restarts = (strategy.restart_every, strategy.outage_slots) if strategy and strategy.restart_every else (0, 0.0)
    score = contest(seed, strategy, rounds=rounds, islands=islands, noisy=strategy is None)
    return score, score.final / clean(seed, islands, *restarts, rounds).final - 1.0


def rounds_of(islands: tuple[int, int]) -> int:
    return ROUNDS if sum(islands) <= 16 else ROUNDS // 2


def row(name: str, strategy: Strategy | None, islands: tuple[int, int], seeds: tuple[int, ...]) -> tuple[str, bool]:
    found = [compared(strategy, seed, islands, rounds_of(islands)) for seed in seeds]
    rise, drift = max(score.worst_rise for score, _ in found), mean(drift for _, drift in found)
    applied = sum(score.applied for score, _ in found)
    blamed = sorted({name for score, _ in found for name in score.blamed})
    stalled = sum(not score.reached for score, _ in found)
    who = f"{islands[1]} of {sum(islands)}"
    cells = [name, who, f"{rise:+.2%}", f"{drift:+.2%}", str(applied), str(len(blamed)), str(stalled)]
    honest = [one for one in blamed if one.startswith("l")]
    return f"| {' | '.join(cells)} |", rise <= MAX_RISE and drift <= MAX_DRIFT and not stalled and not honest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("many", "usual"))
    only = parser.parse_args().only
    print("| deltas | learners | worst merge | final loss | merged | quarantined | stalled runs |")
    print("|---|---|---|---|---|---|---|")
    holds = True
    for islands in MANY if only != "usual" else ():
        for name, strategy in BROKEN.items():
            line, sound = row(name, strategy, islands, SEEDS[:1] if sum(islands) > 16 else SEEDS)
            holds &= sound
            print(line, flush=True)
    for islands in (THREE, MANY[0]) if only != "many" else ():
        for name, plan in (*USUAL.items(), (LABEL_NOISE, None)):
            print(row(name, plan, islands, SEEDS)[0], flush=True)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
