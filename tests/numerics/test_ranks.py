"""An island of several ranks trains as one device does: same gradients, same fragments, same saved moments."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.numerics.ranked import RankedCase, Trained, one_rank, several_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = [
    RankedCase("sharded"),
    RankedCase("copied", sharding="ddp", at_once=2),
    RankedCase("micro-batches and uneven shards", rows=10, at_once=2, split_rows=True),
    RankedCase("unlike parameters in a step", model="choosing", at_once=1),
    RankedCase("unlike parameters in a step, copied", model="choosing", sharding="ddp", at_once=1),
    RankedCase("tied weights, a frozen tensor and buffers", model="two_names", split_rows=True),
]
MIXTURES = [
    RankedCase("mixture", model="moe64", at_once=1),
    RankedCase("mixture copied", model="moe64", sharding="ddp", at_once=1),
]
NEAR = 1e-5


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """All cases on two ranks."""
    return several_ranks([*CASES, *MIXTURES], 2, tmp_path_factory.mktemp("ranks"))


def assert_near(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=NEAR)
    for one, other in zip(found.fragments, expected.fragments, strict=True):
        torch.testing.assert_close(one, other, atol=NEAR, rtol=0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_train_as_one(two: dict[str, Trained], case: RankedCase) -> None:
    assert_near(two[case.name], one_rank(case))


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_a_mixture_trains_as_on_one_rank_with_the_same_micro_batches(two: dict[str, Trained], case: RankedCase) -> None:
    """Its balance loss is not linear in the batch, so that another split is another objective."""
    assert_near(two[case.name], one_rank(case))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.name)
def test_moments_of_two_ranks_are_restored_by_one(two: dict[str, Trained], case: RankedCase) -> None:
    assert_near(one_rank(case, two[case.name].moments), one_rank(case, one_rank(case).moments))


def test_moments_of_one_rank_are_restored_by_two(tmp_path: Path) -> None:
    case = CASES[2]
    moments = one_rank(case).moments
    assert_near(several_ranks([case], 2, tmp_path, moments)[case.name], one_rank(case, moments))


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install 'diloco[hf]'"
)
def test_a_rotary_model_of_transformers_is_built_without_memory_and_trains_as_on_one_rank(tmp_path: Path) -> None:
    case = RankedCase("rotary", model="llama")
    assert_near(several_ranks([case], 2, tmp_path)[case.name], one_rank(case))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_steps_of_ranks_are_those_of_one(tmp_path: Path, ranks: int) -> None:
    cases = [replace(case, steps=100) for case in (*CASES, *MIXTURES)]
    found = several_ranks(cases, ranks, tmp_path)
    for case in cases:
        assert_near(found[case.name], one_rank(case))
