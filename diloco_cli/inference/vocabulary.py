"""Text as a model's tokens and back: bytes, or a tokenizer of Hugging Face from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from diloco_cli.config.models import BYTE_VOCABULARY, TEXT_DATA
from diloco_cli.config.settings import RunSettings
from diloco_cli.corpus.encoders import TOKENIZER, tokenizer_digest, tokenizer_folder
from diloco_cli.errors import UsageError
from diloco_cli.paths import install_hint

UNKNOWN = "\ufffd"  # stands for bytes that are no whole character, or not yet


class Vocabulary(Protocol):
    """`size`: tokens from here on are no text; None: the model's are all. `begin`: what a text without a token before
    it begins with; `end`: the token after which a text is over, if there is one."""

    size: int | None
    begin: int
    end: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """A token is a byte of UTF-8. A text begins after a line break."""

    size: int | None = BYTE_VOCABULARY
    begin = ord("\n")
    end: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Words:
    """Those of a tokenizer's folder; no code from it is run. `bare`: nothing is put around a text, and one begins where
    another has ended: as in token shards that were made of text here."""

    size: int | None = None

    def __init__(self, folder: Path, bare: bool = False) -> None:
        self._tokenizer, self._bare = _tokenizer(folder), bare
        self.end: int | None = self._tokenizer.eos_token_id
        first = self._tokenizer.bos_token_id
        begins = (self.end, first, 0) if bare else (first, self.end, 0)
        self.begin: int = next(token for token in begins if token is not None)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=not self._bare)]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def vocabulary_of(run: RunSettings, tokenizer: str | None, size: int) -> Vocabulary:
    """As named; else bytes, for a model that was trained on bytes or knows nothing else. Raises UsageError where
    neither is so, and for another tokenizer than the one that made the run's own data."""
    if tokenizer is not None:
        folder, made_by = tokenizer_folder(tokenizer), run.data.args.get("tokenizer") if run.data.is_own else None
        if made_by is not None and (folder / TOKENIZER).is_file() and tokenizer_digest(str(folder)) != made_by:
            raise UsageError(
                "wrong tokenizer: the run's data were made by another one",
                where=f"--tokenizer {tokenizer}",
                hint=f"--tokenizer {run.data.tokenizer or 'FOLDER'}, with the tokenizer.json of digest {made_by}",
            )
        return Words(folder, bare=made_by is not None)
    reads_bytes = run.data.preset == TEXT_DATA or run.data.text is not None or size == BYTE_VOCABULARY
    if reads_bytes and run.data.tokenizer is None:
        return Bytes()
    known = run.data.tokenizer or "FOLDER"
    raise UsageError(
        f"the model has {size} tokens, and no tokenizer is named here that says what they are",
        where="--tokenizer",
        hint=f"--tokenizer {known}, with the tokenizer.json that the run's data was made with",
    )


class TextStream:
    """Tokens that come one by one, as the text that they add."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._shown = 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> str:
        """What can be shown now: not a character of which some bytes are still to come."""
        self._tokens.append(token)
        text = self._vocabulary.decode(self._tokens)
        return "" if text.endswith(UNKNOWN) else self._advance(text)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._advance(self._vocabulary.decode(self._tokens))

    def _advance(self, text: str) -> str:
        new, self._shown = text[self._shown :], len(text)
        return new


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "a tokenizer needs transformers, which is not installed here", where="--tokenizer", hint=install_hint("hf")
        ) from error
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}", where="--tokenizer", hint="a folder with a tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UsageError(
            f"transformers finds no tokenizer in it: {type(error).__name__}: {error}",
            where=f"--tokenizer {folder}",
            hint="AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes one",
        ) from error
