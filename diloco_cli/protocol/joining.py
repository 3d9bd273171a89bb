"""How a learner's process joins, publishes and follows: the generators behind the training loop."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from diloco_cli.digests import digest
from diloco_cli.errors import FencedError
from diloco_cli.protocol.keys import cast_key, delta_key, incarnation_key, offer_key
from diloco_cli.protocol.log import claim_number, read_log
from diloco_cli.protocol.operations import Create, Get, Sleep, Steps
from diloco_cli.protocol.records import Offer, Output, ProcessClaim, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.wire import RecordError, decode, encode
from diloco_cli.store.port import Created

WAIT_FOR_GENESIS_S = 0.1


@dataclass(frozen=True)
class Joined:
    """What a new incarnation starts from: the log, where its data begins, and its newest saved inner state's key.

    The data begins beyond everything that a predecessor applied or published: no sample is merged twice, and what the
    predecessor had drawn but not published is lost with it.
    """

    incarnation: int
    state: RunState
    data_start: int
    inner: str | None


def join(run: RunFormat, learner: str, claim: ProcessClaim) -> Steps[Joined]:
    """Become the next incarnation of `learner`. Waits for commit 0: nobody trains from weights of its own."""
    state = yield from read_log(run)
    while not state.outputs:
        yield Sleep(WAIT_FOR_GENESIS_S)
        state = yield from read_log(run, state)
    known = state.learner(learner)
    incarnation = yield from claim_number(claim, max(1, known.floor), lambda number: incarnation_key(learner, number))
    data_start, inner = known.data_end, None
    for earlier in range(max(1, known.floor), incarnation):
        last = yield from _newest_offer(learner, earlier, known.next_seq if earlier == known.floor else 0)
        if last is not None:
            data_start, inner = max(data_start, last.data_end), last.inner or inner
    return Joined(incarnation, state, data_start, inner)


def _newest_offer(learner: str, incarnation: int, settled: int) -> Steps[Offer | None]:
    """The last offer of an incarnation: offers are dense, so the walk starts at the last one known to be settled."""
    newest: Offer | None = None
    seq = max(0, settled - 1)
    while True:
        key = offer_key(learner, incarnation, seq)
        data = yield Get(key)
        if data is None:
            return newest
        with suppress(RecordError):  # the syncer gives it its fate; its successor in the walk may be sound
            newest = decode(Offer, data, key)
        seq += 1


def publish(offer: Offer, payload: bytes) -> Steps[None]:
    """The payload, then the offer that names it. FencedError if another process holds this very offer."""
    yield Create(delta_key(*offer.id, offer.payload_digest), payload)
    key = offer_key(*offer.id)
    answer = yield Create(key, encode(offer))
    if not isinstance(answer, Created) and answer.data != encode(offer):
        raise FencedError(f"another process publishes as incarnation {offer.incarnation} of {offer.learner}", where=key)


def fetch_cast(output: Output) -> Steps[bytes | None]:
    """A committed version as learners adopt it; None if it is gone (read the log again) or not what the log says."""
    data = yield Get(cast_key(output.fragment, output.version, output.epoch, output.cast_digest))
    return data if data is not None and digest(data) == output.cast_digest else None


def newer_incarnation(learner: str, incarnation: int) -> Steps[bool]:
    """Whether another process has taken this learner's place."""
    return (yield Get(incarnation_key(learner, incarnation + 1))) is not None
