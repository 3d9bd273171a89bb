"""Times as the log says them: their writers' words. Nothing rests on them, and none of them can break a screen."""

from __future__ import annotations

from datetime import UTC, datetime

UNKNOWN = datetime.fromtimestamp(0, UTC)


def moment(text: str) -> datetime:
    """The moment of an ISO 8601 text, in UTC where it names no zone; UNKNOWN for anything else."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return UNKNOWN
    if not UNKNOWN.year <= found.year < datetime.max.year:
        return UNKNOWN
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
