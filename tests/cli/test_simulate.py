"""`diloco simulate`, as users meet it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from diloco_cli.cli.simulate import start_ups_of
from diloco_cli.clock import wall_s
from diloco_cli.events.event import Event
from diloco_cli.forecast.run import simulated
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat, sealed
from diloco_cli.protocol.log.keys import SYNCER, epoch_key, heartbeat_key, incarnation_key
from diloco_cli.protocol.rules.capacity import SyncerMachine
from diloco_cli.quantities import time_text
from diloco_cli.signing import LOG
from diloco_cli.store.open import open_store
from tests.benchmarks.pace import make_run
from tests.cli.bucket import make_bucket
from tests.forked import run_diloco

SMALL = ["--chips", "300k", "--learners", "4", "--days", "0.5"]


def diloco(*words: str) -> subprocess.CompletedProcess[str]:
    return run_diloco("simulate", *words)


def data_of(*words: str) -> dict[str, Any]:
    done = diloco(*words, "--json")
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


def test_the_published_table_stands_beside_ours_in_eighty_columns() -> None:
    done = diloco("goodput", "--days", "0.05", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "decoupled M=16" in done.stdout and "Fitted, one set for all cells" in done.stdout.replace("\n", " ")
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("table", ["--mixed", "--scavenge"])
def test_what_was_published_without_failures_stands_beside_ours_in_eighty_columns(table: str) -> None:
    done = diloco("goodput", table)
    assert done.returncode == 0, done.stderr
    assert "2604.21428" in done.stdout and "+0.0" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    data = data_of("goodput", table)
    assert data["fitted"] == [] and {row["difference_points"] is None for row in data["rows"]} == {True, False}


def test_plots_are_whole_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, words in (("one.svg", SMALL), ("grid.svg", ["--days", "0.05", "--seeds", "1"])):
        done = diloco("goodput", *words, "--plot", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


RUN_FILE = "examples/quickstart/run.yaml"


def test_a_run_is_simulated_with_a_built_in_scenario() -> None:
    data = data_of("run", RUN_FILE, "--for", "12 s", "--scenario", "spot-storm", "--seed", "3")
    assert data["simulated_s"] == pytest.approx(12.0, abs=1.0) and data["seed"] == 3
    assert 0 < data["goodput"] <= 1 and 0 < data["participation"] <= 1
    assert {island["name"] for island in data["islands"]} == {"belgium", "iowa", "ohio"}
    assert all(island["stalled_s"] >= 0 and island["up_bytes"] > 0 for island in data["islands"])
    assert data["tokens"] > 0 and data["faults"][0]["kind"] == "kill"


def test_a_dry_run_prints_the_timetable_alone() -> None:
    done = diloco("run", RUN_FILE, "--scenario", "syncer-failover", "-n")
    assert done.stdout.splitlines() == [
        "   150.000 s  #0    kill syncer revive after 10 s",
        "   270.000 s  #1    kill syncer revive after 10 s",
        "   390.000 s  #2    kill syncer revive after 10 s",
        "   510.000 s  #3    kill syncer revive after 10 s",
    ]


def test_a_simulated_run_fits_eighty_columns(tmp_path: Path) -> None:
    (tmp_path / "many.yaml").write_text(MANY)
    done = diloco("run", RUN_FILE, "--for", "5 s", "--scenario", str(tmp_path / "many.yaml"))
    assert done.returncode == 0, done.stderr
    assert "no effect on ohio" in done.stdout and "2 skipped" in done.stdout
    assert "goodput" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80


SLOW_ALL = """
version: 1
name: slow
duration: 10 s
faults:
  - {kind: slow, target: all, at: 1 s, for: 1 s, factor: 2}
"""
MANY = """
version: 1
name: many
duration: 10 s
faults:
  - {kind: slow, target: "region:us-central1", at: 1 s, for: 500 ms, factor: 2}
  - {kind: kill, target: all, at: 2 s, revive_after: 1 s}
  - {kind: kill, target: all, at: 2100 ms}
  - {kind: pause, target: ohio, at: 2200 ms, for: 3 s}
"""
RARE = """
version: 1
name: rare
duration: 10 s
faults:
  - {kind: kill, target: learners, poisson: 100 d}
