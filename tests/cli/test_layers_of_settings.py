"""--set > DILOCO_* > run file > user file > default, and `config show --origin` says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.run_file import PREFIX, variables
from tests.cli.conftest import Diloco, edit


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own file, which says one setting."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "diloco" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("train:\n  seed: 1\n  threads: 3\nsync: {quorum: 2}\n")
    return path


def shown(diloco: Diloco, *words: str, **environment: str) -> dict[str, tuple[str, str]]:
    """{key: (value, origin)} as people see it."""
    done = diloco("config", "show", "-f", "q/run.yaml", "--origin", *words, **environment)
    assert done.returncode == 0, done.stderr
    lines = (line.partition(" = ") for line in done.stdout.splitlines())
    return {key: tuple(rest.split("  # ")) for key, _, rest in lines}


@pytest.mark.usefixtures("quickstart")
def test_each_layer_goes_above_the_next(diloco: Diloco, own_file: Path) -> None:
    assert shown(diloco)["train.threads"] == ("3", f"{own_file}:3")
    assert shown(diloco)["train.tokens"] == ("4000000", "q/run.yaml:8")
    assert shown(diloco)["train.precision"] == ('"auto"', "default")
    variables = {"DILOCO_TRAIN_TOKENS": "2M", "DILOCO_TRAIN_THREADS": "4", "DILOCO_SYNC_GRACE_GAMMA": "0.25"}
    found = shown(diloco, **variables)
    assert found["train.tokens"] == ("2000000", "DILOCO_TRAIN_TOKENS")
    assert found["train.threads"] == ("4", "DILOCO_TRAIN_THREADS")
    assert found["sync.grace.gamma"] == ("0.25", "DILOCO_SYNC_GRACE_GAMMA")
    found = shown(diloco, "--set", "train.tokens=1M", **variables)
    assert found["train.tokens"] == ("1000000", "--set train.tokens=1M")


def test_a_word_for_several_settings_leaves_each_to_the_layers_above(
    diloco: Diloco, own_file: Path, quickstart: Path
) -> None:
    found = shown(diloco, "--set", "outer=auto", "--set", "outer.lr=0.2")
    assert (found["outer.lr"][0], found["outer.momentum"][0]) == ("0.2", '"auto"')
    edit(quickstart / "run.yaml", "outer: {name: nesterov, lr: 0.7, momentum: 0.5}", "outer: auto")
    found = shown(diloco, DILOCO_OUTER_MOMENTUM="0.3")
    assert found["outer.lr"][0] == '"auto"' and found["outer.momentum"] == ("0.3", "DILOCO_OUTER_MOMENTUM")
    own_file.write_text("outer: auto\n")
    edit(quickstart / "run.yaml", "outer: auto", "outer: {momentum: 0.4}")
    found = shown(diloco)
    assert found["outer.lr"] == ('"auto"', f"{own_file}:1") and found["outer.momentum"][0] == "0.4"


@pytest.mark.usefixtures("quickstart")
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DILOCO_TRAIN_TOKNS", "2M", "DILOCO_TRAIN_TOKENS"),
        ("DILOCO_TRAIN_TOKENS", "-5", "must not be negative"),
        ("DILOCO_SYNC_CODEC", "bf61", "bf16"),
    ],
)
def test_a_wrong_variable_is_named(diloco: Diloco, variable: str, value: str, says: str) -> None:
    done = diloco("plan", "-f", "q/run.yaml", "--fast", **{variable: value})
    assert done.returncode == 2 and f"error: {variable}" in done.stderr and says in done.stderr


@pytest.mark.usefixtures("quickstart")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trian: {seed: 1}\n", "did you mean train?"),
        ("name: mine\n", "belongs to one run"),
        ("model: {preset: gpt-pico}\n", "belongs to one run"),
        ("train: {sed: 1}\n", "unknown key 'sed'"),
    ],
)
def test_a_wrong_key_of_the_own_file_is_named(diloco: Diloco, own_file: Path, text: str, says: str) -> None:
    own_file.write_text(text)
    done = diloco("plan", "-f", "q/run.yaml", "--fast")
    assert done.returncode == 2 and f"{own_file}:1" in done.stderr and says in done.stderr


def test_every_setting_has_a_variable_of_its_own() -> None:
    keys = variables()
    names = {PREFIX + key.upper().replace(".", "_") for key in keys}
    assert {"train.tokens", "train.inner.lr", "sync.skip_after", "model.preset"} <= set(keys)
    assert len(names) == len(keys) and "DILOCO_HOME" not in names
