"""The values with which a run begins: exactly those of the files, and nothing but all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings
from diloco_cli.corpus.encoders import tokenizer_digest
from diloco_cli.errors import UsageError
from diloco_cli.tasks import huggingface
from diloco_cli.tasks.build import build_model
from diloco_cli.tasks.weights import (
    brought_values,
    carried,
    check_frozen,
    digest_of_values,
    frozen_digest_of,
    unchecked_frozen,
)
from diloco_cli.tensors.flat import bare_parameters
from tests.tokenizer import write_tokenizer
from tests.unit.tasks.test_huggingface import CONFIGS, needs_transformers

PRESET = RunSettings(name="x", model=ModelSettings(preset="gpt-pico"), data=DataSettings(preset="python-stdlib"))
Tensors = dict[str, torch.Tensor]


def folder_with(path: Path, kind: str, dtype: torch.dtype = torch.float32, **saving: object) -> RunSettings:
    """A folder that transformers' own `save_pretrained` wrote, of weights that no seed of a run gives."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind].from_dict({"model_type": kind, **CONFIGS[kind]})
    torch.manual_seed(12345)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path, **saving)
    model = ModelSettings(huggingface=str(path), weights="pretrained")
    return RunSettings(name="x", model=model, data=DataSettings(preset="python-stdlib"))


def refusal(run: RunSettings) -> str:
    with pytest.raises(UsageError) as caught:
        brought_values(run)
    assert caught.value.where and caught.value.hint
    return caught.value.message


def rewritten(run: RunSettings, change: Callable[[Tensors], object]) -> RunSettings:
    """The run, whose file has changed."""
    file = Path(run.model.initial or Path(run.model.huggingface) / "model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return run


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32), ("mixtral", torch.float16)]
)
def test_pretrained_weights_are_those_of_the_files_in_float32(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    import transformers

    run = folder_with(tmp_path / kind, kind, dtype)
    found = brought_values(run)
    theirs = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).named_parameters())
    ours = bare_parameters(build_model(run))
    assert found.keys() == theirs.keys() == ours.keys(), "names as in transformers, tied ones once"
    assert all(
        value.dtype == torch.float32 and torch.equal(value, theirs[name].float()) for name, value in found.items()
    )
    assert not all(torch.equal(value, ours[name]) for name, value in found.items())


@needs_transformers
def test_pretrained_weights_read_no_tokens_but_those_of_their_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither bytes nor another's; a folder without a tokenizer.json, random weights and the preset are not asked."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    run = folder_with(tmp_path / "base", "llama")
    (tmp_path / "a.txt").write_text("a b c " * 9000)

    def carries(tokenizer: str | None, **model: object) -> RunSettings:
        own = DataSettings(text=f"{tmp_path}/a.txt", tokenizer=tokenizer, held_out=0.2)
        return carried(replace(run, data=own, model=replace(run.model, **model)))  # type: ignore[arg-type]

    assert carries(None).data.args["tokenizer"] is None
    base = str(write_tokenizer(tmp_path / "base", ["a", "b", "c"]))
    other = str(write_tokenizer(tmp_path / "other", ["c", "b", "a"]))
    for tokenizer, made_by in ((None, "none: they are the text's bytes"), (other, "blake3-")):
        with pytest.raises(UsageError, match=f"wrong tokenizer: the tokens were made by {made_by}") as caught:
            carries(tokenizer)
        assert caught.value.hint == f"--set data.tokenizer={base}"
    assert carries(base).data.args["tokenizer"] == tokenizer_digest(base)
    assert carries(None, weights="random") and carried(run)


@needs_transformers
def test_weights_in_several_files_are_one_model_and_none_may_be_missing(tmp_path: Path) -> None:
    whole, parts = (
        folder_with(tmp_path / name, "llama", max_shard_size=size) for name, size in (("a", "1GB"), ("b", "40KB"))
    )
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert digest_of_values(brought_values(whole)) == digest_of_values(brought_values(parts))
    next((tmp_path / "b").glob("model-00002*")).unlink()
    assert "not all there: model-00002-of-" in refusal(parts)


