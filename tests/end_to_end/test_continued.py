"""examples/continue-pretrained with less to read: a pretrained model goes on in two islands, and adapters alone."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from diloco_cli.config.codec import replace
from diloco_cli.config.run_file import load_run
from diloco_cli.errors import UsageError
from diloco_cli.export.files import export_file
from diloco_cli.export.naming import own_names
from diloco_cli.launch.new_run import layout_of
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.runtime.daemon import perform
from diloco_cli.syncer.daemon import first_loss
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tasks.weights import carried
from diloco_cli.tensors.flat import bare_parameters
from diloco_cli.training.replica import check_layout
from tests.end_to_end.conftest import EXAMPLES, Playground, playing
from tests.numerics.harness import CLOCK, make_run, outer_parameters, run_to_end

ABSENT = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}: pip install 'diloco[hf,lora]'"
)
FILES = EXAMPLES / "continue-pretrained"


def script(name: str, folder: Path) -> ModuleType:
    """A script of the example, as one that lies in `folder`."""
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER, module.HERE = folder / "base", folder
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    """With base/, pretrained for some steps."""
    with playing(tmp_path_factory.mktemp("continued")) as found:
        for name in ("run.yaml", "inventory.yaml"):
            (found.directory / name).write_text((FILES / name).read_text())
        script("base", found.directory).main(40)
        yield found


def loss_in_transformers(folder: Path, sequences: int) -> float:
    """On the run's held-out sequences, in nats per byte."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    data = build_data(load_run(FILES / "run.yaml", [f"model.huggingface={folder}"]))
    losses = []
    with torch.inference_mode():
        for tokens, targets in data.held_out(sequences):
            logits = model(input_ids=tokens).logits
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
    return float(torch.cat(losses).mean())


def test_a_pretrained_model_goes_on_from_its_own_loss_and_its_export_is_transformers_own(place: Playground) -> None:
    done = place.run("launch", "run.yaml", "--set", "train.tokens=80k", "--set", "evaluation.every=1000", "--json")
    assert done.returncode == 0, done.stderr
    commits = [json.loads(path.read_text()) for path in sorted((place.directory / "bucket/continued/commit").iterdir())]
    evaluations = [commit for commit in commits if commit["kind"] == "eval"]
    before = loss_in_transformers(place.directory / "base", 64)
    assert (evaluations[0]["n"], evaluations[0]["evaluated"]) == (1, 0)
    assert evaluations[0]["loss"] == pytest.approx(before, abs=1e-3)
    final = json.loads(done.stdout)["data"]["loss"]
    assert final == evaluations[-1]["loss"] < before - 0.2
    assert place.run("verify", "continued").returncode == 0
    folder = shutil.copytree(place.directory / "base", place.directory / "exported")
    exported = folder / "model.safetensors"
    names = set(load_file(exported))
    assert place.run("export", "continued", "-o", str(exported), "-y").returncode == 0
    assert set(load_file(exported)) == names
    assert loss_in_transformers(folder, 256) == pytest.approx(final, abs=1e-3)


def test_adapters_alone_are_trained_and_exported_over_a_base_that_must_be_the_same(
    place: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = script("lora", place.directory)
    build, alone = lora.build, threading.Lock()  # transformers does not load two models in one process at once

    def one_by_one(*args: Any, **named: Any) -> torch.nn.Module:
        with alone:
            return build(*args, **named)

    monkeypatch.setattr(lora, "build", one_by_one)
    monkeypatch.setitem(sys.modules, "lora", lora)
    fewer = ("train.tokens=50k", "train.batch_tokens=256", "train.inner.warmup_steps=4", "evaluation.sequences=16")
    settings = load_run(FILES / "lora.yaml", fewer)
    settings = replace(carried(settings), sync=replace(settings.sync, skip_after_s=600.0))
    few = make_run(2, 1, settings.sync, settings.outer, settings.train.inner)
    islands = tuple(replace(island, batch_tokens=256) for island in few.islands)
    run = replace(few, settings=settings, islands=islands, layout=layout_of(settings))
    store, _ = run_to_end(run)
    state, path = perform(read_log(run), store, CLOCK), tmp_path / "adapters.safetensors"
    assert export_file(run, state, store, path, own_names(run.layout))
    with safe_open(tmp_path / "adapters.safetensors", framework="pt") as file:
        assert all("lora_" in name for name in file.keys()), "adapters only"  # noqa: SIM118
    seeded = bare_parameters(build_model(settings))
    assert first_loss(settings, outer_parameters(run, store)) < first_loss(settings, seeded) - 0.05
    other = build_model(settings)
    check_layout(run, other)
    next(value for value in other.parameters() if not value.requires_grad).data[0] += 1
    with pytest.raises(UsageError, match="frozen tensors of the model built here are not those of the run"):
        check_layout(run, other)
