"""A run of real processes becomes a tape, and the tape gives the same parameters again, on one process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from safetensors.numpy import load_file

from tests.end_to_end.conftest import Playground


def test_a_run_is_recorded_from_its_bucket_and_replayed_bit_for_bit(playground: Playground, tmp_path: Path) -> None:
    playground.launch(60_000)
    playground.wait_for(lambda s: s["commit"] >= 4)
    playground.kill("iowa")
    finished = playground.wait_for(lambda s: s["state"] == "FINISHED")
    recorded = playground.json("export", "quickstart", "--tape", "run.tape.gz")
    assert recorded["merges"] >= 10 and recorded["incarnations"] >= 3

    replayed = playground.json("replay", "run.tape.gz", "-o", "replayed.safetensors")
    assert replayed["bit_for_bit"] is True and replayed["differs_at"] is None
    assert replayed["merges_played"] == recorded["merges"] == replayed["merges_with_digest"]
    assert replayed["tokens"] == finished["tokens"] >= 60_000
    assert replayed["loss"] == finished["loss"], "the same parameters have the same held-out loss"
    playground.json("export", "quickstart", "-o", "run.safetensors")
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("replayed", "run"))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)

    altered = json.loads(gzip.decompress((tmp_path / "run.tape.gz").read_bytes()))
    steps = next(event for event in altered["tracks"][0]["events"] if event["kind"] == "steps")
    steps["count"] += 1
    (tmp_path / "altered.tape").write_text(json.dumps(altered))
    differs = playground.run("replay", "altered.tape")
    assert differs.returncode == 11, differs.stderr
    assert "DIFFERENT" in differs.stdout and "altered.tape: merge " in differs.stderr and "hint:" in differs.stderr
