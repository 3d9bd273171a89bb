"""Safetensors files written piece by piece, in a folder that appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.export.files import TensorFiles, copy_tokenizer, files_in, index_of, refuse_folder, shards, whole_folder
from diloco_cli.tensors.payload import Spec

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
