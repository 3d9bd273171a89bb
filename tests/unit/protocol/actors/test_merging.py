"""Offers of the due slot: read, judged, merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.merging import AHEAD_AT_ONCE_BYTES, READS, Candidates, Loader, judged, read_payload
from diloco_cli.protocol.log.operations import Get
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


def test_a_slots_offers_are_judged_together_by_the_norms_that_the_log_will_state() -> None:
    found = candidates(genesis(), 1.00000000049, 1.0, 1e3)
    assert [one.norm for one in found.fit] == [1.0, 1.0, 1e3]
    assert [one.scale for one in found.fit] == [1.0, 1.0, 1.0 / 1e3]
    assert found.reasons == ("l2's delta is 1e+03 times as long as usual: clipped to that",)


def test_what_the_log_remembers_of_the_fragment_counts() -> None:
    state = structs.replace(genesis(), norms={0: {"l9": (1.0, 4)}})
    assert candidates(state, 1e3).fit[0].scale < 1.0 == candidates(genesis(), 1e3).fit[0].scale


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
    loader = Loader(RUN, arithmetic, inbox, lambda output: None)  # type: ignore[arg-type]
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


GOOD = b"payload"
OFFER = replace(offer(genesis()), payload_digest=digest(GOOD), payload_bytes=len(GOOD))
FLIPPED, SHORT = b"pbyload", b"pay"


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([GOOD], GOOD),
        ([FLIPPED, GOOD], GOOD),
        ([SHORT, FLIPPED, GOOD], GOOD),
        ([FLIPPED] * READS, "digest_mismatch"),
        ([SHORT] * READS, "wrong_size"),
        ([None], "missing_payload"),
        ([FLIPPED, None], "missing_payload"),
    ],
)
def test_what_was_damaged_on_its_way_is_read_again(answers: list[bytes | None], found: bytes | str) -> None:
    steps = read_payload(OFFER)
    operation = next(steps)
    with pytest.raises(StopIteration) as ended:
        for answer in answers:
            assert isinstance(operation, Get)
            operation = steps.send(answer)
    assert ended.value.value == found
