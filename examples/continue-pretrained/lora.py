"""A frozen model with LoRA adapters, which alone are trained and exchanged.

    python lora.py adapters.safetensors FOLDER

puts what `diloco export` wrote into peft's own format.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent


class WithLoss(nn.Module):
    """Tokens [batch, length] and their successors -> mean loss in nats per token."""

    def __init__(self, adapted: PeftModel) -> None:
        super().__init__()
        self.adapted = adapted

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.adapted(input_ids=tokens, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(base: str = "base", rank: int = 8) -> WithLoss:
    """`base`: a folder beside this file. peft freezes it; with it frozen, only the adapters travel."""
    model = AutoModelForCausalLM.from_pretrained(HERE / base, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return WithLoss(get_peft_model(model, config))


def save(exported: str, folder: str) -> None:
    model = build()
    model.load_state_dict(load_file(exported), strict=False)
    model.adapted.save_pretrained(folder)


if __name__ == "__main__":
    save(*sys.argv[1:])
