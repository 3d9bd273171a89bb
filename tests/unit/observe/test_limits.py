"""The syncer's machine as its heartbeat says: the same for `status` and for a simulation of the run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from diloco_cli.observe.situation import machine_of_syncer
from diloco_cli.observe.status import status_of
from diloco_cli.plan.syncer_pace import GUESSED_MACHINE, measured_by, work_of
from diloco_cli.protocol.rules.capacity import shortest_slot
from tests.unit.observe.test_status import RUN, facts
from tests.unit.observe.test_verdict import everybody_merged, syncer_says

GUESS = replace(GUESSED_MACHINE, call_s=0.123)
MEASURED = {"call_s": 0.04, "bytes_s": 0.3, "processor_s": 0.2, "reads_back": False, "connections": 1}


def test_a_simulation_of_a_run_has_the_slot_that_its_status_tells() -> None:
    run = syncer_says(everybody_merged(), **MEASURED)
    machine, source = machine_of_syncer(run, GUESS)
    said = status_of(run).syncer
    assert said is not None and said.slot_s is not None and said.calls_s is not None
    spent = shortest_slot(work_of(RUN.layout.num_parameters, 2, RUN.settings.sync), machine, said.slot_s)
    assert (said.calls_s, said.bytes_s, said.processor_s) == (spent.calls_s, spent.bytes_s, spent.processor_s)
    assert said.bytes_s == pytest.approx(0.3) and said.processor_s == pytest.approx(0.2)
    merge, beside = 2 + 4 + 2 + 1, 2 + 2 + 1  # calls; those of looks and a heartbeat come in some turns
    assert merge * 0.04 < said.calls_s < (merge + beside) * 0.04
    assert "as that has measured it: 40 ms a call, 1 at a time" in source and "versions are not read back" in source


@pytest.mark.parametrize("figure", [-1.0, math.inf, math.nan])
def test_figures_that_no_syncer_measures_count_as_none(figure: float) -> None:
    for name in ("call_s", "bytes_s", "processor_s"):
        machine, source = machine_of_syncer(syncer_says(everybody_merged(), **{**MEASURED, name: figure}), GUESS)
        assert machine.call_s == GUESS.call_s and "speed is guessed" in source


def test_means_of_several_merges_are_not_those_of_the_last_one() -> None:
    """A merge that half of the learners missed makes the machine no slower."""
    run = syncer_says(everybody_merged(), **MEASURED)
    heartbeat, notes = run.syncer, run.state.metrics.recent_merges * 4
    missed = structs.replace(notes[-1], participants=notes[-1].participants[:1])
    assert heartbeat is not None
    whole, partly = (measured_by(heartbeat.heartbeat, run.run, some) for some in (notes, (*notes[:-1], missed)))
    assert whole is not None and whole == partly


def test_a_number_of_connections_that_no_syncer_has_harms_no_reader() -> None:
    found = []
    for connections in (-1, 0, 1, 48, 1 << 40):
        said = status_of(syncer_says(everybody_merged(), **{**MEASURED, "connections": connections})).syncer
        assert said is not None
        found.append(said.calls_s)
        guessed, _ = machine_of_syncer(syncer_says(facts(), connections=connections), GUESS)
        assert 1 <= guessed.connections <= 48
    assert found[0] == found[1] == found[2] > found[3] == found[4]


def test_a_syncer_without_a_merge_says_what_it_has_tried_and_its_speed_is_guessed() -> None:
    for run in (
        syncer_says(facts(), reads_back=False, connections=5),
        syncer_says(replace(facts(), state=type(facts().state)()), **{**MEASURED, "connections": 5}),
    ):
        machine, source = machine_of_syncer(run, GUESS)
        assert machine == replace(GUESS, reads_back=False, connections=5)
        assert "its machine's speed is guessed: 123 ms a call, 5 at a time" in source


def test_a_run_whose_syncer_nobody_heard_has_a_guessed_machine() -> None:
    machine, source = machine_of_syncer(replace(facts(), syncer=None), GUESS)
    assert machine == GUESS
    assert "its machine is guessed: 123 ms a call, 48 at a time, 3.5 Gbps up, 3.5 Gbps down" in source
