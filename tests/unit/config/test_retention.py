"""`retention:` of run.yaml: what of the past stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import RetentionSettings
from diloco_cli.errors import UsageError

MODEL = "version: 1\nname: a\nmodel: {preset: gpt-pico}\ndata: {preset: python-stdlib}\n"


def retention(tmp_path: Path, text: str) -> RetentionSettings:
    path = tmp_path / "run.yaml"
    path.write_text(f"{MODEL}{text}\n")
    return load_run(path).retention


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", RetentionSettings(64, 60.0)),
        ("retention: {rounds: 3, grace: 5 min}", RetentionSettings(3, 300.0)),
        ("retention: {rounds: all}", RetentionSettings("all", 60.0)),
        ("retention: {grace: 0 s}", RetentionSettings(64, 0.0)),
    ],
)
def test_what_is_kept(tmp_path: Path, text: str, expected: RetentionSettings) -> None:
    assert retention(tmp_path, text) == expected


@pytest.mark.parametrize("given", ["rounds: 0", "rounds: none", "rounds: 1.5", "grace: 60", "grace: -1 s", "days: 3"])
def test_what_cannot_be_kept_is_refused_with_its_line(tmp_path: Path, given: str) -> None:
    with pytest.raises(UsageError, match="retention") as refused:
        retention(tmp_path, f"retention: {{{given}}}")
    assert refused.value.where is not None and refused.value.where.endswith(":5")
