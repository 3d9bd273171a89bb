"""The comparison under kills: what is killed when, what counts, the tables and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diloco_cli.methods import fitting_outer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "comparison"
ABOUT = {"machine": "a machine", "load": 0.5, "commit": "c0ffee1", "longest_s": 2.0, "hangs": False, "kills": 2}


@pytest.fixture(name="storm")
def _storm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return import_module("storm")


def test_all_contenders_are_killed_alike_and_every_part_in_its_turn(storm: ModuleType) -> None:
    one, *others = (list(storm.StormCase(method, 15.0, 1).kills(600.0)) for method in storm.CONTENDERS)
    assert others == [one, one] and len(one) == 40
    assert [at_s for at_s, _ in one] == sorted(at_s for at_s, _ in one) and one[-1][0] < 600
    assert {target for _, target in one} == set(storm.TARGETS)
    assert len(list(storm.StormCase("ddp", 60.0, 1).kills(120.0))) == 2
    assert not list(storm.StormCase("ddp", None, 1).kills(600.0))


class Still:
    """Two steps, and then nothing."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def marks(self) -> int:
        return min(2, len(self.killed))

    def kill(self, target: str) -> bool:
        self.killed.append(target)
        return True

    def tokens(self) -> float:
        return 10.0 * self.marks()

    def load(self, model: torch.nn.Module) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_makes_no_progress_hangs_and_ends(storm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = _seconds()
    monkeypatch.setattr(storm.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(storm.time, "sleep", lambda seconds: None)
    still = Still()
    found = storm.weathered(storm.StormCase("ddp", 15.0, 1), still, 600.0, -3.0)
    assert found["hangs"] and found["kills"] == len(still.killed) < 40
    assert found["tokens_per_s"] == round(20 / 600, 2) and found["longest_s"] > 0
    times, losses = zip(*found["losses"], strict=True)
    assert times[0] > 3 and len(set(losses)) == 1 and losses[0] == pytest.approx(math.log(256), abs=0.5)


def _seconds() -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s += 0.5


def _rows(figures: dict[tuple[str, float | None], list[float]], falls: dict[str, float]) -> list[dict[str, Any]]:
    """Each method's loss falls by that much a second from 6 on, for a minute and a second."""
    return [
        {
            "method": method, "every_s": every_s, "seed": seed, "tokens_per_s": value, **ABOUT,
            "losses": [(at_s, 6 - falls[method] * at_s) for at_s in range(1, 62, 2)],
        }
        for (method, every_s), values in figures.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip


CALM: dict[tuple[str, float | None], list[float]] = {("ddp", None): [200.0], ("diloco", None): [100.0]}


def test_a_share_is_of_ones_own_undisturbed_rate(storm: ModuleType) -> None:
    storms = {("ddp", 15.0): [50.0, 70.0, 60.0], ("diloco", 15.0): [90.0]}
    lines = list(storm.table(_rows(CALM | storms, {"ddp": 0.04, "diloco": 0.02})))
    assert "time to a loss of 4.360 |" in lines[0]  # ddp's after 41 s of 61
    assert (
        "| 15 s | data-parallel, restarted by torchrun | 60.0 | 30 % (25 to 35, n=3) | 2 s | 0 of 3 | 41 s |" in lines
    )
    assert "| 15 s | `diloco` | 90.0 | 90 % (90 to 90, n=1) | 2 s | 0 of 1 | not in 61 s |" in lines
    assert "12 kills. a machine, load 0.5 to 0.5, commit c0ffee1." in lines


def test_goals_are_met_missed_or_open(storm: ModuleType) -> None:
    def said(rows: list[dict[str, Any]]) -> list[str]:
        return [line.partition(":")[0] for line in storm.verdicts(storm.Figures(rows))]

    few, falls = {("ddp", 15.0): [50.0], ("diloco", 15.0): [93.0]}, {"ddp": 0.02, "diloco": 0.04}
    met = _rows(CALM | few, falls)
    assert said(met) == ["- Met", "- Met", "- Met"]
    assert "needs 51 % of data-parallel" in list(storm.verdicts(storm.Figures(met)))[2]
    assert said(_rows(CALM | {**few, ("diloco", 15.0): [84.0]}, {"ddp": 0.04, "diloco": 0.04})) == ["- Missed"] * 3
    assert said(_rows(CALM | {("diloco", 60.0): [95.0]}, falls)) == ["- Met"]
    assert not said(_rows(CALM, falls))


def test_a_hang_in_any_storm_misses_the_goal(storm: ModuleType) -> None:
    def said(count: int, hangs: bool = False) -> tuple[str, str]:
        rows = [{**ABOUT, "every_s": 15.0, "longest_s": 3.0 + n, "hangs": hangs and n == 1} for n in range(count)]
        goal, _, about = storm.hangs_text(rows)
        return goal, about

    assert said(50)[0].startswith("- Met: `diloco` hung in 0 of 50 storms with a kill every 15 s")
    assert said(6)[0].startswith("- Open: `diloco` hung in 0 of 6")
    assert said(6, hangs=True)[0].startswith("- Missed: `diloco` hung in 1 of 6")
    assert said(3)[1].startswith("6 kills; a storm's longest pause: median 4.0 s, worst 5.0 s. a machine")


def test_who_never_comes_to_the_loss_has_a_bound_for_its_time(storm: ModuleType) -> None:
    rows = _rows({**CALM, ("ddp", 15.0): [50.0], ("diloco", 15.0): [93.0]}, {"ddp": 0.02, "diloco": 0.025})
    for row in rows:
        if row["method"] == "ddp" and row["every_s"]:
            row["losses"] = [(at_s, 6.0) for at_s, _ in row["losses"]]
    line = list(storm.verdicts(storm.Figures(rows)))[2]
    assert line.startswith("- Met") and "needs at most 54 % of" in line
    for row in rows:
        if row["method"] == "diloco":
            row["losses"] = [(at_s, 6 - 0.018 * at_s) for at_s, _ in row["losses"]]
    line = list(storm.verdicts(storm.Figures(rows)))[2]
    assert line.startswith("- Open") and "needs at most 77 % of" in line


def test_a_byte_is_guessed_from_those_before_it(storm: ModuleType) -> None:
    reader = import_module("reader")
    model, text = reader.ByteModel(0.0).eval(), torch.randint(256, (1, 30))
    losses = [model(text[:, :-1], text[:, 1:])]
    for place in (0, 20, 29):  # the last is a target alone
        other = text.clone()
        other[0, place] = (other[0, place] + 1) % 256
        losses.append(model(other[:, :-1], other[:, 1:]))
    assert len({loss.item() for loss in losses}) == 4
    until = torch.arange(12)[None]
    after = torch.cat([until[:, :11], torch.tensor([[99]])], 1)
    targets = torch.zeros(1, 11, dtype=torch.long)
    assert model(until[:, :11], targets) == model(after[:, :11], targets)


def test_contenders_train_the_same_with_the_settings_that_fit_so_many_rounds(storm: ModuleType) -> None:
    reader = import_module("reader")
    assert len(reader.ByteModel(0.0).parts()) == reader.FRAGMENTS
    assert sum(len(list(part.parameters())) for part in reader.ByteModel(0.0).parts()) == len(
        list(reader.ByteModel(0.0).parameters())
    )
    rounds = 120.0 / (reader.H * import_module("contenders").STEP_S)
    assert fitting_outer("adamw", rounds) == (reader.OUTER_LR, reader.OUTER_MOMENTUM)


def test_what_is_trained_learns(storm: ModuleType) -> None:
    trainee = import_module("reader").Trainee(0.0)
    batch = trainee.data.batch(0, 1, 0, 256)
    before = trainee.model(*batch).item()
    for _ in range(30):
        trainee.step(0, 1)
    assert trainee.model(*batch).item() < before - 1.5


def test_torchft_that_cannot_be_installed_gives_a_reason(
    storm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = import_module("contenders")
    (tmp_path / "file").touch()
    monkeypatch.setattr(contenders, "torchft_python", lambda: tmp_path / "file" / "bin" / "python")
    assert "file" in contenders.why_no_torchft()


def test_checkpoints_are_read_in_the_order_of_their_steps(storm: ModuleType, tmp_path: Path) -> None:
    restarted = import_module("restarted")
    for step in (20, 100, 40):
        (tmp_path / f"step-{step:09d}.pt").touch()
    assert [restarted.step_of(path) for path in restarted.checkpoints(tmp_path)] == [20, 40, 100]


@pytest.mark.long
@pytest.mark.parametrize("method", ["ddp", "torchft", "diloco"])
def test_each_comes_through_kills_and_leaves_nothing(storm: ModuleType, method: str) -> None:
    if method == "torchft" and (reason := storm.why_no_torchft()):
        pytest.skip(reason)
    found = storm.measured(storm.StormCase(method, 10.0, 0), 40.0)
    assert found["kills"] == 3 and found["tokens_per_s"] > 0 and not found["hangs"]


def test_a_spare_counts_while_it_is_there(storm: ModuleType) -> None:
    mixed = import_module("mixed")
    rows = [{"merged": 96, "possible": 100, **ABOUT}, {"merged": 99, "possible": 100, **ABOUT}]
    assert next(mixed.table(rows)).startswith("97.5 % of the tokens")
