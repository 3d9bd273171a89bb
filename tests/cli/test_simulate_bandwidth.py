"""`diloco simulate bandwidth`, as users meet it."""

from __future__ import annotations

import pytest

from tests.cli.test_simulate import data_of, diloco
from tests.forked import run_diloco

INVENTORY = "templates/inventory.yaml"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """int4 up, int8 down, whatever a search would choose."""
    path = tmp_path_factory.mktemp("plan") / "p.json"
    pinned = ["--set", "sync.codec=int4", "--set", "sync.weights_codec=int8"]
    assert run_diloco("plan", INVENTORY, *pinned, "-o", str(path)).returncode == 0
    return str(path)


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
        assert row["weights_codec"] is row["down_gbps"] is row["published_gbps"] is None
    assert data["fitted"] == ["buckets"]
    assert {row["gbps"] for row in data_of("bandwidth", "--parameters", "1B", "--sites", "1")["rows"]} == {0}


def test_a_plan_shows_both_directions(plan: str) -> None:
    data = data_of("bandwidth", "--plan", plan)
    rows = [row for row in data["rows"] if row["method"] == "decoupled"]
    assert {row["codec"] for row in rows} >= {"bf16", "int8", "int4"}
    assert data["planned"]["codec"] == "int4" and {row["weights_codec"] for row in rows} == {"int8"}
    most = next(row for row in rows if row["codec"] == "int4" and row["utilisation_percent"] == 99)
    for island in data["islands"]:
        assert 1000 * most["gbps"] >= 0.99 * island["up_mbps_needed"] * (1 - 1e-9)
        assert 1000 * most["down_gbps"] >= 0.99 * island["down_mbps_needed"] * (1 - 1e-9)
    text = diloco("bandwidth", "--plan", plan).stdout
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "Planned: int4 up, int8 down" in text
    above = [number for number, line in enumerate(lines) if line.startswith("int4 H=") and " up " in line]
    assert len(above) == 1 and lines[above[0] + 1].startswith("  int8 down ")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--parameters", "5B", "--overlap", "24"], "--overlap 24 must be below --every 24", "--overlap 23"),
        (["--parameters", "0"], "--parameters must be above 0", "--parameters 5B"),
        (["--parameters", "5B", "--step", "0 s"], "--step must be above 0", "--step '1 s'"),
        (["--step", "0 s"], "--step needs a model of your own", "add --parameters 5B"),
        (["--sites", "4", "--every", "24"], "--sites, --every need a model of your own", "add --parameters 5B"),
        (["--plan", "P", "--fragments", "24"], "--plan says model, islands and schedule", "leave out --fragments"),
        (["--plan", "P", "--parameters", "5B"], "--plan says model, islands and schedule", "leave out --parameters"),
    ],
)
def test_what_cannot_be_or_would_be_ignored_is_refused(words: list[str], message: str, hint: str) -> None:
    done = diloco("bandwidth", *words)
    assert done.returncode == 2 and not done.stdout
    assert f"error: {message}" in done.stderr and f"hint: {hint}\n" in done.stderr
