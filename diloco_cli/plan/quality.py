"""What islands cost in quality: the held-out loss over data-parallel training at equal tokens, as it was measured.

`python examples/quality/run.py --report` writes quality.json. A plan is told the nearest of these trials: of those
with the nearest number of islands, by doublings, the nearest in rounds and in tokens a parameter. The figure is
extrapolated where the plan has less of either than that trial, or islands or parameters beyond all of them; and where
it trains in another way than the trials did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isclose, log2
from pathlib import Path

import msgspec

from diloco_cli.config.settings import RunSettings
from diloco_cli.methods import fitting_outer

FILE = Path(__file__).with_name("quality.json")
MUCH = 2.0  # times as many local steps as a trial's, or as few


class Measured(msgspec.Struct, frozen=True):
    """Trials that differ in their seed alone, with `outer: auto`. `half_width`: of the 95 % interval of `percent`; None
    for one seed."""

    islands: int
    rounds: int
    optimizer: str
    parameters: int
    tokens_per_parameter: float
    percent: float
    half_width: float | None
    seeds: int
    every: int
    mixing: str


@dataclass(frozen=True)
class ExpectedLoss:
    """`beyond`: in what the figure is extrapolated, to a plan with the trial's optimizer."""

    nearest: Measured
    beyond: tuple[str, ...]


@cache
def measured() -> tuple[Measured, ...]:
    return msgspec.json.decode(FILE.read_bytes(), type=tuple[Measured, ...])


def loss_percent(islands: int, rounds: float, optimizer: str, parameters: int, tokens: int) -> float | None:
    """As a plan shows it, to a tenth: smaller differences are noise of a seed. 0 for a single island."""
    if islands < 2:
        return 0.0
    found = expected_loss(islands, rounds, optimizer, parameters, tokens)
    return None if found is None else round(found.nearest.percent, 1)


def expected_loss(islands: int, rounds: float, optimizer: str, parameters: int, tokens: int) -> ExpectedLoss | None:
    """None for a single island, and for an optimizer that was not measured."""
    trials = [trial for trial in measured() if trial.optimizer == optimizer]
    if islands < 2 or not trials:
        return None

    each = tokens / parameters

    def distance(trial: Measured) -> tuple[float, float]:
        of_rounds = abs(log2(max(1.0, rounds) / trial.rounds))
        return abs(log2(islands / trial.islands)), of_rounds + abs(log2(each / trial.tokens_per_parameter))

    nearest = min(trials, key=distance)
    outside = {
        "islands": not min(t.islands for t in trials) <= islands <= max(t.islands for t in trials),
        "rounds": rounds < nearest.rounds,
        "parameters": not min(t.parameters for t in trials) <= parameters <= max(t.parameters for t in trials),
        "tokens a parameter": each < nearest.tokens_per_parameter,
    }
    return ExpectedLoss(nearest, tuple(name for name, is_outside in outside.items() if is_outside))


def unlike(trial: Measured, run: RunSettings, rounds: float) -> tuple[str, ...]:
    """In what a plan's way to train is another than the trial's, with both; settings that are `auto` are as there."""
    every, mixing, outer = run.sync.every, run.sync.mixing, run.outer
    fitting = dict(zip(outer.AUTO, fitting_outer(run.train.inner.name, rounds), strict=True))
    given = {key: value for key in fitting if (value := getattr(outer, key)) != "auto"}
    differs = {
        f"local steps ({every} for {trial.every})": not 1 / MUCH <= every / trial.every <= MUCH,
        f"mixing ({mixing} for {trial.mixing})": mixing != trial.mixing,
        f"outer ({', '.join(f'{key} {value:g}' for key, value in given.items())} for auto)": any(
            not isclose(value, fitting[key]) for key, value in given.items()
        ),
    }
    return tuple(name for name, is_other in differs.items() if is_other)
