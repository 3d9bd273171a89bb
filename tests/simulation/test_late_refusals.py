"""A delta that shows only in the merge what it is: it gets its outcome, and the merge is made without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco_cli.protocol.actors.ports import Merged, Refused
from diloco_cli.protocol.log.records import Offer, RunFormat
from tests.histories.integers import IntegerArithmetic
from tests.simulation.sweeps import check
from tests.simulation.toy import ToyFleet, make_run

Unfit = Callable[[Offer], bool]


def finished(monkeypatch: pytest.MonkeyPatch, run: RunFormat, unfit: Unfit) -> tuple[ToyFleet, list[tuple[str, ...]]]:
    """Deltas turn out to be unfit only while they are merged, as where published norms are checked."""
    attempts: list[tuple[str, ...]] = []
    merge = IntegerArithmetic.merge

    def noted(self: IntegerArithmetic, fragment: int, deltas: list[tuple[Any, float, float]]) -> Merged | Refused:
        attempts.append(tuple(delta.offer.learner for delta, _, _ in deltas))
        return merge(self, fragment, deltas)

    monkeypatch.setattr(IntegerArithmetic, "merge", noted)
    fleet = ToyFleet(run)
    fleet.refuse_in_the_merge(lambda offer: "bad_norms" if unfit(offer) else None)
    fleet.start().finish()
    assert fleet.errors() == []
    return fleet, attempts


@pytest.mark.parametrize("quorum", [1, 2])
def test_the_merge_is_made_without_it_by_whoever_is_left(monkeypatch: pytest.MonkeyPatch, quorum: int) -> None:
    run = make_run(learners=3, quorum=quorum)
    fleet, attempts = finished(monkeypatch, run, lambda offer: offer.learner == "l1" and offer.seq < 4)
    settled = check(fleet).settled
    late = [outcome for (learner, _, seq), outcome in sorted(settled.items()) if learner == "l1" and seq < 4]
    assert late == ["bad_norms"] * 4 and "bad_norms" not in {settled[key] for key in settled if key[0] != "l1"}
    refused = next(index for index, names in enumerate(attempts) if "l1" in names)
    assert attempts[refused + 1] == tuple(name for name in attempts[refused] if name != "l1")
    assert any("l1" in names for names in attempts[refused + 8 :]), "later it takes part"


def test_where_the_quorum_is_gone_the_slot_waits_for_the_next_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(learners=2, quorum=2)
    fleet, attempts = finished(monkeypatch, run, lambda offer: (offer.learner, offer.seq) == ("l1", 0))
    assert check(fleet).settled["l1", 1, 0] == "bad_norms"
    assert set(attempts) == {("l0", "l1")}, "never with one alone"


def test_one_that_is_always_unfit_never_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = finished(monkeypatch, make_run(learners=2), lambda offer: offer.learner == "l1")
    applied = {key[0] for key, outcome in check(fleet).settled.items() if outcome == "applied"}
    assert applied == {"l0"}
