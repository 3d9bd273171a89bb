"""Runs of every layout, codec and clip, from learners to `diloco verify`."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.actors import merging
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.rules.merging import DeltaShare, judge
from tests.numerics.harness import commits, make_run, run_to_end
from tests.numerics.test_identities import CONSTANT

NESTEROV = OuterSettings("nesterov", 0.7, 0.5)


def small_run(learners: int = 2, **sync: Any) -> RunFormat:
    codec = sync.pop("codec", "fp32")
    settings = SyncSettings(every=4, fragments=3, overlap=0, quorum=learners)
    return make_run(learners, 6, replace(settings, **sync), NESTEROV, CONSTANT, codec=codec)


@pytest.mark.parametrize("sync", [
    {"fragments": 7, "codec": "int8"}, {"learners": 3, "clip": 1.0, "codec": "bf16", "merge": "avg"},
    {"clip": 1.5, "codec": "int4", "error_feedback": True},
], ids=str)  # fmt: skip
def test_a_run_of_each_kind_ends_and_its_log_replays_bit_for_bit(sync: dict[str, Any]) -> None:
    run = small_run(**sync)
    store, _ = run_to_end(run)
    found = LogVerifier(store, run).replay()
    assert found.ok and found.merges >= 12 and found.offers_applied == len(run.islands) * found.merges, found
    scales = {item.scale for commit in commits(store) for item in commit.inputs}
    assert sync.get("clip") != 1.0 or min(scales) < 1.0 == max(scales), "at the median itself: some, and not all"


@pytest.mark.parametrize("sync", [{"clip": 1.0}, {"codec": "int8"}], ids=str)
def test_a_syncer_that_clips_as_it_likes_is_found_out(sync: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is consistent in every digest: what it says of each scale is what it has merged by."""

    def halved(*arguments: Any) -> list[DeltaShare]:
        return [replace(one, scale=one.scale * 0.5) for one in judge(*arguments)]

    monkeypatch.setattr(merging, "judge", halved)
    run = small_run(3, **sync)
    store, _ = run_to_end(run)
    found = LogVerifier(store, run).replay()
    told = [text for text in found.mismatches if "where its norm gives" in text]
    assert len(told) == len(found.mismatches) >= found.merges, found.mismatches
