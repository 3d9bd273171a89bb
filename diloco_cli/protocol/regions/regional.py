"""A region with a bucket of its own, beside a syncer: the mirror of the log there and the relay of its offers home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.regions.mirrors import HeadOf, Mirror
from diloco_cli.protocol.regions.relays import PaceOf, Relay, Tell, claimed_by, withheld_by

TRIES_AGAIN_S = 5.0  # after an error that a repeated call does not end: no such bucket, a version lost at home


@dataclass(frozen=True)
class Home:
    """The syncer as mirror and relay see it: the log's head, and how long a slot takes. `suspect` is called with a
    fragment whose newest weights can no longer be read in a region's bucket."""

    head: HeadOf
    pace: PaceOf = lambda: 0.0
    suspect: Callable[[int], None] = lambda fragment: None


def home_of(syncer: Syncer) -> Home:
    return Home(lambda: syncer.state, lambda: syncer.pace.slot_s, syncer.repairer.suspect)


class RegionLink:
    """The mirror and the relay of one region, for as long as one syncer serves."""

    def __init__(
        self, run: RunFormat, region: str, home: Home, leaving: Callable[[], bool], tell: Tell,
        mirror: type[Mirror] = Mirror, relay: type[Relay] = Relay,
    ) -> None:  # fmt: skip
        self.mirror = mirror(run, home.head, leaving, home.pace, home.suspect)
        self.relay = relay(run, region, home.head, home.pace, leaving, tell)

    def works(self) -> dict[str, Callable[[], Steps[None]]]:
        """The work of mirror and relay, done side by side. The caller restarts one that fails after TRIES_AGAIN_S."""
        return {"mirror": self.mirror.serve, "relay": self.relay.serve}


def read_after_relays(syncer: Syncer, links: Mapping[str, RegionLink]) -> None:
    """Keep the syncer from reading a region's learner's offer before the relay has seen it in the region's bucket, and
    let it know which incarnations the relay has seen there."""
    relays = {region: link.relay for region, link in links.items()}
    syncer.inbox.withheld = withheld_by(relays, syncer.run, lambda: syncer.state)
    syncer.inbox.claimed = claimed_by(relays, syncer.run, lambda: syncer.state)
