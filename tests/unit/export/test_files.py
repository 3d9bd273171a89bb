"""Safetensors files written piece by piece, in a folder that appears whole or not at all.

What `--to hf` writes, read by transformers itself: the same loss, the same logits, no key missing or unexpected."""

from __future__ import annotations

import errno
import importlib.util
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from diloco_cli.cli.output import writing_to
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings, SyncSettings
from diloco_cli.corpus.encoders import tokenizer_digest
from diloco_cli.errors import DataCheckError, NoSpaceError, TryAgainError, UsageError
from diloco_cli.export import files
from diloco_cli.export.files import (
    TensorFiles,
    copy_tokenizer,
    export_file,
    export_folder,
    files_in,
    index_of,
    refuse_folder,
    shards,
    whole_folder,
)
from diloco_cli.export.naming import TYPES, describe, own_names, tokenizer_of
from diloco_cli.inference.generation import Causal, load_model
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import state_spec
from diloco_cli.syncer.evaluation import held_out_loss
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.flat import flatten
from diloco_cli.tensors.payload import Spec, from_bytes
from tests.numerics.bucket import begun_run
from tests.numerics.harness import CLOCK, key_of_state
from tests.unit.inference.test_vocabulary import words_in

F32 = torch.float32
SPEC: Spec = {"a": (F32, (3, 2)), "b": (F32, ()), "c": (F32, (4, 5)), "d": (torch.int64, (2,)), "e": (F32, (0, 3))}
VALUES = {
    name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for name, (dtype, shape) in SPEC.items()
}


def test_pieces_in_any_order_give_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    files = TensorFiles({path: SPEC}, {"format": "pt"})
    files.write("a", VALUES["a"][1:], first_row=1)
    for name in "bde":
        files.write(name, VALUES[name])
    files.write_columns("c", VALUES["c"][:, 3:4], first_column=3)
    files.write_columns("c", VALUES["c"].T.contiguous().T[:, 4:], first_column=4)
    files.write("a", VALUES["a"][:1])
    files.write_columns("c", VALUES["c"][:, :3], first_column=0)
    files.check_whole()
    found = load_file(path)
    assert found.keys() == VALUES.keys()
    assert all(torch.equal(found[name], VALUES[name]) and found[name].dtype == VALUES[name].dtype for name in VALUES)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_lone_column_of_a_transposed_matrix_is_written(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)
    path = tmp_path / "x.safetensors"
    files = TensorFiles({path: {"w": (torch.float32, (3, 2))}}, {})
    for row in range(2):
        files.write_columns("w", values[row : row + 1].T, first_column=row)
    assert torch.equal(load_file(path)["w"], values.T)


def test_what_was_never_written_is_found(tmp_path: Path) -> None:
    files = TensorFiles({tmp_path / "x": {"a": (F32, (3, 2))}}, {})
    files.write("a", VALUES["a"][:2])
    with pytest.raises(DataCheckError, match="do not hold a"):
        files.check_whole()


def test_numbers_become_what_was_chosen_and_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    values = torch.tensor([1.0001, -3.0, 65000.0])
    for dtype in (torch.bfloat16, torch.float16):
        TensorFiles({tmp_path / "x": {"a": (dtype, (3,))}}, {}).write("a", values)
        assert torch.equal(load_file(tmp_path / "x")["a"], values.to(dtype))
    with pytest.raises(UsageError, match="float16's largest") as caught:
        TensorFiles({tmp_path / "x": {"a": (torch.float16, (1,))}}, {}).write("a", torch.tensor([1e6]))
    assert caught.value.hint == "--dtype bfloat16"


def test_shards_hold_at_most_what_was_asked_and_a_large_tensor_is_alone(tmp_path: Path) -> None:
    spec: Spec = {"a": (F32, (2,)), "b": (F32, (3,)), "c": (F32, (100,)), "d": (F32, (1,))}
    assert [list(part) for part in shards(spec, 20)] == [["a", "b"], ["c"], ["d"]]
    assert [list(part) for part in shards(spec, None)] == [["a", "b", "c", "d"]]
    files = files_in(tmp_path, spec, 20)
    assert [path.name for path in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads(index_of(files))
    assert index["metadata"]["total_size"] == 4 * 106 and index["weight_map"]["c"] == "model-00002-of-00003.safetensors"
    assert [path.name for path in files_in(tmp_path, spec, 1000)] == ["model.safetensors"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_at_the_end_and_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out") as begun:
        (begun / "config.json").write_text("1")
        assert not (tmp_path / "out").exists()
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "out") as begun:
        (begun / "config.json").write_text("2")
        raise OSError("full")
    assert (tmp_path / "out" / "config.json").read_text() == "1" and names(tmp_path) == ["out"]
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "of a killed export").touch()
    with whole_folder(tmp_path / "out") as begun:
        assert names(begun) == []
        (begun / "generation_config.json").write_text("3")
    assert names(tmp_path / "out") == ["generation_config.json"] and names(tmp_path) == ["out"]


