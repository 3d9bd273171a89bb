"""A small pretrained model, so that this page needs no download: a Llama of 0.1 M parameters, trained on prose.

    python base.py [STEPS]

It reads bytes of the manual that Python brings along (`help("for")`), and writes what any trainer of transformers
writes, `save_pretrained`: base/ with a config.json and model.safetensors.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "base"
SEQUENCE, BATCH = 128, 8
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=SEQUENCE,
    tie_word_embeddings=True,
)


def main(steps: int = 200) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    text = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,))
        tokens = torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()])
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f} nats per byte of prose")
    model.save_pretrained(FOLDER)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
