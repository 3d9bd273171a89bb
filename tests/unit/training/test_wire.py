"""Error feedback: what is owed, what is not, and that nothing is owed where nothing was rounded away."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.settings import SyncSettings
from diloco_cli.layout import Fragment, TensorSlot
from diloco_cli.tensors.codecs import BLOCK, codec, reader_of
from diloco_cli.tensors.merge import DeltaFormat, difference
from diloco_cli.training.wire import Residuals

ROUNDS = 6


def form_of(name: str, size: int = 1000) -> DeltaFormat:
    return DeltaFormat(codec(name), Fragment((TensorSlot("w", (size,), 0),), False), SyncSettings())


INT8 = form_of("int8")


def residuals_of(form: DeltaFormat, feedback: bool = True) -> Residuals:
    return Residuals([form, form], feedback)


def decoded(form: DeltaFormat, payload: bytes) -> torch.Tensor:
    return form.open(payload)[0](0, torch.empty(form.cut.size))


def deltas(seed: int, rounds: int = ROUNDS) -> list[torch.Tensor]:
    """[rounds] of [1000] float32: scales differ widely within a block, as they do in real deltas."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(1000, generator=generator).exp()
    return [1e-3 * scale * torch.randn(1000, generator=generator) for _ in range(rounds)]


def test_a_steady_drift_below_half_a_step_arrives_only_with_feedback() -> None:
    """0.3 of a quantisation step is rounded to nothing for ever, unless it is remembered: int8 scale 1, values 0.3."""
    delta = torch.full((256,), 0.3)
    delta[0] = 127.0
    total, form = {}, form_of("int8", 256)
    for feedback in (False, True):
        residuals, total[feedback] = residuals_of(form, feedback), torch.zeros(256)
        for seq in range(10):
            total[feedback] += decoded(form, residuals.encode(0, seq, seq - 1, reader_of(delta)))
    assert torch.equal(total[False][1:], torch.zeros(255))
    assert torch.equal(total[True][1:], torch.full((255,), 3.0))


def test_a_lossless_codec_owes_nothing() -> None:
    plain, fed_back = (residuals_of(form_of("fp32"), feedback) for feedback in (False, True))
    for seq, delta in enumerate(deltas(4)):
        applied, read = seq - 1 if seq else None, reader_of(delta)
        assert plain.encode(0, seq, applied, read) == fed_back.encode(0, seq, applied, read)


def test_an_offer_that_was_not_applied_is_not_owed() -> None:
    """The second offer is the whole delta again: what the first one rounded away must not be added to it."""
    residuals, (first, whole, following) = residuals_of(INT8), deltas(5, 3)
    residuals.encode(0, 0, None, reader_of(first))
    assert residuals.encode(0, 1, None, reader_of(whole)) == INT8.encode(whole)
    left = whole - decoded(INT8, INT8.encode(whole))
    assert residuals.encode(0, 2, 1, reader_of(following)) == INT8.encode(following + left)


def test_what_was_owed_before_a_refusal_is_still_owed_after_it() -> None:
    residuals, (first, refused, following) = residuals_of(INT8), deltas(6, 3)
    left = first - decoded(INT8, residuals.encode(0, 0, None, reader_of(first)))
    residuals.encode(0, 1, 0, reader_of(refused))
    assert residuals.encode(0, 2, 0, reader_of(following)) == INT8.encode(following + left)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_block_by_block_gives_the_bytes_and_errors_of_whole_vectors(name: str) -> None:
    """Two blocks and a part of one, which is no whole number of a codec's own blocks."""
    size, generator = 2 * BLOCK + 777, torch.Generator().manual_seed(10)
    base, values, later = torch.randn(3, size, generator=generator)
    form = form_of(name, size)
    owing, plain = residuals_of(form), residuals_of(form, feedback=False)
    assert plain.encode(0, 0, None, difference(base, values)) == form.encode(base - values)
    payload = owing.encode(0, 0, None, difference(base, values))
    seen = form.open(payload)[0](0, torch.empty(size))
    assert payload == form.encode(base - values) and torch.equal(owing.left[0][0], (base - values) - seen)
    assert owing.encode(0, 1, 0, difference(values, later)) == form.encode((values - later) + owing.left[0][0])


def test_an_offer_that_was_never_encoded_owes_nothing() -> None:
    """The log had passed its slot by then; the one before it, which was applied, is still made up for."""
    residuals, (first, following) = residuals_of(INT8), deltas(9, 2)
    left = first - decoded(INT8, residuals.encode(0, 0, None, reader_of(first)))
    assert residuals.encode(0, 2, 0, reader_of(following)) == INT8.encode(following + left)


def test_at_most_two_vectors_a_fragment_are_kept() -> None:
    """Of the offer that was applied last, and of the one that is out."""
    residuals = residuals_of(INT8)
    for seq, delta in enumerate(deltas(8, 40)):
        residuals.encode(0, seq, max(0, seq // 7 * 7 - 1) if seq else None, reader_of(delta))
        assert len(residuals.left[0]) <= 2
