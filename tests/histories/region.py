"""A region with a bucket of its own: some learners live there, and each syncer's process mirrors and relays.

The product's mirror and relay, connected as in syncer/regions.py, run as threads of the process. Every write to the
region's bucket is checked as it takes effect: its log is at all times the beginning of the home log, and each role
writes only under its own prefixes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from diloco_cli.digests import digest
from diloco_cli.errors import DilocoError
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.keys import FORMAT_KEY, HEAD_HINT_KEY, SYNCER, commit_key, weights_key
from diloco_cli.protocol.log.operations import Now, Operation, Sleep, Steps, There
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.regions import TRIES_AGAIN_S, RegionLink, RegionStoppedError, Relay, home_of, read_after_relays
from diloco_cli.signing import body_of
from diloco_cli.virtual.world import Actor
from tests.histories.client import Bucket
from tests.histories.options import REGION
from tests.histories.processes import Process
from tests.histories.replayer import OfferId, ViolationError, expect, plain

if TYPE_CHECKING:
    from tests.histories.history import History


ENDS_WITHIN_S = 60.0  # once the run is over: for the region to hear of it
LOOKS_EVERY_S = 0.2
JOINS_HERE = "n0"  # of the islands that join
OF_THE_MIRROR = (FORMAT_KEY, "commit/", "weights/", "snapshot/")


class Region:
    """`residents`: the learners whose operations all go to this bucket; `mirrored`: how many commits it has."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.bucket = Bucket(lambda: history.world.now_s)
        self.residents = {island.name for island in history.run.islands if island.region == REGION} | {JOINS_HERE}
        self.floors = history.monitor.floors_of(self.bucket)
        self.mirrored = 0

    def holds(self, actor: Actor, operation: Operation) -> bool:
        """Whether this operation goes here."""
        return type(operation) is There or (actor.owner is not None and actor.owner.process.role in self.residents)

    # -- the syncer's threads -----------------------------------------------------------------------------------

    def serve(self, process: Process, served: Syncer) -> Steps[RunState]:
        """A syncer with its mirror and its relay; it leaves when the region has the end, or after ENDS_WITHIN_S."""
        leaving = False
        link = RegionLink(
            served.run, REGION, home_of(served), lambda: leaving, lambda line: self._start_again(link.relay),
            self.history.actors.mirror, self.history.actors.relay,
        )  # fmt: skip
        read_after_relays(served, {REGION: link})
        working = set(link.works())
        works = link.works().items()
        process.start_threads([self._work(steps, partial(working.discard, what)) for what, steps in works])
        state = yield from served.serve()
        leaving = True
        ended_s: float = yield Now()
        while working and (yield Now()) - ended_s < ENDS_WITHIN_S:
            yield Sleep(LOOKS_EVERY_S)
        return state

    def _work(self, serve: Callable[[], Steps[None]], done: Callable[[], None]) -> Steps[bool]:
        while True:
            try:
                yield from serve()
            except RegionStoppedError as error:  # no other process writes here
                raise ViolationError("1", f"the mirror stopped: {error}") from error
            except DilocoError:
                yield Sleep(TRIES_AGAIN_S)
            else:
                done()
                return True

    def _start_again(self, relay: Relay) -> None:
        """Restart a learner whose mailbox was given up, as a person would."""
        newest = {account.learner: account.incarnation for account in self.history.beliefs.accounts}
        for learner, incarnation in relay.unheard:
            if newest.get(learner) == incarnation:
                self.history.note(f"{learner} is not heard, and started again")
                self.history.nemesis.crash(learner)

    # -- writes -------------------------------------------------------------------------------------------------

    def created(self, role: str, key: str, data: bytes, now_s: float) -> None:
        """Check a write: copies of home's objects, in the log's order, and residents' own objects are allowed."""
        if role != SYNCER:
            self.history.monitor.check_place(role, key)
            self.history.monitor.genuine.created(key)
            return self.history.monitor.moments.born(key, data, self.bucket)
        expect(key.startswith(OF_THE_MIRROR), "11", f"the mirror wrote {key}")
        # What was written at home, which the bucket may have harmed since.
        home = self.history.run.kept[key] if key == FORMAT_KEY else self.history.bucket.get(key)
        if key.startswith("commit/"):
            expect(key == commit_key(self.mirrored), "1", f"{key} in the region's log, which ends before it")
            made = self.history.monitor.records.get(key)
            expect(data == made, "1", f"{key} in the region's log has other bytes than at home")
            self.mirrored += 1
            self.floors.show(plain(data), now_s)
        elif key.startswith("weights/"):
            expect(key.endswith(digest(data)), "8", f"{key} in the region's bucket has other bytes than its name says")
        else:
            same = home is None or body_of(home) == body_of(data) or key in self.history.bucket.forged
            expect(same, "1", f"{key} in the region's bucket has other bytes than at home")
        return None

    def put(self, role: str, key: str) -> None:
        if role == SYNCER:
            expect(key == HEAD_HINT_KEY, "11", f"the mirror overwrote {key}")
        else:
            self.history.monitor.put(role, key)

    def deleted(self, role: str, key: str, data: bytes | None, now_s: float) -> None:
        self.history.monitor.deleted(role, key, data, now_s, self.floors)

    def published(self, offers: dict[OfferId, bytes]) -> dict[OfferId, bytes]:
        """The offers of residents among these."""
        return {offer_id: data for offer_id, data in offers.items() if offer_id[0] in self.residents}

    # -- the end ------------------------------------------------------------------------------------------------

    def check_at_the_end(self, published: dict[OfferId, bytes]) -> None:
        """The region has the whole log and the newest versions; residents' offers are theirs, here and at home."""
        home, replayer = self.history.bucket, self.history.monitor.replayer
        n = replayer.n
        expect(self.mirrored == n + 1, "1", f"the region has {self.mirrored} commits of {n + 1}, and the run is over")
        log = [plain(home.objects[commit_key(at)]) for at in range(n + 1)]
        newest = {output["fragment"]: output for commit in log for output in commit.get("outputs", ())}
        for output in newest.values():
            key = weights_key(output["fragment"], output["version"], output["epoch"], output["weights_digest"])
            expect(self.bucket.get(key) is not None, "9", f"{key} is not in the region's bucket")
        for offer_id, data in published.items():
            here, there = (replayer.offer_of(bucket, offer_id) for bucket in (self.bucket, home))
            gone = here is None and replayer.is_passed(offer_id, replayer.gc_floor)
            same = (here == data or gone) and there in (data, None)
            expect(same, "7", f"offer {offer_id} has other bytes than it published")
