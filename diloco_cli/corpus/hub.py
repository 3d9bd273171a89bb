"""A tokenizer's folder: one on this machine, or a snapshot from the Hugging Face Hub, which is fetched if need be.

A name is one of config/hub.py. What was fetched before is used again: main moves on only where `hf download` is asked
to. So is what a run or an index says of a tokenizer the digest of its file, never a name alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_cli.config.hub import is_hub_name, is_known_to_lack, parted, snapshot
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
