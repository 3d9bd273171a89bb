"""What a learner does with a merged fragment: by hand, and against a reference for any H, P, tau and mixing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diloco_cli.config.run_file import max_overlap
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.training.wire import mixed
from tests.numerics.harness import flat, make_run, run_to_end, versions
from tests.numerics.test_identities import CONSTANT, assert_close, streaming_diloco

BY_TWO = InnerSettings(name="sgd", lr=1.0, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=0.0)

# Two fragments, a and b, of one number each, both 0 at first. Every inner step subtracts 2 from both. H = 6, P = 2: a
# slot lasts 3 steps; a is sent after steps 3, 9, 15, b after steps 6, 12, 18. One learner, outer SGD with lr 2:
#
#     delta = base - own        merged = base - 2 * delta        own := merged
#
# where base is the merged value adopted last, 0 at first. tau is in slots: 0 adopts right after sending, 1 three steps
# (so 6 less) later. Written below: own at the send | merged | own before -> after adoption, for the first three sends.
#
# tau = 0     a:   -6 | -12 |  -6 -> -12      -24 | -36 | -24 -> -36      -48 | -60
#             b:  -12 | -24 | -12 -> -24      -36 | -48 | -36 -> -48      -60 | -72
# tau = 1     a:   -6 | -12 | -12 -> -12      -18 | -24 | -24 -> -24      -30 | -36
#             b:  -12 | -24 | -18 -> -24      -30 | -36 | -36 -> -36      -42 | -48
BY_HAND = [
    (0, [-12.0, -36.0, -60.0], [-24.0, -48.0, -72.0]),
    (1, [-12.0, -24.0, -36.0], [-24.0, -36.0, -48.0]),
]
# Rebasing, own := merged + (own - own at the send), brings back what a flight of one slot would cost:
#
# tau = 1, rebase         a:   -6 | -12 | -12 -> -18      -24 | -36 | -30 -> -42      -48 | -60
#                         b:  -12 | -24 | -18 -> -30      -36 | -48 | -42 -> -54      -60 | -72
REBASED = ([-12.0, -36.0, -60.0], [-24.0, -48.0, -72.0])


def first_merges(tau: int, **mixing: object) -> tuple[list[float], list[float]]:
    """The first three merged values of a and of b, by the product's own learner and syncer."""
    schedule = {"every": 6, "fragments": 2, "overlap": tau, "merge": "avg"}
    sync = SyncSettings(**schedule, **mixing)  # type: ignore[arg-type]
    run = make_run(1, 4, sync, OuterSettings("sgd", 2.0, 0.0), BY_TWO, "two_scalars")
    assert [[t.name for t in fragment.tensors] for fragment in run.layout.fragments] == [["a"], ["b"]]
    store, _ = run_to_end(run)
    assert LogVerifier(store, run).replay().ok
    a, b = ([float(value) for value in versions(run, store, fragment)][:3] for fragment in (0, 1))
    return a, b


@pytest.mark.parametrize(("tau", "a", "b"), BY_HAND)
def test_a_delay_by_hand(tau: int, a: list[float], b: list[float]) -> None:
    assert first_merges(tau, mixing="replace") == (a, b)


@pytest.mark.parametrize("tau", [0, 1])
def test_rebasing_by_hand(tau: int) -> None:
    assert first_merges(tau, mixing="rebase") == REBASED


@settings(max_examples=8, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_any_schedule_equals_the_reference(data: st.DataObject) -> None:
    """H divisible by P or not, H < P, every tau below P, several fragments in flight, every mixing."""
    fragments = data.draw(st.integers(1, 4), "P")
    every = data.draw(st.integers(1, 9), "H")
    overlap = data.draw(st.integers(0, max_overlap(every, fragments)), "tau")
    learners = data.draw(st.integers(1, 3), "M")
    mixing = data.draw(st.sampled_from(["replace", "rebase"]), "mixing")
    sync = SyncSettings(
        every=every, fragments=fragments, overlap=overlap, quorum=learners, merge="avg",
        mixing=mixing, clip="none",
    )  # fmt: skip
    run = make_run(learners, 3, sync, OuterSettings("nesterov", 0.7, 0.5), CONSTANT)
    assert run.num_fragments == fragments
    store, found = run_to_end(run)
    replay = LogVerifier(store, run).replay()
    assert replay.ok and replay.merges >= 2 * fragments
    assert_close(flat(run, found), streaming_diloco(run, replay.merges))


def test_another_delay_or_another_mixing_gives_other_parameters() -> None:
    """The comparison above can fail."""
    sync = {"every": 6, "fragments": 3, "quorum": 2, "merge": "avg"}
    outer = OuterSettings("nesterov", 0.7, 0.5)
    base = make_run(2, 3, SyncSettings(overlap=1, mixing="replace", **sync), outer, CONSTANT)  # type: ignore[arg-type]
    for change in ({"overlap": 2}, {"mixing": "rebase"}):
        changed = SyncSettings(**{"overlap": 1, **sync, **change})  # type: ignore[arg-type]
        other = make_run(2, 3, changed, outer, CONSTANT)
        assert torch.linalg.vector_norm(streaming_diloco(base, 9) - streaming_diloco(other, 9)) > 1e-4


def test_the_arithmetic_of_adoption_is_exact_at_its_ends() -> None:
    merged, own, sent = torch.tensor([0.1, -3.0]), torch.tensor([0.7, 5.0]), torch.tensor([0.3, 4.0])
    assert mixed("replace", merged, own, None) is merged
    assert torch.equal(mixed("rebase", merged, own, own), merged)
    assert torch.equal(mixed("rebase", merged, own, sent), merged + (own - sent))


def test_an_adoption_in_the_memory_of_ones_own_parameters_gives_the_same_bits() -> None:
    merged, own, sent = torch.randn(3, 1000)
    expected = mixed("rebase", merged, own, sent)
    result = mixed("rebase", merged, own, sent, into=own)
    assert result is own and torch.equal(result, expected)
