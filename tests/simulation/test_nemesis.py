"""What happens to whole processes strikes all of a role, or one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.protocol.log.keys import SYNCER
from tests.histories.history import History
from tests.histories.options import NemesisKind, Options, drawn_options
from tests.histories.outcome import HistoryResult
from tests.histories.script import OF_PROCESSES, NemesisEvent, Script, drawn_nemesis_events
from tests.simulation.traces import trace_of

AT_S, FOR_S = 0.5, 20.0
SEED = 3


def with_a_standby() -> Options:
    quiet = drawn_options(SEED).without_faults()
    return replace(
        quiet, learners=1, apart=0, quorum=1, syncers=1, standbys=1, takeover_s=0.5, merges=8, latency_s=0.001,
        step_s=0.5, steps_a_slot=2, faulty_share=0.9,
    )  # fmt: skip


def struck(kind: NemesisKind, which: int) -> tuple[History, HistoryResult]:
    history = History(SEED, with_a_standby(), Script((), (NemesisEvent(AT_S, kind, SYNCER, FOR_S, which),)))
    return history, history.live()


def moments_of(outcome: HistoryResult, text: str) -> list[float]:
    return [at_s for at_s, what, _ in outcome.tail if what == text]


@pytest.mark.parametrize("kind", ["outage", "forbidden"])
def test_one_syncer_is_cut_off_and_a_standby_serves_in_its_place(kind: NemesisKind) -> None:
    history, outcome = struck(kind, which=1)
    assert outcome.violation is None
    first = history.supervisor.processes[0]
    took_over_s = min(moments_of(outcome, "syncer.2 created"))
    assert AT_S < took_over_s < AT_S + FOR_S / 2 and first.ended_s > took_over_s, "and the first one lives on"
    later = [key for at_s, what, key in outcome.tail if what == "syncer.1 created" and at_s > AT_S]
    assert not [key for key in later if key.startswith("commit/")], "what it finds out is that it has a successor"


def test_an_outage_of_the_role_stops_them_all() -> None:
    _, outcome = struck("outage", which=0)
    assert outcome.violation is None
    assert not [s for s in moments_of(outcome, "syncer.2 created") if s < AT_S + FOR_S / 2]


@pytest.mark.parametrize(("which", "ended"), [(0, {"syncer.1", "syncer.2"}), (1, {"syncer.1"}), (2, {"syncer.2"})])
def test_a_kill_ends_all_of_them_or_one(which: int, ended: set[str]) -> None:
    history, outcome = struck("kill", which)
    assert outcome.violation is None
    assert {process.name for process in history.supervisor.processes if process.ended_s == AT_S} == ended
    assert outcome.crashes == len(ended)


def test_the_swarm_strikes_all_and_one_and_lets_wall_clocks_jump_both_ways() -> None:
    drawn: list[NemesisEvent] = []
    for seed in range(200):
        drawn += drawn_nemesis_events(drawn_options(seed), seed, ["l0"])
    for kind in OF_PROCESSES:
        assert {nemesis_event.which for nemesis_event in drawn if nemesis_event.kind == kind} >= {0, 1, 2}, kind
    assert {nemesis_event.which for nemesis_event in drawn if nemesis_event.kind not in OF_PROCESSES} == {0}
    jumps = [nemesis_event.for_s for nemesis_event in drawn if nemesis_event.kind == "wall_jump"]
    assert min(jumps) < 0 < max(jumps)
    assert all(nemesis_event.for_s >= 0 for nemesis_event in drawn if nemesis_event.kind != "wall_jump")


@pytest.mark.parametrize("wanted", [10, pytest.param(40, marks=pytest.mark.long)])
def test_a_history_in_which_one_of_several_is_struck_is_repeated_by_the_list_of_its_faults(wanted: int) -> None:
    for seed in range(60 * wanted):
        drawn = History(seed, drawn_options(seed)).live()
        if any(nemesis_event.which for nemesis_event in drawn.faulty.nemesis_events):
            assert trace_of(History(seed, drawn_options(seed), drawn.faulty).live()) == trace_of(drawn)
            wanted -= 1
        if not wanted:
            return
    raise AssertionError(f"{wanted} too few were struck")
