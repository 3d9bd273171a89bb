"""A digest of a history, by which two lives of one seed are compared."""

from __future__ import annotations

from diloco_cli.digests import digest
from tests.histories.script import HistoryResult


def trace_of(outcome: HistoryResult) -> str:
    """Of everything that happened and of all that was written."""
    happened = [f"{when_s!r} {text} {key}" for when_s, text, key in outcome.tail]
    lies = [f"{key} {digest(data)}" for key, data in sorted(outcome.objects.items())]
    return digest("\n".join([*happened, *lies, str(outcome.violation)]).encode())
