"""`diloco data`, and how `launch` and `plan` speak of a user's own data before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from diloco_cli.cli.config import schema
from diloco_cli.environment import environment_with
from tests.cli.conftest import ROOT, Diloco, called, copied, edit
from tests.hub_cache import COMMIT, prepared_dataset, snapshot_in
from tests.tokenizer import write_tokenizer

TEXT = "".join(f"line {number} says {number * number}\n" for number in range(6000))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text(TEXT)
    return tmp_path


def test_text_becomes_shards_that_are_shown_and_checked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "data", "tokenize", "corpus/*.txt", "-o", "tokens") == 0
    said = capsys.readouterr()
    assert "000000.bin" in said.err and "100% of the text" in said.err and f"{len(TEXT) + 1:,} tokens" in said.out
    assert called(monkeypatch, "data", "show", "tokens", "--check", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, schema("data show"))
    assert answer["data"]["tokens"] == len(TEXT) + 1 and answer["data"]["checked"]
    shard = here / "tokens" / "000000.bin"
    shard.write_bytes(b"?" + shard.read_bytes()[1:])
    assert called(monkeypatch, "data", "show", "tokens") == 0
    assert called(monkeypatch, "data", "show", "tokens", "--check") == 11
    assert "block 0" in capsys.readouterr().err


def test_shards_of_another_tool_get_an_index(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(here / "a.npy", np.arange(1000, dtype="uint32"))
    assert called(monkeypatch, "data", "show", ".") == 4
    assert "diloco data index" in capsys.readouterr().err
    assert called(monkeypatch, "data", "index", ".", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, schema("data index"))
    assert (answer["data"]["dtype"], answer["data"]["vocabulary"]) == ("uint32", 1000)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["tokenize", "nothing/*.txt", "-o", "out"], 4, "matches no file"),
        (["tokenize", "corpus", "-o", "corpus/a.txt"], 6, "corpus/a.txt"),
        (["tokenize", "corpus", "-o", "out", "--tokenizer", "corpus"], 4, "no tokenizer.json"),
        (["index", "corpus"], 4, "no .bin or .npy"),
        (["show", "nowhere"], 6, "no such directory"),
        (["show", "nowhere"], 6, "diloco data tokenize FILES -o nowhere"),
        (["show", "http://x"], 2, "unknown store scheme"),
    ],
)
def test_what_goes_wrong_is_said_with_its_status(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], status: int, said: str,
) -> None:  # fmt: skip
    assert called(monkeypatch, "data", *words) == status
    assert said in capsys.readouterr().err


def test_rows_that_are_taken_as_plain_text_are_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "rows").mkdir()
    (here / "rows" / "a.JSONL").write_text('{"text": "a row"}\n' * 9)
    for files, warned in (("corpus", False), ("rows", True)):
        assert called(monkeypatch, "data", "tokenize", files, "-o", f"{files}-tokens") == 0
        assert ("a.JSONL is taken as plain text, its markup included" in capsys.readouterr().err) is warned


def test_plan_says_how_often_a_run_goes_through_its_data(diloco: Diloco, here: Path) -> None:
    folder = copied("own-data", here / "own")
    edit(folder / "run.yaml", "../*/README.md", "../corpus")
    planned = diloco("plan", "-f", "own/run.yaml", "--fast")
    assert planned.returncode == 0 and "5% held out: the run's 300k tokens are" in planned.stderr, planned.stderr
    edit(folder / "run.yaml", "../corpus", "../corpse/*.txt")
    assert "matches no file" in diloco("plan", "-f", "own/run.yaml").stderr


@pytest.mark.parametrize(
    ("setting", "status", "said"),
    [
        ("data={text: ../corpus}", 2, "the held-out part is too small"),
        ("train.batch_tokens=102400", 2, "the data are too short"),
        ("data={tokens: ../corpus}", 4, "diloco data tokenize"),
    ],
)
def test_launch_refuses_data_that_do_not_fit_before_it_writes_anything(
    diloco: Diloco, here: Path, setting: str, status: int, said: str
) -> None:
    folder = copied("own-data", here / "own")
    edit(folder / "run.yaml", "../*/README.md", "../corpus")
    words = ("--set", setting, "--set", "train.tokens=4M")
    dry = ["-n"] if "tokens:" in setting else []  # which a plan sees too
    done = diloco("launch", "own/run.yaml", *dry, *words, DILOCO_HOME=str(here / "home"))
    assert done.returncode == status and said in done.stderr and "hint:" in done.stderr, done.stderr
    assert not (folder / "bucket").exists() and "Traceback" not in done.stderr


def offline(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`diloco data tokenize` with a Hub's cache in `here`, and no network to be used: read when `datasets` is
    imported, hence a process of its own."""
    variables = {"HF_HOME": str(here / "hf"), "HF_HUB_OFFLINE": "1", "DILOCO_HOME": str(here / "home")}
    return subprocess.run(
        [sys.executable, "-m", "diloco_cli", "data", "tokenize", *words], cwd=here, capture_output=True, text=True,
        env=environment_with(**variables, PYTHONPATH=str(ROOT)), check=False,
    )  # fmt: skip


def test_a_dataset_and_a_tokenizer_of_names_are_taken_from_the_hub_s_cache(here: Path) -> None:
    prepared_dataset(here / "hf", "maker/rows", ["a b", "b"])
    write_tokenizer(snapshot_in(here / "hf", "maker/words"), ["a", "b"])
    words = ("--dataset", "maker/rows", "--tokenizer", "maker/words", "-o", "tokens")
    made = offline(here, *words)
    assert made.returncode == 0, made.stderr
    assert f"maker/rows@{COMMIT}: 2 rows of train" in made.stderr and "100% of the text" in made.stderr
    assert (here / "tokens" / "000000.bin").read_bytes() == np.array([2, 3, 1, 3, 1], "<u2").tobytes()


def test_files_or_a_dataset_are_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "data", "tokenize", "-o", "out") == 2
    assert "there is nothing to tokenize" in capsys.readouterr().err
    assert called(monkeypatch, "data", "tokenize", "corpus", "--dataset", "x", "-o", "out") == 2
    assert "one of them" in capsys.readouterr().err
    for option in (("--config", "plain"), ("--split", "test"), ("--column", "body")):
        assert called(monkeypatch, "data", "tokenize", "corpus", *option, "-o", "out") == 2
        said = capsys.readouterr().err
        assert f"{' '.join(option)}: there is no --dataset" in said and f"--dataset FOLDER|NAME {option[0]}" in said
    assert called(monkeypatch, "data", "tokenize", "--dataset", "", "-o", "out") == 4, "an empty variable in a script"
    assert "no folder ''" in capsys.readouterr().err
    assert not (here / "out").exists()
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert called(monkeypatch, "data", "tokenize", "--dataset", "corpus", "-o", "out") == 2
    said = capsys.readouterr().err
    assert "datasets is not installed here" in said and "[datasets]" in said
