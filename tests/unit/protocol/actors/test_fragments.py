"""The arithmetic of adoption on integers: what is trained, what it is measured from, what was sent."""

from __future__ import annotations

import random

import pytest

from diloco_cli.protocol.actors.learner import Fragments
from tests.unit.protocol.integer_ports import UnitTraining, UnitWire

OTHER = 1  # a fragment that nothing happens to


def begun(merged: int = 100) -> tuple[Fragments, UnitTraining]:
    training = UnitTraining(2)
    fragments = Fragments(training, UnitWire())
    for fragment in range(2):
        fragments.begin(fragment, merged)
    return fragments, training


def train(training: UnitTraining, moved: int) -> None:
    training.values[0] -= moved


@pytest.mark.parametrize(
    ("mixing", "since", "own"),
    [
        ("replace", None, 50),
        ("rebase", None, 40),  # all ten that were trained, on top of 50
        ("rebase", 3, 46),  # the four since offer 3 was sent
    ],
)
def test_a_version_is_taken_over_as_the_mixing_says(mixing: str, since: int | None, own: int) -> None:
    """Six trained, sent, four trained; then version 50 comes."""
    fragments, training = begun(100)
    train(training, 6)
    assert fragments.send(0, 3, keep=True) == 94
    train(training, 4)
    fragments.adopt(0, 50, mixing, since)  # type: ignore[arg-type]
    assert training.values == [own, 100]
    assert fragments.bases == {0: 50, OTHER: 100}, "the next delta is measured from the version itself"


def test_what_is_on_its_way_during_an_adoption_is_as_if_it_had_been_sent_from_the_new_version() -> None:
    """Ten trained and sent; 50 is adopted, which holds none of it; five more trained; then the offer is in 30."""
    fragments, training = begun(100)
    train(training, 10)
    fragments.send(0, 7, keep=True)
    fragments.adopt(0, 50, "rebase", None)
    assert training.values[0] == 40 and fragments.sent[0] == {7: 40}
    train(training, 5)
    fragments.adopt(0, 30, "rebase", 7)
    assert training.values[0] == 25, "the five that came after the send, and nothing of the ten a second time"
    assert fragments.sent[0] == {}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_all_that_is_trained_is_there_once(seed: int) -> None:
    """`rebase`: merges apply an offer or not, at most one is on its way, versions come when they come. The sum of what
    others did and of all own training is what the parameters are at the end."""
    drawn = random.Random(seed)
    fragments, training = begun(0)
    merged = own = others = sent_own = 0
    waits: int | None = None
    for seq in range(60):
        moved = drawn.randint(0, 9)
        train(training, moved)
        own += moved
        if waits is None and drawn.random() < 0.5:
            fragments.send(0, seq, keep=True)
            waits, delta = seq, fragments.bases[0] - training.values[0]
            sent_own = own
        if drawn.random() < 0.5:
            theirs, applied = drawn.randint(0, 9), waits is not None and drawn.random() < 0.5
            others += theirs
            merged -= theirs + (delta if applied else 0)
            fragments.adopt(0, merged, "rebase", waits if applied else None)
            if applied:
                assert merged == -others - sent_own
                waits = None
            assert training.values[0] == -others - own
