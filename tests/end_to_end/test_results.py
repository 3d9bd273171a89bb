"""What comes out of a run of real processes: its loss once more, text, and a folder that transformers computes with."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.end_to_end.conftest import Playground


def test_the_newest_parameters_are_evaluated_as_the_run_did_at_its_end(survived: Playground) -> None:
    finished = survived.wait_for(lambda data: data["state"] == "FINISHED")
    found = survived.json("evaluate", "quickstart")
    assert found["loss"] == pytest.approx(finished["loss"], abs=1e-6) and found["commit"] == finished["commit"]


def test_text_is_written_and_the_same_for_the_same_seed(survived: Playground) -> None:
    survived.wait_for(lambda data: data["state"] == "FINISHED")
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

    survived.wait_for(lambda data: data["state"] == "FINISHED")
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
