"""The page: whole by itself, the run's numbers in it, and everything from the bucket as text."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from diloco_cli.engines.port import Job, JobState
from diloco_cli.launch.new_run import keep_plan
from diloco_cli.launch.plan_files import read_plan
from diloco_cli.observe.facts import Local, LocalUnit
from diloco_cli.observe.status import status_of
from diloco_cli.plan.plan import Plan, Setting, Stage
from diloco_cli.protocol.log.keys import PLAN_KEY
from diloco_cli.protocol.log.records import Outcome
from diloco_cli.report.history import Mark
from diloco_cli.report.numbers import LaunchPlan, Report, read_launch_plan, report_of
from diloco_cli.report.page import charts_of, figures_of, page_of, poster_svg
from diloco_cli.store.memory import MemoryStore
from tests.forked import ROOT
from tests.unit.observe.test_status import RUN, facts
from tests.unit.report.test_history import add, at, begun, merge

HOSTILE = '\x1b[31m\x07\u202e</td><script>alert("1")</script><img src="https://evil.test/x" onerror=alert(1)>$\\frac{'
QUICKSTART = read_plan(ROOT / "examples" / "quickstart" / "run.yaml", [])
PREDICTION = replace(
    QUICKSTART.prediction, tokens_per_s_ideal=100.0, tokens_per_s=80.0, goodput=0.8,
    waterfall=(Stage("ideal", 100.0, 1.0), Stage(HOSTILE, 80.0, 1.25)),
)  # fmt: skip
ISLANDS = (
    replace(QUICKSTART.islands[0], name="iowa", price_per_h=36.0, egress_per_day=0.2),
    replace(QUICKSTART.islands[1], name="rhine", price_per_h=0.0),
)
MADE = replace(
    QUICKSTART, prediction=PREDICTION, islands=ISLANDS,
    money=replace(QUICKSTART.money, total=12.5, egress_gb_per_day=4.0),
    settings=(Setting("sync.every", "40", HOSTILE, pinned=True),),
)  # fmt: skip


def kept(made: Plan) -> LaunchPlan | None:
    """As launch leaves it, and a report finds it."""
    store = MemoryStore()
    keep_plan(store, made, {"train": "run.yaml:7"})
    return read_launch_plan(store)


PLAN = kept(MADE)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


def reported(plan: LaunchPlan | None = PLAN) -> tuple[Report, list]:
    history = begun()
    for second in range(1, 50):
        merge(history, second, "iowa", *(["rhine"] if second % 3 else []))
    history.marks.append(Mark(20.0, HOSTILE, HOSTILE, HOSTILE))
    report = report_of(facts(), history, plan, history.marks)
    return report, charts_of(report, history)


def hostile() -> tuple[Report, list]:
    """The bucket says the worst wherever it has text."""
    report, _ = reported()
    learners = [replace(row, name=HOSTILE, region=HOSTILE) for row in report.learners]
    regions = [replace(row, name=HOSTILE) for row in report.regions]
    said = {"run": HOSTILE, "url": HOSTILE, "reason": HOSTILE, "hint": HOSTILE, "state": HOSTILE, "software": HOSTILE}
    times = {"started_at": HOSTILE, "ended_at": HOSTILE}
    report = replace(report, learners=learners, regions=regions, **said, **times)
    history = begun()
    for second in range(1, 50):
        merge(history, second, HOSTILE)
    return report, charts_of(report, history)


def test_nothing_from_the_bucket_becomes_markup_and_nothing_is_fetched() -> None:
    pytest.importorskip("matplotlib")
    page = page_of(*hostile(), at(0), "id")
    tags = Tags(page)
    assert "&lt;script&gt;" in page and not tags.tags & {"script", "img", "iframe", "link", "object", "base", "form"}
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "src"]
    links = {value for name, value in tags.attributes if name in ("href", "xlink:href")}
    assert links and all(link.startswith(("#", "data:image/png")) for link in links)
    assert "default-src 'none'" in page
    assert not [character for character in page if not character.isprintable() and character != "\n"]


@pytest.mark.filterwarnings("error:Glyph")  # of a label with a character that no font has
def test_an_svg_file_is_well_formed_whatever_the_bucket_says() -> None:
    pytest.importorskip("matplotlib")
    report, charts = hostile()
    root = ElementTree.fromstring(poster_svg(report, charts))
    assert root.tag.endswith("svg") and "prefers-color-scheme: dark" in poster_svg(report, charts)
    assert not [element for element in root.iter() if element.tag.endswith("script")]


def test_pictures_take_their_colours_from_the_page() -> None:
    pytest.importorskip("matplotlib")
    page = page_of(*reported(), at(0), "id")
    assert "var(--ink" in page and "#010203" not in page
    assert page.count("<figure>") == 5, "all but those of the loss, which this history has none of"


def test_the_numbers_that_people_ask_for_come_first() -> None:
    report, _ = reported()
    said = dict(figures_of(report))
    assert said["merged tokens"] == "9k of 20k" and said["held-out loss, nats per token"] == "1.2500"
    assert said["faults survived"] == "0 restarts, 0 takeovers"


def test_offers_that_the_runs_end_settled_are_not_called_refused() -> None:
    history = begun()
    outcomes = tuple(Outcome("iowa", 1, 0, 0, reason) for reason in ("run_over", "superseded", "late"))
    add(history, "skip", 1, slot=0, outcomes=outcomes)
    report = report_of(facts(), history, None, [])
    assert dict(figures_of(report))["faults survived"] == "0 restarts, 0 takeovers, 1 offer refused"


def test_a_report_says_of_a_run_what_status_says_on_the_same_machine() -> None:
    dead = Local({name: LocalUnit("learner", 7, "dead") for name in ("iowa", "rhine")})
    spoken = facts(iowa=9.0, rhine=9.0)
    status = replace(status_of(spoken, dead), jobs=[Job("iowa", "slurm", "7", JobState.HELD, "held <by> a person")])
    report = report_of(spoken, begun(), None, [], status)
    assert (report.state, report.reason, report.hint) == (status.state, status.reason, status.hint)
    assert status.reason != status_of(spoken).reason
    page = page_of(report, [], "now", "id")
    assert "<td>HELD</td>" in page and "a person" not in page, "no word of a host in what is shown around"


def test_shares_are_of_all_tokens() -> None:
    report = report_of(facts(), begun(), None, [])
    assert [row.share for row in report.learners] == [row.tokens / report.tokens for row in report.learners]
    assert report.learners[0].share > 0, "the history has no merge at all"


def test_money_is_what_the_plan_charges_for_the_time_and_the_bytes() -> None:
    """By hand: 36 an hour for 100 s is 1; iowa's 10 bytes at 0.2 a day for 2 GB a day are next to nothing."""
    report, _ = reported()
    assert report.cost is not None and report.cost.accelerators == pytest.approx(1.0)
    assert report.cost.egress == pytest.approx(10e-9 * 0.1) and report.cost.planned == 12.5
    assert PLAN.egress_per_gb("iowa") == pytest.approx(0.1) and PLAN.egress_per_gb("nobody") == 0.0