hypotheses: ["goodput >= 0.9"]
"""


def answer(folder: Path, *words: str) -> dict[str, Any]:
    done = run_diloco(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_of_a_scenario_does_not_happen_or_is_not_checked_is_said(tmp_path: Path) -> None:
    done = diloco("run", RUN_FILE, "--for", "4 s", "--scenario", "blackout")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "warning: 0 of 1 planned faults happened: the simulated time ended after 4 s" in said
    assert "warning" not in diloco("run", RUN_FILE, "--for", "4 s").stdout
    rare = tmp_path / "rare.yaml"
    rare.write_text(RARE)
    done = diloco("run", RUN_FILE, "--for", "4 s", "--scenario", str(rare))
    assert "warning: rare: with seed 0 no fault falls into its 10 s" in done.stdout
    assert "warning: rare: checked by `diloco chaos run`, not here: goodput >= 0.9" in " ".join(done.stdout.split())


def test_an_existing_run_is_simulated_without_failures_and_prices_and_that_is_said(tmp_path: Path) -> None:
    url = make_bucket(tmp_path / "bucket" / "nano")
    found = answer(tmp_path, "simulate", "run", url, "--for", "10 min", "--json")
    assert found["data"]["merges"] > 0 and found["data"]["cost"] == 0
    assert [text for text in found["warnings"] if "no failures, no prices" in text]
    assert "warnings" not in found["data"]
    assert [text for text in found["warnings"] if "its machine is guessed: 1 ms a call, 48 at a time" in text]


def test_an_existing_run_is_simulated_with_the_machine_that_its_syncer_measured(tmp_path: Path) -> None:
    """A syncer that takes much longer than a slot of 0.2 s merges as often as `status` says that it can."""
    history = simulated(make_run(4, 0.2), {}, (), 0, 20.0, SyncerMachine(0.001, None, None, 1e9))
    folder, store = tmp_path / "bucket" / "pace", history.world.store
    bucket = open_store(str(folder), create=True)
    for key in store.list("", limit=1 << 20):
        bucket.create(key, store.get(key) or b"")
    machine = {"call_s": 0.03, "bytes_s": 0.1, "processor_s": 0.2, "reads_back": False, "connections": 2}
    said = SyncerHeartbeat("SERVING", history.state.epoch, history.state.n, "far", heartbeats=1 << 20, **machine)
    key = heartbeat_key(SYNCER)
    bucket.put(key, sealed(history.run.keyring, LOG, key, said))
    url = f"file://{folder}"
    syncer = answer(tmp_path, "status", url, "--json")["data"]["syncer"]
    needed_s = syncer["busy_percent"] / 100 * syncer["slot_s"]
    assert 0.6 < needed_s < 0.8  # 0.03 * (2 + 4 + 1 + 1) + 0.1 + 0.2, and what is made now and then
    found = answer(tmp_path, "simulate", "run", url, "--for", "40 s", "--json")
    assert found["data"]["simulated_s"] / found["data"]["merges"] == pytest.approx(needed_s, rel=0.2)
    (told,) = [text for text in found["warnings"] if "as that has measured it" in text]
    assert "30 ms a call, 2 at a time" in told and "not read back" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["goodput", "--chips", "2", "--learners", "8"], "out of range"),
        (["goodput", "--mtbi", "12"], "no unit"),
        (["goodput", "--mixed", "--scavenge"], "two tables"),
        (["goodput", "--scavenge", "--chips", "2", "--seed", "0"], "takes no --chips, --seed"),
        (["goodput", *SMALL, "--plot", "x.png"], "SVG"),
        (["goodput", "--mtbi", "1 s"], "fewer chips, or ones that fail more rarely"),
        (["goodput", "--mtbi", "1 d", "--days", "300"], "--days 4.16"),
        (["run", "missing.json"], "no such plan"),
        (["run", RUN_FILE, "--scenario", "nope"], "built in: "),
        (["run", RUN_FILE, "--for", "0 s"], "above 0"),
        (["run", RUN_FILE, "--scenario", "{slow}"], "#0 at 1 s: a simulated run cannot do slow to the syncer"),
    ],
)
def test_what_cannot_be_simulated_says_why(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text(SLOW_ALL)
    done = diloco(*(word.format(slow=tmp_path / "slow.yaml") for word in words))
    assert done.returncode in (2, 4)
    assert message in done.stderr and "Traceback" not in done.stderr


def test_what_the_user_sets_is_neither_fitted_nor_compared_with_what_was_published_for_another() -> None:
    text = diloco("goodput", "--days", "0.02", "--seeds", "1", "--mtbi", "30 d").stdout
    assert "difference to" not in text and "largest difference" not in text and "one interrupt per chip" in text
    assert "standard deviation" not in text and "one seed" in text
    assert max(map(len, text.splitlines())) <= 80
    data = data_of("goodput", *SMALL, "--repair", "5 min", "--mtbi", "30 d")
    assert data["given"] == ["mtbi_s", "repair_scale_s", "repair_mean_s"] and not set(data["given"]) & set(
        data["fitted"]
    )
    assert data["constants"]["repair_mean_s"] == pytest.approx(300) and "repair_shape" in data["fitted"]
    assert "chip time" in data["goodput_meaning"] and data["rows"][0]["goodput_sd"] is None


def test_every_row_names_its_setting_and_json_what_was_fitted() -> None:
    data = data_of("bandwidth")
    assert {row["method"] for row in data["rows"]} == {"data_parallel", "decoupled"}
    assert {(row["sync_every"], row["fragments"], row["overlap"]) for row in data["rows"]} == {
        (0, 0, 0),
        (100, 18, 2),
        (24, 24, 2),
    }
    assert data["constants"].items() >= {"sync_every": 100, "fragments": 18, "overlap": 2, "buckets": 44}.items()
    assert data["fitted"] == ["sync_every", "fragments", "buckets"]
    text = diloco("bandwidth").stdout
    assert "H = 100, P = 18 (both fitted)" in text.replace("\n", " ") and max(map(len, text.splitlines())) <= 80


def test_a_model_of_ones_own() -> None:
    """1e9 parameters of 16 bits, twice 3/4 of them, in 10 steps of 2 s and their stalls; tau is long enough."""
    words = ("--parameters", "1B", "--sites", "4", "--step", "2 s", "--every", "10", "--fragments", "10")
    data = data_of("bandwidth", *words, "--overlap", "9")
    rows = [row for row in data["rows"] if row["method"] == "decoupled" and row["codec"] == "bf16"]
    assert [row["utilisation_percent"] for row in rows] == [50, 75, 90, 95, 99]
    for row in rows:
        assert row["gbps"] == pytest.approx(16 * 1.5 * row["utilisation_percent"] / 100 / 20, rel=1e-6)
        assert row["published_gbps"] is None
    assert data["fitted"] == ["buckets"]
    assert {row["gbps"] for row in data_of("bandwidth", "--parameters", "1B", "--sites", "1")["rows"]} == {0}


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--parameters", "5B", "--overlap", "24"], "--overlap 24 must be below --every 24", "--overlap 23"),
        (["--parameters", "0"], "--parameters must be above 0", "--parameters 5B"),
        (["--parameters", "5B", "--step", "0 s"], "--step must be above 0", "--step '60 s'"),
        (["--step", "0 s"], "--step needs a model of your own", "add --parameters 5B"),
        (["--sites", "4", "--every", "24"], "--sites, --every need a model of your own", "add --parameters 5B"),
    ],
)
def test_what_cannot_be_or_would_be_ignored_is_refused(words: list[str], message: str, hint: str) -> None:
    done = diloco("bandwidth", *words)
    assert done.returncode == 2 and not done.stdout
    assert f"error: {message}" in done.stderr and f"hint: {hint}\n" in done.stderr


def test_how_long_units_of_a_run_take_to_start_is_read_from_its_events_and_claims(tmp_path: Path) -> None:
    store, now_s = open_store(str(tmp_path)), wall_s()
    events = [Event(time_text(now_s + s), "started", unit, "") for s, unit in ((0.0, "iowa"), (50.0, "syncer"))]
    events += [Event(time_text(now_s + 90.0), "restarted", "iowa", ""), Event(time_text(now_s), "merged", "ohio", "")]
    claims = (incarnation_key("iowa", 1), 3.0), (incarnation_key("iowa", 2), 95.0), (epoch_key(2), 52.0)
    for key, s in claims:
        store.create(key, b"x")
        os.utime(tmp_path / key, (now_s + s, now_s + s))
    found = start_ups_of(store, events)
    assert [round(found.of(name, 1) or 0.0, 2) for name in ("iowa", "syncer")] == [4.0, 2.0]
