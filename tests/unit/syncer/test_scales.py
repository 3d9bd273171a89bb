"""A verifier's books of scales follow what a syncer's norm cap and clip did, from the log and the payloads alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.records import Outcome
from diloco_cli.syncer.norms import CAP, MEMORY, NormCap, ScaleBooks
from diloco_cli.tensors.merge import DeltaSource
from tests.unit.protocol.records import applied, commit, genesis

CLIP = 1.5


class Served:
    """A syncer's cap and a verifier's books beside it. `offer` is one delta after the other, each merged alone."""

    def __init__(self, clip: float | Literal["none"] = CLIP) -> None:
        self.clip = clip
        self.books = ScaleBooks(self.clip)
        self.seq = 0
        self.restarts()

    def restarts(self) -> None:
        self.cap = NormCap(self.clip)
        self.books.note(commit(genesis(), "epoch_start"))

    def offers(self, norm: float, fragment: int = 0, lie: float = 1.0, gone: bool = False) -> list[str]:
        """What the books say; a refused one is only noted."""
        self.seq += 1
        scale = self.cap.scale(fragment, norm)
        if scale is None:
            self.books.note(refusal(self.seq, fragment))
            return []
        self.cap.accept(fragment, scale * norm)
        item = replace(applied("l0", self.seq), scale=scale * lie)
        return self.books.merged(fragment, [item], [None if gone else delta(norm)])

    def honestly(self, *norms: float, gone: bool = False) -> Served:
        for norm in norms:
            assert self.offers(norm, gone=gone) == []
        return self


def refusal(seq: int, fragment: int) -> Commit:
    return commit(genesis(), "refuse", outcomes=(Outcome("l0", 1, seq, fragment, "norm_cap"),))


def delta(norm: float) -> DeltaSource:
    return DeltaSource(lambda start, end: None, np.array([norm]))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("clip", ["none", 1.0, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_an_honest_syncer_does_fits(seed: int, clip: float | Literal["none"]) -> None:
    draw, served, refused = random.Random(seed), Served(clip), 0
    for _ in range(600):
        if draw.random() < 0.01:
            served.restarts()
        norm = draw.choice([1.0, 1.0, 1.2, 2.0, 7.0, 20.0, 100.0]) * draw.uniform(0.9, 1.1)
        before = served.seq
        assert served.offers(norm, draw.randrange(2)) == []
        refused += served.seq - before
    assert refused


def test_a_false_scale_is_found_and_named() -> None:
    served = Served().honestly(1.0, 1.0, 1.0, 3.0)
    assert served.offers(3.0, lie=0.5) == ["offer 1/5 of l0 is scaled by 0.25, where its length gives 0.5"]
    assert served.offers(1.0, lie=1.001) != [] and served.offers(1.0, lie=1 + 1e-9) == []


def test_one_far_too_long_is_found_although_it_is_merged_as_it_is() -> None:
    served = Served().honestly(*[1.0] * 5)
    assert served.books.merged(0, [applied("l0", 9)], [delta(10 * CAP)]) == [
        "offer 1/9 of l0 is merged, and is 80.0 times as long as usual"
    ]


def test_a_new_epoch_remembers_nothing() -> None:
    served = Served().honestly(*[1.0] * 5)
    served.restarts()
    served.honestly(100.0, 100.0, 100.0)
    assert served.offers(100.0, lie=0.5) != []


def test_what_is_not_known_is_passed_over_until_newer_norms_fill_the_memory() -> None:
    served = Served().honestly(*[1.0] * 5, gone=True)
    assert served.offers(1.0, lie=0.5) == []
    served.honestly(*[1.0] * (MEMORY - 2))
    assert served.offers(1.0, lie=0.5) == []
    assert served.offers(1.0, lie=0.5) != []


def test_after_three_refusals_in_a_row_the_scales_of_before_and_after_pass() -> None:
    for read_before in (True, False):
        served = Served().honestly(*[1.0] * 5)
        for seq in range(3):
            served.books.note(refusal(100 + seq, 0))
        item = replace(applied("l0", 50), scale=0.5 if read_before else 1.0)
        assert served.books.merged(0, [item], [delta(3.0)]) == []
        assert served.books.merged(0, [replace(item, seq=51, scale=0.7)], [delta(9.0)]) != [], "it begins anew"
