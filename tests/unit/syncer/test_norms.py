"""The norm cap: poison is refused, a change that everybody shares is not refused for ever."""

from __future__ import annotations

from diloco_cli.syncer.norms import CAP, FEWEST, PATIENCE, NormCap


def accustomed(fragment: int = 0) -> NormCap:
    cap = NormCap()
    assert all(cap.admits(fragment, 1.0) for _ in range(10))
    return cap


def test_there_is_no_cap_before_enough_is_known() -> None:
    cap = NormCap()
    assert all(cap.admits(0, norm) for norm in (1.0, 1000.0, 1.0)) and FEWEST == 3
    assert not cap.admits(0, 1000.0)


def test_a_delta_far_above_the_median_is_refused_and_not_remembered() -> None:
    cap = accustomed()
    assert cap.admits(0, CAP) and not cap.admits(0, CAP * 1.01) and cap.admits(0, 1.0)
    assert not cap.admits(0, CAP * 1.01), "the refused one did not move the median"


def test_one_learners_poison_is_refused_for_as_long_as_others_are_accepted() -> None:
    cap = accustomed()
    for _ in range(100):
        assert not cap.admits(0, 1e6)
        assert cap.admits(0, 1.0)


def test_after_refusals_in_a_row_the_fragment_goes_on_from_what_there_is() -> None:
    cap = accustomed()
    assert [cap.admits(0, 100.0) for _ in range(PATIENCE + 2)] == [False] * PATIENCE + [True, True]


def test_fragments_have_references_of_their_own() -> None:
    cap = accustomed(fragment=0)
    assert cap.admits(1, 1e6) and not cap.admits(0, 1e6)
