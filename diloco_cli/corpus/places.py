"""Where a run's own data are read from on this machine.

$DILOCO_SHARDS names this machine's own copy of the token shards of a run: a folder or URL. It need not be trusted: the
run's format has the digest of the index.
"""

from __future__ import annotations

from pathlib import Path

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
    folders = [fixed_folder(data.text)] if data.text else []
    folders += [Path(data.tokenizer)] if data.text and data.tokenizer else []
    return tuple(real_url(str(folder)) for folder in folders)
