"""The comparison under kills: what is killed when, what counts, and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "comparison"
ABOUT = {"machine": "a machine", "load": 0.5, "commit": "c0ffee1", "longest_s": 2.0, "hangs": False, "kills": 2}


@pytest.fixture(name="storm")
def _storm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return import_module("storm")


def test_both_contenders_are_killed_alike_and_every_part_in_its_turn(storm: ModuleType) -> None:
    one, other = (list(storm.StormCase(method, 15.0, 1).kills(600.0)) for method in ("ddp", "diloco"))
    assert one == other and len(one) == 39
    assert [at_s for at_s, _ in one] == sorted(at_s for at_s, _ in one)
    assert {target for _, target in one} == set(storm.TARGETS)
    assert not list(storm.StormCase("ddp", None, 1).kills(600.0))


class Still:
    """Two steps, and then nothing."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def marks(self) -> int:
        return min(2, len(self.killed))

    def kill(self, target: str) -> None:
        self.killed.append(target)

    def tokens(self) -> float:
        return 10.0 * self.marks()

    def close(self) -> None:
        pass


def test_what_makes_no_progress_hangs_and_ends(storm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = _seconds()
    monkeypatch.setattr(storm.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(storm.time, "sleep", lambda seconds: None)
    still = Still()
    found = storm.weathered(storm.StormCase("ddp", 15.0, 1), still, 600.0)
    assert found["hangs"] and found["kills"] == len(still.killed) < 39
    assert 0 < found["tokens_per_s"] < 1 and found["longest_s"] > 0


def _seconds() -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s += 0.5


def test_a_share_is_of_ones_own_undisturbed_rate(storm: ModuleType) -> None:
    figures = {
        ("ddp", None): [200.0],
        ("ddp", 15.0): [50.0, 70.0, 60.0],
        ("diloco", None): [100.0],
        ("diloco", 15.0): [90.0],
    }
    rows = [
        {"method": method, "every_s": every_s, "seed": seed, "tokens_per_s": value, **ABOUT}
        for (method, every_s), values in figures.items()
        for seed, value in enumerate(values)
    ]
    lines = list(storm.table(rows))
    assert "| 15 s | data-parallel, restarted by torchrun | 60.0 | 30 % (25 to 35, n=3) | 2 s | 0 of 3 |" in lines
    assert "| 15 s | `diloco` | 90.0 | 90 % (90 to 90, n=1) | 2 s | 0 of 1 |" in lines
    assert lines[-1] == "12 kills. a machine, load 0.5 to 0.5, commit c0ffee1."


def test_checkpoints_are_read_in_the_order_of_their_steps(storm: ModuleType, tmp_path: Path) -> None:
    for step in (20, 100, 40):
        (tmp_path / f"step-{step:09d}.pt").touch()
    assert [storm.step_of(path) for path in storm.checkpoints(tmp_path)] == [20, 40, 100]


@pytest.mark.long
@pytest.mark.parametrize("method", ["ddp", "diloco"])
def test_each_comes_through_kills_and_leaves_nothing(storm: ModuleType, method: str) -> None:
    found = storm.measured(storm.StormCase(method, 10.0, 0), 40.0)
    assert found["kills"] == 3 and found["tokens_per_s"] > 0 and not found["hangs"]


def test_a_spare_counts_while_it_is_there(storm: ModuleType) -> None:
    mixed = import_module("mixed")
    rows = [{"merged": 96, "possible": 100, **ABOUT}, {"merged": 99, "possible": 100, **ABOUT}]
    assert next(mixed.table(rows)).startswith("97.5 % of the tokens")
