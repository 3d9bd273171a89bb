"""Where a run's own data are read from on this machine.

$DILOCO_SHARDS names this machine's own copy of the token shards of a run: a folder or URL. It need not be trusted: the
run's format has the digest of the index.
"""

from __future__ import annotations

from pathlib import Path

from diloco_cli.config.hub import HUB, is_hub_name
from diloco_cli.config.settings import DataSettings
from diloco_cli.corpus.text import fixed_folder
from diloco_cli.environment import environment_value
from diloco_cli.store.open import real_url

SHARDS_VARIABLE = "DILOCO_SHARDS"


def shards_here() -> str | None:
    return environment_value(SHARDS_VARIABLE)


def data_places(data: DataSettings) -> tuple[str, ...]:
    """The URLs of all that is read because the settings name it, as they are without symbolic links and `..`."""
    if data.args.get("digest") and shards_here():
        return ()
    if data.tokens:
        return (real_url(data.tokens),)
    if not data.text:
        return ()
    return (real_url(str(fixed_folder(data.text))), *([_place_of(data.tokenizer)] if data.tokenizer else []))


def _place_of(tokenizer: str) -> str:
    """A name on the Hub is looked for in the working directory first."""
    on_hub = is_hub_name(tokenizer) and not Path(tokenizer).is_dir()
    return f"{HUB}{tokenizer.removeprefix(HUB)}" if on_hub else real_url(tokenizer)
