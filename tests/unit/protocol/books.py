"""A learner's books, without a learner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_cli.protocol.actors.progress import OfferDraft, Progress
from diloco_cli.protocol.log.records import Mixing
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.records import BATCH


def stepped(progress: Progress, steps: int, tokens: int = BATCH) -> list[OfferDraft]:
    """Take so many steps; the offers that came due on the way."""
    drafts = []
    for _ in range(steps):
        progress.stepped(tokens)
        drafts += progress.due(0.0, 0.0)
    return drafts


def hear(progress: Progress, state: RunState) -> bool:
    """Of a log whose merges say nothing of time: offers are made by steps alone."""
    progress.aim.heard(state, 0.0, 0.0)
    return progress.heard(state)


def adopt(progress: Progress, state: RunState, fragment: int = 0, **changes: Any) -> tuple[Mixing, OfferDraft | None]:
    """Adopt the fragment's newest version as a learner does: (by what rule, the send since which progress is kept)."""
    output = replace(state.outputs[fragment], **changes)
    mixing = progress.mixing_of(output, state)
    since = progress.kept_since(fragment) if mixing == "rebase" else None
    if mixing == "rebase":
        progress.rebased(output, since)
    else:
        progress.adopted(output)
    return mixing, since
