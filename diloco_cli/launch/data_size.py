"""How often a run will go through its own data, as far as this machine can tell without reading it: for `plan`."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.config.settings import RunSettings
from diloco_cli.corpus.index import read_index
from diloco_cli.corpus.sources import find_sources
from diloco_cli.store.open import open_store, parse_url
from diloco_cli.units import format_count, format_size


def planned_epochs(run: RunSettings) -> str | None:
    """One line; None for other data, and for shards in a bucket, which a plan does not ask. Raises NotFoundError for
    text or shards that are not there."""
    data = run.data
    if data.text:
        sources = find_sources([data.text])
        size = sum(source.size for source in sources)
        found = f"data: {len(sources)} files, {format_size(size)} of text"
        return f"{found}: tokenized at launch" if data.tokenizer else f"{found}, {_epochs(run, size)}"
    if not data.tokens or parse_url(data.tokens).scheme != "file":
        return None
    index = read_index(open_store(data.tokens))
    return (
        f"data: {format_count(index.num_tokens)} tokens in {Path(data.tokens).name}, {_epochs(run, index.num_tokens)}"
    )


def _epochs(run: RunSettings, tokens: int) -> str:
    epochs = run.train.tokens / (tokens * (1 - run.data.held_out))
    return (
        f"{run.data.held_out:.0%} held out: the run's {format_count(run.train.tokens)} tokens are {epochs:.3g} epochs"
    )
