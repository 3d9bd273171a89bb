"""`plan --explain` and `plan --calibrate` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_cli.cli.plan_table import at_most
from diloco_cli.units import format_count

MOST_SECTIONS = 14  # on a terminal only the first islands of a large fleet are shown
NUMBER_COLUMNS = 14


def explanation_text(explanations: Sequence[Mapping[str, Any]]) -> str:
    """Grouped by what the numbers belong to; the formula, and under it the same with numbers."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for item in explanations:
        groups.setdefault(item["of"], []).append(item)
    lines: list[str] = []
    most = at_most(MOST_SECTIONS)
    for of in [*groups][:most]:
        lines += ["", f"{of}:"] if lines else [f"{of}:"]
        for item in groups[of]:
            lines += _explained(item)
    if len(groups) > most:
        lines += ["", f"and {len(groups) - most} more islands: | less, or --json"]
    return "\n".join(lines)


def _explained(item: Mapping[str, Any]) -> list[str]:
    value = f"{item['value']:,.6g}" if abs(item["value"]) < 1e6 else format_count(item["value"])
    head = f"  {item['name']} = {value}{' ' + item['unit'] if item['unit'] else ''}"
    body = f"      = {item['formula']}"
    return [head, body, f"      = {item['numbers']}"] if item["numbers"] else [head, body]


def calibration_text(comparison: Sequence[Mapping[str, Any]]) -> str:
    """Predicted and measured side by side."""
    rows = [("compared", "predicted", "measured", "measured / predicted")]
    rows += [(row["what"], _number(row["predicted"]), _number(row["measured"]), _ratio(row)) for row in comparison]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " ".join(cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(
            zip(row, widths, strict=True)
        )).rstrip()
        for row in rows
    ]  # fmt: skip
    notes = [f"{row['what']}: {row['note']}" for row in comparison if row["note"]]
    return "\n".join([*lines, *notes, "", "planned again with the measured speeds:"])


def _number(value: float | None) -> str:
    return "?" if value is None else format_count(value)


def _ratio(row: Mapping[str, Any]) -> str:
    return "?" if row["ratio"] is None else f"{row['ratio']:.3f}"
