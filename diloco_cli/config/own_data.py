"""Where a run file's own data lie, and what may stand beside them; nothing is read."""

from __future__ import annotations

import os
from pathlib import Path

from diloco_cli.config.build import Origins
from diloco_cli.config.codec import replace
from diloco_cli.config.hub import is_hub_name
from diloco_cli.config.presets import MODEL_PRESETS, ViTShape
from diloco_cli.config.settings import DataSettings, RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.store.url import is_url, normalise_store_url


def placed(run: RunSettings, folder: Path, origins: Origins) -> RunSettings:
    """The run with absolute places of its data: a relative path is beside the run file, in `folder`. Raises
    UsageError for what is no place."""
    data = run.data
    try:
        tokens = normalise_store_url(data.tokens, folder) if data.tokens else None
    except UsageError as error:
        raise UsageError(f"data.tokens: {error.message}", where=origins.get("data.tokens"), hint=error.hint) from None
    text, tokenizer = (_local(data, key, folder, origins) for key in ("text", "tokenizer"))
    return replace(run, data=replace(data, tokens=tokens, text=text, tokenizer=tokenizer))


def _local(data: DataSettings, key: str, folder: Path, origins: Origins) -> str | None:
    """An absolute path or pattern on this machine; of a tokenizer that is not here, its name on the Hub."""
    path: str | None = getattr(data, key)
    if path is None:
        return None
    on_hub = key == "tokenizer" and is_hub_name(path)
    if is_url(path) and not on_hub:
        raise UsageError(
            f"data.{key}: must be a path on this machine, not a URL",
            where=origins.get(f"data.{key}"),
            hint="diloco data tokenize FILES -o gs://BUCKET/PREFIX, then data: {tokens: gs://BUCKET/PREFIX}",
        )
    place = os.path.normpath(folder.absolute() / Path(path).expanduser())
    return path if on_hub and not Path(place).is_dir() else place


def check_own_data(run: RunSettings, where: str) -> None:
    """Raises UsageError for keys that have no effect, and for a model that reads no text."""
    data, usual = run.data, DataSettings()
    if data.args and not data.entrypoint:
        raise UsageError("data: args belong to an entrypoint, and there is none", where=where)
    if data.is_own:
        if run.model.preset and isinstance(MODEL_PRESETS[run.model.preset], ViTShape):
            raise UsageError(f"data: {run.model.preset} reads images, not tokens", where=where)
        return
    idle = [key for key in ("tokenizer", "held_out", "cache_bytes") if getattr(data, key) != getattr(usual, key)]
    if idle:
        key = idle[0].removesuffix("_bytes")
        raise UsageError(f"data.{key}: it has an effect on tokens and text alone", where=where)
