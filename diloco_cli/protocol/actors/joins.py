"""Requests of islands that want to join: how a syncer, or the relay of a region, finds them.

They lie under the name of each island, so that a bucket policy confines each to its own. They are found by listings,
apart from operators' requests. A look reads few objects that are none, so a flood of these makes a queue. It is read
from both ends by turns: from the newest, so that an island that asks again after a flood is heard at once, and from the
oldest, so that an island waits during a flood no longer than what lies before its request takes. Only requests to the
present epoch's syncer count, which their keys tell: whatever an earlier syncer left open is not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_cli.protocol.log.keys import JOINS, join_key, read_join_key
from diloco_cli.protocol.log.operations import List, Steps
from diloco_cli.protocol.log.records import Island, Join, RunFormat
from diloco_cli.protocol.log.signed import read_signed
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import RecordError, decode
from diloco_cli.signing import Unsigned, learner_signer

PAGE = 1000
PAGES_PER_LOOK = 4
MAX_JOINS_PER_LOOK = 32  # and so in one commit
JUNK_PER_LOOK = 4  # objects that are no requests, or further ones of an island
OLDEST, NEWEST = 0, -1  # of the requests that were not read yet
MAX_REMEMBERED = 1 << 16  # keys; of more, the oldest are found anew by the next round of listings


@dataclass(frozen=True)
class FoundJoin:
    """A request with its key and bytes."""

    key: str
    data: bytes
    island: Island


@dataclass
class JoinQueue:
    """The requests of one bucket. `_known`: the keys found since the epoch began; `_unread`: those of them that were
    not read yet."""

    run: RunFormat
    _epoch: int = -1
    _after: str = ""
    _known: dict[str, None] = field(default_factory=dict)
    _unread: list[str] = field(default_factory=list)

    def look(self, state: RunState) -> Steps[list[FoundJoin]]:
        """The next requests, at most MAX_JOINS_PER_LOOK; one for each island."""
        run = state.with_members(self.run)
        if len(run.all_islands) >= run.num_shards:
            return []  # nobody can join
        if state.epoch != self._epoch:
            self._epoch, self._after, self._known, self._unread = state.epoch, "", {}, []
        yield from self._list(run)
        found: dict[str, FoundJoin] = {}
        junk, end = 0, NEWEST
        while self._unread and junk < JUNK_PER_LOOK and len(found) < MAX_JOINS_PER_LOOK:
            one = yield from self._read(self._unread[end], run.keyring.without(state.revoked))
            self._unread.pop(end)
            end = OLDEST if end == NEWEST else NEWEST
            if one is None:
                junk += 1
            else:
                junk += one.island.name in found
                found.setdefault(one.island.name, one)
        return list(found.values())

    def _list(self, run: RunFormat) -> Steps[None]:
        """Go on with the listing of all requests, some pages further; after its end begin anew."""
        for _ in range(PAGES_PER_LOOK):
            keys: list[str] = yield List(JOINS, self._after, PAGE)
            new = [key for key in keys if key not in self._known and self._counts(key, run)]
            self._known |= dict.fromkeys(new)
            self._unread += reversed(new)
            self._after = keys[-1] if len(keys) == PAGE else ""
            if not self._after:
                break
        for key in list(self._known)[: max(0, len(self._known) - MAX_REMEMBERED)]:
            del self._known[key]
        del self._unread[: max(0, len(self._unread) - MAX_REMEMBERED)]

    def _counts(self, key: str, run: RunFormat) -> bool:
        """Whether the key is one of a request to the present syncer, of an island that is none of the run's."""
        named = read_join_key(key)
        return named is not None and named[1] == self._epoch and run.island(named[0]) is None

    def _read(self, key: str, keyring: Unsigned) -> Steps[FoundJoin | None]:
        """The request, if it is a genuine one of the island that its key names."""
        named = read_join_key(key)
        assert named is not None
        data = yield from read_signed(keyring, learner_signer(named[0]), key)
        if data is None or not keyring.authenticates(learner_signer(named[0]), key, data):
            return None
        try:
            join = decode(Join, data, key)
        except RecordError:
            return None
        return FoundJoin(key, data, join.island) if join_key(join.island.name, join.epoch, join.number) == key else None
