"""`diloco evaluate`, `generate` and `export` of runs whose data are their owner's, where none of them trains."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Diloco, copied, edit
from tests.forked import ROOT

PROSE = (ROOT / "README.md").read_text(encoding="utf-8")


def test_data_that_can_only_be_held_out_are_evaluated_on(diloco: Diloco, tmp_path: Path) -> None:
    copied("own-loop", tmp_path / "own")
    words = ("launch", "own/run.yaml", "--create-only")
    first, again = (diloco(*words, DILOCO_HOME=str(tmp_path / "home")) for _ in range(2))
    assert first.returncode == 0 and "run own-loop is created" in first.stdout, first.stderr
    assert f'join("file://{tmp_path}/own/bucket/own-loop", name="ohio", ...)' in first.stdout
    assert again.returncode == 0 and "run own-loop exists already" in again.stdout, again.stderr
    done = diloco("evaluate", "own-loop", "--json", DILOCO_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["loss"] == pytest.approx(3.47, abs=0.2), "ln 32: nothing is learned yet"


def test_a_model_that_cannot_be_evaluated_is_refused_at_launch_or_said_not_to_be_a_bug(
    diloco: Diloco, tmp_path: Path
) -> None:
    home, task = str(tmp_path / "home"), copied("own-loop", tmp_path / "own") / "task.py"
    edit(task, "def forward(self, tokens, targets)", "def forward(self, tokens)")
    refused = diloco("launch", "own/run.yaml", "--create-only", DILOCO_HOME=home)
    assert refused.returncode == 2 and "forward(tokens, targets): too many positional" in refused.stderr
    assert "model: model" not in refused.stderr
    edit(task, "def forward(self, tokens)", "def forward(self, tokens, targets)")
    assert diloco("launch", "own/run.yaml", "--create-only", DILOCO_HOME=home).returncode == 0
    edit(task, "self.embedding(tokens)", "self.embedding(targets.unsqueeze(0))")
    said = diloco("evaluate", "own-loop", DILOCO_HOME=home)
    assert said.returncode == 2 and "forward on held-out data (tokens [" in said.stderr and "a bug" not in said.stderr


def test_own_loops_may_take_larger_batches_than_the_evaluators_data_have(diloco: Diloco, tmp_path: Path) -> None:
    copied("own-loop", tmp_path / "own")
    (tmp_path / "own" / "prose.txt").write_text(PROSE[:20_000])
    settings = ("data={text: prose.txt, held_out: 0.1}", "train.batch_tokens=16384", "evaluation.sequences=4")
    words = [word for setting in settings for word in ("--set", setting)]
    done = diloco("launch", "own/run.yaml", "--create-only", *words, DILOCO_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr


def test_only_what_reads_the_data_asks_for_consent_to_them_by_an_option_that_it_has(
    diloco: Diloco, quickstart: Path, tmp_path: Path
) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    made = diloco("data", "tokenize", "prose.txt", "-o", "far/tokens")
    assert made.returncode == 0, made.stderr
    settings = (f"data={{tokens: {tmp_path}/far/tokens, held_out: 0.2}}", "evaluation.sequences=4")
    words = [word for setting in settings for word in ("--set", setting)]
    done = diloco("launch", "q/run.yaml", "--create-only", *words, DILOCO_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert diloco("evaluate", "quickstart", DILOCO_HOME=str(tmp_path / "home")).returncode == 0, "launch has consented"
    url, other = f"file://{quickstart}/bucket/quickstart", {"DILOCO_HOME": str(tmp_path / "other")}
    written = diloco("generate", url, "--tokens", "3", **other)
    assert written.returncode == 0, written.stderr
    exported = diloco("export", url, "--to", "torch", "-o", "model.safetensors", **other)
    assert exported.returncode == 0, exported.stderr
    refused = diloco("evaluate", url, **other)
    assert refused.returncode == 8 and "--allow-store" in refused.stderr, refused.stderr
    command = refused.stderr.partition("if you trust what it names: diloco ")[2].partition(";")[0].partition(", or")[0]
    followed = diloco(*shlex.split(command), **other)
    assert followed.returncode == 0 and "held-out loss" in followed.stdout, f"{command}: {followed.stderr}"
