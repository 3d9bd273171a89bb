"""The size of a Hugging Face model from its config.json: published totals of known models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.huggingface import (
    ARCHITECTURES,
    commit_of,
    facts_of_config,
    find_folder,
    read_config,
    sequence_of,
)
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import ModelSettings, RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.plan_files import facts_of

LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
KNOWN = {  # config -> published parameters, tensors
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        124_439_808, 148,
    ),
    "pythia-160m": (
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 2048},
        162_322_944, 148,
    ),
    "llama-2-7b": (LLAMA_7B, 6_738_415_616, 291),
    "mistral-7b": (
        {**LLAMA_7B, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
        7_241_732_096, 291,
    ),
    "mixtral-8x7b": (
        {**LLAMA_7B, "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8,
         "num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704, 291,
    ),
    "qwen2.5-0.5b": (
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
         "max_position_embeddings": 32768, "tie_word_embeddings": True},
        494_032_768, 290,
    ),
    "qwen3-0.6b": (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
         "max_position_embeddings": 40960, "tie_word_embeddings": True},
        596_049_920, 310,
    ),
    "gemma-2b": (
        {"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "num_hidden_layers": 18,
         "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384,
         "max_position_embeddings": 8192},
        2_506_172_416, 164,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_published_totals_of_known_models_come_out(name):
    config, parameters, tensors = KNOWN[name]
    facts = facts_of_config(config, "config.json")
    assert (facts.parameters, facts.num_tensors) == (parameters, tensors)


def test_a_mixture_counts_the_two_experts_that_a_token_meets():
    facts = facts_of_config(KNOWN["mixtral-8x7b"][0], "config.json")
    assert facts.parameters - facts.idle_parameters == 12_879_925_248  # "12.9B active" (arXiv 2401.04088)


def test_every_known_architecture_has_a_known_model():
    assert {config["model_type"] for config, _, _ in KNOWN.values()} == set(ARCHITECTURES)


def write(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError) as caught:
        facts_of_config({"model_type": "lama"}, "x/config.json")
    assert "'lama' is not known here" in caught.value.message and "did you mean llama" in caught.value.message
    assert "gpt2, gpt_neox, llama" in caught.value.message and "parameters:" in (caught.value.hint or "")


@pytest.mark.parametrize("value", [None, 0, "many", True, 1.5])
def test_a_number_that_is_missing_or_none_is_named(value):
    with pytest.raises(UsageError, match=r"x/config.json: num_hidden_layers: must be a whole number"):
        facts_of_config({**LLAMA_7B, "num_hidden_layers": value}, "x/config.json")


def test_a_folder_is_found_in_the_order_of_places_and_a_hub_name_in_the_cache(tmp_path, monkeypatch):
    first, second = write(tmp_path / "a" / "tiny", LLAMA_7B), write(tmp_path / "b" / "tiny", LLAMA_7B)
    assert find_folder("tiny", [tmp_path / "none", tmp_path / "a", tmp_path / "b"]) == first
    assert find_folder(str(second), [tmp_path / "a"]) == second, "an absolute path is itself"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find_folder("maker/model", [tmp_path]) is None
    snapshot = write(tmp_path / "hub" / "models--maker--model" / "snapshots" / "abc", LLAMA_7B)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    assert find_folder("maker/model", [tmp_path]) == snapshot


def test_a_revision_is_a_commit_or_a_branch_of_the_cache_and_no_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--maker--model"
    old, new = (write(cached / "snapshots" / name, LLAMA_7B) for name in ("abc", "def"))
    (cached / "refs").mkdir()
    for branch, commit in (("main", "def"), ("v1", "abc")):
        (cached / "refs" / branch).write_text(commit)
    for revision, found in ((None, new), ("main", new), ("v1", old), ("abc", old), ("v2", None)):
        assert find_folder("maker/model", [tmp_path], revision) == found
    assert (commit_of(old), commit_of(tmp_path)) == ("abc", None)
    with pytest.raises(UsageError, match=r"no model of that name at revision v2") as caught:
        read_config("maker/model", [], "v2")
    assert "--revision v2" in caught.value.hint
    write(tmp_path / "tiny", LLAMA_7B)
    with pytest.raises(UsageError, match="is a folder, and has none"):
        find_folder("tiny", [tmp_path], "main")


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_folder_with_weights_is_not_planned_until_something_is_said_of_them(tmp_path, file):
    folder = write(tmp_path / "tiny", LLAMA_7B)
    (folder / file).write_bytes(b"")
    run = RunSettings(name="x", model=ModelSettings(huggingface="tiny"))
    with pytest.raises(UsageError, match=f"tiny holds weights .{file}., and nothing says") as caught:
        facts_of(run, tmp_path)
    assert caught.value.where == "model.weights" and "weights=pretrained" in caught.value.hint
    for said in ({"weights": "random"}, {"initial": "a.safetensors"}):
        assert facts_of(replace(run, model=replace(run.model, **said)), tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (None, "model.safetensors is missing"),
        ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, "two.safetensors is missing"),
        ({"weight_map": ["one.safetensors"]}, "no weight_map"),
        ([], "cannot be read"),
    ],
)
def test_weights_that_are_to_be_used_must_be_there_whole(tmp_path, index, says):
    folder = write(tmp_path / "tiny", LLAMA_7B)
    if index is not None:
        (folder / "one.safetensors").write_bytes(b"")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=says):
        facts_of(RunSettings(name="x", model=ModelSettings(huggingface="tiny", weights="pretrained")), tmp_path)


def test_what_is_nowhere_or_no_json_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no folder 'maker/model'") as caught:
        read_config("maker/model", [tmp_path])
    assert "hf download maker/model config.json" in (caught.value.hint or "")
    for broken in ("{", "[]"):
        folder = write(tmp_path / f"broken{len(broken)}", {})
        (folder / "config.json").write_text(broken)
        with pytest.raises(UsageError, match=r"config\.json: (cannot be read|must be a JSON object)"):
            read_config(folder.name, [tmp_path])


def test_sequences_are_as_wanted_else_what_the_model_allows_up_to_1024():
    assert sequence_of(131072, None, "") == 1024 and sequence_of(512, None, "") == 512
    assert sequence_of(131072, 4096, "") == 4096
    with pytest.raises(UsageError, match=r"2048 is longer than the model's positions \(1024\)"):
        sequence_of(1024, 2048, "")


def test_a_run_is_planned_from_the_config_beside_its_run_file(tmp_path):
    write(tmp_path / "tiny", LLAMA_7B)
    facts = facts_of(RunSettings(name="x", model=ModelSettings(huggingface="tiny", sequence=2048)), tmp_path)
    assert (facts.parameters, facts.layers, facts.width, facts.sequence) == (6_738_415_616, 32, 4096, 2048)
    assert facts.embedding_parameters == 32000 * 4096


@pytest.mark.parametrize(("example", "parameters"), [("hugging-face", 329_376), ("vision", 199_104)])
def test_the_examples_can_be_planned_without_their_extras(example, parameters):
    folder = Path(__file__).resolve().parents[3] / "examples" / example
    assert facts_of(load_run(folder / "run.yaml"), folder).parameters == parameters
