"""How the directions of deltas agree: by hand, whoever lies, and sampled."""

from __future__ import annotations

import warnings

import pytest
import torch

from diloco_cli.tensors.codecs import Read
from diloco_cli.tensors.directions import PARTNERS, SAMPLED_CHUNKS, agreements
from diloco_cli.tensors.stripes import CHUNK


def reader_of(delta: torch.Tensor) -> Read:
    return lambda start, room: delta[start : start + room.numel()]


def agreed(*deltas: torch.Tensor, seed: str = "s") -> list[float]:
    return list(agreements(deltas[0].numel(), [reader_of(delta) for delta in deltas], seed))


def noisy(count: int, size: int, noise: float) -> list[torch.Tensor]:
    """Deltas with a direction in common."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(size, generator=generator)
    return [common + noise * torch.randn(size, generator=generator) for _ in range(count)]


def test_three_by_hand() -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert agreed(x, x + y / 2, -3 * x) == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)])
    assert agreed(x, y, torch.zeros(2)) == [0.0, 0.0, 0.0]


def test_what_is_not_finite_agrees_with_nobody_and_moves_no_other() -> None:
    x = torch.tensor([1.0, 1.0])
    for bad in (float("inf"), float("nan")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert agreed(x, x, torch.tensor([bad, 1.0]), x)[::2] == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(("honest", "flipped"), [(2, 1), (3, 2), (12, 4), (56, 8)])
def test_a_minority_that_flips_the_signs_is_seen_and_nobody_else(honest: int, flipped: int) -> None:
    deltas = noisy(honest, 5000, 1.0)
    mean = torch.stack(deltas).mean(0)
    found = agreed(*deltas, *[-mean] * flipped)
    assert min(found[:honest]) > 0.3 and max(found[honest:]) < -0.6


def test_of_two_honest_ones_and_their_negative_mean_only_that_is_against_the_others() -> None:
    """Though each honest one, too, points against the mean of the others: theirs are nearly orthogonal."""
    a, b = noisy(2, 5000, 10.0)
    found = agreed(a, b, -(a + b))
    assert min(found[:2]) > -0.05 and found[2] < -0.65


def test_a_sample_of_a_large_delta_says_about_the_same_for_every_seed_and_thread() -> None:
    size = (2 * SAMPLED_CHUNKS + 1) * CHUNK + 77
    deltas = noisy(3, size, 1.0)
    found = [agreed(*deltas, seed=seed) for seed in "abc"]
    assert found[0] != found[1] and all(one == pytest.approx(0.5, abs=0.06) for row in found for one in row)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    assert agreed(*deltas, seed="a") == found[0]
    torch.set_num_threads(threads)


def test_of_many_each_is_compared_with_some() -> None:
    deltas = noisy(2 * PARTNERS + 1, 100, 0.1)
    assert len(agreed(*deltas)) == len(deltas) and min(agreed(*deltas)) > 0.9
