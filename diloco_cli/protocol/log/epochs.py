"""Numbers that processes claim one after the other: the furthest one, and the claim of the next epoch.

Claims are dense: each process takes the first number that is free. So the furthest one is found by doubling and halving
steps. Claims that lie apart are made by no process of this program; they drive a number on by REACH a look at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from diloco_cli.errors import TryAgainError
from diloco_cli.protocol.log.keys import epoch_key
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.records import ProcessClaim, RunFormat
from diloco_cli.protocol.log.signed import create_signed
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, encode
from diloco_cli.signing import LOG

REACH = 1 << 20  # numbers beyond the last one known: more than processes ever die in a row
CLAIMS_TRIED = 64  # of numbers that others take first
Found = TypeVar("Found")


def furthest(known: int, reach: int, look: Callable[[int], Steps[Found | None]]) -> Steps[tuple[int, Found] | None]:
    """The furthest number beyond `known`, within `reach` of it, under which `look` finds something, and that; None if
    there is none."""
    found: tuple[int, Found] | None = None
    low, high, step = known, known + reach + 1, 1
    while high - low > 1:
        number = min(low + step, (low + high + 1) // 2)
        there = yield from look(number)
        if there is None:
            high = number
        else:
            low, found, step = number, (number, there), 2 * step
    return found


def newest_epoch(known: int) -> Steps[tuple[int, bytes] | None]:
    """The furthest epoch beyond `known` under whose key anything lies, and these bytes; None if there is none."""
    return (yield from furthest(known, REACH, _epoch_claim))


def _epoch_claim(epoch: int) -> Steps[bytes | None]:
    data: bytes | None = yield Get(epoch_key(epoch), MAX_RECORD_BYTES)
    return data


def claim_epoch(run: RunFormat, claim: ProcessClaim, state: RunState) -> Steps[int]:
    """A free epoch after the log's, now claimed by this process."""
    epoch = state.epoch + 1
    for _ in range(CLAIMS_TRIED):
        mine = run.keyring.sign(LOG, epoch_key(epoch), encode(replace(claim, number=epoch)))
        if (yield from create_signed(run.keyring, LOG, epoch_key(epoch), mine)) == mine:
            return epoch
        newest = yield from newest_epoch(epoch)
        epoch = 1 + (epoch if newest is None else newest[0])
    raise TryAgainError(f"{CLAIMS_TRIED} epochs in a row were claimed by other processes first", where=epoch_key(epoch))
