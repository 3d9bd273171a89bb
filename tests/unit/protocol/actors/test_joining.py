"""Saved moments: what offers name, and what is left of them after a rollback."""

from __future__ import annotations

from diloco_cli.protocol.actors.joining import REMEMBERED, Saves


def saved(*numbers: int) -> Saves:
    """One as of each of these commits."""
    saves = Saves()
    for n in numbers:
        saves.add(f"at {n}", n)
    return saves


def test_offers_name_the_newest() -> None:
    assert saved().newest is None
    assert saved(3, 7).newest == "at 7"


def test_a_rollback_goes_back_to_the_newest_save_that_it_leaves() -> None:
    saves = saved(3, 7, 12)
    assert saves.go_back(((10, 20),)) == "at 7" == saves.newest
    assert saves.go_back(((10, 20), (7, 30))) == "at 7", "a save as of the very commit that it goes back to"
    assert saves.go_back(((10, 20), (7, 30), (2, 40))) is None


def test_a_save_that_a_rollback_has_overtaken_on_its_way_counts_for_nothing() -> None:
    """Made before the learner knew of it, uploaded after."""
    saves = saved(3)
    saves.go_back(((10, 20),))
    saves.add("at 15", 15)
    assert saves.newest == "at 3"
    saves.add("at 20", 20)
    assert saves.newest == "at 20"


def test_what_lies_behind_a_rollback_takes_no_place() -> None:
    saves = saved(*range(1, REMEMBERED + 1))
    saves.go_back(((5, 20),))
    for n in range(21, 26):
        saves.add(f"at {n}", n)
    assert saves.go_back(((5, 20), (4, 30))) == "at 4"
