"""A run of real processes becomes a tape, and the tape gives the same parameters again, on one process."""

from __future__ import annotations

import gzip
import json

from safetensors.numpy import load_file

from tests.end_to_end.conftest import SURVIVED_TOKENS, Playground


def test_a_run_is_recorded_from_its_bucket_and_replayed_bit_for_bit(survived: Playground) -> None:
    finished = survived.json("status", "quickstart")
    recorded = survived.json("export", "quickstart", "--tape", "run.tape.gz")
    assert recorded["merges"] >= 10 and recorded["incarnations"] >= 3

    replayed = survived.json("replay", "run.tape.gz", "-o", "replayed.safetensors")
    assert replayed["bit_for_bit"] is True and replayed["differs_at"] is None
    assert replayed["merges_played"] == recorded["merges"] == replayed["merges_with_digest"]
    assert replayed["tokens"] == finished["tokens"] >= SURVIVED_TOKENS
    assert replayed["loss"] == finished["loss"], "the same parameters have the same held-out loss"
    survived.json("export", "quickstart", "-o", "run.safetensors")
    ours, theirs = (load_file(survived.directory / f"{name}.safetensors") for name in ("replayed", "run"))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)

    altered = json.loads(gzip.decompress((survived.directory / "run.tape.gz").read_bytes()))
    steps = next(event for event in altered["tracks"][0]["events"] if event["kind"] == "steps")
    steps["count"] += 1
    (survived.directory / "altered.tape").write_text(json.dumps(altered))
    differs = survived.run("replay", "altered.tape")
    assert differs.returncode == 11, differs.stderr
    assert "DIFFERENT" in differs.stdout and "altered.tape: merge " in differs.stderr and "hint:" in differs.stderr
