"""Models of Hugging Face transformers, offline, from a folder with a config.json."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.huggingface import facts_of_config
from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.errors import RefusedError, UsageError
from diloco_cli.paths import install_hint
from diloco_cli.tasks.build import build_data, build_model, build_model_on_meta
from diloco_cli.tasks.weights import carried
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.training.replica import Replica
from diloco_cli.training.trial import check_task

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'diloco[hf]'",
)
SMALL = {"vocab_size": 300, "max_position_embeddings": 48, "initializer_range": 0.02}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**SMALL, **SIZES, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, object]] = {
    "gpt2": {"vocab_size": 300, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {**SMALL, **SIZES},
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "mistral": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 8},
}


def run_in(folder: Path, kind: str, **changes: object) -> RunSettings:
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **changes}))
    return RunSettings(
        name="x",
        model=ModelSettings(huggingface=str(folder / kind)),
        data=DataSettings(preset="python-stdlib"),
        train=TrainSettings(batch_tokens=96),
    )


@needs_transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_built_has_the_size_that_its_config_says(tmp_path, kind):
    run = run_in(tmp_path, kind)
    facts = facts_of_config(json.loads((tmp_path / kind / "config.json").read_text()), "config.json")
    built = parameter_facts(build_model_on_meta(run))
    assert sum(torch.Size(p.shape).numel() for p in built) == facts.parameters
    if kind != "mixtral" or version("transformers") >= "5":  # before, experts were not stacked
        assert len(built) == facts.num_tensors, "tied weights are there once"
    embedded = sum(torch.Size(p.shape).numel() for p in built if p.embedding)
    assert embedded == facts.embedding_parameters


@needs_transformers
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_it_trains_on_bytes_with_the_names_and_the_loss_of_transformers(tmp_path, kind):
    import transformers

    run = run_in(tmp_path, kind)
    check_task(run, batch_tokens=96)
    model, data = build_model(run), build_data(run)
    config = transformers.AutoConfig.from_pretrained(run.model.huggingface)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert set(ours) == {name for name, _ in theirs.named_parameters()}
    theirs.load_state_dict(ours, strict=False)
    theirs.eval()
    tokens, targets = data.batch(0, 1, 0, 96)
    assert tokens.shape == (2, 48)
    both = torch.cat([tokens, targets[:, -1:]], dim=1)[:, :48]
    expected = theirs(input_ids=both, labels=both).loss  # shifts by itself: the first 47 predictions
    model.eval()
    found = model(tokens[:, :47], targets[:, :47])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    replica = Replica(run, model, data, 0, 1)
    losses = [replica.step(0, 96, 3e-3) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3


@needs_transformers
def test_a_step_is_the_same_whenever_it_is_repeated(tmp_path):
    """gpt2's own config has dropout of 0.1."""
    run = run_in(tmp_path, "gpt2")
    model = build_model(run).train()
    batch = build_data(run).batch(0, 1, 0, 96)
    assert torch.equal(model(*batch), model(*batch))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build_model(run).parameters(), strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@needs_transformers
def test_too_few_symbols_too_long_sequences_and_strange_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"256 symbols, .* only 100"):
        build_data(run_in(tmp_path, "llama", vocab_size=100))
    run = run_in(tmp_path, "llama")
    longer = RunSettings(name="x", model=ModelSettings(huggingface=run.model.huggingface, sequence=64), data=run.data)
    with pytest.raises(UsageError, match=r"64 is longer than the model's positions \(48\)"):
        build_data(longer)
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(UsageError, match="transformers cannot read the config"):
        build_model(run)


@needs_transformers
def test_a_run_carries_the_config_and_nothing_that_names_code_or_kernels(tmp_path):
    foreign = {"auto_map": {"AutoConfig": "evil.C"}, "attn_implementation": "evil/kernel", "_name_or_path": "/etc"}
    run = run_in(tmp_path, "llama", **foreign, rope_scaling={"rope_type": "default", "attn_implementation": "evil/k"})
    carries = carried(run)
    (tmp_path / "llama" / "config.json").unlink()
    assert carries.model.args["model_type"] == "llama" and "evil" not in json.dumps(carries.model.args)
    foreign_run = carries.with_consent(False)
    assert build_model(foreign_run) is not None and build_data(foreign_run) is not None, "it needs no consent"
    hostile = replace(foreign_run, model=replace(carries.model, args={**carries.model.args, **foreign}))
    build_model(hostile)
    with pytest.raises(RefusedError, match="has not consented"):
        build_model(run.with_consent(False))


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs transformers") as caught:
        build_model(run_in(tmp_path, "gpt2"))
    assert caught.value.hint == install_hint("hf")


@needs_transformers
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_with_checkpointing_it_trains_the_same_bit_for_bit(tmp_path, kind):
    found = []
    for checkpointing in (False, True):
        run = run_in(tmp_path, kind)
        run = replace(run, train=replace(run.train, checkpointing=checkpointing))
        replica = Replica(run, build_model(run), build_data(run), 0, 1)
        found.append(([replica.step(96 * step, 96, 0.01) for step in range(2)], dict(replica.tensors)))
    (losses, plain), (same, again) = found
    assert losses == same and all(torch.equal(tensor, again[name]) for name, tensor in plain.items())
