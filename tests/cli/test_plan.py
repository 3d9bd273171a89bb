"""`diloco plan`, `init` and `config show` as a user meets them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diloco_cli.cli.main import add_command
from diloco_cli.cli.plan import _told_of
from diloco_cli.cli.plan_choices import Compared, compared_text, rivals_text
from diloco_cli.cli.plan_view import MAX_ROWS, grouped_islands, islands_table, plan_text
from diloco_cli.cli.preflight import refuse_stores
from diloco_cli.config.codec import replace
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.forecast.outlook import Rival
from diloco_cli.forecast.run import BRIEF, LONG
from diloco_cli.launch.plan_files import read_plan, resolve
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.planner import make_plan, rivals
from diloco_cli.quantities import parse_count
from tests.benchmarks.plan import RUN, islands

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
PINNED = ("--set", "sync.codec=int8", "--set", "sync.weights_codec=int8", "--set", "sync.fragments=24")
"""For a quick search, where it is not the question."""


@pytest.fixture
def diloco(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    app = typer.Typer()
    for name in ("init", "plan", "config"):
        add_command(app, name)

    def run(*words, status=0, fast=True):
        """Most of what `plan` prints needs no simulation."""
        words = (*words, "--fast") if words[0] == "plan" and fast else words
        result = CliRunner().invoke(app, [str(word) for word in words])
        if isinstance(result.exception, DilocoError):
            raise result.exception
        assert result.exit_code == status, result.output
        run.told = result.stderr
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
    with pytest.raises(UsageError, match="--diff prints differences alone"):
        diloco(*quickstart("--diff", plan, "--simulate"), fast=False)


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


def test_a_plan_is_confirmed_and_says_how_far_it_may_move(diloco):
    assert "confirmed" not in json.loads(diloco(*quickstart("--json"), fast=False))["data"]
    (line,) = (x for x in diloco(*quickstart(), fast=False).splitlines() if x.startswith("confirmed"))
    found = re.match(r"confirmed  (\S+) tok/s in virtual time, (\S+) to (\S+) \(.* to .*\) with links and", line)
    assert found is not None
    rate, least, most = (float(parse_count(each)) for each in found.groups())
    assert (least / rate, most / rate) == (pytest.approx(0.8, rel=0.05), pytest.approx(1.2, rel=0.05))
    assert "confirmed" not in diloco(*quickstart())
    assert "confirmed" not in diloco(*quickstart("--explain"), fast=False)


def test_what_takes_long_to_confirm_is_not_begun_unless_it_is_asked_for(diloco):
    text = diloco("plan", "-f", QUICKSTART.parent / "plan" / "machines-run.yaml", fast=False)
    assert "confirmed  no: 12 islands with 96 fragments take longer; --simulate does it" in text


def test_what_takes_too_long_even_where_it_is_asked_for_is_told_and_the_plan_stands(diloco):
    words = ("plan", "-f", QUICKSTART.parent / "plan" / "machines-run.yaml", "--set", "sync.fragments=384")
    for asked in ([], ["--simulate"]):
        text = diloco(*words, *asked, fast=False)
        assert re.search(r"confirmed  no: 13 islands with 384 fragments take \d\d,\d{3} simulated offers, more", text)
        assert ("\nsimulated  3 histories" in text) == bool(asked) and "\nrivals" not in text


def test_simulate_puts_events_beside_the_closed_form(diloco, monkeypatch):
    monkeypatch.setattr("diloco_cli.forecast.run.LONG", BRIEF)
    run = QUICKSTART.parent / "plan" / "run.yaml"
    found = json.loads(diloco("plan", "-f", run, "--simulate", "--json", fast=False))["data"]
    assert found["simulation"]["failures"] > 100
    assert found["simulation"]["failures_percent"] == pytest.approx(found["simulation"]["closed_form_percent"], abs=1.5)
    assert found["confirmed"]["plan_off_percent"] == pytest.approx(0, abs=1.5)
    assert found["confirmed"]["histories"] == 8
    (rival,) = found["rivals"]
    assert rival["islands"] == ["iowa", "eu-spot"] and rival["better_percent"] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "300"), "write an amount per hour such as 150/h"),
        (("--budget", "x/run"), "--budget 'x/run': write an amount"),
        (("--budget", "0/h"), "--budget must be above 0"),
        (("--deadline", "3"), "has no unit"),
        (("--objective", "speed"), "must be one of tokens, cost, loss"),
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
            assert max(map(len, diloco("plan", "-f", path, *PINNED, *words).splitlines())) <= 80
        islands = read_plan(path, PINNED[1::2]).islands
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


NOTHING = QUICKSTART.parent / "plan" / "nothing.yaml"
TPU_RUN = QUICKSTART.parent / "plan" / "tpu-run.yaml"


def test_what_to_rent_is_told_compared_and_written_for_the_inventory(diloco, tmp_path):
    words = ("-f", TPU_RUN, "--deadline", "7 d", *PINNED)
    text = diloco("plan", NOTHING, "--add", "auto", *words)
    lines = text.splitlines()
    assert re.match(r"rent       \d+ x \S+:8 spot in us-east-2 \(", lines[0])
    assert "now        nothing that trains" in lines
    assert {"elsewhere", "on demand", "other kind", "guessed"} <= {line[:10].strip() for line in lines}
    pasted = tmp_path / "inventory.yaml"
    pasted.write_text(NOTHING.read_text() + text[text.index("\nmachines:") :])
    told = json.loads(diloco("plan", NOTHING, "--add", "auto", *words, "--json"))["data"]
    best, *others = told["rent"]["proposals"]
    assert told["rent"]["now"] is None and best["spot"] and best["days_to_target"] <= 7
    assert best["total"] <= min(other["total"] for other in others)
    later = json.loads(diloco("plan", pasted, "--objective", "cost", *words, "--json"))["data"]
    assert later["money"]["total"] == pytest.approx(told["money"]["total"])


def test_a_table_of_ones_own_and_one_machine_more(diloco, tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text("InstanceType,AcceleratorName,AcceleratorCount,Price,Region\nbig,H100,8,30,us-central1\n")
    words = ("plan", QUICKSTART.parent / "plan" / "tpu.yaml", "-f", TPU_RUN, "--prices", prices, "--add")
    one = json.loads(diloco(*words, "H100:8@us-central1 x4", "--json"))["data"]
    assert [(p["instance"], p["machines"]) for p in one["rent"]["proposals"]] == [("big", 4)]
    assert "rented" in {island["name"] for island in one["islands"]}
    assert one["prediction"]["days_to_target"] < one["rent"]["now"]["days_to_target"]


def test_what_is_rented_says_whom_it_replaces_and_may_keep_somebody(diloco, tmp_path):
    """Of cheap fast machines, one beside which the own slow ones are not worth their price."""
    prices = tmp_path / "prices.csv"
    prices.write_text("InstanceType,AcceleratorName,AcceleratorCount,Price,Region\nbig,H100,8,3,us-central1\n")
    words = ("plan", "-f", TPU_RUN, "--prices", prices, "--add", "auto", "--deadline", "20 d", *PINNED)
    text = diloco(*words)
    assert re.search(r"^rent .*\n?.*, instead of \S+", text, re.MULTILINE)
    name = re.findall(r", instead of\s+([\w-]+)", text)[0]
    kept = json.loads(diloco(*words, "--with", name, "--json"))["data"]
    assert {name, "rented"} <= {island["name"] for island in kept["islands"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--add", "auto"), "until when, or for how much"),
        (("--add", "H1000:8"), "unknown device 'H1000'; nearest: H100"),
        (("--add", "H100:8@moon"), "no such machine is listed"),
        (("--add", "auto", "--budget", "$300/run"), re.escape("--budget '$300/run': write an amount per hour such as")),
        (("--add", "auto", "--budget", "300"), "or for all of it such as 20k/run"),
        (("--prices", "prices.csv"), "--prices are of what --add rents"),
        (("--add", "auto", "--without", "home"), "--add is beside all that the inventory has"),
        (("--add", "H100:8", "--prices", "missing.csv"), "no such table of prices"),
    ],
)
def test_what_cannot_be_rented_is_refused(diloco, words, message):
    with pytest.raises(DilocoError, match=message):
        diloco("plan", NOTHING, "-f", TPU_RUN, *words)


def test_the_frontier_stands_beside_what_else_is_asked_for(diloco):
    words = ("plan", NOTHING, "-f", TPU_RUN, "--add", "H100:8 x8", "--frontier", "--explain")
    text = diloco(*words)
    places = [text.index(part) for part in ("rent  ", "asked for by", "\nmachines:", "\nmodel:\n")]
    assert places == sorted(places)


def test_the_frontier_is_a_line_for_each_plan_with_its_goal(diloco):
    words = ("plan", "-f", TPU_RUN, "--frontier", *PINNED)
    head, *lines, lacking = diloco(*words).splitlines()
    assert lacking == "money is without some egress"
    assert head.split() == ["time", "in", "all", "per", "h", "loss", "islands", "asked", "for", "by"]
    assert len(lines) >= 3 and lines[-1].endswith("--objective cost") and "--objective loss" in "".join(lines)
    rows = json.loads(diloco(*words, "--json"))["data"]["frontier"]
    assert [row["goal"] for row in rows] == [line[line.index("--objective") :] for line in lines]
    assert [row["days_to_target"] for row in rows] == sorted(row["days_to_target"] for row in rows)


def test_the_frontier_without_an_island_says_what_reproduces_each_line(diloco):
    rows = json.loads(diloco(*FOUR, "--without", "eu-spot", "--frontier", "--json"))["data"]["frontier"]
    assert rows and all(row["goal"].endswith(" --without eu-spot") for row in rows)
    assert all("eu-spot" not in row["islands"] for row in rows)
    again = json.loads(diloco(*FOUR, *shlex.split(rows[0]["goal"]), "--json"))["data"]
    assert again["prediction"]["days_to_target"] == pytest.approx(rows[0]["days_to_target"], rel=0.01)


def test_the_frontier_with_a_simulation_says_what_it_confirms(diloco, monkeypatch):
    monkeypatch.setattr("diloco_cli.forecast.run.LONG", replace(LONG, most_offers=1))
    text = diloco(*FOUR, "--without", "eu-spot", "--frontier", "--simulate", fast=False)
    places = [text.index(part) for part in ("asked for by", "\nconfirmed  no: ", "\nsimulated ")]
    assert places == sorted(places)
    assert "more than 1: the closed form alone says what is merged" in " ".join(text.split())


def test_the_frontier_is_drawn_with_a_point_for_each_plan(diloco, tmp_path):
    pytest.importorskip("matplotlib")
    words = ("plan", "-f", TPU_RUN, "--frontier", "--plot", tmp_path / "frontier.svg", *PINNED)
    count = len(re.findall("--objective", diloco(*words)))
    svg = (tmp_path / "frontier.svg").read_text()
    assert len(re.findall(r" islands?<", svg)) == count
    assert ">money in all without some egress<" in svg and ">loss over data-parallel, %<" in svg


FOUR = ("plan", "-f", QUICKSTART.parent / "plan" / "run.yaml", "--set", "sync.every=568")


def test_a_plan_without_an_island_stands_beside_the_one_with_it(diloco):
    lines = diloco(*FOUR, "--without", "home", "--without", "old").splitlines()
    assert lines[0].split() == ["now", "without", "home,", "without", "old"]
    assert [line[:8].strip() for line in lines[1:7]] == ["time", "tok/s", "in all", "loss", "islands", "limited"]
    assert lines[5].split()[1:] == ["iowa,", "eu-spot,", "old,", "home", "iowa,", "eu-spot"] and lines[7] == ""
    assert lines[3].count("without some egress") == 2 and "%" not in lines[3]  # the missing part may decide
    found = json.loads(diloco(*FOUR, "--without", "home", "--json"))["data"]
    assert found["compared"]["then"]["tokens_per_s"] == found["prediction"]["tokens_per_s"]
    assert found["compared"]["now"]["tokens_per_s"] > found["prediction"]["tokens_per_s"]
    now = found["compared"]["now"]
    assert (now["islands"], now["islands_there"], now["sync"]["every"], now["limited_percent"] > 0) == (4, 4, 568, True)
    assert found["goal"]["without_islands"] == ["home"] and not found["excluded"]


def test_an_island_that_the_plan_leaves_out_is_taken_for_what_it_costs(diloco):
    words = ("plan", "-f", TPU_RUN, "--objective", "cost")
    told = json.loads(diloco(*words, "--with", "v6e-holland", "--json"))["data"]
    assert {island["name"] for island in told["islands"]} == {"v5e-nevada", "v6e-holland"}
    assert told["compared"]["then"]["total"] > told["compared"]["now"]["total"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--without", "hme"), "no island 'hme' to plan with or without; did you mean home", "the islands are iowa"),
        (("--with", "home", "--without", "home"), "with home or without it", "leave out"),
        (
            ("--without", "iowa", "--without", "eu-spot", "--without", "old", "--without", "home"),
            "no island",
            "keep one",
        ),
        (("--set", "sync.every=100", "--with", "home"), "no plan with home: home: needs 142 Mbps", "sync.every=568"),
        (("--with", "home", "--calibrate", "no-run"), "--calibrate makes one plan again", "--calibrate RUN prints"),
    ],
)
def test_what_cannot_be_compared_is_refused(diloco, words, message, hint):
    with pytest.raises(DilocoError, match=re.escape(message)) as caught:
        diloco(*FOUR, *words)
    assert hint in caught.value.hint


def test_two_plans_say_who_is_in_which_what_has_no_price_and_what_longer_rounds_are_counted_as():
    plan = read_plan(QUICKSTART / "run.yaml")
    first, *others = plan.islands
    one, rest = (replace(plan, islands=tuple(islands)) for islands in ([first], others))
    text = compared_text(Compared("without it", one, rest))
    row = next(line for line in text.splitlines() if line.startswith("islands"))
    assert row.split()[1:] == " ".join([first.name, *(f"{i.name}," for i in others)]).rstrip(",").split()
    assert "in all" not in text and "not in it" not in text
    longer = replace(rest, schedule=replace(rest.schedule, sync_every=263))
    assert "a doubling of H beyond 50 as 5 % of the tokens" in compared_text(Compared("longer", one, longer))
    stated = [replace(plan.inventory.islands[0], name=f"i{n}") for n in range(9)]
    many = [replace(first, name=island.name) for island in stated]
    plan = replace(plan, inventory=replace(plan.inventory, islands=tuple(stated)))
    without = [replace(plan, islands=tuple(i for i in many if i.name != name)) for name in ("i0", "i8")]
    row = next(line for line in compared_text(Compared("other", *without)).splitlines() if line.startswith("islands"))
    assert "8 of 9, not i0" in row and row.endswith("8 of 9, not i8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--with", "iowa"), "iowa takes part already"),
        (("--set", "sync.every=100", "--without", "home"), "home is left out already"),
    ],
)
def test_a_comparison_that_changes_nothing_says_so(diloco, words, told):
    diloco(*FOUR, *words)
    assert told in diloco.told


def test_why_launch_would_end_is_one_short_line_and_with_v_all_of_it():
    why = [f"launch would end here: reason {n} (with a parenthesis) (hint: {n})" for n in range(3)]
    assert _told_of(why, False) == ["warning: launch would end here: reason 0 (with a parenthesis); and 2 more (-v)"]
    assert _told_of(why, True) == [f"warning: {each}" for each in why]
    assert _told_of(why[:1], False) == [f"warning: {why[0]}"]


def test_what_is_written_is_not_said_to_be_lost(diloco, tmp_path):
    text = diloco(*FOUR, "--without", "home", "-o", tmp_path / "plan.json")
    assert "start it: diloco launch FILE" in " ".join(text.split())
    assert "not kept" not in diloco.told and "made now for a comparison" in diloco.told
    diloco(*FOUR, "--without", "home")
    assert "so it is not kept" in diloco.told


def test_a_rival_that_is_better_in_virtual_time_is_told_with_what_asks_for_it():
    found = resolve(TPU_RUN, anew=True)
    others = rivals(found.plan, found.origins, 4)
    assert len(others) == 4 and all(other.schedule != found.plan.schedule for other in others)
    assert all(other.syncer.busy_percent <= 100 for other in others)
    finer = next(other for other in others if other.schedule.fragments != found.plan.schedule.fragments)
    told = " ".join(rivals_text(found.plan, [Rival(finer, 2.2e6, 3.0)]).split())
    assert f"--set sync.every={finer.schedule.sync_every}" in told
    assert f"--set sync.fragments={finer.schedule.fragments}" in told and "+3.0 % in virtual time" in told
    assert "none is better" in rivals_text(found.plan, [Rival(finer, 2.1e6, 0.4)])
    fewer = replace(finer, run=found.plan.run, islands=finer.islands[1:])
    assert f"--without {finer.islands[0].name}: " in rivals_text(found.plan, [Rival(fewer, 2.2e6, 3.0)])
