"""An island of several ranks trains as one device does: same gradients, same fragments, same saved moments."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco_cli.tensors import flat
from tests.numerics.ranked import CARRIED_HERE, RankedCase, Trained, one_rank, several_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
ROLLED_BACK = ("kept", "adopted", "rolled back", "rolled back to fresh moments")
MUON = RankedCase("muon", optimizer="muon", steps=3, rows=10, at_once=2)
CASES = [
    RankedCase("sharded"),
    RankedCase("copied", sharding="ddp", at_once=2),
    RankedCase("micro-batches and uneven shards", rows=10, at_once=2),
    RankedCase("unlike parameters in a step", model="choosing", at_once=1),
    RankedCase("unlike parameters in a step, copied", model="choosing", sharding="ddp", at_once=1),
    RankedCase("tied weights, a frozen tensor and buffers", model="two_names"),
    RankedCase("plain SGD", optimizer="sgd"),
    MUON,
    RankedCase("muon copied", optimizer="muon", steps=3, sharding="ddp"),
    RankedCase("muon, adopted and rolled back", optimizer="muon", steps=1, events=ROLLED_BACK),
    RankedCase("adopted and rolled back", steps=4, events=ROLLED_BACK),
    RankedCase("adopted and rolled back, copied", sharding="ddp", steps=4, events=ROLLED_BACK),
]
MIXTURES = [
    RankedCase("mixture", model="moe64", at_once=1),
    RankedCase("mixture copied", model="moe64", sharding="ddp", at_once=1),
]
FED_BACK = RankedCase("int4 sent", steps=4, events=("sent",) * 3, codec="int4")
SENT = [
    FED_BACK,
    replace(FED_BACK, name="int4 sent by copies", sharding="ddp"),
    replace(FED_BACK, name="int4 sent, uneven rows", rows=10, at_once=2),
]
HALF = [
    RankedCase("bf16", precision="bf16", optimizer="sgd"),
    RankedCase("bf16 copied", sharding="ddp", precision="bf16", optimizer="sgd"),
    RankedCase("bf16 mixture", model="moe", precision="bf16", optimizer="sgd", at_once=1),
]
SPLIT = RankedCase("float32 mixture", model="moe", steps=30, at_once=2)
NEAR = 1e-5
BF16 = 2**-8


@pytest.fixture(scope="module", autouse=True)
def _float64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "CARRIED", CARRIED_HERE)
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """All cases on two ranks."""
    return several_ranks([*CASES, *MIXTURES, *SENT, *HALF, SPLIT], 2, tmp_path_factory.mktemp("ranks"))


def assert_near(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=NEAR)
    for one, other in zip(found.fragments, expected.fragments, strict=True):
        torch.testing.assert_close(one, other, atol=NEAR, rtol=0.0)


def assert_rounded(found: Trained, case: RankedCase) -> None:
    """A batch's gradient is a sum in another order, of what is rounded to bf16: it may be off by its rounding, 2^-8,
    and with plain SGD so is the way that the parameters went. AdamW would make whole steps of it where a gradient is
    almost 0."""
    expected, start = one_rank(case), one_rank(replace(case, steps=0))
    assert found.losses == pytest.approx(expected.losses, abs=1e-3)
    for one, other, began in zip(found.fragments, expected.fragments, start.fragments, strict=True):
        torch.testing.assert_close(one, other, atol=BF16 * float((other - began).abs().max()), rtol=0.0)


def assert_sent(found: Trained, case: RankedCase) -> None:
    """Byte for byte, with rounding errors of earlier sends; and a run on it ends as that of one rank."""
    assert found.payloads == found.of_whole and len(found.payloads) == case.fragments * len(case.events)
    assert found.losses[-1] == pytest.approx(one_rank(case).losses[-1], rel=0.01)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_train_as_one(two: dict[str, Trained], case: RankedCase) -> None:
    assert_near(two[case.name], one_rank(case))


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_a_mixture_trains_as_on_one_rank_with_the_same_micro_batches(two: dict[str, Trained], case: RankedCase) -> None:
    """Its balance loss is not linear in the batch, so that another split is another objective."""
    assert_near(two[case.name], one_rank(case))


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_half_precision_of_ranks_differs_by_its_own_rounding_alone(two: dict[str, Trained], case: RankedCase) -> None:
    assert_rounded(two[case.name], case)
    assert two[case.name].losses != pytest.approx(one_rank(replace(case, precision="fp32")).losses, abs=NEAR)


@pytest.mark.parametrize("case", SENT, ids=lambda case: case.name)
def test_what_ranks_send_in_int4_is_the_delta_of_the_whole_tensors(two: dict[str, Trained], case: RankedCase) -> None:
    assert_sent(two[case.name], case)


def test_a_float32_mixture_ends_within_a_hundredth_whatever_its_micro_batches(two: dict[str, Trained]) -> None:
    expected = one_rank(replace(SPLIT, at_once=None))
    assert two[SPLIT.name].losses[-1] == pytest.approx(expected.losses[-1], rel=0.01)
    assert two[SPLIT.name].losses[-1] != pytest.approx(expected.losses[-1], abs=NEAR)  # another objective, indeed


@pytest.mark.parametrize("case", [CASES[0], CASES[2], MUON], ids=lambda case: case.name)
def test_moments_of_two_ranks_are_restored_by_one(two: dict[str, Trained], case: RankedCase) -> None:
    assert_near(one_rank(case, two[case.name].moments), one_rank(case, one_rank(case).moments))


@pytest.mark.long
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
def test_four_ranks_train_as_one(tmp_path: Path) -> None:
    """Of rows and widths that they do not divide alike, in micro-batches."""
    found = several_ranks([CASES[2], MUON], 4, tmp_path)
    for case in (CASES[2], MUON):
        assert_near(found[case.name], one_rank(case))
