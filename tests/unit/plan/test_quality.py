"""A plan is told the loss of the nearest trial, and in what that figure is extrapolated."""

from __future__ import annotations

import pytest

from diloco_cli.cli.plan_view import answer
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, OuterSettings, RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.plan import quality
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.planner import make_plan
from diloco_cli.plan.quality import Measured, expected_loss, unlike
from tests.unit.plan.fleets import IOWA, MODEL, RUN, SPOT, fleet, with_sync

MEASURED = quality.measured
TWO = Measured(2, 400, "adamw", 100_000, 20.0, 1.0, 0.25, 3, 24, "rebase")
EIGHT = Measured(8, 100, "adamw", 100_000, 20.0, 8.7, None, 1, 24, "rebase")
EIGHT_LONG = Measured(8, 200, "adamw", 100_000, 80.0, 2.1, None, 1, 24, "rebase")


@pytest.fixture(autouse=True)
def _two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "measured", lambda: (TWO, EIGHT))


@pytest.mark.parametrize(
    ("islands", "rounds", "parameters", "tokens", "nearest", "beyond"),
    [
        (2, 400, 100_000, 2_000_000, TWO, ()),
        (3, 400, 100_000, 2_000_000, TWO, ()),
        (3, 300, 100_000, 2_000_000, TWO, ("rounds",)),
        (8, 120, 100_000, 2_000_000, EIGHT, ()),
        (64, 100, 10**9, 10**9, EIGHT, ("islands", "parameters", "tokens a parameter")),
        (2, 0.5, 100_000, 2_000_000, TWO, ("rounds",)),
        (2, 10**6, 100_000, 2_000_000, TWO, ()),
    ],
)
def test_the_nearest_trial_and_what_lies_beyond_all(
    islands: int, rounds: float, parameters: int, tokens: int, nearest: Measured, beyond: tuple[str, ...]
) -> None:
    found = expected_loss(islands, rounds, "adamw", parameters, tokens)
    assert found is not None and (found.nearest, found.beyond) == (nearest, beyond)


@pytest.mark.parametrize("rounds", [200, 400, 783.7, 10**5])
@pytest.mark.parametrize("islands", [2, 4, 8])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_more_rounds_never_choose_a_trial_of_another_number_of_islands(
    monkeypatch: pytest.MonkeyPatch, rounds: float, islands: int, optimizer: str
) -> None:
    monkeypatch.setattr(quality, "measured", MEASURED)
    found = expected_loss(islands, rounds, optimizer, 122_880, 20 * 122_880)
    assert found is not None and found.nearest.islands == islands
    assert found.nearest.tokens_per_parameter == 20  # the rows with more of both have a lower loss
    assert found.beyond == (("rounds",) if rounds < found.nearest.rounds else ())


@pytest.mark.parametrize(
    ("rounds", "each", "nearest", "beyond"),
    [
        (200, 20, EIGHT, ()),
        (10**4, 20, EIGHT, ()),
        (200, 60, EIGHT_LONG, ("tokens a parameter",)),
        (120, 80, EIGHT_LONG, ("rounds",)),
        (300, 200, EIGHT_LONG, ()),
    ],
)
def test_a_trial_with_more_tokens_a_parameter_is_farther_and_its_figure_extrapolated(
    monkeypatch: pytest.MonkeyPatch, rounds: float, each: int, nearest: Measured, beyond: tuple[str, ...]
) -> None:
    monkeypatch.setattr(quality, "measured", lambda: (EIGHT_LONG, EIGHT))
    found = expected_loss(8, rounds, "adamw", 100_000, each * 100_000)
    assert found is not None and (found.nearest, found.beyond) == (nearest, beyond)


def test_nothing_is_said_of_a_single_island_and_of_an_optimizer_without_trials() -> None:
    assert expected_loss(1, 400, "adamw", 100_000, 10**6) is None
    assert expected_loss(2, 400, "sgd", 100_000, 10**6) is None


def test_the_answer_has_a_line_of_the_loss_with_its_interval_and_seeds() -> None:
    made = make_plan(RUN, fleet(IOWA, SPOT), MODEL)
    text = " ".join(" ".join(answer(made)).split())
    assert "loss +1.0 ± 0.2 % over data-parallel at equal tokens, as 2 islands with 400 rounds of adamw, 100k" in text
    ways = "local steps (100 for 24), mixing (replace for rebase), outer (lr 0.7, momentum 0.9 for auto)"
    assert text.endswith(f"parameters and 20 tokens for each had (3 seeds); extrapolated: parameters, {ways}")
    alone = make_plan(RUN, replace(fleet(IOWA), islands=(IOWA,)), MODEL)
    assert not any(line.startswith("loss") for line in answer(alone))