def test_the_waterfall_ends_at_what_was_merged_and_the_plans_is_scaled_to_this_machine() -> None:
    report, _ = reported()
    assert report.measured[-1].tokens_per_s == pytest.approx(report.tokens / report.wall_s)
    rates = [stage.tokens_per_s for stage in report.measured[:-1]]
    assert rates == sorted(rates, reverse=True) and rates[0] == 200.0
    assert [stage.tokens_per_s for stage in report.planned] == [200.0, 160.0]


def test_an_absent_island_takes_its_own_speed_from_the_waterfall() -> None:
    """Not its share of the islands: a slow one that is away costs little."""
    fast, slow = (replace(island, tokens_per_s=rate) for island, rate in zip(RUN.islands, (180.0, 20.0), strict=True))
    history = begun()
    for second in range(1, 51):
        merge(history, second, fast.name, *([slow.name] if second % 2 else []))
    report = report_of(replace(facts(), run=replace(RUN, islands=(fast, slow))), history, None, [])
    stages = {stage.name: stage.tokens_per_s for stage in report.measured}
    assert stages["after absences"] == pytest.approx(stages["after outages"] * (180 + 20 / 2) / 200)


def test_settings_say_where_they_come_from() -> None:
    origins = {setting.name: setting.origin for setting in reported()[0].settings}
    assert origins["train.tokens"] == "run.yaml:7" and origins["outer.lr"] == "default"
    assert origins["sync.every"] == HOSTILE
    assert {setting.origin for setting in reported(None)[0].settings} == {"unknown"}


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"prediction": 1}', b'{"x":' * 9000])
def test_a_plan_that_cannot_be_read_is_none(data: bytes) -> None:
    store = MemoryStore()
    store.put(PLAN_KEY, data)
    assert read_launch_plan(store) is None


def test_numbers_beyond_all_measure_break_no_picture() -> None:
    """Heartbeats are not signed, and whoever may write the plan may write any number."""
    pytest.importorskip("matplotlib")
    assert kept(replace(MADE, money=replace(MADE.money, total=1e308))) is None
    said = facts(mean_tokens_per_s=1e308, up_bytes=2**62, down_bytes=2**62)
    history = begun()
    merge(history, 1, "iowa")
    report = report_of(said, history, PLAN, [Mark(1e300, "chaos", "iowa", "")])
    assert page_of(report, charts_of(report, history), at(0), "id").count("<figure>") == 5


def test_a_run_without_a_plan_has_no_cost_and_one_without_a_merge_has_a_page() -> None:
    pytest.importorskip("matplotlib")
    assert reported(None)[0].cost is None
    report = report_of(facts(), begun(), None, [])
    assert "<figure>" not in page_of(report, charts_of(report, begun())[:0], at(0), "id")
