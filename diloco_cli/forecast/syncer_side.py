"""The syncer's calls in virtual time: how long each takes, with its bytes over the syncer's link, and its arithmetic.

The simulated bucket holds only the names of payloads and versions; their true sizes take the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.config.settings import Link
from diloco_cli.forecast.island import Sizes, SizesWire, fragment_of
from diloco_cli.protocol.log.keys import read_delta_key, read_version_key
from diloco_cli.protocol.log.operations import Create, Get, Operation
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.store.port import Store


@dataclass
class SyncerSide:
    """`latency_s` of each call; `merge_s`: of the arithmetic of one merge, before its state is written."""

    sizes: Sizes
    store: Store
    latency_s: float
    merge_s: float
    link: Link

    def __post_init__(self) -> None:
        self.up, self.down = SizesWire(self.link.up_bps), SizesWire(self.link.down_bps)

    def call_s(self, operation: Operation, now_s: float, merging: bool) -> float:
        """`merging`: not before the first commit, whose versions no arithmetic makes."""
        match operation:
            case Create(key, _):
                begins_s = now_s + (self.merge_s if merging and key.startswith("state/") else 0.0)
                return self.latency_s + self.up.done_s(begins_s, self._version_bytes(key), 1.0) - now_s
            case Get(key, _):
                num_bytes = self._version_bytes(key) or self._delta_bytes(key)
                return self.latency_s + self.down.done_s(now_s, num_bytes, 1.0) - now_s
        return self.latency_s

    def _version_bytes(self, key: str) -> float:
        version = read_version_key(key)
        if version is None:
            return 0.0
        sizes = self.sizes.state if key.startswith("state/") else self.sizes.weights
        return sizes[version[0]] if sizes else 0.0

    def _delta_bytes(self, key: str) -> float:
        payload = self.store.get(key, MAX_RECORD_BYTES) if read_delta_key(key) is not None else None
        return 0.0 if not payload else self.sizes.delta[fragment_of(payload)]
