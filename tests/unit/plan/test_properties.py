"""Laws of every plan: more bandwidth, more chips, fewer failures never predict worse."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import IslandSettings, Link, RunSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import kept_in_flight, run_fleet
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.planner import make_plan
from diloco_cli.plan.search import SEARCHED, search
from tests.unit.plan.fleets import HOME, IOWA, MODEL, OLD, RUN, SPOT, fleet, with_sync

A_CHANGE = 0.998  # a search prefers other settings only if they are better by 0.2 %
MIXINGS = st.sampled_from(("replace", "rebase"))


def predicted(islands: list[IslandSettings], run: RunSettings) -> float:
    """Tokens per second with the settings as they are; only the islands are chosen. 0: no plan."""
    try:
        return make_plan(run, fleet(*islands), MODEL).prediction.tokens_per_s
    except InfeasibleError:
        return 0.0


def valued(islands: list[IslandSettings], run: RunSettings) -> float:
    """The score with everything searched. 0: no plan."""
    found = search(candidates(run, fleet(*islands), MODEL), run, MODEL, frozenset(SEARCHED), Goal())
    return found.effective_tokens_per_s if found else 0.0


def linked(bps: float) -> list[IslandSettings]:
    link = Link(bps, bps, 0.01)
    return [replace(i, link=link) for i in (IOWA, SPOT, OLD)] + [replace(HOME, link=Link(bps / 7, bps / 3, 0.05))]


@settings(max_examples=40, deadline=None)
@given(
    bps=st.floats(2e7, 1e10), more=st.floats(1.0, 20.0), every=st.integers(24, 400), mixing=MIXINGS,
    overlap=st.sampled_from(("auto", 4)),
)  # fmt: skip
def test_more_bandwidth(bps: float, more: float, every: int, mixing: str, overlap: str | int) -> None:
    run = with_sync(every=every, mixing=mixing, overlap=overlap)
    assert predicted(linked(bps * more), run) >= predicted(linked(bps), run) * (1 - 1e-9)


@settings(max_examples=15, deadline=None)
@given(bps=st.floats(2e7, 1e10), more=st.floats(1.0, 20.0))
def test_more_bandwidth_with_everything_searched(bps: float, more: float) -> None:
    assert valued(linked(bps * more), RUN) >= valued(linked(bps), RUN) * A_CHANGE


@settings(max_examples=40, deadline=None)
@given(mtbf=st.floats(300.0, 1e6), more=st.floats(1.0, 20.0), restart=st.floats(1.0, 5000.0), quorum=st.integers(1, 3))
def test_fewer_failures_and_faster_restarts(mtbf: float, more: float, restart: float, quorum: int) -> None:
    def rate(mtbf_s: float, restart_s: float) -> float:
        islands = [replace(i, mtbf_s=mtbf_s, restart_s=restart_s) for i in (IOWA, SPOT, OLD)]
        return predicted(islands, with_sync(quorum=quorum))

    assert rate(mtbf * more, restart) >= rate(mtbf, restart) * (1 - 1e-9)
    assert rate(mtbf, restart / more) >= rate(mtbf, restart) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 8), more=st.integers(1, 8), who=st.sampled_from((1, 2)))
def test_more_chips_at_an_island_that_does_not_set_the_pace(count: int, more: int, who: int) -> None:
    islands = [IOWA, SPOT, OLD]
    fewer = replace(islands[who], accelerators=replace(islands[who].accelerators, count=count))
    larger = replace(fewer, accelerators=replace(fewer.accelerators, count=count + more))
    before, after = ([*islands[:who], island, *islands[who + 1 :]] for island in (fewer, larger))
    if candidates(RUN, fleet(*after), MODEL)[0].island.name == "iowa":
        assert predicted(after, RUN) >= predicted(before, RUN) * A_CHANGE


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 8), more=st.integers(1, 56))
def test_more_chips_anywhere_once_h_may_follow(count: int, more: int) -> None:
    """With H pinned, a faster pace shortens the round, which links may not carry. With H searched nothing is lost but
    what whole steps cost: a round of H steps can be made as long as before to within one of them, and an island ends
    its round at most half a step early."""

    def fleet_of(chips: int) -> list[IslandSettings]:
        return [replace(IOWA, accelerators=replace(IOWA.accelerators, count=chips)), SPOT, OLD, HOME]

    run = with_sync(every=24)
    before = search(candidates(run, fleet(*fleet_of(count)), MODEL), run, MODEL, frozenset(SEARCHED), Goal())
    assert before is not None
    slowest = max(candidate.step_s for candidate in before.kept)
    rounding = slowest / before.schedule.round_s
    assert valued(fleet_of(count + more), run) >= before.effective_tokens_per_s * A_CHANGE * (1 - rounding)


@settings(max_examples=100, deadline=None)
@given(a=st.floats(0.001, 5.0), b=st.floats(0.001, 5.0))
def test_more_in_flight_keeps_less(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0 < kept_in_flight(high) <= kept_in_flight(low) <= 1


def test_every_stage_of_the_waterfall_is_at_most_the_one_before() -> None:
    for mixing in ("replace", "rebase"):
        everyone = candidates(RUN, fleet(), MODEL)
        for flow in run_fleet(everyone, with_sync(mixing=mixing).sync, MODEL).flows:
            assert flow.ideal >= flow.after_idle >= flow.after_link >= flow.after_failures > 0
