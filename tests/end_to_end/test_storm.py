"""A storm over real processes: what it strikes merges again; PASS is said of a sound run, and of no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import run_diloco
from tests.studies.launched import LaunchedRun, lived, run_file

RUN = run_file(10_000).replace("quorum: 2", "quorum: 1").replace("step_s: 0.1", "step_s: 0.15")
STORM = """\
version: 1
name: short
duration: 10 s
warm_up: 500 ms
faults:
  - {kind: kill, target: l1, at: 1 s, revive_after: 1 s}
  - {kind: pause, target: l0, at: 3 s, for: 1 s}
  - {kind: kill, target: syncer, at: 5 s}
  - {kind: partition, target: l0, at: 7 s, for: 1 s}
  - {kind: kill, target: all, at: 4 s}
constraints: {max_concurrent: 2}
hypotheses: [verify, "goodput >= 0.01", "recovery_p95 <= 10 min"]
"""

SHORT = """\
version: 1
name: shorter
duration: 2 s
faults: [{kind: kill, target: l1, at: 1 s}]
hypotheses: [verify, "goodput >= 9"]
"""


class ForkingRun(LaunchedRun):
    forking = True


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    folder = tmp_path_factory.mktemp("storm")
    with lived(ForkingRun(folder, RUN)) as run:
        (folder / "s.yaml").write_text(STORM)
        run.wait(lambda: len(run.log()) > 32, 120.0)  # what the storm is compared with
        yield run


def storm(run: LaunchedRun, *words: str, file: str = "s.yaml") -> tuple[int, str, str]:
    done = run_diloco("chaos", "run", file, "supervised", *words, folder=run.directory, **run.environment)
    return done.returncode, done.stdout, done.stderr


def test_a_storm_passes_and_fails_once_the_bucket_is_damaged(launched: LaunchedRun) -> None:
    code, out, said = storm(launched, "--json")
    data = json.loads(out)["data"]
    assert code == 0 and data["verdict"] == "PASS", said + out
    rows = [(f["kind"], f["target"], f["verified"], f["healed"]) for f in data["faults"] if not f["skipped"]]
    struck = [("kill", "l1"), ("pause", "l0"), ("kill", "syncer"), ("partition", "l0")]
    assert rows == [(kind, target, True, True) for kind, target in struck]
    skipped = [fault["skipped"] for fault in data["faults"] if not fault["injected"]]
    assert skipped == ["more than 2 units would be disturbed at once"] * 3
    assert all(fault["recovery_s"] > 0 for fault in data["faults"] if fault["injected"])
    again = data["recovery"]["merged_again_s"]
    assert again["max"] >= again["p95"] >= again["median"] > 0 and data["goodput"] > 0.01
    assert data["undisturbed_tokens_per_s"] > 0 and sum(f["tokens_lost"] or 0 for f in data["faults"]) > 0
    assert data["verify"] == {"ok": True, "problem": ""}
    launched.damage_deltas(slice(0, -8))  # all but those that are not merged yet
    (launched.directory / "s3.yaml").write_text(SHORT)
    code, out, said = storm(launched, file="s3.yaml")
    assert code == 7 and out.startswith("FAIL") and "FAIL  goodput >= 9: " in out and "FAIL  verify: " in out, out
    assert "error: verify: the bucket does not agree" in said and "hint: diloco report" in said


def test_the_timetable_is_the_same_byte_for_byte(launched: LaunchedRun) -> None:
    first = storm(launched, "--dry-run")
    assert first[0] == 0 and first[1] == storm(launched, "-n")[1] and first[1].count("\n") == 5
    (launched.directory / "p.yaml").write_text(STORM.replace("target: l1, at: 1 s", "target: learners, every: 2 s"))
    drawn = {storm(launched, "-n", "--seed", seed, file="p.yaml")[1] for seed in "1234"}
    assert len(drawn) > 1


def test_a_run_that_is_elsewhere_is_refused(launched: LaunchedRun, tmp_path: Path) -> None:
    home = {**launched.environment, "DILOCO_HOME": str(tmp_path)}
    done = run_diloco("chaos", "run", "s.yaml", launched.bucket.as_uri(), folder=launched.directory, **home)
    assert done.returncode == 8 and "no unit that may be killed on this machine" in done.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"duration: 10 s": "duration: 99 h\nseed: 1", "at: 5 s": "at: 98 h"}, "and the run is over in"),
        ({"target: l1": "target: l9"}, "there is no unit 'l9'; allowed: l0, l1, syncer, supervisor"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_anything_happens(
    launched: LaunchedRun, changes: dict[str, str], says: str
) -> None:
    text = STORM
    for old, new in changes.items():
        text = text.replace(old, new)
    (launched.directory / "s2.yaml").write_text(text)
    code, _, said = storm(launched, file="s2.yaml")
    assert code == 2 and says in said, said
