"""An exported folder appears whole or not at all, and replaces nothing but an earlier export."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.export.folder import copy_tokenizer, refuse_folder, whole_folder
from tests.forked import ROOT


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
    with whole_folder(tmp_path / "out") as begun:
        (begun / "generation_config.json").write_text("3")
    assert names(tmp_path / "out") == ["generation_config.json"] and names(tmp_path) == ["out"]


def test_a_killed_export_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom diloco_cli.export.folder import whole_folder\n"
        "with whole_folder(Path(sys.argv[1])) as begun:\n"
        "    (begun / 'config.json').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert names(tmp_path) == [".out.partial"]
    refuse_folder(tmp_path / "out", overwrite=False)
    with whole_folder(tmp_path / "out") as begun:
        assert names(begun) == []
    assert names(tmp_path) == ["out"], "the next one goes ahead, and takes away what was left"


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
