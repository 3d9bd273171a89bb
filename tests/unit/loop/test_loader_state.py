"""A loader's state is what it was after a round trip; what cannot be saved is refused, and garbage is no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.errors import UsageError
from diloco_cli.loop.data import MAX_STATE_BYTES, encoded, joined, parted

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


@pytest.mark.parametrize("state", [{"a": [1, object()]}, {"a": {1, 2}}, {"a": torch.zeros(1, dtype=torch.float64)}])
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
