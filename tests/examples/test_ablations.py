"""The ablations' machinery on a sample: every variant can be played, and one study makes its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from examples.quality.methods.fleets import play_fleet
from examples.quality.methods.trial import make_run

ONE_ROUND = 24 * 2 * 128  # of two learners, in tokens


def test_a_study_prints_a_row_for_each_of_its_variants(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--studies", "codec", "--seeds", "1", "--jobs", "1", "--tokens", str(ONE_ROUND), "--output", str(tmp_path)]
    load("ablations").main(words)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    losses = {row["labels"]["variant"]: row["loss"] for row in rows}
    assert list(losses) == ["bf16", "fp32", "int8", "int4", "int4, error feedback"]
    assert losses["int4"] != losses["bf16"], "the codec makes a difference, however small"
    printed = capsys.readouterr().out
    assert all(f"| {variant} | 2 | 1 |" in printed for variant in losses)


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_variant_of_every_study_is_a_trial_of_its_own_whose_fleet_merges(
    load: Callable[[str], ModuleType], rounds: int
) -> None:
    """Nothing is trained here."""
    ablations = load("ablations")
    for study in ablations.STUDIES:
        wanted = list(ablations.trials_of(study, ablations.TASK, seeds=1))
        assert len({named.key for named in wanted}) == len(wanted)
        for named in wanted:
            run = make_run(named.trial)
            fleet = play_fleet(run, named.trial.pacings, rounds * run.round_tokens, named.trial.quantum_tokens)
            assert fleet.state.merges
