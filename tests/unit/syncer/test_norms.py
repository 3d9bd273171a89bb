"""The norm cap and the clip: poison is refused, what is long is shortened, a change that all share goes through."""

from __future__ import annotations

from typing import Literal

import pytest

from diloco_cli.syncer.norms import CAP, FEWEST, PATIENCE, NormCap


def merged(cap: NormCap, fragment: int, norm: float) -> float | None:
    """The scale of a delta that is merged, unless it is refused."""
    scale = cap.scale(fragment, norm)
    if scale is not None:
        cap.accept(fragment, scale * norm)
    return scale


def admits(cap: NormCap, fragment: int, norm: float) -> bool:
    return merged(cap, fragment, norm) is not None


def accustomed(fragment: int = 0, clip: float | Literal["none"] = "none") -> NormCap:
    cap = NormCap(clip)
    assert [merged(cap, fragment, 1.0) for _ in range(10)] == [1.0] * 10
    return cap


def test_there_is_no_cap_before_enough_is_known() -> None:
    cap = NormCap()
    assert all(admits(cap, 0, norm) for norm in (1.0, 1000.0, 1.0)) and FEWEST == 3
    assert not admits(cap, 0, 1000.0)


def test_a_delta_far_above_the_median_is_refused_and_not_remembered() -> None:
    cap = accustomed()
    assert admits(cap, 0, CAP) and not admits(cap, 0, CAP * 1.01) and admits(cap, 0, 1.0)
    assert not admits(cap, 0, CAP * 1.01), "the refused one did not move the median"


def test_one_learners_poison_is_refused_for_as_long_as_others_are_accepted() -> None:
    cap = accustomed()
    for _ in range(100):
        assert not admits(cap, 0, 1e6)
        assert admits(cap, 0, 1.0)


def test_after_refusals_in_a_row_the_fragment_goes_on_from_what_there_is() -> None:
    cap = accustomed()
    assert [admits(cap, 0, 100.0) for _ in range(PATIENCE + 2)] == [False] * PATIENCE + [True, True]


def test_fragments_have_references_of_their_own() -> None:
    cap = accustomed(fragment=0)
    assert admits(cap, 1, 1e6) and not admits(cap, 0, 1e6)


def test_without_a_clip_what_is_long_stays_as_it_is() -> None:
    assert accustomed().scale(0, CAP) == 1.0


@pytest.mark.parametrize("norm", [0.0, 1.0, 1.999, 2.0])
def test_a_delta_within_the_clip_stays_as_it_is(norm: float) -> None:
    assert accustomed(clip=2.0).scale(0, norm) == 1.0


def test_a_longer_delta_is_scaled_down_to_the_clip() -> None:
    assert accustomed(clip=2.0).scale(0, 4.0) == 2.0 * 1.0 / 4.0
    assert accustomed(clip=2.0).scale(0, CAP) == 2.0 / CAP


def test_the_cap_still_refuses_what_a_clip_could_shorten() -> None:
    assert accustomed(clip=2.0).scale(0, CAP * 1.01) is None


def test_there_is_no_clip_before_enough_is_known() -> None:
    cap = NormCap(1.0)
    assert [merged(cap, 0, norm) for norm in (1.0, 100.0, 1.0)] == [1.0] * FEWEST
    assert cap.scale(0, 4.0) == 0.25


def test_clipped_deltas_move_the_median_by_what_was_merged_of_them() -> None:
    """Ten deltas of 1, then all are 4: each counts as the 2 that the clip left of it, until 2 is the median."""
    cap = accustomed(clip=2.0)
    assert [merged(cap, 0, 4.0) for _ in range(10)] == [0.5] * 10
    assert cap.scale(0, 8.0) == 0.5 and cap.scale(0, 4.0) == 1.0