AS_MEASURED = with_sync(every=24, mixing="rebase")


@pytest.mark.parametrize(
    ("run", "rounds", "others"),
    [
        (AS_MEASURED, 100, ["outer (lr 0.7, momentum 0.9 for auto)"]),
        (replace(AS_MEASURED, outer=OuterSettings("nesterov", "auto", "auto")), 20, []),
        (replace(AS_MEASURED, outer=OuterSettings("nesterov", 0.4, 0.9)), 100, []),
        (replace(AS_MEASURED, outer=OuterSettings("nesterov", 0.4, "auto")), 50, ["outer (lr 0.4 for auto)"]),
    ],
)
def test_settings_count_as_measured_if_auto_would_choose_them(run: RunSettings, rounds: int, others: list[str]) -> None:
    assert list(unlike(TWO, run, rounds)) == others


@pytest.mark.parametrize(("every", "is_named"), [(11, True), (12, False), (48, False), (49, True), (2000, True)])
def test_local_steps_are_named_beyond_twice_those_of_the_trial(every: int, is_named: bool) -> None:
    run = replace(with_sync(AS_MEASURED, every=every), outer=OuterSettings("nesterov", "auto", "auto"))
    assert list(unlike(TWO, run, 400)) == [f"local steps ({every} for 24)"] * is_named


@pytest.mark.parametrize(("momentum", "is_said"), [(0.9, True), (0.5, False)])
def test_the_loss_is_said_to_be_more_where_the_rounds_are_few_for_the_momentum(momentum: float, is_said: bool) -> None:
    run = replace(RUN, outer=OuterSettings("nesterov", 0.7, momentum), train=replace(RUN.train, tokens=10**9))
    text = " ".join(" ".join(answer(make_plan(run, fleet(IOWA, SPOT), MODEL))).split())
    assert text.endswith("; more, with only 14 rounds at momentum 0.9") == is_said, text


EIGHT_ALIKE = fleet(*(replace(IOWA, name=f"iowa{n}") for n in range(8)))
SEARCHING = {f"sync.{key}": "run.yaml:1" for key in ("codec", "weights_codec", "fragments")}  # all else is searched


def test_the_least_loss_is_that_of_as_few_islands_as_the_deadline_allows() -> None:
    goal = Goal("loss")
    alone = make_plan(RUN, EIGHT_ALIKE, MODEL, goal, SEARCHING)
    assert (len(alone.islands), alone.prediction.loss_percent) == (1, 0.0)
    assert "taken as that of data-parallel training" in " ".join(answer(alone))
    assert "with it the loss is +1.0 % over data-parallel training, instead of 0.0 %" in alone.excluded[0].reason
    half = replace(goal, deadline_s=0.9 * 86_400 * alone.prediction.days_to_target)
    few = make_plan(RUN, EIGHT_ALIKE, MODEL, half, SEARCHING)
    fastest = make_plan(RUN, EIGHT_ALIKE, MODEL, origins=SEARCHING)
    assert few.prediction.loss_percent == 1.0 < (fastest.prediction.loss_percent or 0.0)
    assert 2 <= len(few.islands) < len(fastest.islands) == 8


def test_of_plans_with_the_same_loss_the_fastest_is_taken() -> None:
    one = make_plan(RUN, EIGHT_ALIKE, MODEL, Goal("loss"), SEARCHING)
    best_alone = max(
        make_plan(RUN, fleet(island), MODEL, origins=SEARCHING).prediction.tokens_per_s for island in (IOWA, SPOT)
    )
    assert one.prediction.tokens_per_s == pytest.approx(best_alone, rel=0.01)


def test_the_least_loss_of_an_optimizer_without_trials_is_refused() -> None:
    run = replace(RUN, train=replace(RUN.train, inner=InnerSettings("sgd")))
    with pytest.raises(UsageError, match=r"needs trials with train\.inner\.name sgd; there are some with adamw"):
        make_plan(run, EIGHT_ALIKE, MODEL, Goal("loss"))
