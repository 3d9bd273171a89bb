"""Held-out parts, and whether tokens fit a model and its run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.settings import DataSettings, EvaluationSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.corpus.fit import LARGEST_GROUP, Split, refuse_misfit, split_of
from diloco_cli.errors import UsageError

SEQUENCE = 64


def run_with(sequences: int) -> RunSettings:
    return RunSettings(
        "x", model=ModelSettings("gpt-pico"), data=DataSettings(tokens=Path("/t").as_uri(), held_out=0.05),
        train=TrainSettings(tokens=10**6, batch_tokens=256), evaluation=EvaluationSettings(sequences=sequences),
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [2, 200, 50_257])
def test_a_token_that_the_model_does_not_have_is_refused(vocabulary: int) -> None:
    for known in (vocabulary, vocabulary + 1, None):
        refuse_misfit(run_with(16), 100_000, vocabulary, SEQUENCE, known)
    with pytest.raises(UsageError, match=f"of {vocabulary - 1} is too small: .* up to {vocabulary - 1}") as raised:
        refuse_misfit(run_with(16), 100_000, vocabulary, SEQUENCE, vocabulary - 1)
    assert f"--set model.vocabulary={vocabulary};" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("sequences", "said"),
    [(100, "held-out part is too small: 78 sequences of 64"), (1000, "data are too short: 1562 sequences of 64")],
)
def test_what_is_to_be_held_out_must_be_there(sequences: int, said: str) -> None:
    assert split_of(100_000, SEQUENCE, 0.05).held_out == 78
    refuse_misfit(run_with(78), 100_000, 256, SEQUENCE, 256)
    with pytest.raises(UsageError, match=said):
        refuse_misfit(run_with(sequences), 100_000, 256, SEQUENCE, 256)


@settings(max_examples=150)
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
