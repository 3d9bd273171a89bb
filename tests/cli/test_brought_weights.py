"""`launch` with weights of one's own: what does not fit is refused before anything is written or started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_cli.config.run_file import load_run
from diloco_cli.errors import UsageError
from diloco_cli.layout import make_layout
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.open import open_store
from diloco_cli.tasks.build import build_model
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.training.replica import check_layout
from tests.cli.conftest import Diloco, copied
from tests.numerics.harness import CLOCK
from tests.unit.tasks.test_huggingface import needs_transformers


@pytest.fixture
def exported(quickstart: Path) -> Path:
    """A file as `diloco export` writes it of the quickstart's model."""
    parameters = build_model(load_run(quickstart / "run.yaml")).named_parameters()
    path = quickstart / "weights.safetensors"
    save_file({name: parameter.detach() for name, parameter in parameters}, path)
    return path


def refused(diloco: Diloco, folder: Path, model: str) -> str:
    done = diloco("launch", "q/run.yaml", "--set", model, DILOCO_HOME=str(folder / "home"))
    assert done.returncode == 2 and "Traceback" not in done.stderr and "hint:" in done.stderr, done.stderr
    assert not (folder / "q" / "bucket").exists() and not (folder / "home" / "quickstart").exists()
    return done.stderr


def test_a_file_of_another_model_is_refused(diloco: Diloco, exported: Path, tmp_path: Path) -> None:
    """What else does not fit: tests/unit/tasks/test_weights.py, tests/unit/config/test_huggingface.py."""
    tensors = load_file(exported)
    name = min(tensors)
    del tensors[name]
    save_file(tensors, exported)
    assert f"missing: {name}" in refused(diloco, tmp_path, "model.initial=weights.safetensors")


@needs_transformers
def test_weights_of_which_nothing_is_said_are_refused_where_the_models_numbers_are_given(
    diloco: Diloco, quickstart: Path, tmp_path: Path
) -> None:
    """So that planning reads no config.json; else: tests/unit/config/test_huggingface.py."""
    copied("hugging-face/tiny-llama", quickstart / "tiny")
    (quickstart / "tiny" / "model.safetensors").touch()
    numbers = "parameters: 0.3M, layers: 1, width: 16, sequence: 64"
    said = refused(diloco, tmp_path, f"model={{huggingface: tiny, {numbers}}}")
    assert "nothing says whether the run begins with them" in said


def test_what_config_show_and_the_schema_say_of_them(diloco: Diloco, quickstart: Path) -> None:
    words = ("--set", "model={huggingface: x, weights: pretrained, revision: main}")
    shown = diloco("config", "show", "-f", "q/run.yaml", *words).stdout
    assert 'model.weights = "pretrained"\n' in shown and 'model.revision = "main"\n' in shown
    model = json.loads(diloco("config", "schema", "run").stdout)["properties"]["model"]["properties"]
    assert {"weights", "revision", "initial", "weights_digest", "frozen_digest"} <= model.keys()


def test_a_run_can_be_created_alone(diloco: Diloco, tmp_path: Path) -> None:
    own = copied("own-model", tmp_path / "own")
    done = diloco("launch", "own/run.yaml", "--create-only", DILOCO_HOME=str(tmp_path / "home"))
    assert done.returncode == 0 and "diloco syncer --run file://" in done.stdout, done.stderr
    log = own / "bucket" / "own-model" / "commit"
    first, evaluated = (json.loads(path.read_text()) for path in sorted(log.iterdir()))
    assert len(first["outputs"]) > 1 and evaluated["loss"] == pytest.approx(3.47, abs=0.1)
    assert not list((tmp_path / "home").rglob("units/*.json")), "nothing was started"
    again = diloco("launch", "own/run.yaml", "--create-only", "--json", DILOCO_HOME=str(tmp_path / "home"))
    assert json.loads(again.stdout)["data"]["commits"] == 2 == len(list(log.iterdir())), "it is there already"


def test_a_file_alone_gives_the_layout_and_the_first_commit_of_a_run_for_loops_of_ones_own(
    diloco: Diloco, exported: Path, tmp_path: Path
) -> None:
    numbers = "model={initial: weights.safetensors, parameters: 0.3M, layers: 3, width: 80, sequence: 128}"
    words = ("launch", "q/run.yaml", "--set", numbers, "--set", "data={}")
    complaint = diloco(*words, DILOCO_HOME=str(tmp_path / "home"))
    assert complaint.returncode == 2 and "--create-only" in complaint.stderr, complaint.stderr
    done = diloco(*words, "--create-only", DILOCO_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    there = diloco("export", "quickstart", "-o", "again.safetensors", DILOCO_HOME=str(tmp_path / "home"))
    assert there.returncode == 0, there.stderr
    before, after = load_file(exported), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    url = f"file://{tmp_path}/q/bucket/quickstart"
    run = perform(read_format(url, None), open_store(url), CLOCK)
    model = build_model(load_run(exported.parent / "run.yaml"))
    assert run.layout.digest == make_layout(parameter_facts(model), run.settings.sync).digest, (
        "embeddings, by their names"
    )
    check_layout(run, model)
    with pytest.raises(UsageError, match=r"weight is missing in the run and \[2, 2\] here; \d+ more differ"):
        check_layout(run, torch.nn.Linear(2, 2))
