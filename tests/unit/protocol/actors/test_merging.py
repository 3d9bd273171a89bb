"""A payload is called damaged only when it stays so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.merging import READS, read_payload
from diloco_cli.protocol.log.operations import Get
from tests.unit.protocol.records import genesis, offer

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
