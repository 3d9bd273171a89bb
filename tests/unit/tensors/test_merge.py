"""Buffers in payloads and versions: every bit of every type, and merged as their kind asks."""

from __future__ import annotations

from math import isclose

import pytest
import torch

from diloco_cli.config.settings import SyncSettings
from diloco_cli.layout import BUFFER_BYTES, Fragment, ParameterFact, TensorSlot, make_layout, with_buffers
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.flat import buffers_behind, flatten, pack_buffers, unflatten, unpack_buffers
from diloco_cli.tensors.merge import (
    APART,
    BuffersOffer,
    DeltaFormat,
    WeightsFormat,
    are_finite,
    difference,
    merge_buffers,
)
from diloco_cli.tensors.payload import PayloadError

Tensors = dict[str, torch.Tensor]
ROOM = 5


def some(dtype: str, seed: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    drawn = torch.randn(ROOM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 40
    return drawn > 0 if kind == torch.bool else drawn.abs().to(kind)


def tensors(seed: int) -> Tensors:
    return {"p": torch.randn(7, 3), **{f"b.{dtype}": some(dtype, seed) for dtype in BUFFER_BYTES}}


def fragment_of(values: Tensors) -> Fragment:
    facts = [
        ParameterFact(name, tuple(value.shape), False, str(value.dtype)[len("torch.") :])
        for name, value in values.items()
    ]
    layout = with_buffers(make_layout([facts[0]], SyncSettings(fragments=1)), facts[1:])
    return layout.fragments[0]


def packed(fragment: Fragment, values: Tensors) -> torch.Tensor:
    return buffers_behind(fragment, flatten(fragment, values))


def merged(
    each: list[Tensors],
    weights: list[float],
    before: Tensors | None = None,
    scale: float = 1.0,
    believed: int = 100,
    more: int = 1,
) -> Tensors:
    """`scale`: of the last one's delta; which has so many times `more` tokens believed than the others'."""
    fragment = fragment_of(each[0])
    into, current = torch.zeros(fragment.buffer_bytes, dtype=torch.uint8), packed(fragment, before or each[0])
    scales = [1.0] * (len(each) - 1) + [scale]
    tokens = [believed] * (len(each) - 1) + [believed * more]
    shares = zip(each, weights, scales, tokens, strict=True)
    offers = [BuffersOffer(packed(fragment, one), *share) for one, *share in shares]
    merge_buffers(fragment, current, offers, into)
    return {slot.name: values for slot, values in unpack_buffers(fragment, into)}


def alone(*each: float | torch.Tensor) -> list[Tensors]:
    """Models with one buffer."""
    return [{"p": torch.zeros(1), "b": torch.as_tensor(one)} for one in each]


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_they_cross_in_every_codec_bit_for_bit(name: str) -> None:
    values = tensors(1) | {"b.int64": torch.tensor([-1, 2**53 + 1, -(2**63), 2**63 - 1, 0])}
    fragment, other = fragment_of(values), {name: torch.zeros_like(value) for name, value in values.items()}
    flat = flatten(fragment, values)
    weights = WeightsFormat(codec(name), fragment)
    version = {"parameters": flat[: fragment.num_parameters], "buffers": buffers_behind(fragment, flat)}
    unflatten(fragment, weights.from_bytes(weights.to_bytes(version)), other)
    form = DeltaFormat(codec(name), fragment, SyncSettings())
    payload = form.encode_blocks(difference(torch.zeros_like(flat), flat), buffers_behind(fragment, flat))
    assert torch.equal(form.buffers(payload), version["buffers"])
    assert all(torch.equal(other[name], value) for name, value in values.items() if name != "p")
    with pytest.raises(PayloadError):
        weights.from_bytes(codec(name).to_bytes(version["parameters"]))


def test_a_fragment_without_any_has_the_bytes_that_it_always_had() -> None:
    fragment, values = Fragment((TensorSlot("p", (21,), 0),), False), torch.randn(21)
    assert WeightsFormat(codec("int8"), fragment).to_bytes({"parameters": values}) == codec("int8").to_bytes(values)
    form = DeltaFormat(codec("int8"), fragment, SyncSettings())
    assert form.buffers(form.encode(values)) is None


def test_each_is_merged_as_its_kind_asks() -> None:
    each, weights = [tensors(seed) for seed in (1, 2, 3)], [1.0, 5.0, 2.0]
    found = merged(each, weights)
    for name in found:
        values = torch.stack([one[name] for one in each])
        if values.is_floating_point():
            expected = (values.double() * torch.tensor(weights).double()[:, None]).sum(dim=0) / 8
            tolerance = torch.finfo(values.dtype).eps
            torch.testing.assert_close(found[name].double(), expected, rtol=tolerance, atol=0.0)
        else:
            assert torch.equal(found[name], values[1])
    assert merged(alone(3, 5, 4), weights)["b"] == 5
    assert merged(alone(False, True, False), weights)["b"]
    orders = alone(*(torch.tensor(order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2])))
    assert merged(orders, weights)["b"].tolist() == [3, 2, 1, 0], "a permutation is one"


def test_what_all_agree_on_stays_as_it_is_and_one_without_weight_says_nothing() -> None:
    mine, other = tensors(1), tensors(2)
    assert all(torch.equal(value, mine[name]) for name, value in merged([mine] * 3, [0.3, 3.0, 7.1]).items())
    assert all(torch.equal(value, mine[name]) for name, value in merged([mine, other], [1.0, 0.0]).items())


@pytest.mark.parametrize("wrong", [1e38, -1e3, APART * 1.4])
def test_who_moves_a_buffer_much_further_than_the_others_is_left_out(wrong: float) -> None:
    honest, before = [1.0, 1.25, 0.75], alone(0.0)[0]
    assert merged(alone(*honest, wrong), [1.0] * 4, before)["b"] == 1.0
    assert merged(alone(*honest, 1.0 + APART / 2), [1.0] * 4, before)["b"] == 1.0 + APART / 8, "chance goes in"
    lone = [torch.full((512,), one) for one in honest] + [torch.eye(512)[7] * 100]
    assert torch.equal(merged(alone(*lone), [1.0] * 4, alone(torch.zeros(512))[0])["b"], torch.ones(512))
    fast = merged(alone(1.0, 1.0, 41.0), [1.0, 1.0, 50.0], before, more=50)["b"]
    assert isclose(float(fast), (2 + 50 * 41) / 52, rel_tol=1e-6), "an island of many more steps moves it further"
    still = [0.0, 0.0, 0.0]
    assert merged(alone(*still, 8.0), [1.0] * 4, before)["b"] == 2.0, "what others have no data for goes in"


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8])
def test_a_counter_rises_by_no_more_than_the_believed_tokens(kind: torch.dtype) -> None:
    before, most = torch.tensor(20, dtype=kind), torch.tensor(torch.iinfo(kind).max, dtype=kind)
    counters, start = alone(before + 8, most), alone(before)[0]
    assert merged(counters, [1.0, 1.0], start, believed=32)["b"] == 52
    assert merged(counters, [1.0, 1.0], start, believed=0)["b"] == 20
    assert merged(counters, [1.0, 1.0], start, believed=2**63)["b"] == most


def test_beside_a_clipped_delta_they_do_not_count() -> None:
    mine, wrong, before = tensors(1), tensors(2), tensors(3)
    assert all(torch.equal(v, mine[name]) for name, v in merged([mine, wrong], [1.0, 9.0], before, 0.9).items())
    assert all(torch.equal(v, before[name]) for name, v in merged([wrong], [9.0], before, 0.9).items())


def test_a_buffer_without_values_stays_one() -> None:
    assert merged(alone(*[torch.zeros(0)] * 3), [1.0] * 3)["b"].shape == (0,)


def test_a_value_that_is_not_finite_is_seen() -> None:
    values = tensors(1)
    fragment, room = fragment_of(values), torch.zeros(fragment_of(values).buffer_bytes, dtype=torch.uint8)
    for name in [name for name, value in values.items() if value.is_floating_point() and name != "p"]:
        pack_buffers(fragment, room, values)
        assert are_finite(fragment, room)
        values[name][3] = float("nan")
        pack_buffers(fragment, room, values)
        assert not are_finite(fragment, room)
        values[name][3] = 0.0
