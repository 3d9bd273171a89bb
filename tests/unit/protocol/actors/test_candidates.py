"""What becomes of the offers of a slot that is merged, and of one that is skipped; what is read before its slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.observe.checker import Checker
from diloco_cli.protocol.actors.candidates import AHEAD_AT_ONCE_BYTES, Candidates, Loader, judged, skip_commit
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.log.norms import FragmentNorms, Usual
from diloco_cli.protocol.log.records import Offer
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.played import played
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
    books, wrong = (
        Checker(RUN, lambda holds, rule, otherwise: wrong.append(otherwise) if not holds else None),
        list[str](),
    )
    books.norms = state.norms
    books.check_judgement(skip, "commit/1.json")
    assert not wrong


@dataclass
class Cosines:
    """Arithmetic that finds these, and notes by which seeds it was asked."""

    found: tuple[float, ...]
    seeds: list[str] = field(default_factory=list)

    def agreements(self, fragment: int, deltas: list[Any], seed: str) -> tuple[float, ...]:
        self.seeds.append(seed)
        return self.found


@pytest.mark.parametrize(
    ("norms", "cosines", "light"),
    [
        ((1.0, 1.0, 1.0), (0.5, 0.5, -0.9), ["l2"]),
        ((1.0, 1.0, 1.0), (0.5, 0.5, -0.69), []),
        ((1.0, 1.0, 1.0), (), []),
        ((1.0, 1.0, 1.0, 1e3), (0.5, -0.9, 0.5), ["l1"]),
        ((1.0, 1.0, 1.0, 1.0), (-0.9, -0.9, -0.9, -0.9), []),
    ],
    ids=["a flip", "against", "not compared", "beside what is refused", "two against two"],
)
def test_a_delta_that_flips_weighs_little_in_its_own_merge(
    norms: tuple[float, ...], cosines: tuple[float, ...], light: list[str]
) -> None:
    state, arithmetic = genesis(), Cosines(cosines)
    loader = Loader(RUN, arithmetic, Inbox(RUN), lambda output: None, lambda: "drawn")  # type: ignore[arg-type]
    before = candidates(state, *norms)
    loader.loaded = {one.id: Loaded(norm) for one, norm in zip(before.offers, norms, strict=True)}
    found = loader.compared(state, before)
    pairs = zip(before.fit, found.fit, strict=True)
    assert [now.offer.learner for then, now in pairs if now.weight == then.weight / 64] == light
    assert (found.refused, found.agrees, found.nonce) == (before.refused, cosines, "drawn")
    assert arithmetic.seeds == ["drawn"], "that nobody can have known who offered"
    assert any("against the others" in reason for reason in found.reasons) == bool(light)


@dataclass
class Holding:
    """Arithmetic that has these fragments in memory."""

    fragments: frozenset[int] = frozenset({0, 1})

    def holds(self, fragment: int, state_digest: str) -> bool:
        return fragment in self.fragments

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any:
        return Loaded(float(offer.seq))


PAYLOAD = b"payload"


def coming(learner: str = "l0", seq: int = 0, num_bytes: int = len(PAYLOAD), fragment: int = 1) -> Offer:
    """An offer for the next slot of that fragment; slot 0, of fragment 0, is due."""
    return offer(
        genesis(), fragment, learner=learner, seq=seq, payload_digest=digest(PAYLOAD), payload_bytes=num_bytes
    )  # fmt: skip


def looked(offers: list[Offer], arithmetic: Holding = Holding(), there: bool = True) -> tuple[Loader, list[str]]:
    """A loader that has looked ahead, and the keys that it asked for."""
    inbox, asked = Inbox(RUN), list[str]()
    inbox.open(genesis(), 0.0)
    for one in offers:
        inbox.deliver(one)
    loader = Loader(RUN, arithmetic, inbox, lambda output: None, lambda: "nonce")  # type: ignore[arg-type]
    for _ in range(2):  # what was looked for once is not asked for again
        played(loader.look_ahead(genesis()), lambda get: asked.append(get.key) or (PAYLOAD if there else None))
    return loader, asked


def test_payloads_for_the_next_slots_are_read_ahead_once_and_of_each_learner_the_newest() -> None:
    loader, asked = looked([coming(seq=0), coming(seq=1), coming("l1"), coming(fragment=0)])
    assert list(loader.loaded) == [("l0", 1, 1), ("l1", 1, 0)] and len(asked) == 2


def test_what_is_read_ahead_goes_with_its_fragments_version_and_with_its_offer() -> None:
    loader, _ = looked([coming("l0"), coming("l1")])
    loader.merged(0)
    assert len(loader.loaded) == 2
    loader.inbox.drop(coming("l0"), "superseded")
    loader.merged(0)
    assert list(loader.loaded) == [("l1", 1, 0)]
    loader.merged(1)
    assert not loader.loaded and not loader.ahead


def test_a_payload_that_is_not_there_takes_no_room_and_is_no_reason_to_refuse() -> None:
    loader, asked = looked([coming()], there=False)
    assert not loader.loaded and sum(loader.ahead.values()) == 0 and len(asked) == 1
    assert list(loader.inbox.pending()) == [coming()] and not loader.inbox.outcomes


def test_nothing_is_read_ahead_that_is_too_large_or_whose_version_would_have_to_be_read_first() -> None:
    assert looked([coming(num_bytes=AHEAD_AT_ONCE_BYTES + 1)])[1] == []
    assert looked([coming()], Holding(frozenset({0})))[1] == []