def test_only_an_earlier_export_is_overwritten_and_only_if_asked(tmp_path: Path) -> None:
    refuse_folder(tmp_path / "new", overwrite=False)
    out = tmp_path / "out"
    out.mkdir()
    refuse_folder(out, overwrite=False)  # empty
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (out / name).touch()
    refuse_folder(out, overwrite=True)
    with pytest.raises(UsageError, match="exists already"):
        refuse_folder(out, overwrite=False)
    (out / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"no export has written: thesis\.tex"):
        refuse_folder(out, overwrite=True)
    with pytest.raises(UsageError, match="is a file"):
        refuse_folder(out / "thesis.tex", overwrite=True)
    with pytest.raises(UsageError, match="no directory") as caught:
        refuse_folder(tmp_path / "a" / "b", overwrite=False)
    assert (caught.value.hint or "").startswith("mkdir -p")


def test_a_tokenizers_files_are_copied_and_no_others(tmp_path: Path) -> None:
    source, into = tmp_path / "source", tmp_path / "into"
    for folder in (source, into):
        folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "modeling.py"):
        (source / name).write_text(name)
    assert copy_tokenizer(source, into) == ["tokenizer.json", "tokenizer_config.json"] == names(into)


NEEDED = "transformers is not installed: pip install 'diloco[hf]'"
with_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason=NEEDED)
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.3},
    "mixtral": {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2},
}
SPLIT = SyncSettings(every=24, fragments=24)
BYTES = DataSettings(preset="python-stdlib")
CPU = torch.device("cpu")


def begun(folder: Path, kind: str) -> tuple[RunFormat, Store]:
    """A run of a config, or of a preset, some of whose tensors are cut into several fragments."""
    model = ModelSettings(preset=kind)
    if kind in CONFIGS:
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
        model = ModelSettings(preset=None, huggingface=str(folder / kind), sequence=32)
    run, store, _ = begun_run(folder / "bucket", model, data=BYTES, sync=SPLIT)
    assert any(tensor.rows for fragment in run.layout.fragments for tensor in fragment.tensors)
    return run, store


def exported(run: RunFormat, store: Store, folder: Path, dtype: str = "float32", max_bytes: int | None = None) -> Any:
    """The folder as transformers loads it."""
    from transformers import AutoModelForCausalLM

    state, chosen = perform(read_log(run), store, CLOCK), TYPES[dtype]
    described = describe(run.settings, run.layout, chosen)
    export_folder(run, state, store, folder, described, chosen, max_bytes, None)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, keys = loaded
    assert not any(keys.values()), keys
    assert model.dtype == chosen
    return model.eval()


@with_transformers
@pytest.mark.parametrize("kind", [*CONFIGS, "gpt-pico"])
def test_transformers_computes_what_the_run_does(tmp_path: Path, kind: str) -> None:
    run, store = begun(tmp_path, kind)
    theirs = exported(run, store, tmp_path / "out", max_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    ours = load_model(run, perform(read_log(run), store, CLOCK), store, CPU)
    text = list(b"def main(arguments):\n    ")
    with torch.inference_mode():
        found = theirs(input_ids=torch.tensor([text])).logits.float()
    torch.testing.assert_close(found[0], Causal(run.settings, ours).logits(text), atol=1e-5, rtol=1e-5)
    data = build_data(run.settings)
    tokens, targets = next(iter(data.held_out(8)))
    with torch.inference_mode():
        logits = theirs(input_ids=tokens).logits.float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
    assert abs(float(loss) - held_out_loss(ours, data, 8)) < 1e-4


@with_transformers
def test_half_the_bytes_load_as_such_and_the_config_is_the_runs_own(tmp_path: Path) -> None:
    run, store = begun(tmp_path, "gpt2")
    model = exported(run, store, tmp_path / "out", "bfloat16")
    assert model.config.resid_pdrop == 0.3  # the run trains without; who goes on with it may want it again
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2.2 * run.layout.num_parameters


def test_a_full_disk_is_said_and_leaves_no_folder_and_one_fragment_at_most_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = begun(tmp_path, "gpt-pico")
    state, read, seen = perform(read_log(run), store, CLOCK), files.read_version, list[Any]()

    def reading(*arguments: Any) -> torch.Tensor:
        assert all(earlier() is None for earlier in seen)
        if len(seen) == run.num_fragments - 1:
            raise OSError(errno.ENOSPC, "no space left")
        flat = read(*arguments)
        seen.append(weakref.ref(flat))
        return flat

    monkeypatch.setattr(files, "read_version", reading)
    described = describe(run.settings, run.layout, torch.float32)
    with pytest.raises(NoSpaceError, match="cannot write"), writing_to(tmp_path / "out"):
        export_folder(run, state, store, tmp_path / "out", described, torch.float32, None, None)
    assert len(seen) == run.num_fragments - 1 and [path.name for path in tmp_path.iterdir()] == ["bucket"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ModelSettings(preset="moe-pico"), "the preset moe-pico"),
        (ModelSettings(preset=None, entrypoint="tests.numerics.tiny:regression"), "code of your own"),
    ],
)
def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path, model: ModelSettings, why: str) -> None:
    run, _, _ = begun_run(tmp_path / "bucket", "tests.numerics.tiny:regression")
    settings = type(run.settings)(name="x", model=model)
    with pytest.raises(UsageError, match=why) as caught:
        describe(settings, run.layout, torch.float32)
    assert "--to torch" in (caught.value.hint or "")


