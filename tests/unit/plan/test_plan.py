"""A plan file is read back exactly, and refused when it is newer, broken or missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run, load_run_with_origins
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.plan import (
    load_plan,
    plan_differences,
    plan_digest,
    plan_file_name,
    plan_to_json,
    save_plan,
    summary_of,
)
from diloco_cli.plan.planner import make_plan

JSON_KEYS = {"verdict", "islands", "excluded", "schedule", "prediction", "alternatives", "assumptions"}
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


def test_one_changed_number_is_noticed(made, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(made, path)
    text = path.read_text()
    path.write_text(text.replace(f'"local_steps": {made.islands[0].local_steps}', '"local_steps": 1', 1))
    assert path.read_text() != text
    with pytest.raises(UsageError, match="its content is not what its digest says"):
        load_plan(path)
    path.write_text(json.dumps(json.loads(text), indent=4))  # another layout is no other content
    assert load_plan(path) == made


def test_into_a_folder_a_plan_goes_under_its_own_name_which_must_tell_the_truth(made, tmp_path):
    path = save_plan(made, tmp_path)
    assert path.name == plan_file_name(made)
    assert plan_digest(made).partition("-")[2].startswith(path.name.split("-")[-1].split(".")[0])
    save_plan(replace(made, why="another"), path)
    with pytest.raises(UsageError, match="the file's name says"):
        load_plan(path)


def test_the_same_files_give_the_same_name_wherever_they_lie(tmp_path):
    names = set()
    for folder in (tmp_path / "a", tmp_path / "b" / "c"):
        folder.mkdir(parents=True)
        for name in ("run.yaml", "inventory.yaml"):
            (folder / name).write_text((templates_directory() / name).read_text())
        run, origins = load_run_with_origins(folder / "run.yaml")
        names.add(
            plan_file_name(
                make_plan(run, load_inventory(folder / "inventory.yaml"), model_facts(run.model), None, origins)
            )
        )
    assert len(names) == 1


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
        ({"version": 99}, "of version 99, newer than this diloco reads"),
        ({"version": 3}, "of version 3, and this diloco reads 4"),
        ({"version": "x"}, "version is 'x'"),
        ({"version": True}, "version is True"),
        ({"format": "other"}, "not a plan file"),
        ({"plan": {}}, "changed after it was made"),
        ({"plan": []}, "changed after it was made"),
        ({"digest": None}, "changed after it was made"),
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
    assert summary_of(lines) == "1 to add, 1 to change, 1 to remove"
    assert plan_differences(made, made) == []


def test_a_plan_file_of_this_version_that_lies_here_for_good_can_still_be_read():
    plan = load_plan(Path(__file__).parent / "golden" / "plan-4.json")
    assert [island.name for island in plan.islands] == ["iowa"]
    assert [left.name for left in plan.excluded] == ["home"]
    assert plan.run.sync.every == 100
    assert {setting.name: setting.pinned for setting in plan.settings}["sync.every"]
    assert plan.prediction.waterfall[0].name == "ideal"
