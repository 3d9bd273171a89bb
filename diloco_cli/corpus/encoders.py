"""From text to tokens: byte by byte, or by the tokenizer of Hugging Face in a folder or of a name on the Hub.

Of a tokenizer only `tokenizer.json` is used, which is data: no code of a tokenizer is ever run. The package
`tokenizers` comes with the extra `hf`. A name's snapshot in the Hub's cache is used again once it is there; a run or an
index therefore names a tokenizer by the digest of its file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco_cli.config.huggingface import is_hub_name, is_known_to_lack, parted, snapshot
from diloco_cli.config.models import BYTE_VOCABULARY
from diloco_cli.digests import digest
from diloco_cli.environment import environment_flag
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import install_hint

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizer_folder(name: str, tell: Callable[[str], object] = lambda line: None) -> Path:
    """Where the `tokenizer.json` lies. `tell`: what is said before something is fetched, and if what ends a text is not
    known. Raises NotFoundError if it is neither here nor on the Hub."""
    if Path(name).is_dir() or not is_hub_name(name):
        return Path(name)
    bare, revision = parted(name)
    found = snapshot(bare, revision, TOKENIZER)
    if found is None:
        tell(f"fetching {bare} from the Hub")
        found = _fetched(name, bare, revision)
    if not (found / TOKENIZER_CONFIG).is_file() and not is_known_to_lack(found, TOKENIZER_CONFIG):
        _fetch_config(bare, found.name, tell)
    return found


def _fetch_config(bare: str, commit: str, tell: Callable[[str], object]) -> None:
    """It says what ends a text; a repository may have none."""
    hub = _hub()
    try:
        hub.hf_hub_download(bare, TOKENIZER_CONFIG, revision=commit)
    except Exception as error:  # the package raises many kinds
        if isinstance(error, hub.errors.LocalEntryNotFoundError) or not isinstance(
            error, hub.errors.EntryNotFoundError
        ):
            tell(f"{bare}: its {TOKENIZER_CONFIG} cannot be fetched, so nothing is put between texts")


def _fetched(name: str, bare: str, revision: str | None) -> Path:
    """The snapshot that the tokenizer's file is in now."""
    hub = _hub()
    try:
        return Path(hub.hf_hub_download(bare, TOKENIZER, revision=revision)).parent
    except Exception as error:  # the package raises many kinds
        cut_off = isinstance(error, hub.errors.LocalEntryNotFoundError)  # no network, or none is to be used
        why = f"the Hub says: {type(error).__name__}: {error}"
        if cut_off:
            why = "HF_HUB_OFFLINE is set" if environment_flag("HF_HUB_OFFLINE") else "the Hub cannot be reached"
        at = f" --revision {revision}" if revision else ""
        raise NotFoundError(
            f"no {TOKENIZER} of {name!r}: no folder of that name here, not in the Hub's cache, and {why}",
            hint=f"hf download {bare} {TOKENIZER} {TOKENIZER_CONFIG}{at} while there is a network; or give a folder",
        ) from error


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError("huggingface_hub is not installed here", hint=install_hint("hf")) from error
    hub: Any = huggingface_hub
    hub.logging.set_verbosity_error()  # it would tell of each retry
    return hub


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
    """The tokenizer of a folder, without what it would put around a text. What spells a special token stays text:
    only `end` ends a document."""

    def __init__(self, folder: Path) -> None:
        data = _read(folder)
        self.digest: str | None = digest(data)
        self._tokenizer = _parsed(data, folder)
        numbers = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = 1 + max(numbers.values(), default=0)
        end = _end_of_text(folder)
        self.end: tuple[int, ...] = (numbers[end],) if end in numbers else ()
        special = {each.content for each in self._tokenizer.get_added_tokens_decoder().values() if each.special}
        names = (special | ({end} & numbers.keys())) - {_unknown(data)}
        self._special = np.array([numbers[name] for name in names], np.uint32)

    def encode(self, texts: list[bytes]) -> list[Tokens]:
        decoded = [text.decode() for text in texts]
        found = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        tokens = [np.asarray(each.ids, np.uint32) for each in found]
        for each in tokens:
            if (special := each[np.isin(each, self._special)]).size:
                raise UsageError(
                    f"there is text that becomes the special token {self._tokenizer.id_to_token(int(special[0]))!r}",
                    hint="take that text out, or use a tokenizer whose special tokens no text spells",
                )
        return tokens


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
    found.encode_special_tokens = True  # as text
    return found


def _unknown(data: bytes) -> str | None:
    """The token of what the model does not know, which text may become."""
    model = json.loads(data).get("model", {})
    name, number = model.get("unk_token"), model.get("unk_id")
    if name is None and number is not None:  # of a Unigram model, whose vocabulary is a list
        name = model["vocab"][number][0]
    return name if isinstance(name, str) else None


def _end_of_text(folder: Path) -> str | None:
    """The name of the token that ends a text, as the folder's config says."""
    try:
        with (folder / TOKENIZER_CONFIG).open("rb") as stream:
            named = json.loads(stream.read(MAX_FILE_BYTES)).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None
