"""What becomes of the offers of a slot that is merged, and of one that is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.observe.bookkeeping import Books
from diloco_cli.protocol.actors.candidates import Candidates, judged, skip_commit
from diloco_cli.protocol.log.norms import FragmentNorms, Usual
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.records import RUN, genesis, offer


@dataclass(frozen=True)
class Loaded:
    norm: float


def candidates(state: RunState, *norms: float) -> Candidates:
    offers = [offer(state, learner=f"l{i}") for i in range(len(norms))]
    loaded: dict[Any, Any] = {one.id: Loaded(norm) for one, norm in zip(offers, norms, strict=True)}
    return judged(RUN, state, offers, loaded)


@pytest.mark.parametrize("known", [False, True])
def test_a_skip_refuses_only_by_the_memory_as_it_does_not_state_the_other_norms(known: bool) -> None:
    usual = {f"l{i}": Usual(1.0, 4, 0, 8) for i in range(3)}
    state = structs.replace(genesis(), norms={0: FragmentNorms(usual)} if known else {})
    found = candidates(state, 1.0, 1.0, 1e3)
    assert [one.learner for one in found.refused] == ["l2"], "a merge refuses it beside the others"
    skip = skip_commit(found, 0, "too few", ())
    assert [one.learner for one in skip.outcomes] == [one.learner for one in found.unfit_alone] == ["l2"] * known
    assert ("usual delta" in skip.reason) == known
    books, wrong = Books(RUN, lambda holds, otherwise: wrong.append(otherwise) if not holds else None), list[str]()
    books.norms = state.norms
    books.check_judgement(skip, "commit/1.json")
    assert not wrong
