"""Settings as people list them: a key and a value a line, and the place where each was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEYS = {"sync.skip_after_s": "sync.skip_after", "retention.grace_s": "retention.grace"}
"""Settings with another name in the file."""


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(key as in the file, value), in the order of the settings."""
    for name, value in tree.items():
        place = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from leaves(value, place)
        else:
            yield KEYS.get(place, place), value


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """A place for the key itself, or for the mapping that it was given in."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "default")
