"""The order of examples, and the digits."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from diloco_cli.errors import UsageError
from diloco_cli.paths import install_hint
from diloco_cli.tasks.data import HELD_OUT, HELD_OUT_VIEWS, ByteText, Digits, ShuffledEpochs

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install 'diloco[vision]'"
)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_in_an_epoch_every_example_is_drawn_once_by_one_shard(shards):
    size = 12
    order = ShuffledEpochs(size, seed=5)
    epochs = [[i for s in range(shards) for i in order.shard(s, shards, e * size // shards, size // shards)]
              for e in range(3)]  # fmt: skip
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1], "shuffled anew"


def test_a_position_gives_the_same_examples_however_the_stream_was_read_before():
    straight, jumping = ShuffledEpochs(10, seed=1), ShuffledEpochs(10, seed=1)
    expected = straight.shard(1, 2, 0, 20)
    assert [jumping.shard(1, 2, i, 1)[0] for i in reversed(range(20))] == expected[::-1]
    assert ShuffledEpochs(10, seed=2).shard(1, 2, 0, 20) != expected


def test_text_goes_on_exactly_at_a_position():
    text = ByteText(sequence=16, seed=0)
    whole, _ = text.batch(1, 3, 0, 64)
    second, successors = ByteText(sequence=16, seed=0).batch(1, 3, 32, 32)
    assert torch.equal(whole[2:], second) and torch.equal(second[:, 1:], successors[:, :-1])


@needs_sklearn
def test_digits_are_addressed_by_position():
    digits = Digits(sequence=16, seed=3)
    images, classes = digits.batch(0, 2, 0, 8 * 16)
    assert images.shape == (8, 8, 8) and images.dtype == torch.float32 and classes.dtype == torch.int64
    again = Digits(sequence=16, seed=3).batch(0, 2, 4 * 16, 4 * 16)
    assert torch.equal(images[4:], again[0]) and torch.equal(classes[4:], again[1])
    other_shard, _ = digits.batch(1, 2, 0, 8 * 16)
    assert not torch.equal(images, other_shard)


@needs_sklearn
def test_the_same_image_looks_different_in_the_next_epoch():
    digits = Digits(sequence=1, seed=0)
    size = 1797 - HELD_OUT
    first = {int(i): n for n, i in enumerate(digits._order.shard(0, 1, 0, size))}
    n, m = first[7], size + digits._order.shard(0, 1, size, size).index(7)
    (a, b), (a_class, b_class) = zip(*(digits.batch(0, 1, at, 1) for at in (n, m)), strict=True)
    assert a_class == b_class and not torch.equal(a, b)


@needs_sklearn
def test_held_out_digits_are_the_same_in_every_run_and_never_trained_on():
    one, other = (list(Digits(16, seed).held_out(500)) for seed in (0, 9))
    assert sum(len(classes) for _, classes in one) == 500
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    everything = sum(len(classes) for _, classes in Digits(16, 0).held_out(10**6))
    assert everything == HELD_OUT * HELD_OUT_VIEWS
    digits = Digits(16, 0)
    train, held_out = digits._train.padded.flatten(1), digits._held_out.padded.flatten(1)
    assert len(train) + len(held_out) == 1797
    shared = (held_out[:, None] == train[None]).all(dim=2).sum()
    assert int(shared) == 0


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match="scikit-learn") as caught:
        Digits(16, 0)
    assert caught.value.hint == install_hint("vision")
