"""An operator's intents: written into the bucket, carried out by the syncer as a commit that names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.protocol.keys import request_key
from diloco_cli.protocol.log import append, claim_epoch, read_log
from diloco_cli.protocol.operations import Create, Get, Steps
from diloco_cli.protocol.records import Commit, Island, ProcessClaim, Request, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.wire import RecordError, decode, encode
from diloco_cli.store.port import Created

LONGEST_REASON = 500  # characters of a stranger's text in the log


@dataclass(frozen=True)
class Pending:
    """Requests that were not carried out yet: the last number; the reason of a stop, if that is what they come to; the
    island that asks to join, if it is one of those; else why they are refused."""

    newest: int
    stop: str | None
    refused: str
    join: Island | None = None


def pending_requests(state: RunState) -> Steps[Pending | None]:
    """A later `resume` withdraws a stop; what is no request counts for nothing. One that asks to join is alone: it
    comes after those before it, and those behind it come after it."""
    number, pending = state.next_request, None
    while (data := (yield Get(request_key(number)))) is not None:
        stop, refused = (pending.stop, pending.refused) if pending else (None, "")
        try:
            request = decode(Request, data, request_key(number))
            if request.kind == "join" and request.island is not None:
                return pending or Pending(number, None, "", request.island)
            stop = (request.reason or "by request")[:LONGEST_REASON] if request.kind == "stop" else None
            refused = "an older stop was withdrawn"
        except RecordError as error:
            refused = f"request {number}: {error}"[:LONGEST_REASON]
        pending = Pending(number, stop, refused)
        number += 1
    return pending


def ask_to_stop(state: RunState, nonce: str, time: str, reason: str) -> Steps[int]:
    """Write a stop request under the next free number, which is returned."""
    return (yield from _ask(state, "stop", nonce, time, reason))


def withdraw_stop(state: RunState, nonce: str, time: str) -> Steps[bool]:
    """Before a run goes on: withdraw a stop that nobody was there to carry out. True if there was one."""
    pending = yield Get(request_key(state.next_request))
    if pending is None:
        return False
    yield from _ask(state, "resume", nonce, time, "diloco resume")
    return True


def ask_to_join(state: RunState, nonce: str, time: str, island: Island) -> Steps[int]:
    """Write a request to be admitted under the next free number, which is returned."""
    return (yield from _ask(state, "join", nonce, time, "", island))


def _ask(
    state: RunState, kind: Literal["stop", "resume", "join"], nonce: str, time: str, reason: str,
    island: Island | None = None,
) -> Steps[int]:  # fmt: skip
    number = state.next_request
    while True:
        mine = encode(Request(number, kind, nonce, time, reason, island))
        answer = yield Create(request_key(number), mine)
        if isinstance(answer, Created) or answer.data == mine:
            return number
        number += 1


def stop_without_syncer(run: RunFormat, claim: ProcessClaim, time: str, reason: str) -> Steps[RunState]:
    """With no syncer alive the command itself claims the next epoch, commits the stop, and leaves. It leaves a run
    alone that has ended meanwhile, or that has no first version yet: only a syncer can make that."""
    state = yield from read_log(run)
    if state.n < 0:
        return state
    epoch = yield from claim_epoch(claim, state)
    for kind in ("epoch_start", "stop"):
        mine = False
        while not mine and state.phase == "RUNNING":
            draft = Commit(
                n=0, kind=kind, epoch=epoch, nonce=claim.nonce, previous="", time=time, software=claim.software,
                reason=reason, request=state.next_request if kind == "stop" else None,
            )  # fmt: skip
            state, mine = yield from append(run, state, draft)
    return state
