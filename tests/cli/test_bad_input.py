"""Whatever a user gets wrong: what, where, allowed values, a hint, the documented exit status, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.runtime.registry import remember_run
from tests.cli.bucket import make_bucket
from tests.cli.conftest import Diloco, edit
from tests.forked import ROOT, run_diloco


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("run.yaml", "codec: bf16", "codec: bf61", ["run.yaml:", "bf61", "bf16", "int8"]),
        ("run.yaml", "fragments: 4", "fragments: 4\n  quorum: 9 #", ["run.yaml:", "9 islands", "1 to 3", "hint:"]),
        ("inventory.yaml", "accelerators: cpu:1", "accelerators: H1000:8", ["inventory.yaml:", "H1000"]),
        ("inventory.yaml", "name: ohio", "name: syncer", ["inventory.yaml:", "reserved"]),
    ],
)
def test_a_wrong_line_is_named_with_what_is_allowed(
    diloco: Diloco, quickstart: Path, file: str, old: str, new: str, says: list[str]
) -> None:
    """All the others: tests/unit/config/."""
    edit(quickstart / file, old, new)
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for text in says:
        assert text in done.stderr


def test_a_missing_run_file_is_named(diloco: Diloco) -> None:
    done = diloco("launch", "nowhere.yaml")
    assert done.returncode in (2, 4) and "nowhere.yaml" in done.stderr and "hint:" in done.stderr


def test_a_store_that_cannot_be_made_ends_with_status_6(diloco: Diloco, quickstart: Path) -> None:
    (quickstart / "bucket").write_text("a file is in the way")
    done = diloco("launch", "q/run.yaml")
    assert done.returncode == 6 and "Traceback" not in done.stderr, done.stderr


def test_an_unknown_run_ends_with_status_4_also_in_json(diloco: Diloco) -> None:
    for words in (["status", "nobody"], ["verify", "nobody"], ["stop", "nobody"], ["resume", "nobody"]):
        plain = diloco(*words)
        assert plain.returncode == 4 and "nobody" in plain.stderr and "hint:" in plain.stderr
    body = json.loads(diloco("status", "nobody", "--json").stdout)
    assert body["ok"] is False and body["error"]["code"] == "not_found" and body["error"]["hint"]


def test_a_damaged_or_newer_format_is_a_data_error_and_not_a_bug(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    for damage in ("", '{"schema": 1}', "\x00\xff"):
        (tmp_path / "bad" / "FORMAT.json").write_text(damage)
        done = diloco("status", f"file://{tmp_path}/bad")
        assert done.returncode == 11 and "Traceback" not in done.stderr, done.stderr
    (tmp_path / "bad" / "FORMAT.json").write_text('{"schema": 99}')
    done = diloco("status", f"file://{tmp_path}/bad")
    assert done.returncode == 11 and "schema 99" in done.stderr and "a newer diloco" in done.stderr


def test_export_and_verify_need_a_run_and_export_never_overwrites(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    done = diloco("export", "nobody")
    assert done.returncode == 2 and "exists already" in done.stderr
    assert (tmp_path / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export --tokenizer words", "add --to hf"),
        ("export -o .", "is a folder"),
        ("generate --temperature nan", "--temperature"),
        ("generate --device abacus", "no device 'abacus'"),
    ],
)
def test_wrong_words_about_results_are_refused(diloco: Diloco, tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "thesis.tex").touch()
    make_bucket(tmp_path / "bucket" / "nano")
    done = diloco(*words.split(), str(tmp_path / "bucket" / "nano"))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_region_that_does_not_exist_is_refused_before_anything_is_created(diloco: Diloco, quickstart: Path) -> None:
    done = diloco("launch", "q/run.yaml", "--region", "us-centrall")
    assert done.returncode == 2 and "did you mean us-central1?" in done.stderr and "hint:" in done.stderr
    assert not (quickstart / "bucket").exists() and diloco("runs").stdout.count("quickstart") == 0


def test_a_file_of_another_kind_is_said_to_be_one(diloco: Diloco, quickstart: Path) -> None:
    assert diloco("plan", "q/run.yaml", "--fast", "-o", "plan.json").returncode == 0
    for words, says, hint in (
        ("launch q/inventory.yaml", "this is an inventory, not a run file", "diloco plan q/inventory.yaml -f RUN"),
        ("status q/inventory.yaml", "this is an inventory, not a run file", "inventory: inventory.yaml"),
        ("plan q/run.yaml -f q/run.yaml", "this is a run file, not an inventory", "diloco plan q/run.yaml"),
        ("plan plan.json", "this is a plan, not an inventory", "diloco launch plan.json"),
        ("plan -f plan.json", "this is a plan, not a run file", "diloco launch plan.json"),
    ):
        done = diloco(*words.split())
        assert done.returncode == 2 and says in done.stderr and hint in done.stderr.partition("hint:")[2]


def test_launch_takes_the_run_file_of_its_folder(diloco: Diloco, quickstart: Path) -> None:
    done = diloco("launch")
    assert done.returncode == 2 and "this folder has no run.yaml" in done.stderr and "hint: diloco init" in done.stderr
    assert "run quickstart:" in run_diloco("launch", "-n", folder=quickstart).stdout


def test_the_deleted_bucket_of_a_run_that_was_launched_here_is_said_to_be_gone(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    remember_run(f"file://{tmp_path}/bucket/nano")
    for words in (["status"], ["resume", "nano"]):
        done = diloco(*words)
        assert done.returncode == 6 and "the bucket of run nano is gone: no such directory" in done.stderr
        assert "hint: bring it back" in done.stderr and "`diloco stop nano`" in done.stderr
    assert "mount the disk" in diloco("status", f"file://{tmp_path}/bucket/other").stderr


def test_words_that_are_wrong_are_json_where_a_program_reads(diloco: Diloco) -> None:
    for words, command in (
        (["status", "--json", "--bogus"], "status "),
        (["status", "a", "b", "--json"], "status "),
        (["simulate", "run", "--json"], "simulate run "),
        (["--json"], ""),
    ):
        done = diloco(*words)
        body = json.loads(done.stdout)
        assert done.returncode == 2 and not body["ok"] and body["error"]["code"] == "usage", done.stdout
        assert body["error"]["hint"] == f"diloco {command}-h", body
    plain = diloco("status", "--bogus")
    assert plain.returncode == 2 and plain.stdout == "" and "No such option" in plain.stderr


def test_an_output_that_is_not_utf_8_is_no_error(quickstart: Path) -> None:
    command = [sys.executable, "-m", "diloco_cli", "plan", "-f", "q/run.yaml", "--fast"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=quickstart.parent, capture_output=True, env=environment, check=False)
    assert done.returncode in (0, 10) and b"bug" not in done.stderr, done.stderr


def test_a_tab_a_folder_and_too_few_tokens_have_hints_that_help(diloco: Diloco, quickstart: Path) -> None:
    (quickstart / "tab.yaml").write_text("name: x\nsync:\n\tevery: 5\n")
    for words, hint in (
        (["plan", "q/tab.yaml"], "indent with spaces"),
        (["launch", "q"], "did you mean q/run.yaml?"),
        (["launch", "q/run.yaml", "-n", "--set", "train.tokens=1"], "or more\n"),
        (["status", "q/run.yaml"], "hint: diloco launch q/run.yaml"),
    ):
        done = diloco(*words)
        assert done.returncode in (2, 4) and hint in done.stderr, done.stderr


def test_a_place_that_cannot_be_written_is_named_before_a_run_is_made(diloco: Diloco, quickstart: Path) -> None:
    done = diloco("launch", "q/run.yaml", "--create-only", DILOCO_HOME="/proc/nothing")
    assert done.returncode == 2 and "cannot write there" in done.stderr and "set DILOCO_HOME" in done.stderr
    assert not list((quickstart / "bucket").glob("*/FORMAT.json"))


def test_commits_without_their_format_are_left_alone(diloco: Diloco, quickstart: Path) -> None:
    """A new FORMAT.json over them made the log a damaged one, and the hint was to delete a commit."""
    assert diloco("launch", "q/run.yaml", "--create-only").returncode == 0
    (format_path,) = (quickstart / "bucket").glob("*/FORMAT.json")
    data = format_path.read_bytes()
    format_path.unlink()
    done = diloco("launch", "q/run.yaml", "--create-only")
    assert done.returncode == 2 and "FORMAT.json is gone" in done.stderr and not format_path.exists()
    format_path.write_bytes(data)
    assert diloco("launch", "q/run.yaml", "--create-only").returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_another_users_folder_is_no_missing_run_and_no_bug(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    for words in (["status"], ["init"]):
        said = diloco(*words, str(tmp_path / "closed/there")).stderr
        assert "permission denied" in said and "bug" not in said
