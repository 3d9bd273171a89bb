"""Offers of the due slot: read, judged, merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.joining import fetch_weights
from diloco_cli.protocol.actors.merging import READS, Candidates, judged, read_payload
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.records import LOOKS, get_named
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.records import RUN, genesis, offer


@dataclass(frozen=True)
class Loaded:
    norm: float


def candidates(state: RunState, *norms: float) -> Candidates:
    offers = [offer(state, learner=f"l{i}") for i in range(len(norms))]
    loaded: dict[Any, Any] = {one.id: Loaded(norm) for one, norm in zip(offers, norms, strict=True)}
    return judged(RUN, state, offers, loaded, lambda one: one.tokens)


def test_a_slots_offers_are_judged_together_by_the_norms_that_the_log_will_state() -> None:
    found = candidates(genesis(), 1.00000000049, 1.0, 1e3)
    assert [one.norm for one in found.fit] == [1.0, 1.0, 1e3]
    assert [one.scale for one in found.fit] == [1.0, 1.0, 1.0 / 1e3]
    assert found.reasons == ("l2's delta is 1e+03 times as long as usual: clipped to that",)


def test_what_the_log_remembers_of_the_fragment_counts() -> None:
    state = structs.replace(genesis(), norms={0: {"l9": (1.0, 4)}})
    assert candidates(state, 1e3).fit[0].scale < 1.0 == candidates(genesis(), 1e3).fit[0].scale


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
    assert answered(read_payload(OFFER), answers) == found


def answered(steps: Steps[Any], answers: list[bytes | None]) -> Any:
    """What it returns after exactly these reads."""
    operation = next(steps)
    with pytest.raises(StopIteration) as ended:
        for answer in answers:
            assert isinstance(operation, Get)
            operation = steps.send(answer)
    return ended.value.value


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([GOOD], GOOD),
        ([SHORT, FLIPPED, SHORT, GOOD], GOOD),
        ([FLIPPED] * LOOKS, "has other bytes than the log says"),
        ([FLIPPED, None], "is missing"),
    ],
)
def test_so_is_what_the_log_names(answers: list[bytes | None], found: bytes | str) -> None:
    assert answered(get_named("state/0000/x", digest(GOOD), 100), answers) == found
    weights = replace(genesis().outputs[0], weights_digest=digest(GOOD))
    assert answered(fetch_weights(RUN, weights), answers) == (found if found == GOOD else None)
