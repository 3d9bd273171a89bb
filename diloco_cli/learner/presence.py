"""A learner's presence in its bucket beside the actor: its link, its traffic, its first and its last heartbeat."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import DilocoError, FencedError, NoSpaceError, StoreError
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat, genuine
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.wire import RecordError, decode
from diloco_cli.runtime.daemon import Lanes, SystemClock, perform
from diloco_cli.signing import learner_signer
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, retrying_text
from diloco_cli.store.wrappers import EmulatedLink, MeteredStore

CLEAN_STOP_S = 1.5  # for each background thread; the supervisor kills 8 s after SIGTERM


def behind_its_link(store: Store, island: Island) -> Store:
    link = island.link
    if not link.emulate:
        return store
    return EmulatedLink(store, link.up_bps, link.down_bps, link.rtt_s or 0.0)


def depart(learner: Learner, lanes: Lanes, store: Store) -> None:
    """End the lanes, then write the last heartbeat; a successor's must stay."""
    learner.follower.leaves = True
    lanes.close(CLEAN_STOP_S)
    has_successor = isinstance(lanes.failure, FencedError)
    if hasattr(learner, "progress") and not has_successor:
        with suppress(DilocoError):  # nothing depends on it
            perform(learner.follower.send_heartbeat(), store, SystemClock(monotonic_s, sleep_s, lambda: None))


def heartbeat_unless_it_fails(store: Store, learner: Learner) -> None:
    """Write a heartbeat while a call is repeated: the follower, which usually does so, may be waiting for the call."""
    with suppress(StoreError, NoSpaceError):
        store.put(heartbeat_key(learner.name), learner.follower.heartbeat_record())


def earlier_heartbeat(run: RunFormat, store: Store, name: str) -> LearnerHeartbeat | None:
    key = heartbeat_key(name)
    data = genuine(run.keyring, learner_signer(name), key, store.get(key, MAX_HEARTBEAT_BYTES))
    try:
        return decode(LearnerHeartbeat, data, heartbeat_key(name)) if data is not None else None
    except RecordError:
        return None


def traffic(meter: MeteredStore, store: RetryingStore, earlier: LearnerHeartbeat | None) -> dict[str, Any]:
    """Byte and request counts of this process and of the incarnations before it."""
    counts = meter.counts
    return {
        "up_bytes": counts.up_bytes + (earlier.up_bytes if earlier else 0),
        "down_bytes": counts.down_bytes + (earlier.down_bytes if earlier else 0),
        "requests": counts.num_requests + (earlier.requests if earlier else 0),
        "writes": counts.num_writes + (earlier.writes if earlier else 0),
        "retrying": retrying_text(store),
    }
