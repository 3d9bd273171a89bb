"""Error feedback in a whole run: uploads in int8, by the product's own learner and syncer."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from tests.numerics.harness import flat, make_run, merges, run_to_end
from tests.numerics.test_identities import DYADIC

OUTER = OuterSettings("sgd", 1.0, 0.0)


def final(codec: str, feedback: bool, learners: int = 1) -> torch.Tensor:
    """One learner, outer lr 1, gradients that are the data: the outer parameters are the sum of what arrived."""
    sync = SyncSettings(every=5, fragments=1, overlap=0, quorum=learners, merge="avg")
    sync = replace(sync, error_feedback=feedback)
    run = make_run(learners, 8, sync, OUTER, DYADIC, "slope", "dyadic_stream", codec=codec)
    store, found = run_to_end(run)
    assert LogVerifier(store, run).replay().ok
    assert len(merges(store)) == 8
    return flat(run, found)


def test_feedback_brings_a_coarse_run_closer_to_the_exact_one() -> None:
    exact = final("fp32", False)
    without, fed_back = (torch.linalg.vector_norm(final("int8", on) - exact) for on in (False, True))
    assert 0 < fed_back < without / 1.5


@pytest.mark.parametrize("learners", [1, 2])
def test_with_a_lossless_codec_nothing_changes(learners: int) -> None:
    assert torch.equal(final("fp32", True, learners), final("fp32", False, learners))
