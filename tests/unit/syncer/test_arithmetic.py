"""The syncer's numbers on a model of three weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco_cli.algorithm.payload import to_bytes
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.errors import UsageError
from diloco_cli.protocol.records import Offer, RunFormat
from diloco_cli.syncer.arithmetic import TorchArithmetic
from tests.numerics.harness import make_run

SIZE = 5


@pytest.fixture
def run() -> RunFormat:
    return make_run(1, 1, SyncSettings(every=4, fragments=1), OuterSettings("sgd", 1.0, 0.0), InnerSettings(), "slope")


@pytest.fixture
def arithmetic(run: RunFormat) -> TorchArithmetic:
    """At version 0: a = [1, -2, 0.5], b = [4, 0.25]."""
    arithmetic = TorchArithmetic(run)
    arithmetic.settle(0, digest(arithmetic.initial()[0].state))
    return arithmetic


def offer(fragment: int = 0) -> Offer:
    return Offer("l0", 1, 0, 0, fragment, 0, "", 0, 4, 4, 1, "", 0, "")


def payload(values: list[float]) -> bytes:
    return to_bytes({"values": torch.tensor(values)})


def current(arithmetic: TorchArithmetic) -> torch.Tensor:
    return arithmetic._current[0].parameters


def test_the_first_version_is_the_seeded_model_without_momentum(run: RunFormat, arithmetic: TorchArithmetic) -> None:
    assert current(arithmetic).tolist() == [1.0, -2.0, 0.5, 4.0, 0.25]
    assert not arithmetic._current[0].momentum.any()
    assert TorchArithmetic(run).initial() == arithmetic.initial(), "every syncer begins with the same bytes"


def test_another_model_than_the_formats_is_refused(run: RunFormat) -> None:
    other = replace(run, layout=replace(run.layout, digest="blake3-" + "0" * 64))
    with pytest.raises(UsageError, match="other tensors"):
        TorchArithmetic(other).initial()


@pytest.mark.parametrize("data", [b"", b"x" * 100, payload([1.0] * 4), payload([1.0] * 6), payload([1.0] * SIZE)[:-1]])
def test_what_is_no_payload_of_this_fragment_is_refused(arithmetic: TorchArithmetic, data: bytes) -> None:
    assert arithmetic.read_delta(offer(), data, None) == "bad_payload"
    assert arithmetic.read_delta(offer(), payload([1.0] * SIZE), data) == "bad_payload", "as a base too"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(arithmetic: TorchArithmetic, poison: float) -> None:
    assert arithmetic.read_delta(offer(), payload([0.0, poison, 0.0, 0.0, 0.0]), None) == "non_finite"


def test_a_finite_delta_that_overflows_the_parameters_is_refused(arithmetic: TorchArithmetic) -> None:
    huge = torch.full((SIZE,), 3e38)
    arithmetic._current[0].parameters.fill_(-3e38)
    assert arithmetic.merge(0, [(huge, 1.0)]) == "non_finite"


def test_the_norm_cap_refuses_poison_unless_it_is_a_replay(run: RunFormat, arithmetic: TorchArithmetic) -> None:
    for _ in range(5):
        assert not isinstance(arithmetic.read_delta(offer(), payload([1.0] * SIZE), None), str)
    poison = payload([1e4] * SIZE)
    assert arithmetic.read_delta(offer(), poison, None) == "norm_cap"
    replaying = TorchArithmetic(run, check_norms=False)
    assert not any(isinstance(replaying.read_delta(offer(), payload([1.0] * SIZE), None), str) for _ in range(5))
    assert not isinstance(replaying.read_delta(offer(), poison, None), str)


def test_re_anchoring_adds_what_has_moved_since_the_base(arithmetic: TorchArithmetic) -> None:
    base = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    delta = torch.tensor([0.5, 0.25, 0.0, -1.0, 2.0])
    before = current(arithmetic).clone()
    found = arithmetic.read_delta(offer(), payload(delta.tolist()), arithmetic.broadcast.to_bytes(base))
    assert torch.equal(found, delta + (before - base))
    assert torch.equal(current(arithmetic), before), "the version itself stays as it is"


def test_a_merge_holds_only_once_the_log_has_settled_it(arithmetic: TorchArithmetic) -> None:
    before = current(arithmetic).clone()
    merged = arithmetic.merge(0, [(torch.ones(SIZE), 1.0)])
    assert not isinstance(merged, str)
    assert torch.equal(current(arithmetic), before), "a candidate changes nothing"
    arithmetic.settle(0, "blake3-of-another-syncers-merge")
    assert torch.equal(current(arithmetic), before)
    assert arithmetic.holds(0, digest(merged.state)), "asking for a candidate that is in the log settles it"
    torch.testing.assert_close(current(arithmetic), before - 1.0)


def test_a_restored_version_goes_on_like_the_one_in_memory(run: RunFormat, arithmetic: TorchArithmetic) -> None:
    merged = arithmetic.merge(0, [(torch.ones(SIZE), 1.0)])
    assert not isinstance(merged, str)
    arithmetic.settle(0, digest(merged.state))
    other = TorchArithmetic(run)
    assert not other.holds(0, digest(merged.state))
    other.restore(0, digest(merged.state), merged.state)
    assert other.holds(0, digest(merged.state))
    deltas = [(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 2.0)]
    assert other.merge(0, deltas) == arithmetic.merge(0, deltas)
