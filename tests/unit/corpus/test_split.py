"""What is held out: never trained on, spread over the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.corpus.split import LARGEST_GROUP, Split


@settings(max_examples=150, deadline=None)
@given(size=st.integers(0, 20_000), share=st.floats(0.001, 0.6))
def test_every_sequence_is_either_trained_on_or_held_out(size, share):
    split = Split(size, share)
    trained, held_out = split.trained(np.arange(split.train)), split.evaluated(size)
    assert sorted([*trained, *held_out]) == list(range(size))
    assert len(held_out) == split.held_out


def test_the_share_is_about_what_was_asked_for():
    assert Split(1_000_000, 0.01).held_out == 10_000
    assert Split(1000, 0.05).held_out == 50


def test_a_share_that_a_bucket_made_up_is_still_a_split():
    assert Split(1000, 5e-324).held_out == 0 and Split(1000, -1.0).held_out == 0
    assert Split(1000, 7.0).held_out == 496


def test_the_held_out_part_is_spread_over_the_whole_in_few_groups():
    split = Split(100_000, 0.02)
    chosen = split.evaluated(64)
    assert len(chosen) == 64 and min(chosen) < 10_000 and max(chosen) > 70_000
    assert len({number // LARGEST_GROUP for number in chosen}) == 64 // LARGEST_GROUP
