"""The syncer's numbers on a model of three weights.

Payloads that wait for their merge lie on disk: the same bytes, and no memory of their own.
"""

from __future__ import annotations

import gc
import stat
import weakref
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.errors import UsageError
from diloco_cli.layout import ParameterFact, with_buffers
from diloco_cli.protocol.actors.merging import Merged, Refused
from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.syncer.arithmetic import SMALLEST_BYTES, Spool, TorchArithmetic, version_spec
from diloco_cli.tensors.merge import DeltaSource, delta_formats
from diloco_cli.tensors.payload import to_bytes, views
from tests.benchmarks import durable
from tests.numerics.harness import make_run

SIZE, NUM_A = 5, 3


@pytest.fixture
def run() -> RunFormat:
    return make_run(1, 1, SyncSettings(every=4, fragments=1), OuterSettings("sgd", 1.0, 0.0), InnerSettings(), "slope")


def begun(run: RunFormat, **sync: Any) -> TorchArithmetic:
    """At version 0: a = [1, -2, 0.5], b = [4, 0.25]."""
    changed = replace(run.settings, sync=replace(run.settings.sync, **sync))
    arithmetic = TorchArithmetic(replace(run, settings=changed))
    arithmetic.settle(0, digest(next(arithmetic.initial()).state))
    return arithmetic


@pytest.fixture
def arithmetic(run: RunFormat) -> TorchArithmetic:
    return begun(run)


def offer(fragment: int = 0) -> Offer:
    return Offer("l0", 1, 0, 0, fragment, 0, "", 0, 4, 4, 1, "", 0, "")


def payload(values: list[float], norms: list[float] | None = None) -> bytes:
    """As the fp32 codec writes it, with norms (of the tensors a and b) only if they are given."""
    claimed = {} if norms is None else {"norms": torch.tensor(norms)}
    return to_bytes({**claimed, "values": torch.tensor(values)})


def read(arithmetic: TorchArithmetic, values: list[float], norms: list[float] | None = None) -> DeltaSource:
    found = arithmetic.read_delta(offer(), payload(values, norms), None)
    assert isinstance(found, DeltaSource), found
    return found


def decoded(source: DeltaSource) -> torch.Tensor:
    return source.read(0, torch.empty(SIZE)).clone()


def merged(arithmetic: TorchArithmetic, *deltas: tuple[DeltaSource, float], scale: float = 1.0) -> Merged:
    found = arithmetic.merge(0, [(source, weight, scale, 1) for source, weight in deltas])
    assert isinstance(found, Merged), found
    return found


def current(arithmetic: TorchArithmetic) -> torch.Tensor:
    return arithmetic.parameters(0)


def test_what_is_settled_can_be_published_anew_bit_for_bit(run: RunFormat, arithmetic: TorchArithmetic) -> None:
    first = next(arithmetic.initial())
    assert arithmetic.settled(0) == first
    second = merged(arithmetic, (read(arithmetic, [1.0, 2.0, 3.0, 4.0, 5.0]), 1.0))
    assert arithmetic.settled(0) == first, "what nobody has committed is no version"
    arithmetic.settle(0, digest(second.state))
    restored = TorchArithmetic(run)
    restored.restore(0, digest(second.state), second.state)
    assert arithmetic.settled(0) == restored.settled(0) == Merged(second.state, second.weights)


def test_the_first_version_is_the_seeded_model_without_buffers(run: RunFormat, arithmetic: TorchArithmetic) -> None:
    assert current(arithmetic).tolist() == [1.0, -2.0, 0.5, 4.0, 0.25]
    assert set(arithmetic._current[0].tensors) == {"parameters"}, "its optimizer has no buffer"
    assert [*TorchArithmetic(run).initial()] == [*arithmetic.initial()], "every syncer begins with the same bytes"


