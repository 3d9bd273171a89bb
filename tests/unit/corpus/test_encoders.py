"""From text to tokens, by a tokenizer in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.corpus.encoders import FolderEncoder, encoder_of, tokenizer_digest
from diloco_cli.errors import NotFoundError, UsageError
from tests.tokenizer import write_tokenizer


def test_bytes_need_no_tokenizer() -> None:
    assert [list(tokens) for tokens in encoder_of(None).encode([b"ab", b"\xff"])] == [[97, 98], [255]]


def test_a_folder_s_tokenizer_gives_its_tokens_its_size_and_what_ends_a_text(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, ["the", "cat", "sat"])
    encoder = FolderEncoder(folder)
    assert encoder.vocabulary == 5 and encoder.digest == tokenizer_digest(str(folder))
    assert [list(tokens) for tokens in encoder.encode([b"the cat", b"sat dog"])] == [[2, 3], [4, 0]]
    assert encoder.end == (1,)
    other = FolderEncoder(write_tokenizer(tmp_path / "other", ["the", "dog", "sat"]))
    assert other.digest != encoder.digest


def test_a_folder_without_a_config_ends_no_text(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path, ["a"]) / "tokenizer_config.json").unlink()
    assert FolderEncoder(tmp_path).end == ()


def test_what_is_no_tokenizer_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no tokenizer\.json") as missing:
        encoder_of(str(tmp_path))
    assert "save_pretrained" in str(missing.value.hint)
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(UsageError, match="no tokenizer"):
        encoder_of(str(tmp_path))
