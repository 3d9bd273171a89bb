"""A tiny Hugging Face tokenizer in a folder, made without the Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def write_tokenizer(folder: Path, words: list[str]) -> Path:
    """Words between spaces; [UNK] is 0, [END] is 1. Skips the test where tokenizers is not installed."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'diloco[hf]'")
    numbers = {word: number for number, word in enumerate(["[UNK]", "[END]", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[END]"}}))
    return folder
