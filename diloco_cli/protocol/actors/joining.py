"""How a learner's process joins, and publishes: what is asked of the store behind the training loop.

`Saves`: the inner optimizer's saved moments, as of which commit each, and the way back to them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from diloco_cli.digests import digest
from diloco_cli.errors import FencedError
from diloco_cli.protocol.actors.membership import refuse_unless_running
from diloco_cli.protocol.log.commit_log import claim_number, create_signed, read_log, read_signed
from diloco_cli.protocol.log.keys import (
    delta_key,
    incarnation_key,
    max_fragment_bytes,
    offer_key,
    read_inner_key,
    weights_key,
)
from diloco_cli.protocol.log.operations import Create, Get, Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion, Offer, ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import RecordError, decode, encode
from diloco_cli.signing import UNSIGNED, Unsigned, learner_signer

WAIT_FOR_GENESIS_S = 0.1
MAX_FORGED_CLAIMS = 64  # in a row, that are looked behind
REMEMBERED = 16  # the newest saves; an older one is hardly worth going back to


@dataclass(frozen=True)
class Joined:
    """What a new incarnation starts from: the log, where its data begins, its newest saved inner state's key, and the
    commit by which that was saved.

    The data begins beyond everything that a predecessor applied or published: no sample is merged twice, and what the
    predecessor had drawn but not published is lost with it. Saved moments that an offer from behind a rollback names
    are none, unless that rollback only made versions anew. `state` is the log of before: a stop since then counts.
    """

    incarnation: int
    state: RunState
    data_start: int
    inner: str | None
    inner_n: int


def join(run: RunFormat, learner: str, claim: ProcessClaim) -> Steps[Joined]:
    """Become the next incarnation of `learner`. Waits for commit 0: nobody trains from weights of its own.

    An island of the launch may be there before the syncer that resumes the run. One that joined since finds the run
    stopped, or over, only if that came between its admission and this: raises UsageError."""
    state = yield from read_log(run)
    if all(island.name != learner for island in run.islands):
        refuse_unless_running(run, state)
    while not state.outputs:
        yield Sleep(WAIT_FOR_GENESIS_S)
        state = yield from read_log(run, state)
    known = state.learner(learner)
    incarnation = yield from claim_number(
        claim, max(1, known.floor), lambda i: incarnation_key(learner, i), run.keyring, learner_signer(learner)
    )
    offers: list[Offer] = []
    for earlier in range(max(1, known.floor), incarnation):
        last = yield from _newest_offer(run, learner, earlier, known.next_seq if earlier == known.floor else 0)
        offers += [] if last is None else [last]
    head = (yield from read_log(run, state)) if offers else state  # an earlier process may have lived on for long
    inner = next((o.inner for o in reversed(offers) if o.inner and o.base >= head.moments_floor), None)
    data_start = max([known.data_end, *(offer.data_end for offer in offers)])
    return Joined(incarnation, state, data_start, inner, head.n)


def _newest_offer(run: RunFormat, learner: str, incarnation: int, settled: int) -> Steps[Offer | None]:
    """The last offer of an incarnation: offers are dense, so the walk starts at the last one known to be settled."""
    newest: Offer | None = None
    seq = max(0, settled - 1)
    while True:
        key = offer_key(learner, incarnation, seq)
        data = yield from read_signed(run.keyring, learner_signer(learner), key)
        if data is None:
            return newest
        with suppress(RecordError):  # the syncer gives it its outcome; its successor in the walk may be sound
            found = decode(Offer, data, key)
            newest = found if run.keyring.authenticates(learner_signer(learner), key, data) else newest
        seq += 1


def publish(offer: Offer, payload: bytes, keyring: Unsigned = UNSIGNED) -> Steps[bytes]:
    """The payload if there is any, then the offer that names it; its bytes. FencedError if another process holds this
    very offer."""
    if payload:
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
    key = offer_key(*offer.id)
    mine = keyring.sign(learner_signer(offer.learner), key, encode(offer))
    if (yield from create_signed(keyring, learner_signer(offer.learner), key, mine)) != mine:
        raise FencedError(f"another process publishes as incarnation {offer.incarnation} of {offer.learner}", where=key)
    return mine


def fetch_weights(run: RunFormat, output: FragmentVersion) -> Steps[bytes | None]:
    """A committed version as learners adopt it; None if it is gone (read the log again) or not what the log says."""
    key = weights_key(output.fragment, output.version, output.epoch, output.weights_digest)
    data = yield Get(key, max_fragment_bytes(run.layout, output.fragment))
    return data if data is not None and digest(data) == output.weights_digest else None


def fetch_moments(key: str | None, max_bytes: int) -> Steps[bytes | None]:
    """Saved moments, if they are the very bytes that their key names. Offers carry such keys: a stranger's word."""
    if key is None or read_inner_key(key) is None:
        return None
    data: bytes | None = yield Get(key, max_bytes)
    return data if data is not None and key.endswith(digest(data)) else None


def newer_incarnation(learner: str, incarnation: int, keyring: Unsigned = UNSIGNED) -> Steps[bool]:
    """Whether another process has taken this learner's place. A claim that is not signed with its key takes nothing."""
    for number in range(incarnation + 1, incarnation + 1 + MAX_FORGED_CLAIMS):
        key = incarnation_key(learner, number)
        claim = yield from read_signed(keyring, learner_signer(learner), key)
        if claim is None:
            return False
        if keyring.authenticates(learner_signer(learner), key, claim):
            return True
    return False


class Saves:
    """Keys of this process's saves, each with the newest commit that was known when it was made. The upload lane adds,
    the training asks."""

    def __init__(self) -> None:
        self._saves: tuple[tuple[int, str], ...] = ()
        self._rollbacks: tuple[tuple[int, int], ...] = ()

    def add(self, key: str, n: int) -> None:
        left = (save for save in self._saves if self._counts(save[0]))  # or those would take the place of what counts
        self._saves = (*left, (n, key))[-REMEMBERED:]

    @property
    def newest(self) -> str | None:
        """What offers name. A save that a rollback has overtaken on its way counts for nothing."""
        return next((key for n, key in reversed(self._saves) if self._counts(n)), None)

    def _counts(self, n: int) -> bool:
        return all(n <= to or n >= at for to, at in self._rollbacks)

    def go_back(self, rollbacks: tuple[tuple[int, int], ...]) -> str | None:
        """`rollbacks`: as in RunState. What was saved between the two commits of one, or is yet to come from there,
        counts for nothing. Returns the newest save that is left."""
        self._rollbacks = rollbacks
        return self.newest

    def forget(self) -> None:
        """None of them could be restored."""
        self._saves = ()
