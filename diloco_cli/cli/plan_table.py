"""The table of islands: as many columns as the terminal has room for, the important ones first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_cli.cli.output import table
from diloco_cli.plan.plan import PlannedIsland
from diloco_cli.units import format_count, format_duration

MAX_ROWS = 24  # of a large fleet on a terminal: the largest islands
UNLIMITED = 10**6


@dataclass(frozen=True)
class Column:
    """`rank`: the columns with the largest ones go first where there is no room."""

    heading: str
    cell: Callable[[PlannedIsland], str]
    rank: int
    left: bool = False


def _accelerators(island: PlannedIsland) -> str:
    nodes = island.devices // int(island.accelerators.rpartition(":")[2])
    return island.accelerators + (f" x{nodes}" if nodes > 1 else "")


def _of(needed: float, available: float | None) -> str:
    """'142/2k', or '142/?' where nothing is known."""
    have = "?" if available is None else format_count(available)
    return f"{needed:.0f}/{have}" if needed >= 10 else f"{needed:.2g}/{have}"


COLUMNS = (
    Column("island", lambda i: i.name, 0, left=True),
    Column("region", lambda i: i.region, 12, left=True),
    Column("accelerators", _accelerators, 1, left=True),
    Column("tok/s", lambda i: format_count(i.tokens_per_s), 0),
    Column("batch", lambda i: format_count(i.batch_tokens), 4),
    Column("step", lambda i: format_duration(i.step_s), 2),
    Column("H_i", lambda i: str(i.local_steps), 2),
    Column("idle", lambda i: f"{i.idle_percent:.0f}%", 5),
    Column("up Mbps", lambda i: _of(i.up_mbps_needed, i.up_mbps_available), 3),
    Column("down", lambda i: _of(i.down_mbps_needed, i.down_mbps_available), 6),
    Column("sent", lambda i: f"{i.sent_mbps:.3g}", 10),
    Column("transfer", lambda i: f"{i.transfer_s:.3g}/{format_duration(max(0.0, i.transfer_window_s))}", 9),
    Column("GB", lambda i: _of(i.memory_gb_needed, i.memory_gb_available), 7),
    Column("sharding", lambda i: i.sharding, 10, left=True),
    Column("there", lambda i: f"{100 * i.availability:.1f}%", 8),
    Column("price/h", lambda i: f"{i.price_per_h:g}", 11),
)


def at_most(limit: int) -> int:
    """How many entries are shown: so many on a terminal; in a pipe or a file nothing is left out."""
    return limit if sys.stdout.isatty() else UNLIMITED


def islands_table(islands: Sequence[PlannedIsland], width: int, max_rows: int) -> list[str]:
    """Lines of at most `width` characters, unless names alone need more. Nothing inside a cell is ever cut; of more
    than `max_rows` islands the largest are shown."""
    largest = sorted(islands, key=lambda i: (-i.tokens_per_s, i.name))[:max_rows]
    shown = largest if len(islands) > max_rows else islands
    columns = list(COLUMNS)
    while True:
        lines = _lines(columns, shown)
        widest = max(columns, key=lambda column: column.rank)
        if max(map(len, lines)) <= width or widest.rank == 0:
            break
        columns.remove(widest)
    if len(islands) > len(shown):
        lines.append(f"the {len(shown)} largest of {len(islands)} islands; all of them: | less, or --json")
    return lines


def _lines(columns: Sequence[Column], islands: Sequence[PlannedIsland]) -> list[str]:
    rows = [[column.heading for column in columns], *([column.cell(i) for column in columns] for i in islands)]
    return table(rows, gap=" ", left=[number for number, column in enumerate(columns) if column.left])
