"""What is said of islands that their owners' own loops train: what the positions in the log mean there."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_cli.config.own_loops import MEANS, DataClass, data_class_of
from diloco_cli.protocol.log.records import Island


def own_loop_note(island: Island, note: str) -> str:
    """`note`, after what `status` says of the island's data."""
    data = data_class_of(island.infra)
    if data is None:
        return note
    said = "own loop, positions not checked" if data == "external" else f"own loop, {data} data"
    return f"{said}; {note}" if note else said


def own_loops(islands: Iterable[Island]) -> dict[str, DataClass]:
    """Of each island with a loop of its own, by name."""
    return {island.name: data for island in islands if (data := data_class_of(island.infra)) is not None}


def own_loop_lines(loops: dict[str, DataClass]) -> list[str]:
    """One line for each class of data."""
    names = {data: [name for name, its in sorted(loops.items()) if its == data] for data in MEANS}
    return [f"own loops, {data} data: {', '.join(names[data])}: {MEANS[data]}" for data in MEANS if names[data]]
