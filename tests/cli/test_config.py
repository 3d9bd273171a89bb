"""The published JSON Schemas: all templates and examples satisfy them, what is wrong does not, and `--json` prints what
they say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from diloco_cli.cli.config import NAMES, schema
from diloco_cli.config.fields import plain, read_yaml_file
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.errors import UsageError
from tests.cli.conftest import Diloco
from tests.cli.test_help import command_of, every_command
from tests.forked import ROOT, run_diloco

TRACKED = subprocess.run(
    ["git", "ls-files", "templates", "examples"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
YAML = [name for name in TRACKED if name.endswith((".yaml", ".yml"))]
SHORT = ["--set", "train.tokens=40k", "--set", "train.batch_tokens=256", "--set", "sync.every=16"]


def kind_of(name: str) -> str | None:
    keys = set(read_yaml_file(ROOT / name).value)
    return "run" if keys & {"model", "train"} else "inventory" if keys & {"islands", "machines"} else None


OF_USERS = [(name, kind) for name in YAML if (kind := kind_of(name)) is not None]


def problems(kind: str, tree: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema(kind)).iter_errors(tree)]


@pytest.mark.parametrize("name", NAMES)
def test_every_schema_is_one(name: str) -> None:
    Draft202012Validator.check_schema(schema(name))


def test_the_command_prints_it(diloco: Diloco) -> None:
    done = diloco("config", "schema", "status")
    assert done.returncode == 0 and json.loads(done.stdout) == json.loads(json.dumps(schema("status")))


@pytest.mark.parametrize("words", [words for words in every_command() if words], ids=" ".join)
def test_every_command_with_json_has_a_schema(words: list[str]) -> None:
    _, command, _ = command_of(words)
    if any("--json" in param.opts for param in command.params):
        assert {" ".join(words), words[0]} & set(NAMES)


def test_an_unknown_schema_names_the_nearest(diloco: Diloco) -> None:
    done = diloco("config", "schema", "statos")
    assert done.returncode == 2 and "did you mean status" in done.stderr


@pytest.mark.parametrize(("name", "kind"), OF_USERS)
def test_all_templates_and_examples_satisfy_them(name: str, kind: str) -> None:
    assert problems(kind, plain(read_yaml_file(ROOT / name))) == []


def test_there_are_templates_and_examples_of_both_kinds() -> None:
    assert {kind for _, kind in OF_USERS} == {"run", "inventory"} and len(OF_USERS) > 12


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("run", "tokens: 4M", "tokns: 4M"),
        ("run", "codec: bf16", "codec: bf61"),
        ("run", "fragments: 4", "fragments: 0"),
        ("run", "momentum: 0.5", "momentum: 1.0"),
        ("run", "every: 5", "every: often"),
        ("run", "name: quickstart", "name:"),
        ("inventory", "region: europe-west4", "regoin: europe-west4"),
        ("inventory", "slowdown: 2.0", "slowdown: 0.5"),
        ("inventory", "accelerators: cpu:1", "accelerators: 'cpu:'"),
        ("inventory", "version: 1", "version: [1]"),
        ("inventory", "store: {url: bucket", "store: {uri: bucket"),
    ],
)
def test_what_the_schema_refuses_the_reader_refuses(quickstart: Path, kind: str, old: str, new: str) -> None:
    path = quickstart / f"{kind}.yaml"
    assert problems(kind, plain(read_yaml_file(path))) == []
    path.write_text(path.read_text().replace(old, new, 1))
    assert problems(kind, plain(read_yaml_file(path)))
    with pytest.raises(UsageError):
        (load_run if kind == "run" else load_inventory)(path)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What `diloco init` writes, launched for a short while, and what `launch --json` printed."""
    folder = tmp_path_factory.mktemp("launched")
    assert run_diloco("init", "q", folder=folder).returncode == 0
    done = run_diloco("launch", "q/run.yaml", *SHORT, "--json", folder=folder, forking=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_what_launch_prints_is_what_its_schema_says(launched: tuple[Path, str]) -> None:
    body = json.loads(launched[1].splitlines()[-1])
    assert problems("launch", body) == []
    assert body["data"]["state"] == "FINISHED" and body["data"]["tokens"] >= 40_000


def test_events_are_lines_of_what_their_schema_says(launched: tuple[Path, str]) -> None:
    lines = run_diloco("events", "--json", folder=launched[0]).stdout.splitlines()
    assert lines and [problem for line in lines for problem in problems("events", json.loads(line))] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status", "status"),
        ("verify", "verify"),
        ("runs", "runs"),
        ("chaos list", "chaos list"),
        ("export", "export -o model.safetensors"),
        ("export", "export --to torch -o state.safetensors --dtype bfloat16"),
        ("export", "export --to hf -o folder --max-shard-size 200kB"),
        ("generate", "generate --prompt def --tokens 5 --top-k 9 --temperature 0.8"),
        ("evaluate", "evaluate --limit 4"),
        ("stop", "stop"),
        ("report", "report"),
        ("plan", "plan -f q/run.yaml"),
        ("config", "config show -f q/run.yaml"),
        ("simulate bandwidth", "simulate bandwidth"),
        ("simulate goodput", "simulate goodput --chips 300k --learners 4 --days 0.5"),
        ("simulate goodput", "simulate goodput --mixed"),
        ("simulate run", "simulate run q/run.yaml --for 5s"),
        ("doctor", "doctor q/bucket --quick"),
        ("resume", "resume nobody"),
        ("status", "status nobody"),
        ("plan", "plan nowhere.yaml -f q/run.yaml"),
    ],
)
def test_what_a_command_prints_is_what_its_schema_says(launched: tuple[Path, str], name: str, words: str) -> None:
    """Errors too."""
    body = json.loads(run_diloco(*words.split(), "--json", folder=launched[0]).stdout)
    assert problems(name, body) == []
    assert body["ok"] == ("nobody" not in words and "nowhere" not in words), body["error"]


def test_the_schema_of_plan_names_what_its_options_add(quickstart: Path, diloco: Diloco) -> None:
    words = "plan -f q/run.yaml --without ohio --frontier --explain --simulate --json"
    body = json.loads(diloco(*words.split()).stdout)
    assert {"compared", "frontier", "explanations", "confirmed", "rivals", "simulation"} <= body["data"].keys()
    found = schema("plan")
    named = found["$defs"]["Plan"]["properties"]
    assert body["data"].keys() <= named.keys() and problems("plan", body) == []
