"""`launch` refuses a model and data that cannot train together before it starts or writes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Diloco, copied, edit


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    return copied("own-model", tmp_path / "own")


def refused(diloco: Diloco, folder: Path, *words: str) -> str:
    done = diloco("launch", "own/run.yaml", *words, DILOCO_HOME=str(folder / "home"))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "bucket").exists(), "nothing was written"
    return done.stderr


def test_a_loss_per_token_is_refused(diloco: Diloco, own_model: Path) -> None:
    edit(own_model / "model.py", "targets.flatten())", 'targets.flatten(), reduction="none")')
    complaint = refused(diloco, own_model)
    assert "must return the mean loss" in complaint and "a tensor [64] of float32" in complaint


def test_sequences_longer_than_a_presets_positions_are_refused(diloco: Diloco, own_model: Path) -> None:
    complaint = refused(diloco, own_model, "--set", "model={preset: gpt-pico}", "--set", "data.args={sequence: 128}")
    assert "128 tokens are longer than the model's 64 positions" in complaint and "hint:" in complaint


def test_a_hugging_face_folder_that_is_not_there_is_refused(diloco: Diloco, own_model: Path) -> None:
    complaint = refused(diloco, own_model, "--set", "model={huggingface: nowhere}")
    assert "no folder 'nowhere' with a config.json" in complaint and "hf download nowhere" in complaint
