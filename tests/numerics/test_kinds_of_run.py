"""Runs of every layout, codec and clip, from learners to `diloco verify`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.observe.bookkeeping import Books
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, RunFormat
from diloco_cli.protocol.log.wire import encode
from diloco_cli.protocol.rules.merging import token_weight
from diloco_cli.syncer import arithmetic
from diloco_cli.syncer.norms import NormCap
from tests.numerics.harness import commits, make_run, run_to_end
from tests.numerics.test_identities import CONSTANT

NESTEROV = OuterSettings("nesterov", 0.7, 0.5)


def small_run(**sync: Any) -> RunFormat:
    codec = sync.pop("codec", "fp32")
    settings = SyncSettings(every=4, fragments=3, overlap=0, adoption="at_tau", quorum=2)
    return make_run(2, 6, replace(settings, **sync), NESTEROV, CONSTANT, codec=codec)


@pytest.mark.parametrize("sync", [
    {"layout": "layers"}, {"layout": "strided", "fragments": 2}, {"split_rows": True}, {"codec": "int8"},
    {"codec": "int4", "granularity": "row"}, {"codec": "bf16", "merge": "avg"}, {"granularity": "fragment"},
    {"clip": 1.0}, {"clip": 1.5, "codec": "int4", "error_feedback": True},
], ids=str)  # fmt: skip
def test_a_run_of_each_kind_ends_and_its_log_replays_bit_for_bit(sync: dict[str, Any]) -> None:
    run = small_run(**sync)
    store, _ = run_to_end(run)
    found = LogVerifier(store, run).replay()
    assert found.ok and found.merges >= 12 and found.offers_applied == 2 * found.merges, found


def test_a_clip_is_in_the_log_and_a_false_one_is_found() -> None:
    run = small_run(clip=1.0)
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
    """Its log is consistent in every digest: what it says of each scale is what it has merged by. Without `sync.clip`
    there is nothing to lie about, and nothing else changes."""

    class Liar(NormCap):
        def scale(self, fragment: int, norm: float) -> float | None:
            honest = super().scale(fragment, norm)
            return honest if honest is None or self.clip == "none" else honest * 0.5

    monkeypatch.setattr(arithmetic, "NormCap", Liar)
    run = small_run(**sync)
    store, _ = run_to_end(run)
    found = LogVerifier(store, run).replay()
    lied = sum(item.scale < 0.6 for commit in commits(store) for item in commit.inputs)
    told = [text for text in found.mismatches if "where its length gives" in text]
    assert found.ok == (lied == 0) and bool(told) == bool(lied) == ("clip" in sync), found.mismatches


@pytest.mark.parametrize(("clip", "scale"), [("none", 0.5), (2.0, 0.0), (2.0, 1.5), (2.0, -1.0)])
def test_a_scale_that_the_settings_do_not_allow_is_a_broken_rule(clip: Any, scale: float) -> None:
    run, broken = small_run(clip=clip), list[str]()
    books = Books(run, lambda holds, otherwise: None if holds else broken.append(otherwise))
    books.versions[0] = [FragmentVersion(0, version, -1, 1, "", "") for version in (0, 1)]
    weight = token_weight(64, 16, run.settings.sync.weight)
    item = MergedOffer("l0", 1, 0, 0, 0, 64, 64, 16, weight, "blake3-", 0)
    assert books.check_input(item, 0, "commit") and not broken
    assert not books.check_input(replace(item, seq=1, base=1, data_start=64, data_end=128, scale=scale), 0, "commit")
    assert "is scaled by" in broken[0]
