"""`diloco plan`, `init` and `config show` as a user meets them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diloco_cli.errors import DilocoError, UsageError

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
HEAVY = ("torch", "gcsfs", "fsspec", "rich", "numpy")


@pytest.fixture
def diloco():
    app = typer.Typer()
    for name in ("init", "plan", "config"):
        importlib.import_module(f"diloco_cli.cli.{name}").register(app)

    def run(*words, status=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if isinstance(result.exception, DilocoError):
            raise result.exception
        assert result.exit_code == status, result.output
        return result.stdout

    return run


def quickstart(*more):
    return ("plan", QUICKSTART / "inventory.yaml", "-f", QUICKSTART / "run.yaml", *more)


def test_plan_prints_verdict_islands_schedule_and_waterfall_in_80_columns(diloco):
    text = diloco(*quickstart())
    assert text.startswith("feasible: all 3 islands take part")
    for word in ("belgium", "overlap", "after failures", "synchronous", "assumptions:"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


def test_json_is_one_object_in_the_envelope(diloco):
    body = json.loads(diloco(*quickstart("--json")))
    assert (body["command"], body["ok"], body["warnings"]) == ("plan", True, [])
    assert [i["local_steps"] for i in body["data"]["islands"]] == [40, 40, 20]


def test_the_run_file_names_its_inventory(diloco):
    assert "feasible" in diloco("plan", "-f", QUICKSTART / "run.yaml")


def test_set_changes_one_value(diloco):
    body = json.loads(diloco(*quickstart("--json", "--set", "sync.every=80")))
    assert body["data"]["schedule"]["sync_every"] == 80


def test_a_saved_plan_is_compared_and_a_difference_exits_10(diloco, tmp_path):
    plan = tmp_path / "plan.json"
    diloco(*quickstart("-o", plan))
    assert diloco(*quickstart("--against", plan)) == "no difference\n"
    changes = diloco(*quickstart("--against", plan, "--set", "sync.every=80"), status=10)
    assert "~ schedule.sync_every: 40 -> 80" in changes


def test_init_writes_files_that_can_be_planned_and_never_overwrites(diloco, tmp_path):
    diloco("init", tmp_path / "new")
    assert "feasible" in diloco("plan", "-f", tmp_path / "new" / "run.yaml")
    (tmp_path / "new" / "run.yaml").write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        diloco("init", tmp_path / "new")
    assert (tmp_path / "new" / "run.yaml").read_text() == "mine"
    diloco("init", tmp_path / "new", "-y")
    assert (tmp_path / "new" / "run.yaml").read_text() != "mine"


def test_without_any_inventory_plan_says_how_to_get_one(diloco):
    with pytest.raises(UsageError, match="no inventory given"):
        diloco("plan")


def test_config_show_tells_where_each_value_comes_from(diloco):
    path = QUICKSTART / "run.yaml"
    lines = diloco("config", "show", "-f", path, "--origin", "--set", "sync.skip_after=5 s").splitlines()
    assert "sync.quorum = 1  # default" in lines
    assert any(line.startswith(f"sync.every = 40  # {path}:") for line in lines)
    assert "sync.skip_after = 5.0  # --set sync.skip_after=5 s" in lines


def test_planning_imports_nothing_heavy():
    code = (
        "import sys, typer\n"
        "from diloco_cli.cli import plan, init, config\n"
        "app = typer.Typer(rich_markup_mode=None)\n"
        "[module.register(app) for module in (plan, init, config)]\n"
        f"app({[str(word) for word in quickstart()]!r}, standalone_mode=False)\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
