"""Islands that their owner trains with a loop of his own (`from diloco_cli import join`): `infra: loop/DATA`.

DATA says what the island's positions mean. It stands in the run's format, or in the log of an island that joined later,
so that `status` and `verify` can say it without asking the island.
"""

from __future__ import annotations

from typing import Literal

from diloco_cli.errors import UsageError, suggestion

LOOP = "loop"
DataClass = Literal["addressed", "stateful", "external"]
DATA_CLASSES: dict[str, DataClass] = {"addressed": "addressed", "stateful": "stateful", "external": "external"}
MEANS: dict[DataClass, str] = {
    "addressed": "its loop draws each position of its shard once",
    "stateful": "its loader goes on from a saved state, and skips what was offered since",
    "external": "positions not checked: its loader may repeat samples",
}


def data_class_of(infra: str) -> DataClass | None:
    """How an own loop reads its data; None for an island that `diloco learner` trains."""
    kind, _, data = infra.partition("/")
    return DATA_CLASSES.get(data) if kind == LOOP else None


def infra_of(data: DataClass) -> str:
    return f"{LOOP}/{data}"


def data_class(text: str, where: str) -> DataClass:
    """Raises UsageError for another word."""
    if text not in DATA_CLASSES:
        raise UsageError(
            f"must be one of {', '.join(DATA_CLASSES)}, not {text!r}{suggestion(text, DATA_CLASSES)}", where=where
        )
    return DATA_CLASSES[text]
