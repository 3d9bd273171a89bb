"""`diloco simulate`: what would happen, in virtual time. It predicts and never trains."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.output import print_json, talk
from diloco_cli.cli.simulate_bandwidth import bandwidth
from diloco_cli.cli.simulate_run import run
from diloco_cli.clock import monotonic_s
from diloco_cli.errors import UsageError
from diloco_cli.units import parse_count, parse_duration

if TYPE_CHECKING:
    from diloco_cli.forecast.chips import ChipsLearner, Constants
    from diloco_cli.forecast.goodput import Form, GoodputRow
    from diloco_cli.forecast.slots import MergeRules

GRID_DAYS, GRID_SEEDS = 2.0, 3
FLEET_DAYS, FLEET_SEEDS = 30.0, 1
SLOWDOWN = 2.0
MAX_CHIPS, MAX_LEARNERS, MAX_DAYS, MAX_SEEDS = 100_000_000, 1024, 366.0, 100

simulate = typer.Typer(
    help="What would happen, in virtual time: goodput, bandwidth, worst cases, whole runs. It never trains.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@simulate.command("goodput")
def goodput(
    chips: str = typer.Option(None, "--chips", help="Chips of the whole fleet, such as 1.2M."),
    learners: int = typer.Option(None, "--learners", min=1, max=MAX_LEARNERS, help="Learners that share them."),
    mtbi: str = typer.Option(None, "--mtbi", help="Mean time between interrupts of one chip, such as 365 d."),
    repair: str = typer.Option(None, "--repair", help="Mean time until a failed slice is back, such as 60 s."),
    days: float = typer.Option(None, "--days", min=0.01, max=MAX_DAYS, help="Simulated days of each history."),
    seed: int = typer.Option(0, "--seed", min=0, help="The first history's seed."),
    seeds: int = typer.Option(None, "--seeds", min=1, max=MAX_SEEDS, help="Histories of each cell."),
    stragglers: int = typer.Option(0, "--stragglers", min=0, help="So many learners are slow."),
    slowdown: float = typer.Option(None, "--slowdown", min=1.0, max=1000.0, help="How slow: times a step's time; 2."),
    plan: Path = typer.Option(
        None, "--plan", metavar="PLAN", help="Your own fleet: a file written by `diloco plan -o`."
    ),
    fast: bool = typer.Option(False, "--fast", help="Jump from failure to failure; merges are left out."),
    unmemoised: bool = typer.Option(False, "--unmemoised", help="Decide every slot anew: slow, for checking."),
    plot: Path = typer.Option(None, "--plot", metavar="FILE", help="Write a picture (SVG) here."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Goodput and uptime of a failing fleet: decoupled learners, data-parallel beside them.

    Without options: the table of arXiv 2604.21428 (its chips, its learners), with the difference per cell.
    """
    from diloco_cli.forecast.goodput import all_methods, published_grid
    from diloco_cli.forecast.slots import MergeRules

    own = chips is not None or learners is not None or plan is not None
    form = _form(fast, unmemoised)
    _refuse_unused(own, stragglers, slowdown)
    constants = _constants(plan, mtbi, repair)
    days = days or (FLEET_DAYS if own else GRID_DAYS)
    numbers = list(range(seed, seed + (seeds or (FLEET_SEEDS if own else GRID_SEEDS))))
    started_s, rules = monotonic_s(), MergeRules()
    if own:
        fleet, total, rules = _fleet(plan, chips, learners, constants, (slowdown or SLOWDOWN,) * stragglers)
        rows = _collect(all_methods(fleet, total, constants, days, numbers, form, rules), 3)
    else:
        rows = _collect(published_grid(constants, days, numbers, form), 30)
    data = {
        **_goodput_data(rows, days, numbers, form, plan, rules),
        **_constants_data(constants, plan is not None, mtbi is not None, repair is not None),
        "wall_s": monotonic_s() - started_s,
    }
    if plot is not None:
        _plot(rows, plot)
    if json:
        print_json("simulate goodput", data)
    else:
        from diloco_cli.cli.simulate_view import goodput_text

        print(goodput_text(rows, data))


def _form(fast: bool, unmemoised: bool) -> Form:
    if fast and unmemoised:
        raise UsageError("--fast leaves out the merges that --unmemoised decides anew", hint="choose one of them")
    return "fast" if fast else "unmemoised" if unmemoised else "stepwise"


def _refuse_unused(own: bool, stragglers: int, slowdown: float | None) -> None:
    if slowdown is not None and not stragglers:
        raise UsageError("--slowdown says how slow stragglers are, and there are none", hint="add --stragglers 1")
    if not own and stragglers:
        raise UsageError("--stragglers needs a fleet of your own", hint="add --chips 1.2M --learners 8")


