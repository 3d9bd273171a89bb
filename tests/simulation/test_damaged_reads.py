"""Where one read in twenty comes with a flipped bit, anywhere in it, a run's records are what was written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.protocol.actors import joining
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log import claims
from diloco_cli.protocol.log.operations import Create, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.signing import Checksummed, Unsigned
from diloco_cli.store.port import Created
from diloco_cli.virtual.faulty_calls import Fault
from tests.histories.campaign import lived
from tests.histories.options import Options, drawn_options
from tests.histories.outcome import Actors

SHOWN_BY = 58  # the first seed in which a process leaves for a successor that does not exist; earlier ones take seconds


class Trusting(Checksummed):
    """Signs what it writes, and takes everybody else at his word."""

    def authenticates(self, signer: str, key: str, data: bytes) -> bool:
        return True


class NoChecksums(Syncer):
    """Believes every record as it came."""

    def __init__(self, run: RunFormat, *arguments: Any, **options: Any) -> None:
        trusting = run if run.signing is not None else replace(run, keyring=Trusting(run.run_id))
        super().__init__(trusting, *arguments, **options)


def damaging(seed: int) -> Options:
    return replace(drawn_options(seed), calls=(Fault.FLIPPED,), read_rate=0.05)


def sample_and_rest(some: int, every: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seeds", [range(some), pytest.param(range(some, every), marks=pytest.mark.long)])


@sample_and_rest(20, 60)
def test_no_history_notices(seeds: range) -> None:
    broken = [(seed, found) for seed in seeds if (found := lived(seed, damaging(seed)).violation) is not None]
    assert broken == []


def test_without_checksums_the_log_breaks() -> None:
    """The next commit names the digest of bytes that are not in the bucket."""
    seeds = (seed for seed in range(400) if not drawn_options(seed).signed)
    actors = Actors(syncer=NoChecksums)
    found = next((found for seed in seeds if (found := lived(seed, damaging(seed), actors).violation)), None)
    assert found is not None and found.invariant in {"1", "exit"}, found


def doubtful(seed: int) -> Options:
    """Answers are lost as well: what took effect is known only by reading it."""
    return replace(damaging(seed), calls=(Fault.FLIPPED, Fault.LOST_ANSWER), write_rate=0.1)


@sample_and_rest(20, 40)
def test_no_process_is_fenced_by_its_own_claim(seeds: range) -> None:
    broken = [(seed, found) for seed in seeds if (found := lived(seed, doubtful(seed)).violation) is not None]
    assert broken == []


def naive(keyring: Unsigned, signer: str, key: str, mine: bytes, same: int = 2) -> Steps[bytes]:
    answer = yield Create(key, mine)
    return mine if isinstance(answer, Created) else answer.data


def test_who_believes_a_damaged_answer_leaves_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "create_signed", naive)
    monkeypatch.setattr(joining, "create_signed", naive)
    found = next((found for seed in range(SHOWN_BY, 400) if (found := lived(seed, doubtful(seed)).violation)), None)
    assert found is not None and "gave way" in found.text, found
