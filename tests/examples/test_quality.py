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


def test_the_report_makes_the_page_that_is_there_of_the_results_that_are_there(
    quality: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["experiment"], "SEQUENCES", 512)  # as on the page
    monkeypatch.setattr(quality, "draw", lambda rows, path: None)
    page = (quality.HERE / "README.md").read_text()
    head, begin, tables = page.partition(quality.BEGIN)
    (tmp_path / "README.md").write_text(f"{head}{begin}\nold\n{quality.END}{tables.partition(quality.END)[2]}")
    old = json.loads((quality.HERE / "results.jsonl").read_text().splitlines()[0])
    results = json.dumps({**old, "key": "of another version", "loss": 9.0}) + "\n"
    (tmp_path / "results.jsonl").write_text(results + (quality.HERE / "results.jsonl").read_text())
    quality.main(["--report", "--output", str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == page


@pytest.mark.parametrize("task", ["dense-20", "dense-80", "moe-20"])
def test_the_model_of_each_task_can_be_built(quality: Any, task: str) -> None:
    model = build_model_on_meta(quality.named(task, "adamw", "decoupled", 4, 0).trial.settings)
    assert 1e5 < sum(parameter.numel() for parameter in model.parameters()) < 2e5


def test_a_page_without_markers_is_left_as_it_is(quality: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("text")
    with pytest.raises(UsageError, match="no markers"):
        quality.main(["--report", "--output", str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == "text"


def test_differences_are_paired_by_seed_with_students_interval(quality: Any) -> None:
    """By hand: +1 %, +2 %, +3 %: mean 2, standard deviation 1, 4.303 x 1 / sqrt(3) = 2.484. Unpaired seeds drop out."""

    def rows(losses: dict[int, float]) -> list[dict[str, Any]]:
        return [{"labels": {"seed": seed}, "loss": loss} for seed, loss in losses.items()]

    found = quality.report.percent_over(rows({0: 2.02, 1: 4.08, 2: 1.03, 3: 9.0}), rows({2: 1.0, 0: 2.0, 1: 4.0}))
    assert str(found) == "+2.00 ± 2.48"


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
