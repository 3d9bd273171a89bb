"""What the log remembers of the lengths of deltas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.protocol.log.commits import Merge, Quarantine, Readmit, Skip
from diloco_cli.protocol.log.norms import FALLS, GROWS, LEARNERS_KEPT, Norms, norms_after, times_usual, usual_norms
from diloco_cli.protocol.log.records import MergedOffer
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import decode, encode
from tests.unit.protocol.records import applied, genesis, merge, output


def item(learner: str, norm: float, steps: int = 4, scale: float = 1.0) -> MergedOffer:
    return replace(applied(learner), norm=norm, steps=steps, scale=scale)


def after(*items: MergedOffer) -> RunState:
    return merge(genesis(), *items)


def test_of_each_learner_the_newest_merged_norm_is_remembered_as_it_was_after_clipping() -> None:
    state = after(item("l0", 8.0), item("l1", 1e6, scale=1e-6))
    assert state.norms == {0: {"l0": (8.0, 4), "l1": (1.0, 4)}}
    assert decode(RunState, encode(state), "a snapshot") == state


def newest(norms: Norms, *items: MergedOffer) -> Norms:
    """After a merge of fragment 0."""
    return norms_after(norms, Merge(slot=0, inputs=items, outputs=(output(0, 1, 0),)), 2)


def test_a_norm_falls_by_half_a_merge_at_most_and_rises_at_once() -> None:
    norms: Norms = {}
    seen = []
    for norm in (8.0, 0.0, 1e-9, 100.0):
        norms = newest(norms, item("l0", norm))
        seen.append(norms[0]["l0"][0])
    assert seen == [8.0, 8.0 * FALLS, 8.0 * FALLS**2, 100.0]


def test_those_that_were_merged_last_are_kept() -> None:
    norms = newest({}, *[item(f"l{i:02}", 1.0) for i in range(LEARNERS_KEPT)])
    norms = newest(newest(norms, item("l00", 1.0)), item("new", 1.0))
    assert len(norms[0]) == LEARNERS_KEPT and "l00" in norms[0] and "l01" not in norms[0]


@pytest.mark.parametrize("kind", [Quarantine, Readmit])
def test_what_is_remembered_of_a_learner_is_forgotten_when_it_is_kept_out_or_readmitted(
    kind: type[Quarantine] | type[Readmit],
) -> None:
    norms = newest({}, item("l0", 2.0), item("l1", 2.0))
    assert norms_after(norms, kind(learner="l0"), 2) == {0: {"l1": (2.0, 4)}}
    assert norms_after(norms, Skip(slot=1), 2) == norms


def test_what_a_delta_is_compared_with() -> None:
    def usual(memory: list[float], *norms: float) -> list[float]:
        known = {f"l{i}": (norm, 4) for i, norm in enumerate(memory)}
        return usual_norms(known, [(norm, 4) for norm in norms], [4] * len(norms))

    assert usual([], 1.0, 2.0) == [0.0, 0.0]
    assert usual([], 1.0, 2.0, 3.0) == [3.0, 3.0, 2.0], "the upper median of the others"
    assert usual([1.0, 9.0], 5.0) == [GROWS * 9.0], "the upper median in memory"
    assert usual([0.625] * 3, 1.0, 2.0, 3.0) == [2.5, 2.5, 2.0], "whichever is less"
    assert usual([0.1], 1.0, 2.0, 3.0) == [3.0, 3.0, 2.0], "one learner that came first is not heard"


def test_honest_norms_grow_with_the_steps_by_the_root_at_least_and_in_proportion_at_most() -> None:
    assert usual_norms({"l0": (1.0, 4)}, [(1.0, 16), (1.0, 1)], [16, 1]) == [GROWS * 4.0, GROWS * 0.5]


def test_people_see_how_long_each_learners_newest_delta_was_and_its_cosine() -> None:
    state = after(item("l0", 2.0), item("l1", 2.0), replace(item("l2", 20.0), cosine=-0.456))
    assert {name: one.times_usual for name, one in state.metrics.deltas.items()} == {"l0": 0.1, "l1": 0.1, "l2": 10.0}
    assert state.metrics.deltas["l2"].cosine == -0.46
    assert times_usual({"l0": (1.0, 4)}, [item("l0", 2.0)]) == [2.0]
