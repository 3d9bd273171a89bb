"""While no syncer serves, a command that has committed something brings it to the regions' own buckets, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.cli.output import talk

if TYPE_CHECKING:
    from diloco_cli.cli.run_argument import OpenRun
    from diloco_cli.protocol.state import RunState

REACHED_WITHIN_S = 10.0


def tell_regions(opened: OpenRun, head: RunState) -> None:
    """As far as they can be reached from here within some seconds; the next syncer completes what is left."""
    if not opened.format.regions:
        return
    from diloco_cli.protocol.regional import Home
    from diloco_cli.syncer.regions import RegionServices

    services = RegionServices(opened.format, opened.store, Home(lambda: head), tell=talk)
    services.start()
    services.end(over=True, within_s=REACHED_WITHIN_S)
