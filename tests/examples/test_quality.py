"""The quality experiment's machinery on a sample: it runs, resumes, says what it may. Its figures are not judged."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.errors import UsageError
from diloco_cli.tasks.build import build_model_on_meta

ONE_ROUND = 24 * 2 * 128  # one of two learners, in tokens
METHODS = ("data-parallel", "decoupled", "failures")
TRIALS = [(method, optimizer) for method in METHODS for optimizer in ("adamw", "muon")]


@pytest.fixture(name="quality")
def _quality(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`--quick` trains for one round."""
    quality: Any = load("quality")
    monkeypatch.setitem(quality.TASKS, "quick", dataclasses.replace(quality.TASKS["quick"], tokens=ONE_ROUND))
    return quality


def test_the_quick_form_runs_every_method_once_and_a_second_start_finds_them_done(
    quality: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--jobs", "1", "--output", str(tmp_path)]
    quality.main(words)
    first = capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["labels"]["method"], row["labels"]["optimizer"]) for row in rows] == TRIALS
    assert all(1.0 < row["loss"] < 6.0 and row["processed"] >= ONE_ROUND for row in rows)
    for method, optimizer in TRIALS:
        assert f"| quick | 2 | {method} | {optimizer} | 1 |" in first.out
    quality.main(words)
    second = capsys.readouterr()
    assert "0 to run" in second.err
    assert second.out == first.out


def test_a_seed_decides_the_first_parameters_and_the_data_and_nothing_else(quality: Any) -> None:
    first, second = (quality.named("dense-20", "adamw", "decoupled", 4, seed).trial for seed in (0, 1))
    assert [t.settings.train.seed for t in (first, second)] == [0, 1]
    assert [t.settings.data.args for t in (first, second)] == [{"seed": 0}, {"seed": 1}]
    same = replace(second.settings, data=first.settings.data, train=replace(second.settings.train, seed=0))
    assert same == first.settings


def test_the_report_rewrites_what_stands_between_the_markers_from_results_that_are_not_out_of_date(
    quality: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "draw", lambda rows, path: None)
    page = tmp_path / "README.md"
    page.write_text(f"before\n{quality.BEGIN}\nold\n{quality.END}\nafter\n")
    named = [quality.named("dense-20", "adamw", method, 4, 0) for method in METHODS]
    keys = [named[0].key, named[1].key, "of another version"]
    with (tmp_path / "results.jsonl").open("w") as file:
        for one, key, loss in zip(named, keys, (1.0, 1.01, 9.0), strict=True):
            line = {"key": key, "labels": one.labels, "loss": loss, "processed": 8, "merged": 8, "curve": []}
            file.write(json.dumps(line) + "\n")
    for _ in range(2):
        quality.main(["--report", "--output", str(tmp_path)])
        text = page.read_text()
        assert text.startswith(f"before\n{quality.BEGIN}\n")
        assert text.endswith(f"{quality.END}\nafter\n")
        assert "| dense-20 | 4 | decoupled | adamw | 1 | 1.0100 | +1.00 | +1.00 | 1.00 |" in text
        assert "| dense-20 | 4 | adamw decoupled | adamw data-parallel | +1.00 | <= +1.5 | met by one seed |" in text
        assert "old" not in text
        assert "9.0" not in text


@pytest.mark.parametrize("task", ["dense-20", "dense-80", "moe-20"])
def test_the_model_of_each_task_can_be_built(quality: Any, task: str) -> None:
    model = build_model_on_meta(quality.named(task, "adamw", "decoupled", 4, 0).trial.settings)
    assert 1e5 < sum(parameter.numel() for parameter in model.parameters()) < 2e5


def test_a_page_without_markers_is_left_as_it_is(quality: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("text")
    with pytest.raises(UsageError, match="no markers"):
        quality.main(["--report", "--output", str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == "text"


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
        (0.1, 0.3, "met"),
        (1.0, 0.4, "missed"),
        (0.4, 0.3, "met on the mean, not settled by these seeds"),
        (0.6, 0.3, "missed on the mean, not settled by these seeds"),
        (0.1, None, "met by one seed"),
    ],
)
def test_a_verdict_is_given_only_where_the_interval_allows_it(
    report: Any, value: float, half_width: float | None, expected: str
) -> None:
    assert report.verdict(report.Estimate(value, half_width), 0.5) == expected


def test_what_the_plan_is_told_is_what_the_page_has(quality: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["experiment"], "SEQUENCES", 512)  # as on the page
    told = quality.planned(quality.current(quality.HERE / "results.jsonl"))
    assert quality.quality.FILE.read_text() == told
    page = (quality.HERE / "README.md").read_text()
    for row in json.loads(told):
        interval = "" if row["half_width"] is None else f" ± {row['half_width']:.2f}"
        assert f"| decoupled | {row['optimizer']} | {row['seeds']} |" in page
        assert f" | {row['percent']:+.2f}{interval} | " in page


def test_two_bits_lose_a_third_of_a_step_and_error_feedback_carries_it(quality: Any) -> None:
    """A third: sqrt(.1188) of a standard deviation, of the best four levels for normally distributed values (Max)."""
    codec = sys.modules["methods.two_bits"].INT2  # type: ignore[attr-defined]
    for size in (1, 63, 64, 1000):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert len(codec.to_bytes(values)) <= 200 + 2.25 / 8 * (size + 64)
    left, carried = torch.zeros(1000), torch.zeros(1000)
    for _ in range(50):
        found = codec.from_bytes(codec.to_bytes(values + left), 1000)
        left, carried = values + left - found, carried + found / 50
    once = codec.from_bytes(codec.to_bytes(values), 1000)
    assert 0.3 < float((once - values).norm() / values.norm()) < 0.4
    assert float((carried - values).norm() / values.norm()) < 0.05
    assert torch.equal(codec.from_bytes(codec.to_bytes(torch.zeros(64)), 64), torch.zeros(64))
    for bad in (torch.inf, torch.nan):
        values[3] = bad
        assert not bool(codec.from_bytes(codec.to_bytes(values), 1000)[:64].isfinite().any())
