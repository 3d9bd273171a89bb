"""Heartbeats: each unit states its own condition every few seconds. Hints for people; no commit depends on them.

They end with a signature or a checksum as other records do, and what is not genuine counts as not there. One object is
overwritten again and again, so an older heartbeat may be put back: `Beats` tells which are news.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diloco_cli.digests import digest
from diloco_cli.layout import Layout
from diloco_cli.protocol.log.keys import BYTES_PER_PARAMETER, SYNCER, heartbeat_key
from diloco_cli.protocol.log.operations import MAX_AT_ONCE
from diloco_cli.protocol.log.records import RecordError, decode_plain, encode
from diloco_cli.signing import LOG, Authenticator

MAX_HEARTBEAT_BYTES = 1 << 16
FORGOTTEN = 0.005  # per heartbeat: an outage is forgotten within the hour, while slow merges recur
FORGOTTEN_SLOT_S = 60.0  # in longer slots slow merges recur less often, and all is forgotten so much more slowly
LONGER_THAN_USUAL = 2.0
MAX_SLOWEST_S = 300.0  # the longest silence of its own that a syncer may state, beyond what a version takes
MOVED_BYTES_PER_S = 50e6  # at least
SEEN_KEPT = 1024


def moving_s(layout: Layout) -> float:
    """How long a unit may say nothing because it moves a version of the largest fragment."""
    largest = max(fragment.num_parameters for fragment in layout.fragments)
    return BYTES_PER_PARAMETER * largest / MOVED_BYTES_PER_S


def tolerated_s(least_s: float, slowest_s: float, layout: Layout) -> float:
    """How long a silence of a syncer is no reason to take it for gone: `least_s`, or longer by its own longest silence
    (`slowest_s`) while it worked, as it states it."""
    return max(least_s, LONGER_THAN_USUAL * min(slowest_s, MAX_SLOWEST_S + moving_s(layout)))


def sealed(keyring: Authenticator, role: str, key: str, heartbeat: object) -> bytes:
    """The bytes to write under this key, by a process that signs as `role`."""
    return keyring.sign(role, key, encode(heartbeat))


def genuine(keyring: Authenticator, role: str, key: str, data: bytes | None) -> bytes | None:
    """The heartbeat that lies under this key; None if it is not of a process that may sign as `role`."""
    return data if data is not None and keyring.authenticates(role, key, data) else None


def of_syncer(keyring: Authenticator, data: bytes | None) -> bytes | None:
    return genuine(keyring, LOG, heartbeat_key(SYNCER), data)


def process_on(host: str, pid: int) -> str:
    """As a learner's heartbeat names its process."""
    return f"process {pid} on {host}"


@dataclass(frozen=True)
class LearnerHeartbeat:
    """What a learner states. Rates are per second of its own clock; byte counts are since its first incarnation.
    `last_step_s`: seconds since its last step ended, or since it began. `data_percent`: of its steps' time, what those
    after the first waited for data; None where the loop that reads them is its user's own. `moments`: its newest saved
    ones, as of commit `moments_n`, so that a successor finds those that no offer names. `process`: where it lives."""

    state: str
    incarnation: int
    n: int
    step: int
    position: int
    tokens_per_s: float
    behind: int
    mean_tokens_per_s: float = 0.0
    loss: float | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    requests: int = 0
    blocked_percent: float = 0.0
    note: str = ""
    retrying: str = ""
    writes: int = 0  # requests that write or list, for which stores charge most
    last_step_s: float = 0.0
    data_percent: float | None = None
    moments: str | None = None
    moments_n: int = 0
    process: str = ""


@dataclass(frozen=True)
class MirrorHeartbeat:
    """What a syncer states of one region's bucket: the mirrored log ends at commit `n`, `behind` commits short of the
    home log, for `behind_s` by now. `offers`: the offers carried home. `up_bytes` and `down_bytes`: sent to and
    received from that bucket by syncers, in `requests` requests; `writes`: those that write or list. `stopped`: the
    bucket holds other bytes than home. `unheard`: learners whose offers are not carried home, and why."""

    region: str
    n: int = -1
    behind: int = 0
    behind_s: float = 0.0
    offers: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    stopped: bool = False
    error: str = ""
    requests: int = 0
    writes: int = 0
    unheard: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GarbageHeartbeat:
    """What a syncer has still to delete, though readers have had their grace: about so many `objects`, which `commits`
    have left behind (-1: not known before its first sweep has ended); `per_h`: how many more there are an hour later,
    by the last minutes."""

    objects: int = 0
    commits: int = 0
    per_h: float = 0.0


@dataclass(frozen=True)
class SyncerHeartbeat:
    """What a syncer or a standby states. `unit`: `syncer` or the standby's name. `heartbeats`: how many it has sent;
    `slowest_s`: the longest recent time between two of them, on its own clock. `call_s`: a call to the store, in
    the mean; `bytes_s`, `processor_s`: of a recent merge, its bytes beyond its calls, its computation (0: not
    known). `calls_a_s`: its pace of calls, where the store refuses more; else 0. `reads_back`: what it has written,
    because the store does not check uploads itself. `connections`: how many calls it makes at a time. `wants`: the
    keys of records that it cannot read, for those who hold them (mending.py)."""

    state: str
    epoch: int
    n: int
    host: str
    reason: str = ""
    up_bytes: int = 0
    down_bytes: int = 0
    requests: int = 0
    retrying: str = ""
    memory_bytes: int = 0
    unit: str = "syncer"
    heartbeats: int = 0
    slowest_s: float = 0.0
    mirrors: tuple[MirrorHeartbeat, ...] = ()
    writes: int = 0
    call_s: float = 0.0
    bytes_s: float = 0.0
    processor_s: float = 0.0
    calls_a_s: float = 0.0
    reads_back: bool = True
    connections: int = MAX_AT_ONCE
    garbage: GarbageHeartbeat = GarbageHeartbeat()
    wants: tuple[str, ...] = ()


@dataclass
class Cadence:
    """When a process sends its next heartbeat, how many it has sent, and the longest recent time between two."""

    every_s: float
    count: int = 0
    slowest_s: float = 0.0
    _next_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    def said(self, now_s: float, slot_s: float) -> None:
        if self.count > 0:
            kept = 1 - FORGOTTEN / max(1.0, slot_s / FORGOTTEN_SLOT_S)
            self.slowest_s = max(self.slowest_s * kept, now_s - self._next_s + self.every_s)
        self._next_s, self.count = now_s + self.every_s, self.count + 1


class Beats:
    """Which heartbeats of syncers are news to one reader: a later one of the newest epoch that was heard, or one of a
    process that has no epoch yet and was not heard before."""

    def __init__(self) -> None:
        self._newest = (0, 0)
        self._seen: deque[str] = deque(maxlen=SEEN_KEPT)

    def is_new(self, heartbeat: bytes | None) -> bool:
        """`heartbeat`: a genuine one. What does not decode is none."""
        if heartbeat is None:
            return False
        try:
            plain = decode_plain(heartbeat, heartbeat_key(SYNCER))
        except RecordError:
            return False
        epoch, count = (plain.get(name, 0) for name in ("epoch", "heartbeats"))
        if isinstance(epoch, int) and isinstance(count, int) and epoch > 0:
            before, self._newest = self._newest, max(self._newest, (epoch, count))
            return self._newest > before
        mark = digest(heartbeat)
        is_new = mark not in self._seen
        self._seen.append(mark)
        return is_new
