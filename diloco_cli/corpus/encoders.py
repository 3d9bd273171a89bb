"""From text to tokens: byte by byte, or by a Hugging Face tokenizer in a folder or of a name on the Hub.

Only the folder's `tokenizer.json` is used, which is data: no code of a tokenizer is ever run. The package `tokenizers`
comes with the extra `hf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco_cli.config.presets import BYTE_VOCABULARY
from diloco_cli.corpus.hub import TOKENIZER, TOKENIZER_CONFIG, tokenizer_folder
from diloco_cli.digests import digest
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import install_hint

MAX_FILE_BYTES = 64 << 20
Tokens = npt.NDArray[Any]


class Encoder(Protocol):
    """`vocabulary`: every token is below it. `digest`: of the tokenizer; None for bytes. `end`: what follows each
    document."""

    vocabulary: int
    digest: str | None
    end: tuple[int, ...]

    def encode(self, texts: list[bytes]) -> list[Tokens]:
        """The tokens of each, [n]. Raises UnicodeDecodeError for what is no text."""
        ...


class ByteEncoder:
    vocabulary = BYTE_VOCABULARY
    digest: str | None = None
    end: tuple[int, ...] = (10,)  # a line's end

    def encode(self, texts: list[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class FolderEncoder:
    """The tokenizer of a folder, without what it would put around a text."""

    def __init__(self, folder: Path) -> None:
        data = _read(folder)
        self.digest: str | None = digest(data)
        self._tokenizer = _parsed(data, folder)
        numbers = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = 1 + max(numbers.values(), default=0)
        end = _end_of_text(folder)
        self.end: tuple[int, ...] = (numbers[end],) if end in numbers else ()

    def encode(self, texts: list[bytes]) -> list[Tokens]:
        found = self._tokenizer.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray(each.ids, np.uint32) for each in found]


def encoder_of(tokenizer: str | None, tell: Callable[[str], object] = lambda line: None) -> Encoder:
    """By the tokenizer in this folder, or of this name on the Hub; None: bytes. Raises NotFoundError, UsageError."""
    return ByteEncoder() if tokenizer is None else FolderEncoder(tokenizer_folder(tokenizer, tell))


def tokenizer_digest(tokenizer: str) -> str:
    """Of the tokenizer in a folder or of a name, without loading it. Raises NotFoundError if there is none."""
    return digest(_read(tokenizer_folder(tokenizer)))


def _read(folder: Path) -> bytes:
    try:
        with (folder / TOKENIZER).open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotFoundError(
            f"the tokenizer's folder has no {TOKENIZER} that can be read: {error.strerror}",
            where=str(folder),
            hint="name one of the Hub as OWNER/NAME or hf://NAME, or write a folder:"
            ' python -c "from transformers import AutoTokenizer as A;'
            " A.from_pretrained('NAME').save_pretrained('FOLDER')\"",
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{TOKENIZER} has more than {MAX_FILE_BYTES >> 20} MiB", where=str(folder))
    return data


def _parsed(data: bytes, folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        where, hint = "data.tokenizer", install_hint("hf")
        raise UsageError("tokenizers is not installed here", where=where, hint=hint) from error
    try:
        found = Tokenizer.from_str(data.decode())
    except Exception as error:  # the package has no narrower one
        raise UsageError(f"no tokenizer: {error}", where=str(folder / TOKENIZER)) from error
    found.no_truncation()
    found.no_padding()
    return found


def _end_of_text(folder: Path) -> str | None:
    """The name of the token that ends a text, as the folder's config says."""
    try:
        with (folder / TOKENIZER_CONFIG).open("rb") as stream:
            named = json.loads(stream.read(MAX_FILE_BYTES)).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None
