"""Samples of the study of attendance. The full one is a command: python -m tests.studies.attendance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.config.run_file import load_run
from tests.studies import attendance
from tests.studies.attendance import CASES, HEADER, INVENTORY, QUICKSTART, AttendanceRow, files_of, line, misses

ROW = AttendanceRow(merges=160, participation=0.98, slot=1.0, merged=0.95, merged_before=0.99, load=1.0)


def test_the_median_of_the_runs_is_held_against_the_bounds() -> None:
    worse = replace(ROW, participation=0.9, merged=0.5)
    assert not misses("near", [ROW, worse, ROW]) and misses("near", [ROW, worse, worse])
    assert not misses("slow-4", [ROW, worse, ROW]) and misses("slow-24", [worse])
    assert misses(QUICKSTART, [worse]) and not misses(QUICKSTART, [replace(ROW, participation=0.94)])
    text = line("near", [ROW, worse, ROW])
    assert text.count("|") == HEADER.partition("\n")[0].count("|") and "0.980 (0.980, 0.900, 0.980)" in text


@pytest.mark.parametrize("case", [*CASES, QUICKSTART])
def test_every_case_is_a_run_that_can_be_read(case: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    run_text, inventory = files_of(case)
    (tmp_path / "run.yaml").write_text(run_text)
    (tmp_path / "inventory.yaml").write_text(inventory)
    run = load_run(tmp_path / "run.yaml")
    assert run.name == attendance.NAME and run.sync.mixing == "rebase"


@pytest.mark.long
def test_three_islands_take_part_in_nearly_every_merge() -> None:
    row = attendance.study(replace(CASES["near"], merges=24).run_file(), INVENTORY)
    assert row.merges >= 24 and row.participation > 0.8