@needs_transformers
def test_weights_that_are_not_the_configs_are_named(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "llama", "llama")
    rewritten(run, lambda t: t.update({"model.norm.weight": torch.ones(3), "model.more": torch.ones(1)}))
    rewritten(run, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))
    complaint = refusal(run)
    assert "missing: model.layers.0.mlp.up_proj.weight;" in complaint and "unexpected: model.more;" in complaint
    assert "of another shape: model.norm.weight" in complaint
    if version("transformers") >= "5":  # before, it did not say the shapes
        assert "model.norm.weight [3], not [32]" in complaint


@needs_transformers
def test_weights_that_are_damaged_no_numbers_or_pickles_are_refused(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "llama", "llama")
    file = tmp_path / "llama" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert "transformers cannot read these weights" in refusal(run)
    file.write_bytes(whole)
    rewritten(run, lambda t: t["model.norm.weight"].fill_(float("nan")))
    assert "model.norm.weight has values that are not finite" in refusal(run)
    file.rename(tmp_path / "llama" / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle, which is not read" in refusal(run)


@needs_transformers
def test_a_revision_of_the_hubs_cache_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--maker--model"
    folder_with(cached / "snapshots" / "abc", "llama")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    named = replace(PRESET, model=ModelSettings(huggingface="maker/model", weights="pretrained"))
    carries = carried(named, brought_values(named))
    assert carries.model.revision == "abc" and carries.model.args["model_type"] == "llama"
    shutil.copytree(cached / "snapshots" / "abc", cached / "snapshots" / "def")
    (cached / "refs" / "main").write_text("def")
    assert carried(named, None).model.revision == "def"
    assert carried(replace(named, model=replace(named.model, revision="abc")), None).model.revision == "abc"
    unknown = replace(named, model=replace(named.model, revision="nowhere"))
    assert "no model of that name" in refusal(unknown)


@pytest.fixture
def initial(tmp_path: Path) -> RunSettings:
    """A preset with a file as `diloco export` writes it."""
    other = replace(PRESET, train=replace(PRESET.train, seed=7))
    save_file(
        {name: value.detach() for name, value in build_model(other).named_parameters()}, tmp_path / "a.safetensors"
    )
    return replace(PRESET, model=replace(PRESET.model, initial=str(tmp_path / "a.safetensors")))


def test_a_file_of_values_is_read_as_an_export_wrote_it(initial: RunSettings) -> None:
    found, ours = brought_values(initial), bare_parameters(build_model(initial))
    assert found.keys() == ours.keys() and not torch.equal(found["embedding.weight"], ours["embedding.weight"])
    written = load_file(initial.model.initial)
    assert all(torch.equal(value, written[name]) for name, value in found.items())
    assert brought_values(PRESET) is None


def test_a_file_of_another_model_is_refused_with_the_names(initial: RunSettings) -> None:
    rewritten(initial, lambda t: t.update({"embedding.weight": torch.ones(2, 2), "more": torch.ones(1)}))
    assert "unexpected: more; of another shape: embedding.weight [2, 2], not [256, 64]" in refusal(initial)
    rewritten(initial, lambda t: [t.pop(name) for name in list(t)[2:]])
    assert "missing: " in refusal(initial) and " more" in refusal(initial), "a long list is cut"


def test_a_file_that_is_nowhere_damaged_or_inexact_is_refused(initial: RunSettings) -> None:
    assert "no file 'none.safetensors'" in refusal(
        replace(initial, model=replace(initial.model, initial="none.safetensors"))
    )
    rewritten(initial, lambda t: t.update({"embedding.weight": t["embedding.weight"].double()}))
    assert "embedding.weight is float64; allowed: float32, bfloat16, float16" in refusal(initial)
    file = Path(initial.model.initial)
    file.write_bytes(file.read_bytes()[:-1])
    assert "no whole safetensors file" in refusal(initial)


def test_the_format_has_the_digest_of_the_values_and_a_pinned_one_must_be_theirs(initial: RunSettings) -> None:
    values = brought_values(initial)
    pinned = carried(initial, values)
    assert pinned.model.weights_digest == digest_of_values(values) and carried(pinned, values) == pinned
    other = {**values, "embedding.weight": values["embedding.weight"] + 1}
    assert digest_of_values(dict(reversed(values.items()))) == digest_of_values(values)
    with pytest.raises(UsageError, match="the digest here is") as caught:
        carried(pinned, other)
    assert caught.value.where == "model.weights_digest"


class Adapted(torch.nn.Module):
    """A frozen base of values `base`, and something to train."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.full((4,), base), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.zeros(4))


def adapted(base: float = 1.0) -> torch.nn.Module:
    return Adapted(base)


def adapted_run(base: float) -> RunSettings:
    return replace(PRESET, model=ModelSettings(entrypoint=f"{__name__}:adapted", args={"base": base}))


def test_frozen_parameters_are_compared_by_a_digest_that_the_format_carries() -> None:
    run = carried(adapted_run(1.0))
    assert run.model.frozen_digest == frozen_digest_of(adapted_run(1.0)) is not None
    check_frozen(run, Adapted(1.0))
    with pytest.raises(UsageError, match="1 frozen tensors of the model built here are not those of the run") as caught:
        check_frozen(run, Adapted(2.0))
    assert caught.value.where == "model.frozen_digest" and "base weights" in caught.value.hint
    with torch.device("meta"):
        check_frozen(run, Adapted(2.0))
    assert frozen_digest_of(PRESET) is None and carried(PRESET) == PRESET


def test_the_frozen_base_of_a_run_that_nothing_here_builds_is_pinned_by_its_user() -> None:
    run = replace(PRESET, model=ModelSettings(initial="adapters.safetensors", parameters=4, layers=1, width=4))
    told = str(unchecked_frozen(run, Adapted(1.0)))
    assert "1 frozen tensors are not compared between islands" in told
    pinned = replace(run, model=replace(run.model, frozen_digest=told.rpartition("=")[2]))
    assert carried(pinned) == pinned and unchecked_frozen(pinned, Adapted(1.0)) is None
    check_frozen(pinned, Adapted(1.0))
    with pytest.raises(UsageError, match="not those of the run"):
        check_frozen(pinned, Adapted(2.0))
    assert unchecked_frozen(carried(adapted_run(1.0)), Adapted(1.0)) is None


@needs_transformers
def test_what_is_carried_is_plain_data_and_names_no_place_to_read(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "llama", "llama")
    carries = carried(run, brought_values(run))
    shutil.rmtree(tmp_path / "llama")
    assert json.dumps(carries.model.args) and build_model(carries.with_consent(False)) is not None


class Buffered(torch.nn.Module):
    def __init__(self, kept: float, computed: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor(kept))
        self.register_buffer("computed", torch.tensor(computed), persistent=False)


def test_a_buffer_that_only_the_weights_have_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "build", lambda settings: Buffered(1.0))
    assert huggingface._other_buffers(Buffered(1.0, computed=2.0), PRESET.model) == {}
    assert huggingface._other_buffers(Buffered(2.0), PRESET.model) == {"kept": torch.tensor(2.0)}


class NormAlone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)


def test_a_file_may_bring_buffers_in_their_own_types_that_are_not_as_the_code_makes_them(tmp_path: Path) -> None:
    state = NormAlone().state_dict() | {"norm.num_batches_tracked": torch.tensor(2**40)}
    run = replace(PRESET, model=ModelSettings(entrypoint=f"{__name__}:NormAlone", initial=str(tmp_path / "a")))
    save_file(state, tmp_path / "a")
    found = brought_values(run)
    assert found.keys() == state.keys() - {"norm.running_mean", "norm.running_var"}
    assert found["norm.num_batches_tracked"] == torch.tensor(2**40)
    save_file({name: state[name] for name in ("norm.weight", "norm.bias")}, tmp_path / "a")
    assert brought_values(run).keys() == {"norm.weight", "norm.bias"}
    save_file(state | {"norm.running_mean": torch.ones(4)}, tmp_path / "a")
    assert "of another shape: norm.running_mean [4], not [3]" in refusal(run)