def _constants(plan: Path | None, mtbi: str | None, repair: str | None) -> Constants:
    from diloco_cli.forecast.goodput import PUBLISHED

    if plan is not None and (mtbi is not None or repair is not None):
        raise UsageError(
            "--plan says how often its islands fail and how long they are away", hint="leave out --mtbi and --repair"
        )
    constants = PUBLISHED
    if mtbi is not None:
        constants = replace(constants, mtbi_s=_positive("--mtbi", parse_duration(mtbi)))
    if repair is not None:
        mean_s = _positive("--repair", parse_duration(repair))
        constants = replace(constants, repair=constants.repair.with_mean(mean_s))
    return constants


def _positive(option: str, seconds: float) -> float:
    if seconds <= 0:
        raise UsageError(f"{option} must be above 0", hint=f"{option} '60 s'")
    return seconds


def _fleet(
    plan: Path | None, chips: str | None, learners: int | None, constants: Constants, slowdowns: tuple[float, ...]
) -> tuple[tuple[ChipsLearner, ...], int, MergeRules]:
    """The learners, how many chips they have, and how they merge."""
    from diloco_cli.forecast.chips import equal_learners
    from diloco_cli.forecast.slots import MergeRules

    if plan is not None:
        from diloco_cli.forecast.goodput import learners_of_plan, rules_of_plan
        from diloco_cli.plan.plan_file import load_plan

        if chips is not None or learners is not None or slowdowns:
            raise UsageError("--plan says which islands there are", hint="leave out --chips, --learners, --stragglers")
        made = load_plan(plan)
        return learners_of_plan(made), sum(island.devices for island in made.islands), rules_of_plan(made)
    number, total = learners or 8, parse_count(chips) if chips is not None else 1_200_000
    if not number <= total <= MAX_CHIPS:
        raise UsageError(
            f"--chips {total} is out of range: from one per learner ({number}) to {MAX_CHIPS:,}",
            hint="diloco simulate goodput --chips 1.2M --learners 8",
        )
    if len(slowdowns) > number:
        raise UsageError(f"--stragglers {len(slowdowns)} is more than the {number} learners")
    return equal_learners(total, number, constants, slowdowns), total, MergeRules()


def _collect(rows: Iterable[GoodputRow], count: int) -> list[GoodputRow]:
    """Shows on a terminal how far it is."""
    shown = sys.stderr.isatty()
    done = []
    for row in rows:
        done.append(row)
        if shown:
            print(f"\r{len(done)} of {count} cells", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return done


def _goodput_data(
    rows: list[GoodputRow], days: float, seeds: list[int], form: Form, plan: Path | None, rules: MergeRules
) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in rows],
        "goodput_meaning": "share of the allocated chip time that is spent on steps that count",
        "days": days,
        "seed": seeds[0],
        "seeds": seeds,
        "form": form,
        "plan": None if plan is None else str(plan),
        "quorum": rules.quorum,
        "drift_s": rules.drift_s if plan is not None else None,
    }


def _constants_data(constants: Constants, planned: bool, own_mtbi: bool, own_repair: bool) -> dict[str, Any]:
    """The constants that entered, and which of them are fitted: neither published, nor the user's own. A plan states
    failures, restarts and the length of a slot."""
    from diloco_cli.forecast.chips import FITTED

    repair = constants.repair
    named = {
        "mtbi_s": constants.mtbi_s,
        "step_s": constants.step_s,
        "down_s": constants.down_s,
        "up_s": constants.up_s,
        "slice_chips": constants.slice_chips,
        "repair_scale_s": repair.scale_s,
        "repair_shape": repair.shape,
        "repair_exponent": repair.exponent,
        "repair_mean_s": repair.mean_s,
    }
    unused = ("mtbi_s", "step_s", "slice_chips", "repair_scale_s", "repair_mean_s") if planned else ()
    given = [*(["mtbi_s"] if own_mtbi else []), *(["repair_scale_s", "repair_mean_s"] if own_repair else [])]
    return {
        "constants": {name: value for name, value in named.items() if name not in unused},
        "fitted": [
            name
            for name in named
            if (name in FITTED or name.startswith("repair")) and name not in unused and name not in given
        ],
        "given": given,
    }


def _plot(rows: list[GoodputRow], path: Path) -> None:
    from diloco_cli.cli.simulate_view import goodput_plot
    from diloco_cli.plots import save_svg

    save_svg(path, lambda: goodput_plot(rows))
    talk(f"plot written to {path}")


simulate.command("bandwidth")(bandwidth)
simulate.command("run")(run)
