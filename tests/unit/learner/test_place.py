"""A process's place among its island's ranks, from the variables of what started it."""

from __future__ import annotations

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.learner.parent import RankPlace, place_here, started_as_rank

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        (("5", "8", "1", "4"), RankPlace(5, 8, 1, 4)),
        (("1", "2", None, None), RankPlace(1, 2, 0, 1, guessed=True)),  # as in a pod of its own
        (("0", "1", "0", "1"), None),  # the only one
    ],
)
def test_it_is_what_the_environment_says(
    values: tuple[str | None, ...], place: RankPlace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert place_here() == place and started_as_rank() == (place is not None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert started_as_rank(), "also as the only one, by torchrun"


def test_numbers_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("2", "2", "0", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="RANK=2, WORLD_SIZE=2"):
        place_here()
