"""What a learner says of its own speed: however false, the others' run goes on."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.protocol.log.records import Offer, Timings
from diloco_cli.protocol.rules.merging import MAX_S
from tests.simulation.sweeps import finished
from tests.simulation.toy import STEP_S, ToyFleet, make_run

LIES = {
    "slow": Timings(step_s=MAX_S, slot_s=MAX_S),
    "far away": Timings(upload_s=MAX_S, adoption_s=MAX_S),
    "fast": Timings(step_s=1e-9, slot_s=1e-9),
    "often": Timings(step_s=STEP_S, slot_s=1e-9),
}


@pytest.mark.parametrize("timings", LIES.values(), ids=LIES)
def test_a_liar_delays_nobody_for_long(timings: Timings, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 1. One island comes late, so that the liar is alone in some merges, and one never: the syncer waits for it as
    long as it takes it for alive."""
    honest = Progress.offer

    def offer(progress: Progress, draft: Any, digest: str, size: int, nonce: str, own: Timings, *more: Any) -> Offer:
        said = timings if progress.learner == "l0" else own
        return honest(progress, draft, digest, size, nonce, said, *more)

    monkeypatch.setattr(Progress, "offer", offer)
    fleet = ToyFleet(make_run(learners=3, merges=30, quorum=1))
    fleet.syncer()
    fleet.learner("l0")
    fleet.learner("l1", delay_s=1.0)
    finished(fleet)
    assert STEP_S / 8 < fleet.served.pace.slot_s < 60 and fleet.served.pace.sync_s < 60
