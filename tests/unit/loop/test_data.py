"""A loader's state is what it was after a round trip; what cannot be saved is refused, and garbage is no state.

Every sample of an epoch is drawn once over all shards, and from any position on as from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.errors import UsageError
from diloco_cli.loop.data import MAX_STATE_BYTES, ShardSampler, encoded, joined, parted

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@dataclass
class Held:
    state: Any

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@given(state=PLAIN, position=st.integers(0, 1 << 50), moments=st.binary())
def test_a_state_is_what_it_was_and_so_are_the_moments_before_it(state: Any, position: int, moments: bytes) -> None:
    own, saved = parted(joined(moments, encoded(Held(state), position)))
    assert saved is not None and (own, saved.position, saved.state) == (moments, position, state)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_are_saved_with_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    state = {"generator": torch.ones(shape, dtype=dtype)}
    _, saved = parted(joined(b"", encoded(Held(state), 8)))
    back = saved.state["generator"]
    assert (back.dtype, back.shape) == (dtype, shape) and torch.equal(back, state["generator"])


@pytest.mark.parametrize("state", [{"a": [1, object()]}, {"a": {1, 2}}, {"a": torch.zeros(1, dtype=torch.complex64)}])
def test_what_cannot_be_saved_is_refused_with_its_place(state: Any) -> None:
    with pytest.raises(UsageError, match=r"which cannot be saved"):
        encoded(Held(state), 0)


def test_a_state_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="more than"):
        encoded(Held("x" * MAX_STATE_BYTES), 0)


@given(data=st.binary(max_size=64))
def test_bytes_without_a_state_are_moments_alone(data: bytes) -> None:
    own, saved = parted(data)
    assert saved is not None or own == data


@dataclass
class Reading:
    shard: int = 0
    num_shards: int = 1
    position: int = 0
    over: bool = False


@settings(max_examples=30)
@given(size=st.integers(4, 700), num_shards=st.integers(1, 4), epochs=st.integers(1, 3))
def test_an_epoch_draws_each_sample_once_over_all_shards(size: int, num_shards: int, epochs: int) -> None:
    each = [(shard + 1) * size // num_shards - shard * size // num_shards for shard in range(num_shards)]
    drawn = [
        list(islice(ShardSampler(Reading(shard, num_shards), size, 8, 5), epochs * length))
        for shard, length in enumerate(each)
    ]
    for epoch in range(epochs):
        parts = [row[epoch * length : (epoch + 1) * length] for row, length in zip(drawn, each, strict=True)]
        assert sorted(index for part in parts for index in part) == list(range(size))


def test_samples_of_any_number_take_no_memory_and_are_shuffled() -> None:
    size = 10**12
    drawn = list(islice(ShardSampler(Reading(), size, 8, 5), 1000))
    assert len(set(drawn)) == 1000 and max(drawn) > size // 2 > min(drawn)
    assert drawn != sorted(drawn)


def test_a_new_iteration_begins_at_the_position_of_then() -> None:
    reading = Reading(1, 2)
    sampler = ShardSampler(reading, 20, 8, 0)
    whole = list(islice(sampler, 12))
    reading.position = 5 * 8
    assert list(islice(sampler, 7)) == whole[5:]


def test_fewer_samples_than_shards_are_refused() -> None:
    with pytest.raises(UsageError, match="3 samples are fewer than the run's 4 shards") as caught:
        ShardSampler(Reading(0, 4), 3, 8, 0)
    assert "allowed: 4 or more" in (caught.value.hint or "")


@pytest.mark.parametrize(("size", "tokens_each"), [(0, 8), (8, 0)])
def test_no_samples_are_refused(size: int, tokens_each: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        ShardSampler(Reading(), size, tokens_each, 0)


def test_a_position_inside_a_sample_is_refused() -> None:
    with pytest.raises(UsageError, match="position 9 lies inside a sample of 8 tokens"):
        next(iter(ShardSampler(Reading(position=9), 10, 8, 0)))
