"""A run loses a learner, its syncer and its supervisor and never what is committed; what comes out of it then: its loss
once more, text, and a folder that transformers computes with."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import SMALL, SURVIVED_TOKENS, Playground


def commits(place: Playground) -> dict[str, bytes]:
    """The log as it lies in the bucket, without what is being written (no key begins with a dot)."""
    folder = place.directory / "quickstart" / "bucket" / "quickstart" / "commit"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}


def learner(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in status["learners"] if item["name"] == name)
    return found


def test_a_run_survives_learner_syncer_and_supervisor_and_verifies(survived: Playground) -> None:
    """Later the same launch finds it finished, and one with other settings is refused."""
    status = survived.json("status", "quickstart")
    assert status["state"] == "FINISHED" and status["tokens"] >= SURVIVED_TOKENS
    assert status["syncer"]["epoch"] >= 2 and learner(status, "iowa")["incarnation"] >= 2
    assert status["loss"] < 4.0
    heartbeat = survived.directory / "quickstart" / "bucket" / "quickstart" / "heartbeat" / "syncer.json"
    assert json.loads(heartbeat.read_bytes())["reads_back"] is False  # a directory has what fsync confirms
    found = survived.json("verify", "quickstart")
    assert found["ok"] and found["duplicates"] == 0 and found["missing"] == 0 and found["mismatches"] == []
    other, again = (
        survived.run("launch", "quickstart/run.yaml", "--set", f"train.tokens={tokens}", *SMALL)
        for tokens in (300_000, SURVIVED_TOKENS)
    )
    assert other.returncode == 2 and "train.tokens" in other.stderr and "hint:" in other.stderr
    assert again.returncode == 0 and "FINISHED" in again.stdout + again.stderr


def test_the_newest_parameters_are_evaluated_as_the_run_did_at_its_end(survived: Playground) -> None:
    finished = survived.json("status", "quickstart")
    found = survived.json("evaluate", "quickstart")
    assert found["loss"] == pytest.approx(finished["loss"], abs=1e-6) and found["commit"] == finished["commit"]


def test_text_is_written_and_the_same_for_the_same_seed(survived: Playground) -> None:
    words = ("generate", "quickstart", "--prompt", "def ", "--tokens", "24")
    first, again, other = (survived.json(*words, "--seed", seed) for seed in ("3", "3", "4"))
    assert first["text"] == again["text"] != other["text"] and first["tokens"] == 24
    done = survived.run(*words, "--seed", "3")
    assert done.stdout == f"def {first['text']}\n" and "seed 3" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install 'diloco[hf]'"
)
def test_transformers_has_the_loss_of_the_run(survived: Playground) -> None:
    from transformers import AutoModelForCausalLM

    from diloco_cli.tasks.data import ByteText

    exported = survived.json("export", "quickstart", "--to", "hf", "-o", "out", "--max-shard-size", "100kB")
    assert "model.safetensors.index.json" in exported["files"]
    model = AutoModelForCausalLM.from_pretrained(survived.directory / "out").eval()
    total, count = 0.0, 0
    for tokens, targets in ByteText(64, 0).held_out(4 * 64):
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits.float().flatten(0, 1)
        total += float(torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"))
        count += targets.numel()
    assert total / count == pytest.approx(survived.json("status", "quickstart")["loss"], abs=1e-3)