def test_what_has_become_a_first_version_leaves_the_seeded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run would begin in half as much memory again as it needs later."""
    run = make_run(1, 3, SyncSettings(every=4, fragments=3), OuterSettings(), InnerSettings())
    arithmetic = TorchArithmetic(run)
    held = [dict(arithmetic._seeded())]
    seen = {name: weakref.ref(tensor) for name, tensor in held[0].items()}
    monkeypatch.setattr(arithmetic, "_seeded", held.pop)
    left = [{name for name, tensor in seen.items() if tensor() is not None} for _ in arithmetic.initial()]
    places = [{slot.name for slot in fragment.tensors} for fragment in run.layout.fragments]
    assert len(places) > 1 and left == [set().union(*places[done:]) for done in range(1, len(places) + 1)]


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


def test_finite_deltas_that_overflow_the_parameters_are_all_refused(arithmetic: TorchArithmetic) -> None:
    state = to_bytes({"parameters": torch.full((SIZE,), -3e38)})
    arithmetic.restore(0, "huge", state)
    huge = read(arithmetic, [3e38] * SIZE)
    assert arithmetic.merge(0, [(huge, 1.0, 1.0, 1), (huge, 1.0, 1.0, 1)]) == Refused(
        {0: "non_finite", 1: "non_finite"}
    )


def test_re_anchoring_keeps_the_low_bits_of_a_small_delta(arithmetic: TorchArithmetic) -> None:
    """delta + (current - base), not (delta + current) - base: parameters are much longer than deltas."""
    generator = torch.Generator().manual_seed(0)
    base = current(arithmetic) + 1e-4 * torch.randn(SIZE, generator=generator)
    delta = 1e-6 * torch.randn(SIZE, generator=generator)
    sent = arithmetic.weights_codec.to_bytes(base)
    found = arithmetic.read_delta(offer(), payload(delta.tolist()), sent)
    assert isinstance(found, DeltaSource)
    assert torch.equal(decoded(found), delta + (current(arithmetic) - arithmetic.weights_codec.from_bytes(sent, SIZE)))


def test_a_merge_holds_only_once_the_log_has_settled_it(arithmetic: TorchArithmetic) -> None:
    before = current(arithmetic).clone()
    version = merged(arithmetic, (read(arithmetic, [1.0] * SIZE), 1.0))
    assert torch.equal(current(arithmetic), before), "a candidate changes nothing"
    arithmetic.settle(0, "blake3-of-another-syncers-merge")
    assert torch.equal(current(arithmetic), before)
    assert arithmetic.holds(0, digest(version.state)), "asking for a candidate that is in the log settles it"
    torch.testing.assert_close(current(arithmetic), before - 1.0)


def test_a_version_stays_as_it_is_while_later_ones_are_made(arithmetic: TorchArithmetic) -> None:
    """The room for a merge is used again and again; what was settled must not lie in it."""
    version = merged(arithmetic, (read(arithmetic, [1.0] * SIZE), 1.0))
    arithmetic.settle(0, digest(version.state))
    held = current(arithmetic).clone()
    other = merged(arithmetic, (read(arithmetic, [2.0] * SIZE), 1.0))
    assert torch.equal(current(arithmetic), held) and digest(version.state) != digest(other.state)


def test_a_restored_version_goes_on_like_the_one_in_memory(run: RunFormat, arithmetic: TorchArithmetic) -> None:
    version = merged(arithmetic, (read(arithmetic, [1.0] * SIZE), 1.0))
    arithmetic.settle(0, digest(version.state))
    other = TorchArithmetic(run)
    assert not other.holds(0, digest(version.state))
    other.restore(0, digest(version.state), version.state)
    assert other.holds(0, digest(version.state))
    deltas = [(read(arithmetic, [1.0, 2.0, 3.0, 4.0, 5.0]), 2.0, 1.0, 1)]
    assert other.merge(0, deltas) == arithmetic.merge(0, deltas)


# -- published norms, checked while they are used --------------------------------------------------------------

A, B = [3.0, 4.0, 0.0, 0.6, 0.8], [0.0, 0.0, 2.0, -1.0, 0.0]
NORMS_OF_A, NORMS_OF_B = [5.0, 1.0], [2.0, 1.0]


def test_published_norms_give_the_bits_that_measured_ones_give(arithmetic: TorchArithmetic) -> None:
    published = [(read(arithmetic, A, NORMS_OF_A), 1.0), (read(arithmetic, B, NORMS_OF_B), 3.0)]
    measured = [(read(arithmetic, A), 1.0), (read(arithmetic, B), 3.0)]
    assert [source.claimed for source, _ in (*published, *measured)] == [True, True, False, False]
    assert merged(arithmetic, *published).state == merged(arithmetic, *measured).state


@pytest.mark.parametrize("norms", [[2.5, 1.0], [5.01, 1.0], [5.0, 0.0], [0.0, 0.0], [5.0, 1e30]])
def test_a_delta_with_other_norms_than_it_claims_is_named_and_the_rest_can_be_merged(
    arithmetic: TorchArithmetic, norms: list[float]
) -> None:
    liar, honest = read(arithmetic, A, norms), read(arithmetic, B, NORMS_OF_B)
    assert arithmetic.merge(0, [(honest, 1.0, 1.0, 1), (liar, 1.0, 1.0, 1)]) == Refused({1: "bad_norms"})
    assert merged(arithmetic, (honest, 1.0)).state == merged(arithmetic, (read(arithmetic, B), 1.0)).state


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_values_that_are_not_finite_do_not_hide_behind_norms_that_are(
    arithmetic: TorchArithmetic, poison: float
) -> None:
    liar, honest = read(arithmetic, [poison, *A[1:]], NORMS_OF_A), read(arithmetic, B, NORMS_OF_B)
    assert arithmetic.merge(0, [(liar, 1.0, 1.0, 1), (honest, 1.0, 1.0, 1)]) == Refused({0: "non_finite"})


@pytest.mark.parametrize(
    ("norms", "reason"),
    [([float("nan"), 1.0], "non_finite"), ([5.0, float("inf")], "non_finite"), ([-5.0, 1.0], "bad_norms")],
)
def test_impossible_norms_are_refused_at_once(arithmetic: TorchArithmetic, norms: list[float], reason: str) -> None:
    assert arithmetic.read_delta(offer(), payload(A, norms), None) == reason


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e19, 1e30])
def test_norms_are_checked_where_their_squares_leave_float32(arithmetic: TorchArithmetic, scale: float) -> None:
    values, norms = [value * scale for value in A], [norm * scale for norm in NORMS_OF_A]
    merged(arithmetic, (read(arithmetic, values, norms), 1.0))
    liar = read(arithmetic, values, [norms[0], 2 * norms[1]])
    assert arithmetic.merge(0, [(liar, 1.0, 1.0, 1)]) == Refused({0: "bad_norms"})


# -- scales -----------------------------------------------------------------------------------------------------


def test_a_delta_at_a_scale_is_the_shorter_delta(arithmetic: TorchArithmetic) -> None:
    by_hand = merged(arithmetic, (read(arithmetic, A), 1.0), (read(arithmetic, [value / 4 for value in B]), 1.0))
    scaled = arithmetic.merge(0, [(read(arithmetic, A), 1.0, 1.0, 1), (read(arithmetic, B), 1.0, 0.25, 1)])
    assert scaled == by_hand, "scaling by a power of two is exact"


@pytest.mark.parametrize(("scale", "believed", "seen"), [(1.0, 8, 28), (1.0, 2**40, 50), (0.5, 8, 20)])
def test_buffers_count_as_far_as_their_delta_does(run: RunFormat, scale: float, believed: int, seen: int) -> None:
    layout = with_buffers(run.layout, [ParameterFact("seen", (), False, "int64")])
    arithmetic, spec = TorchArithmetic(replace(run, layout=layout)), version_spec(layout.fragments[0], "sgd")
    before, after = (torch.tensor([count]).view(torch.uint8) for count in (20, 50))
    arithmetic.restore(0, "first", to_bytes({"parameters": torch.zeros(SIZE), "buffers": before}))
    form = delta_formats(layout, run.settings.sync)[0]
    delta = arithmetic.read_delta(offer(), form.encode(torch.ones(SIZE), after), None)
    found = arithmetic.merge(0, [(delta, 1.0, scale, believed)])
    assert isinstance(found, Merged) and views(found.state, spec)["buffers"].view(torch.int64) == seen


SPOOLED = 1 << 20  # parameters: 1.1 MB of int8 payload each, with scales and norms
FEW = 1 << 18


def anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_what_is_kept_reads_as_it_was_and_leaves_no_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * (SMALLEST_BYTES // 256)
    kept = Spool(tmp_path / "spool").keep(data)
    assert isinstance(kept, memoryview) and kept == data
    assert list((tmp_path / "spool").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    with pytest.raises(TypeError):
        kept[0] = 1


def test_small_payloads_and_those_that_the_disk_refuses_stay_in_memory(tmp_path: Path) -> None:
    small, large = b"x" * (SMALLEST_BYTES - 1), b"x" * SMALLEST_BYTES
    (tmp_path / "file").write_text("")
    assert Spool(tmp_path / "spool").keep(small) is small
    assert Spool(tmp_path / "file" / "spool").keep(large) is large


def test_a_spooled_merge_gives_the_same_bytes(tmp_path: Path) -> None:
    arithmetic, payloads = durable.prepared(FEW, 2)
    spooled, same = durable.prepared(FEW, 2)
    spooled.spool = Spool(tmp_path)
    assert payloads == same
    assert durable.merged(arithmetic, payloads) == durable.merged(spooled, payloads)


def opened_mb(count: int, spool: Path | None) -> float:
    """What so many fetched and opened payloads of 1.1 MB add to this process."""
    arithmetic, payloads = durable.prepared(SPOOLED, 1)
    arithmetic.spool = None if spool is None else Spool(spool)

    def opened(num: int) -> list[object]:
        copies = (bytes(bytearray(payloads[0])) for _ in range(num))  # as a store would hand them out
        return [arithmetic.read_delta(durable.offer(copy), copy, None) for copy in copies]

    opened(2)
    gc.collect()
    before_mb = anonymous_mb()
    held = opened(count)
    gc.collect()
    assert len(held) == count
    return anonymous_mb() - before_mb


def test_memory_does_not_grow_with_the_number_of_learners(tmp_path: Path) -> None:
    """Of 24 payloads of 1.1 MB less than four stay with a spool, and all without. In a new process: one that has
    freed much before grows by nothing."""
    with get_context("spawn").Pool(1) as pool:
        spooled_mb = pool.apply(opened_mb, (24, tmp_path))
        held_mb = pool.apply(opened_mb, (24, None))
    assert spooled_mb < 4.4 and held_mb > 20
