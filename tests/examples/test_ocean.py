"""The ocean on a sample: links are as fast as they should be, contenders run, nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "comparison"


@pytest.fixture(name="ocean")
def _ocean(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return import_module("ocean")


@pytest.mark.long
def test_a_step_costs_data_parallel_training_what_its_bytes_take(
    ocean: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is measured is the link. A ring of four sends 1.5 times the gradients, of 16 bits each."""
    reason = ocean.why_not()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(ocean, "FRAGMENTS", 2)  # long slots: a loaded machine holds them, too
    size = ocean.Size(step_s=0.05, every=48, rounds=6, steps=2)
    gbps = 20.0
    with ocean.sea((*ocean.ISLANDS, ocean.SYNCER)) as water:
        play = ocean.Ocean(water, size, tmp_path)
        rate = play.tokens_per_s(ocean.Voyage("ddp", gbps, 0))
        assert play.tokens_per_s(ocean.Voyage("diloco", None, 0)) > 0
    step_s = 1.5 * 16 * ocean.num_parameters() / size.bits_per_s(gbps)
    assert 0 < rate <= 1.02 * len(ocean.ISLANDS) * ocean.BATCH_TOKENS / step_s, "faster than its link"
    assert water.address(ocean.HUB)
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not [line for line in left.splitlines() if f"-{ocean.os.getpid()}-" in line]


def test_predictions_are_those_of_simulate_bandwidth(ocean: ModuleType) -> None:
    """By hand, of a step of 2 s: 288 Gbit of gradients over a ring of four take 57.6 s at 5 Gbit/s, a third of a step
    and a 44th of the rest pass before; 200 steps and one exchange are 400 s and 57.6 s. What is needed there is had."""
    assert 2 / ocean.predicted("ddp", 5.0, 200) == pytest.approx(57.6 + 2 / 3 + 4 / 3 / 44, rel=1e-3)
    assert ocean.predicted("sync", 5.0, 200) == pytest.approx(400 / 457.6, rel=1e-3)
    assert ocean.predicted("diloco", 5.0, 200) == pytest.approx(1.0, rel=1e-3)


def test_the_table_has_medians_and_what_they_are_of_islands_that_exchange_nothing(ocean: ModuleType) -> None:
    figures = {("alone", None): [200.0], ("ddp", 5.0): [5.0, 7.0, 6.0], ("diloco", 5.0): [190.0]}
    about = {"machine": "a machine", "load": 0.5, "commit": "c0ffee1"}
    rows = [
        {"method": method, "gbps": gbps, "seed": seed, "tokens_per_s": value, **about}
        for (method, gbps), values in figures.items()
        for seed, value in enumerate(values)
    ]
    lines = "\n".join(ocean.table(rows, ocean.Size()))
    assert "| 5 Gbit/s | data-parallel, 16 bits | 6.0 (5.0 to 7.0, n=3) | 3.0 % | 3.4 % | 31.67x |" in lines
    assert "3 seeds. a machine, load 0.5 to 0.5, commit c0ffee1." in lines


def test_where_there_are_no_links_to_shape_it_says_so(
    ocean: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="skipped: network namespaces are Linux's"):
        ocean.main(["--output", str(tmp_path / "ocean.jsonl")])
