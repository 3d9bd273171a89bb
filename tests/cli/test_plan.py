"""`diloco plan`, `init` and `config show` as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diloco_cli.cli.main import add_command
from diloco_cli.cli.plan_view import MAX_ROWS, grouped_islands, islands_table, plan_text
from diloco_cli.cli.preflight import refuse_stores
from diloco_cli.config.codec import replace
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.launch.plan_files import read_plan
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.planner import make_plan
from tests.benchmarks.plan import RUN, islands

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


@pytest.fixture
def diloco(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    app = typer.Typer()
    for name in ("init", "plan", "config"):
        add_command(app, name)

    def run(*words, status=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if isinstance(result.exception, DilocoError):
            raise result.exception
        assert result.exit_code == status, result.output
        return result.stdout

    return run


def quickstart(*more):
    return ("plan", QUICKSTART / "inventory.yaml", "-f", QUICKSTART / "run.yaml", *more)


def test_the_screen_begins_with_the_answer(diloco):
    lines = diloco(*quickstart()).splitlines()
    assert re.fullmatch(r"\S+ tokens in [^:]+: \S+ tok/s, no price given", lines[0])
    assert [line[:10] for line in lines[1:4]] == ["how sure  ", "limited by", "would help"]
    assert any(line.startswith("feasible: all 3 islands take part") for line in lines)
    assert lines[-1].startswith("more: -v")


@pytest.mark.parametrize(("count", "most"), [(4, 40), (13, 40), (1500, 60)])
def test_the_screen_has_as_many_lines_as_a_terminal_whatever_is_planned(monkeypatch, count, most):
    monkeypatch.setenv("COLUMNS", "100")
    plan = make_plan(RUN, islands(count), model_facts(RUN.model), origins={"sync.every": "run.yaml:1"})
    lines = plan_text(plan).splitlines()
    assert len(lines) <= most and max(map(len, lines)) <= 100
    rows = grouped_islands(
        [replace(plan.islands[0], name=f"i{n}", step_s=n, accelerators=f"D{n}:1") for n in range(count)], 100
    )
    assert len(rows) == 1 + min(count, MAX_ROWS)
    assert ("i11 and" in rows[-1]) == (count > MAX_ROWS)


def test_islands_that_look_alike_share_a_row_and_their_speed_and_price_are_added():
    plan = read_plan(QUICKSTART / "run.yaml")
    alike = [replace(plan.islands[0], name=name, tokens_per_s=1000.0, price_per_h=2.0) for name in "abc"]
    heading, row, other = grouped_islands([*alike, replace(alike[0], name="d", step_s=9.0)], 100)
    assert row.startswith("a and 2 more ") and (row.split()[5], row.split()[-1]) == ("3k", "6")
    assert other.startswith("d ") and len(other) == len(row) and heading.split()[-1] == "price/h"


def test_what_is_said_of_several_islands_is_said_once_and_the_rest_is_counted(diloco):
    text = diloco("plan", "-f", QUICKSTART.parent / "plan" / "machines-run.yaml")
    assert "slice-1 and 3 more: launch cannot run it" in text


def test_v_prints_everything_in_80_columns(diloco, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = diloco(*quickstart("-v"))
    for word in ("belgium", "overlap", "after failures", "synchronous", "memory", "assumptions:"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


def test_in_a_pipe_no_column_is_dropped(diloco, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    headings = next(line for line in diloco(*quickstart("-v")).splitlines() if line.startswith("island "))
    for heading in ("island", "region", "up Mbps", "sent", "transfer", "sharding", "there", "price/h"):
        assert heading in headings


def test_json_is_one_object_in_the_envelope(diloco):
    body = json.loads(diloco(*quickstart("--json")))
    assert (body["command"], body["ok"], body["warnings"]) == ("plan", True, [])
    assert [i["local_steps"] for i in body["data"]["islands"]] == [40, 40, 20]


def test_a_saved_plan_is_compared_and_a_difference_exits_10(diloco, tmp_path):
    plan = tmp_path / "plan.json"
    diloco(*quickstart("-o", plan))
    assert diloco(*quickstart("--diff", plan)) == "no difference\n"
    changes = diloco(*quickstart("--diff", plan, "--set", "sync.every=80"), status=10)
    assert "~ schedule.sync_every: 40 -> 80" in changes


def test_explain_prints_arithmetic_and_json_carries_it(diloco):
    text = diloco(*quickstart("--explain"))
    assert "belgium:" in text
    assert "= max(1, round(T / step))" in text
    data = json.loads(diloco(*quickstart("--explain", "--json")))["data"]
    assert {"of", "name", "formula", "numbers", "value", "unit"} == set(data["explanations"][0])


def test_plot_draws_the_waterfall(diloco, tmp_path):
    pytest.importorskip("matplotlib")
    diloco(*quickstart("--plot", tmp_path / "plan.svg"))
    svg = (tmp_path / "plan.svg").read_text()
    assert all(f">{stage}<" in svg for stage in ("ideal", "after idle", "after link", "after failures"))
    with pytest.raises(UsageError, match="written as SVG"):
        diloco(*quickstart("--plot", tmp_path / "plan.png"))


def test_simulate_puts_events_beside_the_closed_form(diloco):
    run = QUICKSTART.parent / "plan" / "run.yaml"
    found = json.loads(diloco("plan", "-f", run, "--simulate", "--json"))["data"]["simulation"]
    assert found["failures"] > 100
    assert found["failures_percent"] == pytest.approx(found["closed_form_percent"], abs=1.5)
    text = " ".join(diloco("plan", "-f", run, "--simulate").split())
    assert "closed form" in text and "by the run's own syncer and learners" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "300"), "write an amount per hour such as 150/h"),
        (("--budget", "x/run"), "count 'x' is no number"),
        (("--budget", "0/h"), "--budget must be above 0"),
        (("--deadline", "3"), "has no unit"),
        (("--objective", "speed"), "must be one of tokens, cost"),
    ],
)
def test_goals_that_cannot_be_read_are_refused(diloco, words, message):
    with pytest.raises(UsageError, match=message):
        diloco(*quickstart(*words))


def test_every_screen_fits_80_columns_and_a_wide_one_shows_more(diloco, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for run in ("run.yaml", "tpu-run.yaml", "machines-run.yaml"):
        path = QUICKSTART.parent / "plan" / run
        for words in ((), ("-v",)):
            assert max(map(len, diloco("plan", "-f", path, *words).splitlines())) <= 80
        islands = read_plan(path).islands
        narrow, wide = islands_table(islands, 80), islands_table(islands, 160)
        assert max(map(len, wide)) <= 160
        assert len(wide[0].split()) > len(narrow[0].split())
        assert "region" in wide[0]
        assert "region" not in narrow[0]
        assert all(island.name in "\n".join(narrow) for island in islands)


def test_launch_warns_of_too_many_fragments_as_plan_does():
    warned = read_plan(QUICKSTART / "run.yaml", ["sync.fragments=4096"]).warnings
    assert any(line.startswith("the model has too few rows for 4096 fragments") for line in warned)


@pytest.mark.parametrize("place", ["here", "gcs", "s3", "home", "slurm", "several"])
def test_init_writes_files_that_can_be_planned_and_never_overwrites(diloco, tmp_path, place):
    diloco("init", tmp_path / "new", "--for", place)
    assert "\nfeasible: " in diloco("plan", "-f", tmp_path / "new" / "run.yaml")
    (tmp_path / "new" / "run.yaml").write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        diloco("init", tmp_path / "new", "--for", place)
    assert (tmp_path / "new" / "run.yaml").read_text() == "mine"
    diloco("init", tmp_path / "new", "--force", "--for", place)
    assert (tmp_path / "new" / "run.yaml").read_text() != "mine"


@pytest.mark.parametrize("place", ["gcs", "s3", "home"])
def test_templates_for_other_hardware_have_nothing_to_warn_of_and_name_no_bucket_of_somebody(diloco, tmp_path, place):
    diloco("init", tmp_path, "--for", place)
    assert "\nfeasible: all 2 islands take part" in diloco("plan", "-f", tmp_path / "run.yaml")
    with pytest.raises(UsageError, match="is the template's: write your own bucket"):
        refuse_stores(read_plan(tmp_path / "run.yaml", []).inventory, tmp_path)


def test_without_any_inventory_plan_says_how_to_get_one(diloco):
    with pytest.raises(UsageError, match="no inventory given"):
        diloco("plan")


def test_plan_alone_plans_the_run_file_of_this_directory(diloco, monkeypatch, tmp_path):
    for name in ("run.yaml", "inventory.yaml"):
        (tmp_path / name).write_text((QUICKSTART / name).read_text())
    monkeypatch.chdir(tmp_path)
    alone = json.loads(diloco("plan", "--json"))["data"]
    assert [island["name"] for island in alone["islands"]] == ["iowa", "ohio", "belgium"]
