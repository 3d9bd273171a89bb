"""The order of sequences."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.corpus.shuffle import WINDOW, BlockShuffle, permuted
from diloco_cli.digests import digest

PINNED = "blake3-2e100f942428c905bf2a1c339fb3a9843f497d4ce2d2ead3d0bbe2f650d64d35"


@settings(max_examples=120)
@given(size=st.integers(1, 700), block=st.integers(1, 40), shards=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_every_sequence_is_drawn_exactly_once_an_epoch_over_all_shards(size, block, shards, seed):
    shards = min(shards, size)
    order = BlockShuffle(size, block, seed)
    lengths = [(s + 1) * size // shards - s * size // shards for s in range(shards)]
    for epoch in range(2):
        drawn = [order.shard(s, shards, epoch * lengths[s], lengths[s]) for s in range(shards)]
        assert sorted(np.concatenate(drawn)) == list(range(size))


@settings(max_examples=60)
@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_a_network_permutes_any_number_of_places(size, key):
    assert sorted(permuted(np.arange(size), size, key)) == list(range(size))


def test_a_position_gives_the_same_sequences_however_the_stream_was_read_before():
    order = BlockShuffle(1000, 13, seed=3)
    straight = order.shard(1, 3, 0, 900)
    jumped = [int(BlockShuffle(1000, 13, seed=3).shard(1, 3, place, 1)[0]) for place in (899, 0, 417)]
    assert jumped == [straight[899], straight[0], straight[417]]
    assert list(BlockShuffle(1000, 13, seed=4).shard(1, 3, 0, 900)) != list(straight)


def drawn_digest() -> str:
    order = BlockShuffle(123_457, 2048, seed=11)
    return digest(order.shard(2, 5, 24_000, 3000).astype("<i8").tobytes())


def test_the_order_is_the_same_in_another_process_and_as_it_always_was():
    code = "from tests.unit.corpus.test_shuffle import drawn_digest; print(drawn_digest())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert said == drawn_digest() == PINNED


def test_a_reader_has_few_blocks_in_use_and_sees_all_of_a_window_mixed():
    size, block = 64 * 100, 100
    drawn = BlockShuffle(size, block, seed=0).shard(0, 1, 0, size)
    for window in range(size // (WINDOW * block)):
        part = drawn[window * WINDOW * block : (window + 1) * WINDOW * block]
        assert len(set(part // block)) <= 2 * WINDOW, "a turned block lies on two"
        assert len(set(part[:100] // block)) > WINDOW / 2, "they are mixed from the beginning"


def test_the_last_short_block_is_another_stretch_in_each_epoch():
    order = BlockShuffle(105, 20, seed=1)
    ends = [tuple(sorted(order.shard(0, 1, epoch * 105, 105)[-5:])) for epoch in range(4)]
    assert len(set(ends)) > 1


def test_a_place_far_into_a_large_corpus_is_computed_not_searched():
    order = BlockShuffle(10**12, 2048, seed=1)
    assert len(set(order.shard(1, 3, 10**14, 512))) == 512


def test_fewer_sequences_than_shards_are_refused():
    with pytest.raises(ValueError, match="fewer than 3 shards"):
        BlockShuffle(2, 1, 0).shard(0, 3, 0, 1)