def test_the_tokenizer_is_the_one_named_or_the_one_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").touch()
    relative, absolute, above = (
        RunSettings(name="x", model=ModelSettings(preset=None, huggingface=name))
        for name in ("tiny", str(folder), "tiny/../tiny")
    )
    assert tokenizer_of(relative, None) is None
    with pytest.raises(UsageError, match="holds no tokenizer"):
        tokenizer_of(relative, folder)
    (folder / "tokenizer.json").touch()
    assert tokenizer_of(relative, None) == tokenizer_of(absolute, folder) == folder
    assert tokenizer_of(absolute, None) is None and tokenizer_of(above, None) is None, "places that a bucket may name"
    assert tokenizer_of(RunSettings(name="x", model=ModelSettings(preset="gpt-pico")), None) is None
    for digest, expected in ((tokenizer_digest(str(folder)), folder), ("another's", None), (None, None)):
        data = DataSettings(text="corpus.txt", args={"tokenizer": digest})
        assert tokenizer_of(replace(relative, data=data), None) == expected, "one that made the run's tokens"


@with_transformers
def test_an_exported_tokenizer_loads_beside_the_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run, store = begun(tmp_path, "gpt-pico")
    (tmp_path / "words").mkdir()
    state, described = perform(read_log(run), store, CLOCK), describe(run.settings, run.layout, torch.float32)
    export_folder(
        run, state, store, tmp_path / "out", described, torch.float32, None, words_in(tmp_path / "words")
    )  # fmt: skip
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.encode("a b") == [2, 3]


# -- one file of a whole model ----------------------------------------------------------------------------------------

Begun = tuple[RunFormat, Store, tuple[FragmentVersion, ...], RunState]


@pytest.fixture
def tiny(tmp_path: Path) -> Begun:
    run, store, outputs = begun_run(tmp_path / "bucket", "tests.numerics.tiny:regression")
    return run, store, outputs, perform(read_log(run), store, CLOCK)


def export(run: RunFormat, state: RunState, store: Store, path: Path) -> int:
    return export_file(run, state, store, path, own_names(run.layout))


def test_the_file_holds_the_committed_values_under_the_models_names(tiny: Begun, tmp_path: Path) -> None:
    run, store, outputs, state = tiny
    path = tmp_path / "model.safetensors"
    assert export(run, state, store, path) == path.stat().st_size
    found = load_file(path)
    for output in outputs:
        fragment = run.layout.fragments[output.fragment]
        values = from_bytes(
            store.get(key_of_state(output)) or b"", state_spec(fragment.num_parameters, run.settings.outer.name)
        )["parameters"]
        assert torch.equal(flatten(fragment, found), values)
    model = build_model(run.settings)
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    model.load_state_dict(found)


def test_the_file_says_where_it_comes_from_and_nothing_is_left_beside_it(tiny: Begun, tmp_path: Path) -> None:
    run, store, _, state = tiny
    (tmp_path / "out").mkdir()
    export(run, state, store, tmp_path / "out" / "model.safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"run": "tiny", "run_id": "id", "commit": "0", "format": "pt"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_damaged_state_is_not_exported(tiny: Begun, tmp_path: Path) -> None:
    run, store, outputs, state = tiny
    key = key_of_state(outputs[0])
    data = store.get(key) or b""
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataCheckError, match="other bytes"):
        export(run, state, store, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_before_the_first_version_there_is_nothing_to_export(tiny: Begun, tmp_path: Path) -> None:
    with pytest.raises(TryAgainError):
        export(tiny[0], RunState(), tiny[1], tmp_path / "model.safetensors")
