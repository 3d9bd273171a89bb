"""A number's formula is read from the function that computes it."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.formulas import Explanation, formula, told

PER_DAY = 24


@formula("money", "cost", "/day")
def cost(price_per_h: float, machines: int, discount: float, doubled: bool) -> float:
    """A docstring is no part of it."""
    full = price_per_h * machines * PER_DAY
    return (full - discount) * (2 if doubled else 1)


@formula("money", "sum")
def added(parts: Sequence[float]) -> float:
    return sum(parts)


@formula("syncer", "weighted")
def weighted(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(share * value for share, value in pairs)


@formula("money", "chance", text="at least {quorum} of {shares}")
def chance(quorum: int, shares: Sequence[float]) -> float:
    return quorum / len(shares)


def test_a_formula_is_told_in_words_and_with_the_numbers_put_in() -> None:
    (found,) = told("money", lambda: cost(1.5, 2, 0.25, doubled=True))
    words = "(price per h x machines x per day - discount) x 2"
    assert found == Explanation("money", "cost", words, "(1.5 * 2 * 24 - 0.25) * 2", 143.5, "/day")
    assert eval(found.numbers) == found.value


def test_sums_are_written_out_unless_they_are_long() -> None:
    (few,), (many,) = (told("money", lambda parts=parts: added(parts)) for parts in ((1.0, 2.5), (1.0,) * 13))
    assert (few.formula, few.numbers, many.numbers) == ("sum of parts", "1 + 2.5", "")
    (pairs,) = told("syncer", lambda: weighted(((0.5, 4.0), (0.25, -8.0))))
    assert (pairs.formula, pairs.numbers) == ("sum of share x value", "0.5 * 4 + 0.25 * -8")


def test_only_the_section_that_is_listened_to_is_told_and_each_number_once() -> None:
    found = told("money", lambda: (weighted(((1.0, 1.0),)), chance(1, (0.9, 0.8)), chance(2, (0.9, 0.8))), "mine")
    assert [(item.of, item.name, item.formula) for item in found] == [("mine", "chance", "at least 1 of 0.9, 0.8")]
    assert added((1.0, 2.0)) == 3.0, "nobody listens"


def test_another_name_tells_another_number() -> None:
    other = cost.named("other cost")
    assert [item.name for item in told("money", lambda: (cost(1.0, 1, 0.0, False), other(1.0, 1, 0.0, False)))] == [
        "cost",
        "other cost",
    ]
