"""A region that has a bucket of its own, beside a syncer: a mirror of the log there, a relay of its offers home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.regions.mirrors import HeadOf, Mirror
from diloco_cli.protocol.regions.relays import PaceOf, Relay, Tell, withheld_by

TRIES_AGAIN_S = 5.0  # after an error that repeating one call does not mend: no such bucket, a version lost at home


@dataclass(frozen=True)
class Home:
    """What is copied from: the log's head, and how long a slot takes. `suspect` is told the fragment whose newest
    weights a region's bucket does not show any more."""

    head: HeadOf
    pace: PaceOf = lambda: 0.0
    suspect: Callable[[int], None] = lambda fragment: None


def home_of(syncer: Syncer) -> Home:
    return Home(lambda: syncer.state, lambda: syncer.pace.slot_s, syncer.repairer.suspect)


class RegionLink:
    """Of one region, for as long as one syncer serves."""

    def __init__(
        self, run: RunFormat, region: str, home: Home, leaving: Callable[[], bool], tell: Tell,
        mirror: type[Mirror] = Mirror, relay: type[Relay] = Relay,
    ) -> None:  # fmt: skip
        self.mirror = mirror(run, home.head, leaving, home.pace, home.suspect)
        self.relay = relay(run, region, home.head, home.pace, leaving, tell)

    def works(self) -> dict[str, Callable[[], Steps[None]]]:
        """What goes on side by side, each again after TRIES_AGAIN_S if it fails: a region must not fall silent."""
        return {"mirror": self.mirror.serve, "relay": self.relay.serve}


def read_after_relays(syncer: Syncer, links: Mapping[str, RegionLink]) -> None:
    """The syncer reads no offer in the name of a region's learner that the region's bucket has not."""
    relays = {region: link.relay for region, link in links.items()}
    syncer.inbox.withheld = withheld_by(relays, syncer.run, lambda: syncer.state)
