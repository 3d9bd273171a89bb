"""The same run in a gs:// bucket, against the fake server of the contract suite, with a storm of 503s on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.fake_gcs import FakeGCS
from tests.end_to_end.conftest import Playground


@pytest.fixture
def gs(playground: Playground) -> Iterator[FakeGCS]:
    with FakeGCS("runs") as server:
        playground.environment["STORAGE_EMULATOR_HOST"] = server.url
        playground.islands("iowa", "ohio", url="gs://runs/here")
        yield server


def test_a_run_in_a_gs_bucket_survives_kills_and_503s_and_verifies(playground: Playground, gs: FakeGCS) -> None:
    playground.launch(40_000)
    playground.wait_for(lambda s: s["commit"] >= 4)
    gs.inject("503", times=40)
    playground.kill("ohio", "syncer")
    playground.wait_for(lambda s: s["state"] == "FINISHED", timeout_s=180)
    found = playground.json("verify", "quickstart")
    assert found["ok"] and found["tokens"] >= 40_000 and found["epochs"] >= 2
