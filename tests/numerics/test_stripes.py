"""Any number of threads makes the same bits: of payloads, norms and merges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.layout import Fragment, TensorSlot
from diloco_cli.methods import CODECS
from diloco_cli.tensors.codecs import BLOCK, CHUNK, FEWEST, MOST_MERGED, codec, merged_block, over_blocks, use_threads
from diloco_cli.tensors.merge import DeltaFormat, DeltaSource, MergeRule, Merging, apply_merge, measured_norms

ROWS, TAIL = 9 * BLOCK // 1024 + 3, 18_942  # a tail that torch's own threads do not touch, but its BLAS does
FRAGMENT = Fragment((TensorSlot("m", (ROWS, 1024), 0), TensorSlot("v", (TAIL,), ROWS * 1024)), False)


@pytest.fixture(autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    use_threads(1)
    torch.set_num_threads(before)


def merged_bits(name: str, rule: MergeRule, threads: int) -> list[str]:
    use_threads(threads)
    sync = SyncSettings(merge=rule)
    form, generator = DeltaFormat(codec(name), FRAGMENT, sync), torch.Generator().manual_seed(5)
    size = form.cut.size
    payloads = [form.encode(torch.randn(size, generator=generator)) for _ in range(3)]
    opened = [form.open(payload) for payload in payloads]
    sources = [DeltaSource(read, norms, claimed=True) for read, norms in opened if norms is not None]
    merging = Merging(rule, form.cut, sources, [1.0, 2.0, 0.5])
    before = {name: torch.randn(size, generator=generator) for name in ("parameters", "momentum")}
    after = {name: torch.zeros(size) for name in before}
    assert apply_merge(OuterSettings("nesterov", 0.7, 0.9), merging, before, after) and not merging.unsound
    measured = measured_norms(form.cut, opened[0][0])
    parts = [*payloads, *(tensor.numpy().tobytes() for tensor in after.values()), measured.tobytes()]
    return [*map(digest, parts)]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("rule", ["avg", "rda"])
def test_any_number_of_threads_makes_the_same_bits(name: str, rule: MergeRule) -> None:
    alone = merged_bits(name, rule, 1)
    assert all(merged_bits(name, rule, threads) == alone for threads in (2, 7))


def test_every_block_is_worked_on_once_whatever_the_number_of_threads() -> None:
    for size in (0, 1, CHUNK, FEWEST, FEWEST + 1, 100 * BLOCK + 1):
        for threads in (1, 2, 5):
            use_threads(threads)
            for block in (BLOCK, MOST_MERGED):
                seen: list[int] = []
                over_blocks(size, seen.extend, block)
                assert sorted(seen) == list(range(0, size, block))


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, BLOCK), (16 * BLOCK, BLOCK), (5 << 20, 5 * CHUNK), (16 << 20, MOST_MERGED), (1 << 30, MOST_MERGED)],
)
def test_a_merges_blocks_are_long_but_leave_work_for_sixteen_threads(size: int, block: int) -> None:
    assert merged_block(size) == block and block % CHUNK == 0


def test_an_error_in_one_thread_is_raised() -> None:
    use_threads(2)
    with pytest.raises(ZeroDivisionError):
        over_blocks(FEWEST + 1, lambda starts: 1 // min(starts.start, 0))
