"""`diloco simulate goodput`, as users meet it: what it says of its constants, the user's own plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_simulate import SMALL, data_of, diloco
from tests.forked import run_diloco


@pytest.mark.parametrize(
    "extra",
    [
        ["--chips", "1.2M", "--learners", "8", "--mtbi", "2 h"],
        ["--chips", "10M", "--learners", "8", "--stragglers", "1", "--slowdown", "1000", "--fast"],
    ],
)
def test_fleets_that_hardly_get_through_a_step_have_a_closed_form_too(extra: list[str]) -> None:
    for row in data_of("goodput", "--days", "0.01", *extra)["rows"]:
        assert 0 <= row["closed_form_goodput_percent"] <= row["closed_form_uptime_percent"] <= 100


def test_what_the_user_sets_is_neither_fitted_nor_compared_with_what_was_published_for_another() -> None:
    text = diloco("goodput", "--fast", "--days", "0.02", "--seeds", "1", "--mtbi", "30 d").stdout
    assert "difference to" not in text and "largest difference" not in text and "one interrupt per chip" in text
    assert "standard deviation" not in text and "one seed" in text
    assert max(map(len, text.splitlines())) <= 80
    data = data_of("goodput", *SMALL, "--fast", "--repair", "5 min", "--mtbi", "30 d")
    assert data["given"] == ["mtbi_s", "repair_scale_s", "repair_mean_s"] and not set(data["given"]) & set(
        data["fitted"]
    )
    assert data["constants"]["repair_mean_s"] == pytest.approx(300) and "repair_shape" in data["fitted"]
    assert "chip time" in data["goodput_meaning"] and data["rows"][0]["goodput_sd"] is None


def test_slices_are_said_to_be_as_large_as_they_are() -> None:
    few = diloco("goodput", "--fast", "--chips", "8", "--learners", "8", "--days", "0.01").stdout.replace("\n", " ")
    assert "each learner is one slice, of 1)" in few and "% of chip time" in few


def test_a_quorum_that_is_missing_is_paid_for_in_the_plans_goodput(tmp_path: Path) -> None:
    island = "infra: ssh, accelerators: 'H100-SXM:8', link: {up: 2 Gbps, down: 2 Gbps}, mtbf: 1 h, restart: 20 min"
    (tmp_path / "inventory.yaml").write_text(
        "version: 1\nstore: {url: gs://bucket/runs, region: here}\nregions: {here: {}}\nislands:\n"
        + "".join(f"  - {{name: {name}, region: here, hosts: {name}, {island}}}\n" for name in ("iowa", "ohio"))
    )
    (tmp_path / "run.yaml").write_text(
        "version: 1\nname: x\ninventory: inventory.yaml\nmodel: {parameters: 1.0B, layers: 16, width: 2048, "
        "sequence: 2048}\ndata: {preset: python-stdlib}\ntrain: {tokens: 2000B, batch_tokens: 524288}\n"
    )
    found = {}
    for quorum in (1, 2):
        words = ["plan", "inventory.yaml", "-f", "run.yaml", "--set", f"sync.quorum={quorum}", "-o", f"{quorum}.json"]
        done = run_diloco(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        plan = str(tmp_path / f"{quorum}.json")
        found[quorum] = data_of("goodput", "--plan", plan, "--days", "30", "--fast")
        assert found[quorum]["quorum"] == quorum
        assert set(found[quorum]["constants"]) == {"down_s", "up_s", "repair_shape", "repair_exponent"}
        assert set(found[quorum]["fitted"]) == set(found[quorum]["constants"])
    one, two = found[1]["rows"][2], found[2]["rows"][2]
    assert one["quorum_percent"] is None and two["quorum_percent"] == pytest.approx(100 * 0.75**2, abs=3)
    assert two["goodput_percent"] < one["goodput_percent"] - 10
    assert two["goodput_percent"] == pytest.approx(two["closed_form_goodput_percent"], abs=3)
    text = diloco("goodput", "--plan", str(tmp_path / "2.json"), "--days", "1", "--fast").stdout.replace("\n", " ")
    assert "The quorum of 2 is there" in text and "and then stand still" in text
