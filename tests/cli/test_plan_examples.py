"""The worked examples of examples/plan: their figures, and that the README shows what the commands print."""

from __future__ import annotations

import importlib.util
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from diloco_cli.forecast.goodput import simulated
from diloco_cli.launch.plan_files import resolve
from diloco_cli.plan.plan import Plan
from tests.forked import run_diloco

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plan"
LET_IN = ["sync.codec=int4", "sync.weights_codec=int4", "sync.every=221"]


@cache
def planned(*overrides: str, run: str = "run.yaml") -> Plan:
    return resolve(EXAMPLES / run, overrides, anew=True).plan


def test_four_islands_give_the_worked_figures() -> None:
    plan = planned()
    assert [round(i.tokens_per_s / 1000) for i in plan.islands] == [465, 165, 3]
    assert [round(i.step_s, 2) for i in plan.islands] == [1.13, 1.59, 23.67]
    assert [i.local_steps for i in plan.islands] == [100, 71, 5]
    assert [round(i.up_mbps_needed) for i in plan.islands] == [142] * 3
    assert [round(i.availability, 3) for i in plan.islands] == [0.97, 0.90, 0.95]
    assert plan.verdict == "feasible with warnings"
    (home,) = plan.excluded
    assert "needs 142 Mbps up, has 30 Mbps" in home.reason
    assert (
        "--set sync.codec=int4 --set sync.weights_codec=int4 --set sync.every=221 (a round of 4.15 min)"
        in home.suggestions
    )
    assert "do without it, as this plan does: -3.0 % tokens/s" in home.suggestions


def test_the_way_out_lets_the_home_in_with_its_worked_figures() -> None:
    plan = planned(*LET_IN)
    home = plan.islands[3]
    assert round(home.tokens_per_s / 1000) == 19
    assert round(home.step_s, 2) == 3.37
    assert home.up_mbps_needed <= 30
    assert round(home.availability, 3) == 0.98
    assert not plan.excluded


def test_no_island_sends_more_than_its_link_carries() -> None:
    for plan in (planned(), planned(*LET_IN), planned(run="tpu-run.yaml"), planned(run="machines-run.yaml")):
        for island in plan.islands:
            assert island.up_mbps_available is None or island.up_mbps_needed <= island.sent_mbps
            assert island.up_mbps_available is None or island.sent_mbps <= island.up_mbps_available


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_the_closed_form_agrees_with_the_events_for_every_quorum(quorum: int) -> None:
    found = simulated(planned(f"sync.quorum={quorum}"))
    assert found.failures_percent == pytest.approx(found.closed_form_percent, abs=3.0)
    assert found.quorum_percent == pytest.approx(found.closed_form_quorum_percent, abs=2.5)


def test_three_generations_of_tpus_take_part_with_settings_that_were_searched() -> None:
    plan = planned(run="tpu-run.yaml")
    assert [i.name for i in plan.islands] == ["v5p-ohio", "v6e-holland", "v5e-nevada"]
    assert [i.shards for i in plan.islands] == ["ddp over 64", "fsdp over 64", "fsdp over 128"]
    # n x peak x 0.40 over 6 N + 12 L d S: 64 x 459, 64 x 918 and 128 x 197 TFLOP/s, 1.99e10 FLOPs a token; of these
    # N / (N + 140,000 a TFLOP/s) with N = 3B: 97.9 %, 95.9 % and 99.1 %
    assert [round(i.tokens_per_s / 1000) for i in plan.islands] == [577, 1130, 501]
    assert not any(setting.pinned for setting in plan.settings)
    assert plan.prediction.tokens_per_s > 5 * plan.prediction.synchronous_tokens_per_s


def module_of(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def forked(words: list[str], cwd: Path, env: dict[str, str], **_: bool) -> subprocess.CompletedProcess[str]:
    """`python -m diloco_cli ...` as a fork of one that has loaded everything."""
    return run_diloco(*words[3:], folder=cwd, COLUMNS=env["COLUMNS"])


def test_the_readme_shows_what_the_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("record")
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=forked))
    text = module.README.read_text(encoding="utf-8")
    blocks = list(module.BLOCK.finditer(text))
    assert len(blocks) >= 6
    for block in blocks:
        assert module.recorded(block) == block[0], f"run examples/plan/record.py: {block['command']} prints other text"


def test_the_table_of_reality_has_only_what_can_be_compared() -> None:
    whole = ("merged tokens/s", "merged tokens/s, steady", "wall time, s", "iowa: bytes/s up")
    rows = [{"what": what, "predicted": 20_000.0, "measured": 19_000.0, "ratio": 0.95} for what in whole]
    table = module_of("reality").table(
        [*rows, {"what": "iowa: tokens/s", "predicted": 2.0, "measured": None, "ratio": None}]
    )
    assert table.splitlines()[-3:] == [
        "| merged tokens/s | 20,000 | 19,000 | 0.950 |",
        "| iowa: bytes/s up | 20,000 | 19,000 | 0.950 |",
        "| iowa: tokens/s | 2 | ? | ? |",
    ]
