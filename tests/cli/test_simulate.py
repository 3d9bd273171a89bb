"""`diloco simulate`, as users meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--chips", "300k", "--learners", "4", "--days", "0.5"]


def diloco(*words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco_cli", "simulate", *words]
    environ = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def data_of(*words: str, **environment: str) -> dict[str, Any]:
    done = diloco(*words, "--json", **environment)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["ok"] and body["command"] == f"simulate {words[0]}"
    found: dict[str, Any] = body["data"]
    return found


def test_goodput_says_what_was_fitted_and_compares_the_three_methods() -> None:
    data = data_of("goodput", *SMALL, "--seed", "7")
    assert [row["method"] for row in data["rows"]] == [
        "data_parallel_no_elasticity",
        "data_parallel_elastic",
        "decoupled",
    ]
    goodputs = [row["goodput_percent"] for row in data["rows"]]
    assert goodputs == sorted(goodputs) and goodputs[2] > 90
    assert data["rows"][2]["learners"] == 4 and data["rows"][2]["chips"] == 300_000
    assert data["rows"][2]["published_goodput_percent"] is None
    assert set(data["fitted"]) >= {"step_s", "down_s", "up_s", "slice_chips"} and "mtbi_s" not in data["fitted"]
    assert set(data["fitted"]) <= set(data["constants"])
    assert (data["days"], data["seed"]) == (0.5, 7) and data["wall_s"] > 0


def test_the_same_seed_gives_the_same_rows_whatever_the_hash_seed() -> None:
    first = data_of("goodput", *SMALL, PYTHONHASHSEED="1")
    second = data_of("goodput", *SMALL, PYTHONHASHSEED="2")
    other = data_of("goodput", *SMALL, "--seed", "1")
    assert first["rows"] == second["rows"] != other["rows"]


def test_the_published_table_stands_beside_ours_in_eighty_columns() -> None:
    done = diloco("goodput", "--fast", "--days", "0.05", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "decoupled M=16" in done.stdout and "Fitted, one set for all cells" in done.stdout.replace("\n", " ")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_fewer_interrupts_and_quicker_repairs_help() -> None:
    usual, rare, quick = (
        data_of("goodput", *SMALL, "--fast", *extra)["rows"][2]["goodput_percent"]
        for extra in ([], ["--mtbi", "3650 d"], ["--repair", "1 s"])
    )
    assert usual < rare and usual < quick


def test_bandwidth_names_the_setting_of_every_row() -> None:
    rows = data_of("bandwidth")["rows"]
    assert {row["method"] for row in rows} == {"data_parallel", "decoupled"}
    assert {(row["sync_every"], row["fragments"], row["overlap"]) for row in rows} == {
        (0, 0, 0),
        (100, 18, 2),
        (24, 24, 2),
    }
    text = diloco("bandwidth").stdout
    assert "H = 100" in text and max(map(len, text.splitlines())) <= 80


def test_a_users_own_plan_is_simulated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco_cli", "plan", "templates/inventory.yaml", "-o", str(tmp_path / "p.json")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    found = data_of("goodput", "--plan", str(tmp_path / "p.json"), "--days", "20", "--fast")
    assert found["rows"][2]["method"] == "decoupled" and 80 < found["rows"][2]["goodput_percent"] < 100
    rows = data_of("bandwidth", "--plan", str(tmp_path / "p.json"))["rows"]
    assert {row["codec"] for row in rows if row["method"] == "decoupled"} >= {"bf16", "int8"}


def test_plots_are_whole_pictures(tmp_path: Path) -> None:
    for name, words in (("one.svg", SMALL), ("grid.svg", ["--days", "0.05", "--seeds", "1"])):
        done = diloco("goodput", "--fast", *words, "--plot", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["goodput", "--chips", "2", "--learners", "8"], "out of range"),
        (["goodput", "--repair", "0 s"], "must be above 0"),
        (["goodput", "--mtbi", "12"], "no unit"),
        (["goodput", "--fast", "--unmemoised"], "choose one of them"),
        (["goodput", *SMALL, "--fast", "--plot", "x.png"], "SVG"),
        (["goodput", *SMALL, "--stragglers", "5"], "more than the 4 learners"),
        (["goodput", "--plan", "missing.json"], "no such plan"),
        (["bandwidth", "--parameters", "5B", "--overlap", "24"], "must be below"),
    ],
)
def test_bad_options_name_what_is_allowed(words: list[str], message: str) -> None:
    done = diloco(*words)
    assert done.returncode in (2, 4)
    assert message in done.stderr and "Traceback" not in done.stderr


def test_simulate_imports_no_torch_and_no_cloud_client() -> None:
    code = (
        "import sys; sys.argv[0] = 'diloco'\n"
        "from diloco_cli.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'gcsfs', 'fsspec', 'aiohttp'} & set(sys.modules)), file=sys.stderr)"
    )
    for words in (["goodput", *SMALL], ["bandwidth"], ["run", RUN_FILE, "--for", "2 s"]):
        command = [sys.executable, "-c", code, "simulate", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "heavy: []" in done.stderr, done.stderr


RUN_FILE = "examples/quickstart/run.yaml"


def test_a_run_is_simulated_with_a_built_in_scenario() -> None:
    data = data_of("run", RUN_FILE, "--for", "12 s", "--scenario", "spot-storm", "--seed", "3")
    assert data["simulated_s"] == pytest.approx(12.0, abs=1.0) and data["seed"] == 3
    assert 0 < data["goodput"] <= 1 and 0 < data["participation"] <= 1
    assert {island["name"] for island in data["islands"]} == {"belgium", "iowa", "ohio"}
    assert all(island["stalled_s"] >= 0 and island["bytes_up"] > 0 for island in data["islands"])
    assert data["tokens"] > 0 and data["faults"][0]["kind"] == "kill"


def test_the_same_seed_gives_the_same_run_whatever_the_hash_seed() -> None:
    words = ("run", RUN_FILE, "--for", "6 s", "--seed", "3")
    first, second = (data_of(*words, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first | {"wall_s": 0} == second | {"wall_s": 0}


def test_a_dry_run_prints_the_timetable_alone() -> None:
    done = diloco("run", RUN_FILE, "--scenario", "syncer-failover", "-n")
    assert done.stdout.splitlines() == [
        "   150.000 s  #0    kill syncer revive after 10 s",
        "   270.000 s  #1    kill syncer revive after 10 s",
        "   390.000 s  #2    kill syncer revive after 10 s",
        "   510.000 s  #3    kill syncer revive after 10 s",
    ]


def test_a_simulated_run_fits_eighty_columns() -> None:
    done = diloco("run", RUN_FILE, "--for", "5 s")
    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80


def test_a_simulated_run_leaves_a_tape_that_can_be_played(tmp_path: Path) -> None:
    from diloco_cli.tapes.files import read_tape

    done = diloco("run", RUN_FILE, "--for", "5 s", "--tape", str(tmp_path / "tape.json.gz"))
    assert done.returncode == 0, done.stderr
    tape = read_tape(tmp_path / "tape.json.gz")
    assert tape.merges and all(merge.state_digest is None for merge in tape.merges)
    assert tape.run.layout.num_parameters > 100_000 and tape.run.name == "quickstart"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "missing.json"], "no such plan"),
        (["run", "no-such-run"], "no-such-run"),
        (["run", RUN_FILE, "--scenario", "nope"], "built in: "),
        (["run", RUN_FILE, "--for", "0 s"], "above 0"),
    ],
)
def test_a_run_that_cannot_be_simulated_says_why(words: list[str], message: str) -> None:
    done = diloco(*words)
    assert done.returncode in (2, 4)
    assert message in done.stderr and "Traceback" not in done.stderr
