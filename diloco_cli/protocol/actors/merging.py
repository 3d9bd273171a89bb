"""Reads and checks deltas, versions and payloads for the arithmetic, and writes versions surely."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.ports import Arithmetic, LoadedDelta
from diloco_cli.protocol.log.keys import delta_key, max_fragment_bytes, state_key, weights_key
from diloco_cli.protocol.log.operations import Create, Get, Steps
from diloco_cli.protocol.log.records import FragmentVersion, Offer, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Created

READS = 3  # of a payload, before it is called damaged

Recover = Callable[[FragmentVersion], bytes | None]


def load_delta(run: RunFormat, arithmetic: Arithmetic, state: RunState, offer: Offer) -> Steps[LoadedDelta | str]:
    """An offer's delta, ready to merge at this head, whose version of the fragment is resident; or the reason of its
    refusal."""
    current = state.outputs[offer.fragment]
    payload = yield from read_payload(offer)
    if isinstance(payload, str):
        return payload
    base_weights = None
    if offer.base != current.version:
        base = state.version(offer.fragment, offer.base)
        if base is None:
            return "unknown_base"
        key = weights_key(base.fragment, base.version, base.epoch, base.weights_digest)
        base_weights = yield Get(key, max_fragment_bytes(run.layout, base.fragment))
        if base_weights is None or digest(base_weights) != base.weights_digest:
            return "unknown_base"
    return arithmetic.read_delta(offer, payload, base_weights)


def read_payload(offer: Offer) -> Steps[bytes | str]:
    """The bytes that the offer names, or the reason why they cannot be read. Other bytes than those are read again
    first, because a read may damage them, and the learner must not be blamed for that. At most the size that the offer
    states is read, which was checked against the layout before (see protocol/rules/eligibility.py)."""
    reason = "missing_payload"
    for _ in range(READS):
        payload: bytes | None = yield Get(delta_key(*offer.id, offer.payload_digest), offer.payload_bytes)
        if payload is None:
            return "missing_payload"
        if len(payload) != offer.payload_bytes:
            reason = "wrong_size"
        elif digest(payload) != offer.payload_digest:
            reason = "digest_mismatch"
        else:
            return payload
    return reason


def make_resident(run: RunFormat, arithmetic: Arithmetic, output: FragmentVersion, recover: Recover) -> Steps[None]:
    """Bring a committed version into memory. `recover` may compute its bytes from older versions and the deltas that
    the log names; raises DataCheckError if neither the bucket nor `recover` has them."""
    if arithmetic.holds(output.fragment, output.state_digest):
        return
    key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
    data = yield Get(key, max_fragment_bytes(run.layout, output.fragment))
    if data is None or digest(data) != output.state_digest:
        problem = "is missing" if data is None else "has other bytes than the log says"
        data = recover(output)
        if data is None or digest(data) != output.state_digest:
            raise DataCheckError(f"the committed state of fragment {output.fragment} {problem}", where=key)
    arithmetic.restore(output.fragment, output.state_digest, data)


def write_surely(key: str, data: bytes) -> Steps[None]:
    """Create an object, and read its bytes back where the store does not check them itself: a commit that named a
    damaged object would stop the run for good."""
    answer = yield Create(key, data)
    if isinstance(answer, Created) and answer.checked:
        return
    seen = yield Get(key, len(data))
    if not isinstance(answer, Created) or seen != data:
        raise DataCheckError("the store holds other bytes than were written", where=key, hint="diloco doctor URL")
