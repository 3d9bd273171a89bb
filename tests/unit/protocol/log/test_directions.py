"""What the log remembers of directions, and what follows: less weight, for as long as a learner opposes the others."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.commits import EpochStart, Merge, Readmit, Skip
from diloco_cli.protocol.log.directions import FLIPS, MOST, flipping_of, opposes, opposition_after
from diloco_cli.protocol.log.norms import NOTHING
from diloco_cli.protocol.rules.norms import OPPOSING_WEIGHT, JudgedDelta, judge
from tests.unit.protocol.records import applied, genesis, merge, output


def after(known: dict[str, float], times: int = 1, **agrees: float | None) -> dict[str, float]:
    made = merge_of(**agrees)
    for _ in range(times):
        known = opposition_after(known, made)
    return known


def merge_of(**agrees: float | None) -> Merge:
    """Two more learners agree with everybody by 0."""
    agrees = {"p": 0.0, "q": 0.0, **agrees}
    inputs = tuple(replace(applied(name), agrees=one) for name, one in sorted(agrees.items()))
    return Merge(slot=0, inputs=inputs, outputs=(output(0, 1, 0),))


def test_a_sign_flip_opposes_at_once_and_for_long() -> None:
    known = after({}, a=0.4, b=0.1, x=-0.7)
    assert known.keys() == {"x"} and opposes(known, "x") and not opposes(known, "a")
    assert not opposes(after({}, 3, x=-0.5), "x") and opposes(after({}, 4, x=-0.5), "x")
    known = after(known, 100, x=-0.9)
    assert known["x"] == MOST and opposes(after(known, 24, x=0.9), "x") and not opposes(after(known, 25, x=0.9), "x")
    assert after(known, 32, x=0.9) == {}


def test_a_delta_that_points_so_clearly_against_the_others_flips() -> None:
    assert flipping_of({"a": 0.5, "b": FLIPS + 1e-6, "x": FLIPS}) == {"x"} and flipping_of({"a": 1.0}) == set()


def test_where_half_of_the_deltas_flip_nobody_can_tell_whose_do() -> None:
    assert flipping_of({"a": -0.9, "b": -0.9, "x": -0.9, "y": -0.9}) is None is flipping_of({})
    assert after({}, x=-0.9, y=-0.9) == {}
    assert flipping_of({"a": 0.1, "b": 0.1, "c": 0.1, "x": -0.9, "y": -0.9}) == {"x", "y"}


def test_seven_good_deltas_between_two_bad_ones_do_not_help() -> None:
    """So often comes the next one for the same fragment of four, after a round of good ones for all."""
    known: dict[str, float] = {}
    for _ in range(4):
        known = after(after(known, x=-0.9), 7, x=0.9)
        assert opposes(known, "x")


def test_honest_learners_of_quite_other_data_oppose_nobody() -> None:
    """The cosines of learners whose texts have not one letter in common, in the order in which a run had them."""
    known: dict[str, float] = {}
    for _ in range(200):
        for agrees in (-0.36, 0.02, -0.05, 0.1):
            known = after(known, a=agrees)
            assert not opposes(known, "a")


def test_only_merges_of_three_say_anything_and_a_readmitted_learner_begins_anew() -> None:
    known = after({}, 5, x=-0.9)
    assert opposition_after(known, EpochStart()) == opposition_after(known, Skip(slot=0)) == known
    assert after(known, 50, p=None, q=None, x=None) == known
    assert (
        opposition_after(known, Readmit(learner="x")) == {} and opposition_after(known, Readmit(learner="a")) == known
    )


def test_the_folded_log_has_it() -> None:
    cosines = {"l0": -0.75, "l1": 0.1, "l2": 0.1}
    state = merge(genesis(), *[replace(applied(name), agrees=cosine) for name, cosine in cosines.items()])
    assert state.opposition == {"l0": 2.0}


def test_who_opposes_weighs_next_to_nothing() -> None:
    deltas = [JudgedDelta(name, 4, 1.0, 8.0, round_steps=4, opposes=name == "x") for name in ("a", "b", "x")]
    assert [v.weight for v in judge(NOTHING, deltas, SyncSettings()).verdicts] == [8.0, 8.0, 8.0 * OPPOSING_WEIGHT]


def test_where_only_who_opposes_is_there_the_merge_is_next_to_nothing() -> None:
    deltas = [JudgedDelta(name, 4, 1.0, 8.0, round_steps=4, opposes=name != "a") for name in ("a", "x", "y")]
    for some, scale in ((deltas, 1.0), (deltas[1:], OPPOSING_WEIGHT), (deltas[1:2], OPPOSING_WEIGHT)):
        verdicts = judge(NOTHING, some, SyncSettings()).verdicts
        assert [verdict.scale for verdict in verdicts] == [scale] * len(some)
