"""A tokenizer's folder: one on this machine, or a snapshot from the Hugging Face Hub, which is fetched if need be.

A name is NAME or NAME@REVISION. What was fetched before is used again: main moves on only where `hf download` is asked
to. So is what a run or an index says of a tokenizer the digest of its file, never a name alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco_cli.config.hub import is_hub_name, parted, snapshot
from diloco_cli.environment import environment_flag
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import install_hint

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizer_folder(name: str) -> Path:
    """Where the `tokenizer.json` lies. Raises NotFoundError if it is neither here nor on the Hub."""
    if Path(name).is_dir() or not is_hub_name(name):
        return Path(name)
    bare, revision = parted(name)
    found = snapshot(bare, revision, TOKENIZER)
    if found is None:
        found = _fetched(name, bare, TOKENIZER, revision)
    if not (found / TOKENIZER_CONFIG).is_file():  # it says what ends a text
        _fetched(name, bare, TOKENIZER_CONFIG, found.name, optional=True)
    return found


def _fetched(name: str, bare: str, file: str, revision: str | None, optional: bool = False) -> Path:
    """The snapshot that this file of the Hub is in now. `optional`: the repository may have none."""
    hub = _hub()
    try:
        return Path(hub.hf_hub_download(bare, file, revision=revision)).parent
    except Exception as error:  # the package raises many kinds
        cut_off = isinstance(error, hub.errors.LocalEntryNotFoundError)  # no network, or none is to be used
        if optional and isinstance(error, hub.errors.EntryNotFoundError) and not cut_off:
            return Path()
        why = f"the Hub says: {type(error).__name__}: {error}"
        if cut_off:
            why = "HF_HUB_OFFLINE is set" if environment_flag("HF_HUB_OFFLINE") else "the Hub cannot be reached"
        at = f" --revision {revision}" if revision else ""
        raise NotFoundError(
            f"no {file} of {name!r}: no folder of that name here, not in the Hub's cache, and {why}",
            hint=f"hf download {bare} {TOKENIZER} {TOKENIZER_CONFIG}{at} while there is a network; or give a folder",
        ) from error


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError("huggingface_hub is not installed here", hint=install_hint("hf")) from error
    return huggingface_hub
