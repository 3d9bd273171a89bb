"""What `launch` refuses, warns of and starts where; with a model of one's own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Diloco, copied, edit


def test_a_region_may_have_a_bucket_of_its_own_where_learners_can_meet(diloco: Diloco, quickstart: Path) -> None:
    edit(quickstart / "inventory.yaml", "europe-west4: {}", "europe-west4: {store: memory://eu}")
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode == 2 and "regions.europe-west4.store: memory://eu lives in one process" in done.stderr
    edit(quickstart / "inventory.yaml", "memory://eu", "gs://eu/runs")
    assert diloco("launch", "q/run.yaml", "--dry-run").returncode == 0


def test_an_islands_ranks_are_told_before_they_start(diloco: Diloco, quickstart: Path) -> None:
    edit(quickstart / "inventory.yaml", "accelerators: cpu:1", "accelerators: cpu:4\n    ranks: 2", 3)
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode == 0 and done.stdout.count("2 ranks (ddp)") == 3, done.stdout + done.stderr


def test_what_no_learner_trains_on_is_refused_before_anything_starts(diloco: Diloco, quickstart: Path) -> None:
    edit(quickstart / "inventory.yaml", "accelerators: cpu:1", "accelerators: TPU-v5p:8", 3)
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode != 0 and "learners do not train on torch's xla devices" in done.stderr, done.stderr


def test_micro_batches_are_told_where_a_batch_is_divided(diloco: Diloco, quickstart: Path) -> None:
    assert "at once" not in diloco("launch", "q/run.yaml", "--dry-run").stdout
    divided = diloco("launch", "q/run.yaml", "--dry-run", "--set", "train.micro_batch_tokens=256").stdout
    assert divided.count("local steps of 1,024 tokens, 256 at once") == 3


def test_what_is_wrong_with_a_model_of_ones_own_is_told_as_the_users_error(diloco: Diloco, tmp_path: Path) -> None:
    folder = copied("own-model", tmp_path / "own")
    for line, says in (
        ("modle:build_model", "No module named 'modle'"),
        ("model:build_data", "unexpected keyword argument 'width'"),
    ):
        done = diloco("launch", "own/run.yaml", "--dry-run", "--set", f"model.entrypoint='{line}'")
        assert done.returncode == 2 and says in done.stderr, done.stderr
    edit(folder / "model.py", "def build_model", "1 / 0\n\n\ndef build_model")
    done = diloco("launch", "own/run.yaml", "--dry-run")
    assert done.returncode == 2 and "ZeroDivisionError" in done.stderr and "a bug" not in done.stderr


def test_a_model_that_cannot_be_built_without_memory_is_built_with_it(diloco: Diloco, tmp_path: Path) -> None:
    folder = copied("own-model", tmp_path / "own")
    edit(folder / "model.py", "        self.out =", "        float(self.embedding.weight.sum())\n        self.out =")
    done = diloco("launch", "own/run.yaml", "--dry-run")
    assert done.returncode == 0 and "learner iowa" in done.stdout, done.stderr


def test_a_model_of_ones_own_trains_from_another_directory(diloco: Diloco, tmp_path: Path) -> None:
    """As the README says it: an entrypoint for the model, one for the data; nothing installed, nothing exported."""
    copied("own-model", tmp_path / "own")
    words, home = ("launch", "own/run.yaml", "--json", "--set", "train.tokens=40k"), str(tmp_path / "home")
    done = diloco(*words, forking=True, DILOCO_HOME=home)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["state"] == "FINISHED" and data["tokens"] >= 40_000 and data["loss"] < 3.4
    again = diloco("resume", "own-model", DILOCO_HOME=home)
    assert again.returncode == 0 and "diloco launch RUN.yaml --set name=own-model-2" in again.stderr
