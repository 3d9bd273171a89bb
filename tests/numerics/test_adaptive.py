"""`mixing: adaptive`: the log says how far the deltas agreed, and every learner adopts accordingly."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import AgreementSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.rules.merging import rebases
from tests.numerics.harness import flat, key_of_delta, make_run, merges, run_to_end
from tests.numerics.test_delay_and_mix import reference
from tests.numerics.test_identities import CONSTANT, assert_close

ALWAYS, NEVER = AgreementSettings(-1.0, -1.0), AgreementSettings(1.0, 1.0)


def adaptive(agreement: AgreementSettings, **changes: object) -> RunFormat:
    settings = {"every": 6, "fragments": 3, "overlap": 1, "quorum": 2, "adoption": "at_tau", "merge": "avg", **changes}
    sync = SyncSettings(mixing="adaptive", agreement=agreement, **settings)  # type: ignore[arg-type]
    return make_run(2, 3, sync, OuterSettings("nesterov", 0.7, 0.5), CONSTANT)


def with_mixing(run: RunFormat, mixing: str) -> RunFormat:
    return replace(run, settings=replace(run.settings, sync=replace(run.settings.sync, mixing=mixing)))


@pytest.mark.parametrize(("agreement", "mixing"), [(ALWAYS, "rebase"), (NEVER, "replace")])
def test_at_its_ends_it_is_one_of_the_two_it_chooses_from(agreement: AgreementSettings, mixing: str) -> None:
    run = adaptive(agreement)
    store, found = run_to_end(run)
    replay = LogVerifier(store, run).replay()
    assert replay.ok
    assert_close(flat(run, found), reference(with_mixing(run, mixing), replay.merges))
    assert {commit.outputs[0].rebase for commit in merges(store)} == {mixing == "rebase"}


@pytest.mark.parametrize("merge", ["avg", "rda"])
def test_the_log_tells_the_mean_cosine_of_the_deltas(merge: str) -> None:
    """Two learners: the cosine between their two deltas, computed from the payloads in the bucket."""
    run = adaptive(AgreementSettings(), merge=merge, granularity="fragment")
    store, _ = run_to_end(run)
    assert LogVerifier(store, run).replay().ok
    for commit in merges(store):
        fragment = commit.outputs[0].fragment
        size = run.layout.fragments[fragment].num_parameters
        deltas = [_values(store.get(key_of_delta(item)) or b"", size) for item in commit.inputs]
        cosine = torch.nn.functional.cosine_similarity(deltas[0], deltas[1], dim=0)
        assert commit.agreement == pytest.approx(float(cosine), abs=1e-4)


def _values(payload: bytes, size: int) -> torch.Tensor:
    """fp32 payloads end with their values."""
    return torch.frombuffer(bytearray(payload[-4 * size :]), dtype=torch.float32)


def test_a_run_between_the_thresholds_changes_over_and_a_verifier_agrees() -> None:
    run = adaptive(AgreementSettings(0.6, 0.4))
    store, _ = run_to_end(run)
    assert LogVerifier(store, run).replay().ok
    other = replace(run.settings.sync, agreement=AgreementSettings(-1.0, -1.0))
    found = LogVerifier(store, replace(run, settings=replace(run.settings, sync=other))).replay()
    assert any("rebase is" in text for text in found.mismatches), "the verifier did not notice other thresholds"


def test_other_mixings_neither_compare_nor_record() -> None:
    run = with_mixing(adaptive(ALWAYS), "replace")
    store, _ = run_to_end(run)
    assert {(commit.agreement, commit.outputs[0].rebase) for commit in merges(store)} == {(None, False)}


@pytest.mark.parametrize(
    ("before", "agreement", "after"),
    [
        (False, 0.29, False), (False, 0.30, True), (True, 0.20, True), (True, 0.19, False),
        (False, 0.25, False), (True, 0.25, True), (False, None, False), (True, None, True),
    ],
)  # fmt: skip
def test_between_its_thresholds_it_stays_as_it_was(before: bool, agreement: float | None, after: bool) -> None:
    assert rebases(before, agreement, AgreementSettings(0.3, 0.2)) is after
