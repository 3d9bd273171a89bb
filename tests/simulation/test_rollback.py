"""Going back to an earlier commit: by the syncer or by the command, whoever dies at whatever moment."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.actors.requests import return_to
from diloco_cli.protocol.log.keys import commit_key
from tests.simulation.operated import (
    answered,
    by_the_command,
    done,
    note_texts,
    run_that_keeps,
    started,
    state_of,
)
from tests.simulation.sweeps import check, finished
from tests.simulation.toy import ToyFleet

RUN = run_that_keeps(merges=14)
TO = 4


def rolled_back(fleet: ToyFleet) -> dict[str, Any]:
    """The one rollback's record in the log."""
    (record,) = [commit for commit in fleet.records() if commit["kind"] == "rollback"]
    return record


def finishes(fleet: ToyFleet) -> None:
    assert finished(fleet).kinds.count("rollback") == 1


@pytest.mark.parametrize("mixing", ["replace", "rebase"])
def test_every_fragment_is_what_it_was_under_a_number_that_no_version_had(mixing: str) -> None:
    """Learners replace their parameters whatever they do otherwise: the reader checks what each delta was made from,
    and that ranges of a learner's data never overlap within a fragment."""
    fleet = started(run_that_keeps(merges=20, mixing=mixing), 10)
    then = {o["fragment"]: o for o in outputs_after(fleet, TO)}
    ends = {name: known.data_end for name, known in state_of(fleet).learners.items()}
    state = answered(fleet, "rollback", to=TO)
    record = rolled_back(fleet)
    assert [(o["version"], o["state_digest"]) for o in record["outputs"]] == [
        (record["n"], then[f]["state_digest"]) for f in range(RUN.num_fragments)
    ]
    assert (state.base_floor, state.rolled_back_to) == (record["n"], TO)
    finishes(fleet)
    assert "before_rollback" in set(check(fleet).settled.values()), "offers from behind it say why they are refused"
    assert all(state_of(fleet).learner(name).data_end > end for name, end in ends.items()), "data is not read again"


def outputs_after(fleet: ToyFleet, n: int) -> list[dict[str, Any]]:
    current = {output["fragment"]: output for record in fleet.records()[: n + 1] for output in record["outputs"]}
    return [current[fragment] for fragment in sorted(current)]


def test_what_was_merged_after_the_target_no_longer_counts_and_is_trained_again() -> None:
    straight, back = started(RUN, 8), started(RUN, 8)
    before = state_of(back).tokens(RUN.layout)
    after = answered(back, "rollback", to=TO)
    assert after.tokens(RUN.layout) < before
    straight.finish()
    finishes(back)
    assert check(back).kinds.count("merge") > check(straight).kinds.count("merge"), "the lost merges were made up for"
    assert check(back).tokens >= RUN.settings.train.tokens


@pytest.mark.parametrize(("to", "why"), [(99, "not 99"), (-1, "not -1"), (None, "not None")])
def test_a_target_that_is_not_there_is_refused_in_the_log(to: int | None, why: str) -> None:
    fleet = started(RUN, 5)
    state = answered(fleet, "rollback", to=to)
    assert any(text.startswith("no rollback: only commits 0 to ") and text.endswith(why) for text in note_texts(state))
    assert "rollback" not in finished(fleet).kinds


@pytest.mark.parametrize(("damage", "words"), [(None, "is missing"), (b"x", "has other bytes")])
def test_a_state_that_is_gone_or_damaged_is_no_target(damage: bytes | None, words: str) -> None:
    fleet = started(RUN, 8)
    output = outputs_after(fleet, TO)[0]
    (key,) = fleet.world.store.list(f"state/0000/{output['version']:012d}-")
    whole = fleet.world.store.get(key) or b""
    fleet.world.store.delete(key) if damage is None else fleet.world.store.put(key, damage)
    state = answered(fleet, "rollback", to=TO)
    assert any(key in text and words in text for text in note_texts(state))
    fleet.world.store.put(key, whole)
    assert "rollback" not in finished(fleet).kinds


def test_a_target_whose_commit_is_damaged_is_refused_and_does_not_end_the_syncer() -> None:
    fleet = started(RUN, 8)
    state = state_of(fleet)
    fleet.run.kept.clear()  # nobody can put it back
    fleet.world.store.put(commit_key(TO), b"x")
    answer = done(fleet, fleet.world.start("reader", return_to(fleet.run, state, TO))).result
    assert isinstance(answer, str) and answer.startswith(commit_key(TO))


def test_with_no_syncer_alive_the_command_does_it_and_a_later_syncer_goes_on() -> None:
    fleet = started(RUN, 8)
    assert by_the_command(fleet, "rollback", to=TO).result.base_floor > 0
    finishes(fleet)
    assert check(fleet).kinds.count("epoch_start") >= 2
