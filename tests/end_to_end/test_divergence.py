"""Real processes: one of two learners begins to climb the loss with deltas of usual size, and the loss jumps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import EXAMPLES
from tests.forked import run_diloco

BAD, SHARD, TURNS_AT = "mallory", 1, 60_000  # tokens of its shard
CPU = "accelerators: 'cpu:1', tokens_per_s: 20000, emulate: {slowdown: 3.0}"
ISLANDS = "".join(f"  - {{name: {name}, region: here, {CPU}}}\n" for name in ("ann", BAD))
WRONG = (  # from then on it climbs the loss
    (
        "        return self._draw(1 + position * num_shards + shard",
        f"        global SIGN\n        SIGN = -1 if shard == {SHARD} and position > {TURNS_AT} else 1\n"
        "        return self._draw(1 + position * num_shards + shard",
    ),
    ("        return F.cross_entropy", "        return (SIGN if self.training else 1) * F.cross_entropy"),
    ("VOCABULARY = 32\n", "VOCABULARY = 32\nSIGN = 1\n"),
)


def begun(folder: Path) -> None:
    """The example of one's own model, for two islands; the training of one of them goes wrong on the way."""
    shutil.copytree(EXAMPLES / "own-model", folder, ignore=shutil.ignore_patterns("bucket", "__pycache__"))
    (folder / "inventory.yaml").write_text(f"version: 1\nstore: {{url: bucket}}\nislands:\n{ISLANDS}")
    module = folder / "model.py"
    text = module.read_text()
    for honest, wrong in WRONG:
        assert honest in text
        text = text.replace(honest, wrong)
    module.write_text(text)


def log(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "bucket" / "own-model" / "commit").glob("[!.]*"))
    return [json.loads(path.read_bytes().split(b"\n")[0]) for path in paths]


@pytest.mark.long
def test_the_run_pauses_and_goes_on_without_the_learner_that_a_person_keeps_out(tmp_path: Path) -> None:
    folder, home = tmp_path / "own", str(tmp_path / "home")
    begun(folder)
    words = ("--set", "train.tokens=500k", "--set", "evaluation.every=1")
    paused = run_diloco("launch", "own/run.yaml", "--json", *words, folder=tmp_path, DILOCO_HOME=home)
    kinds = [commit["kind"] for commit in log(folder)]
    assert kinds.count("rollback") >= 1 and kinds[-1] == "stop", paused.stderr
    seen = json.loads(run_diloco("status", "own-model", "--json", folder=tmp_path, DILOCO_HOME=home).stdout)["data"]
    assert seen["state"] == "PAUSED" and all(one["cosine"] is not None for one in seen["learners"])
    for command in (("quarantine", BAD, "own-model"), ("rollback", "own-model", "--to", good(folder), "-y")):
        done = run_diloco(*command, folder=tmp_path, DILOCO_HOME=home)
        assert done.returncode == 0, done.stderr
    done = run_diloco("resume", "own-model", "--json", folder=tmp_path, DILOCO_HOME=home)
    data = json.loads(done.stdout)["data"]
    assert data["state"] == "FINISHED" and data["loss"] < 0.5
    checked = run_diloco("verify", "own-model", "--json", folder=tmp_path, DILOCO_HOME=home)
    assert checked.returncode == 0, checked.stdout


def good(folder: Path) -> str:
    """The newest commit that evaluated well, and that no rollback has undone."""
    commits = log(folder)
    back = max((commit["n"] for commit in commits if commit["kind"] == "rollback"), default=0)
    well = [c["evaluated"] for c in commits if c["kind"] == "eval" and not c["jumped"] and c["n"] > back]
    return str(well[-1] if well else back)
