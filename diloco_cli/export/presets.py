"""The text presets as GPT-2, which they are but for biases: GPT-2 has them, and theirs are zero."""

from __future__ import annotations

from typing import Any

import torch

from diloco_cli.config.presets import GPTShape
from diloco_cli.export.naming import ExportedTensor, Naming

OF_A_BLOCK = {  # in the preset -> in GPT-2, whose matrices are [in, out]
    "attention_norm": ("ln_1", False),
    "qkv": ("attn.c_attn", True),
    "attention_out": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp_in": ("mlp.c_fc", True),
    "mlp_out": ("mlp.c_proj", True),
}


def gpt2_naming(shape: GPTShape) -> Naming:
    width, layers = shape.width, range(shape.layers)
    out = {"qkv": 3 * width, "mlp_in": 4 * width}
    targets = {
        "embedding.weight": (ExportedTensor("transformer.wte.weight"),),
        "positions.weight": (ExportedTensor("transformer.wpe.weight"),),
        "norm.weight": (ExportedTensor("transformer.ln_f.weight"),),
    }
    beside = {"transformer.ln_f.bias": torch.zeros(width)}
    for layer in layers:
        for ours, (theirs, transposed) in OF_A_BLOCK.items():
            name = f"transformer.h.{layer}.{theirs}"
            targets[f"blocks.{layer}.{ours}.weight"] = (ExportedTensor(f"{name}.weight", transposed),)
            beside[f"{name}.bias"] = torch.zeros(out.get(ours, width))
    return Naming(targets, beside)


def gpt2_config(shape: GPTShape) -> dict[str, Any]:
    """config.json. Bytes have no symbol that begins or ends a text."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": shape.vocabulary,
        "n_positions": shape.sequence, "n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads,
        "n_inner": 4 * shape.width, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
