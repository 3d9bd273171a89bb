"""`launch` with weights of one's own: what does not fit is refused before anything is written or started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_cli.config.run_file import load_run
from diloco_cli.tasks.build import build_model
from tests.cli.conftest import Diloco
from tests.unit.tasks.test_huggingface import needs_transformers

CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def refused(diloco: Diloco, folder: Path, *settings: str) -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    done = diloco("launch", "q/run.yaml", *words, DILOCO_HOME=str(folder / "home"))
    assert done.returncode == 2 and "Traceback" not in done.stderr and "hint:" in done.stderr, done.stderr
    assert not (folder / "q" / "bucket").exists() and not (folder / "home" / "quickstart").exists()
    return done.stderr


@pytest.fixture
def exported(quickstart: Path) -> Path:
    """A file as `diloco export` writes it of the quickstart's model."""
    parameters = build_model(load_run(quickstart / "run.yaml")).named_parameters()
    path = quickstart / "weights.safetensors"
    save_file({name: parameter.detach() for name, parameter in parameters}, path)
    return path


def test_a_file_that_is_missing_cut_or_another_models_is_refused(
    diloco: Diloco, exported: Path, tmp_path: Path
) -> None:
    assert "no file 'none.safetensors'" in refused(diloco, tmp_path, "model.initial=none.safetensors")
    tensors = load_file(exported)
    name = min(tensors)
    save_file({**tensors, name: torch.ones(3)}, exported)
    assert f"of another shape: {name} [3], not [" in refused(diloco, tmp_path, "model.initial=weights.safetensors")
    del tensors[name]
    save_file(tensors, exported)
    assert f"missing: {name}" in refused(diloco, tmp_path, "model.initial=weights.safetensors")
    exported.write_bytes(exported.read_bytes()[:-8])
    assert "no whole safetensors file" in refused(diloco, tmp_path, "model.initial=weights.safetensors")


@needs_transformers
def test_a_folder_whose_weights_are_unsaid_missing_partial_or_misshapen_is_refused(
    diloco: Diloco, quickstart: Path, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, pretrained = quickstart / "tiny", "model={huggingface: tiny, weights: pretrained}"
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder, max_shard_size="8KB")
    (part,) = folder.glob("model-00001-of-*.safetensors")
    assert "nothing says whether the run begins with them" in refused(diloco, tmp_path, "model={huggingface: tiny}")
    tensors = load_file(part)
    save_file({name: tensor[:1].clone() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
    assert f"of another shape: {min(tensors)}" in refused(diloco, tmp_path, pretrained)
    part.unlink()
    assert f"{part.name} is missing" in refused(diloco, tmp_path, pretrained)
    for file in folder.glob("model*"):
        file.unlink()
    assert "model.safetensors is missing" in refused(diloco, tmp_path, pretrained)


def test_what_config_show_and_the_schema_say_of_them(diloco: Diloco, quickstart: Path) -> None:
    words = ("--set", "model={huggingface: x, weights: pretrained, revision: main}")
    shown = diloco("config", "show", "-f", "q/run.yaml", *words).stdout
    assert 'model.weights = "pretrained"\n' in shown and 'model.revision = "main"\n' in shown
    model = json.loads(diloco("config", "schema", "run").stdout)["properties"]["model"]["properties"]
    assert {"weights", "revision", "initial", "weights_digest", "frozen_digest"} <= model.keys()
