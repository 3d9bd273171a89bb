"""Runs of every layout, codec and clip, from learners to `diloco verify`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.actors import merging
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import RunFormat, encode
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


def test_a_clip_is_in_the_log_and_a_false_one_is_found() -> None:
    run = small_run(3, clip=1.0)
    store, _ = run_to_end(run)
    scales = {item.scale for commit in commits(store) for item in commit.inputs}
    assert min(scales) < 1.0 == max(scales), "a clip at the median itself must have shortened some, and left some"
    merge = next(commit for commit in commits(store) if any(item.scale < 1 for item in commit.inputs))
    data = store.get(commit_key(merge.n)) or b""
    changed = json.loads(data)
    for item in changed["inputs"]:
        item["scale"] = 1.0
    store.put(commit_key(merge.n), encode(changed))
    text = " ".join(LogVerifier(store, run).replay().mismatches)
    assert f"{commit_key(merge.n)}: replayed parameters differ" in text


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


def test_a_cosine_that_the_log_states_falsely_is_found() -> None:
    run = small_run(3)
    store, _ = run_to_end(run)
    merge = [commit for commit in commits(store) if commit.inputs][-1]
    changed = json.loads(store.get(commit_key(merge.n)) or b"")
    changed["inputs"][0]["cosine"] += 1e-3
    store.put(commit_key(merge.n), encode(changed))
    assert "l0's delta has the cosine" in " ".join(LogVerifier(store, run).replay().mismatches)


def test_norms_that_the_log_states_falsely_are_found() -> None:
    """By a change that moves no decision."""
    run = small_run()
    store, _ = run_to_end(run)
    merge = [commit for commit in commits(store) if commit.inputs][-1]
    changed = json.loads(store.get(commit_key(merge.n)) or b"")
    changed["inputs"][0]["norm"] *= 1 + 1e-5
    store.put(commit_key(merge.n), encode(changed))
    text = " ".join(LogVerifier(store, run).replay().mismatches)
    assert f"offer {merge.inputs[0].incarnation}/{merge.inputs[0].seq} of l0 has the norm" in text
