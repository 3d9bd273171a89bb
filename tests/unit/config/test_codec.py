"""Settings survive JSON exactly; strangers are refused or, where asked, passed over."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from diloco_cli.config.codec import from_plain, replace, to_plain
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import Inventory, ModelSettings, RunSettings, SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.paths import templates_directory


def through_json(value):
    return json.loads(json.dumps(to_plain(value), allow_nan=False))


def test_the_templates_survive_json_exactly():
    run = load_run(templates_directory() / "run.yaml")
    inventory = load_inventory(templates_directory() / "inventory.yaml")
    assert from_plain(RunSettings, through_json(run)) == run
    assert from_plain(Inventory, through_json(inventory)) == inventory


def test_both_kinds_of_a_union_and_free_arguments_survive():
    run = RunSettings("x", model=ModelSettings(entrypoint="a:b", args={"deep": [1, {"k": 0.1}]}))
    for overlap in (3, "auto"):
        changed = replace(run, sync=replace(run.sync, overlap=overlap))
        assert from_plain(RunSettings, through_json(changed)) == changed


@dataclass(frozen=True)
class Record:
    settings: RunSettings
    number: int = 0


def test_unknown_keys_are_refused_and_of_a_dataclass_passed_over_where_that_is_asked():
    plain = through_json(Record(RunSettings("x")))
    with pytest.raises(UsageError, match="unknown key 'novelty'"):
        from_plain(Record, plain | {"novelty": 1})
    assert from_plain(Record, plain | {"novelty": 1}, strict=False) == Record(RunSettings("x"))
    with pytest.raises(UsageError, match=r"settings\.train: unknown key 'novelty'"):
        from_plain(Record, {"settings": {"name": "x", "train": {"novelty": 1}}}, strict=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("every", "40"),
        ("every", 1.5),
        ("every", True),
        ("codec", "bf61"),
        ("overlap", "never"),
        ("grace", 1),
        ("skip_after_s", "x"),
    ],
)
def test_wrong_types_are_refused_with_their_key(key, value):
    with pytest.raises(UsageError, match=key):
        from_plain(SyncSettings, through_json(SyncSettings()) | {key: value})


def test_missing_keys_without_default_are_refused():
    with pytest.raises(UsageError, match="the key 'name' is missing"):
        from_plain(RunSettings, {})
