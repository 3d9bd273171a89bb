"""The quality experiment's machinery on a sample: it runs, resumes, says what it may. Its figures are not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ONE_ROUND = 24 * 2 * 128  # of two learners, in tokens
METHODS = ["data-parallel", "diloco", "streaming", "decoupled", "failures"]


def test_the_quick_form_runs_every_method_once_and_a_second_start_finds_them_done(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality = load("quality")
    words = ["--quick", "--jobs", "1", "--tokens", str(ONE_ROUND), "--output", str(tmp_path)]
    quality.main(words)
    first = capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(row["labels"]["method"] for row in rows) == sorted(METHODS)
    assert all(1.0 < row["loss"] < 6.0 and row["processed"] >= ONE_ROUND for row in rows)
    for method in METHODS:
        assert f"| dense | 2 | {method} | 1 |" in first.out
    assert "one seed tells nothing" in first.out
    if find_spec("matplotlib"):
        assert ElementTree.parse(tmp_path / "dense.svg").getroot().tag.endswith("svg")
    quality.main(words)
    second = capsys.readouterr()
    assert "0 to run" in second.err
    assert second.out == first.out


@pytest.fixture(name="report")
def _report(load: Callable[[str], ModuleType]) -> Any:
    return load("quality").report


def row(method: str, seed: int, loss: float) -> dict[str, object]:
    return {"labels": {"task": "dense", "learners": 2, "method": method, "seed": seed}, "loss": loss}


def test_differences_are_paired_by_seed_with_students_interval(report: Any) -> None:
    """By hand: +1 %, +2 %, +3 %: mean 2, standard deviation 1, 4.303 x 1 / sqrt(3) = 2.484. Unpaired seeds drop out."""
    ours = [row("decoupled", seed, loss) for seed, loss in ((0, 2.02), (1, 4.08), (2, 1.03), (3, 9.0))]
    theirs = [row("diloco", seed, loss) for seed, loss in ((2, 1.0), (0, 2.0), (1, 4.0))]
    found = report.percent_over(ours, theirs)
    assert found.value == pytest.approx(2.0)
    assert found.half_width == pytest.approx(2.484, abs=1e-3)
    assert str(found) == "+2.00 ± 2.48"


@pytest.mark.parametrize(
    ("value", "half_width", "expected"),
    [
        (0.1, 0.3, ": met"),
        (1.0, 0.4, ": missed"),
        (0.4, 0.3, ": met on the mean, not settled by these seeds"),
        (0.6, 0.3, ": missed on the mean, not settled by these seeds"),
        (0.1, None, ": one seed tells nothing"),
    ],
)
def test_a_verdict_is_given_only_where_the_interval_allows_it(
    report: Any, value: float, half_width: float | None, expected: str
) -> None:
    assert report.verdict(report.Estimate(value, half_width), 0.5).endswith(expected)
