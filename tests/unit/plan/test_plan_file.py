"""A plan file is read back exactly, and refused when it is newer, broken or missing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.plan.model_facts import model_facts
from diloco_cli.plan.plan_file import load_plan, plan_differences, plan_to_json, save_plan
from diloco_cli.plan.planner import make_plan

JSON_KEYS = {"verdict", "islands", "left_out", "schedule", "prediction", "alternatives", "assumptions"}
ISLAND_KEYS = {
    "name", "region", "accelerators", "devices", "tokens_per_s", "step_s", "batch_tokens", "local_steps",
    "round_s", "idle_percent", "up_mbps_needed", "up_mbps_available", "down_mbps_needed",
    "down_mbps_available", "transfer_s", "memory_gb_needed", "memory_gb_available", "fits", "availability",
    "price_per_h", "egress_per_day", "warnings",
}  # fmt: skip
PREDICTION_KEYS = {
    "tokens_per_s_ideal", "tokens_per_s", "goodput", "days_to_target", "synchronous_tokens_per_s",
    "synchronous_goodput", "price_per_h", "egress_per_day",
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    run = load_run(templates_directory() / "run.yaml")
    return make_plan(run, load_inventory(templates_directory() / "inventory.yaml"), model_facts(run.model))


def test_a_plan_is_read_back_exactly(made, tmp_path):
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_json_has_the_published_names(made):
    data = plan_to_json(made)
    assert set(data) >= JSON_KEYS
    assert set(data["islands"][0]) >= ISLAND_KEYS
    assert set(data["prediction"]) >= PREDICTION_KEYS
    assert set(data["schedule"]) >= {"fragments", "sync_every", "overlap", "quorum", "grace_s", "codec"}
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "of version 2, newer than this diloco reads"),
        ({"version": "x"}, "version is 'x'"),
        ({"format": "other"}, "not a plan file"),
        ({"plan": {}}, "the key 'verdict' is missing"),
        ({"plan": []}, "must be an object"),
    ],
)
def test_plans_that_cannot_be_used_are_refused(made, tmp_path, change, message):
    path = tmp_path / "plan.json"
    save_plan(made, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message) as caught:
        load_plan(path)
    assert caught.value.where == str(path)


def test_a_plan_that_is_not_there_or_no_json_is_refused(tmp_path):
    with pytest.raises(NotFoundError):
        load_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="not a plan file"):
        load_plan(tmp_path / "plan.json")


def test_a_plan_cannot_be_written_into_a_folder_that_is_not_there(made, tmp_path):
    with pytest.raises(UsageError, match="cannot write the plan"):
        save_plan(made, tmp_path / "none" / "plan.json")


def test_differences_name_what_changed_came_and_went(made):
    first, *others = made.islands
    changed = replace(made, islands=(replace(first, local_steps=7), replace(others[0], name="new"), *others[1:]))
    lines = plan_differences(made, changed)
    assert f"~ islands.{first.name}.local_steps: {first.local_steps} -> 7" in lines
    assert f"- islands.{others[0].name}" in lines
    assert "+ islands.new" in lines
    assert plan_differences(made, made) == []
