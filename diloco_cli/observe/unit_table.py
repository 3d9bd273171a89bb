"""A row for each unit. Columns go by priority until the rows fit the screen; what is then left to say of a unit stands
below the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from diloco_cli.escaping import escaped
from diloco_cli.observe.lines import BAD, STYLE_OF, WARNING, StyledLine, cut, wrapped
from diloco_cli.observe.status import TOOK_PART, LearnerStatus, Status
from diloco_cli.units import format_count, format_size

COLUMNS = ("LEARNER", "STATE", "INC", "HEARD", "BEHIND", "STEP", "TOK/S", "IN LAST 10", "LOSS", "UP/DOWN", "NOTE")
LEFT = frozenset({"LEARNER", "STATE", "IN LAST 10", "NOTE"})
GIVEN_UP = ("NOTE", "UP/DOWN", "INC", "LOSS", "STEP", "BEHIND", "IN LAST 10")
"""In this order, where the screen is too narrow."""
MAX_NAME, SHORTEST_NAME = 24, 8
GAP = "  "
Row = dict[str, str]


def unit_table(status: Status, width: int | None, max_rows: int | None = None) -> list[StyledLine]:
    """`width` and `max_rows`: those of a screen. With more units, those that are not well come first, and the others
    are counted."""
    rows = [_learner_row(learner) for learner in status.learners]
    left_out: list[Row] = []
    if max_rows is not None and len(rows) > max_rows:
        rows.sort(key=lambda row: (BAD, WARNING).index(_style(row)) if _style(row) in (BAD, WARNING) else 2)
        rows, left_out = rows[: max_rows - 1], rows[max_rows - 1 :]
    rows += _syncer_rows(status)
    columns = _fitting(rows, width)
    lines = [
        StyledLine(text, "bold") for text in _aligned([dict(zip(COLUMNS, COLUMNS, strict=True))], rows, columns, width)
    ]
    lines += [
        StyledLine(text, state=row["STATE"])
        for text, row in zip(_aligned(rows, rows, columns, width), rows, strict=True)
    ]  # fmt: skip
    if left_out:
        counts = Counter(row["STATE"] for row in left_out)
        words = ", ".join(f"{number} {state}" for state, number in counts.most_common())
        lines.append(StyledLine(cut(f"and {len(left_out)} more learners: {words}", width), "dim"))
    if "NOTE" not in columns:
        notes = [f"{row['LEARNER']}: {row['NOTE']}" for row in rows if row["NOTE"]]
        lines += [StyledLine(text) for note in notes for text in wrapped(note, width, "    ", "  ")]
    return lines


def _style(row: Row) -> str:
    return STYLE_OF.get(row["STATE"], "")


def _fitting(rows: Sequence[Row], width: int | None) -> list[str]:
    """The columns that are shown."""
    columns = list(COLUMNS)
    if width is None:
        return columns
    for name in GIVEN_UP:
        if sum(_widths(rows, columns).values()) + len(GAP) * (len(columns) - 1) <= width:
            break
        columns.remove(name)
    return columns


def _widths(rows: Sequence[Row], columns: Sequence[str], width: int | None = 0) -> dict[str, int]:
    """Of each column. On a screen names are shortened, at most to what is left for them."""
    widths = {name: max([len(name), *(len(row.get(name, "")) for row in rows)]) for name in columns}
    if width is not None:
        others = sum(widths[name] + len(GAP) for name in columns if name != "LEARNER")
        most = min(MAX_NAME, max(SHORTEST_NAME, width - others)) if width else MAX_NAME
        widths["LEARNER"] = min(widths["LEARNER"], most)
    return widths


def _aligned(shown: Sequence[Row], rows: Sequence[Row], columns: Sequence[str], width: int | None) -> list[str]:
    widths = _widths(rows, columns, width)
    return [
        GAP.join(
            cut(row.get(name, ""), widths[name]).ljust(widths[name])
            if name in LEFT
            else row.get(name, "").rjust(widths[name])
            for name in columns
        ).rstrip()
        for row in shown
    ]


def _learner_row(learner: LearnerStatus) -> Row:
    return {
        "LEARNER": escaped(learner.name),
        "STATE": escaped(learner.state),
        "INC": str(learner.incarnation),
        "HEARD": age(learner.heard_s),
        "BEHIND": str(learner.behind),
        "STEP": str(learner.step),
        "TOK/S": format_count(learner.tokens_per_s),
        "IN LAST 10": learner.attendance.replace(TOOK_PART, "█").replace(".", "·"),
        "LOSS": f"{learner.loss:.2f}" if learner.loss is not None else "",
        "UP/DOWN": f"{format_size(learner.up_bytes)}/{format_size(learner.down_bytes)}",
        "NOTE": escaped(learner.note),
    }


def _syncer_rows(status: Status) -> list[Row]:
    syncer = status.syncer
    if syncer is None:
        rows = [_other_row("syncer", "-", None, "not heard yet")]
    else:
        by = "" if syncer.unit == "syncer" else f" by {escaped(syncer.unit)}"
        note = f"epoch {syncer.epoch}{by}   {escaped(syncer.note)}".rstrip()
        rows = [_other_row("syncer", escaped(syncer.state), syncer.heard_s, note)]
    for standby in status.standbys:
        name = "(syncer)" if standby.name == "syncer" else escaped(standby.name)  # its unit, which serves no more
        note = f"on {escaped(standby.host)}   {escaped(standby.note)}".rstrip()
        rows.append(_other_row(name, escaped(standby.state), standby.heard_s, note))
    return rows


def _other_row(name: str, state: str, heard_s: float | None, note: str) -> Row:
    return {"LEARNER": name, "STATE": state, "HEARD": age(heard_s), "NOTE": note}


def age(seconds: float | None) -> str:
    """3.2 -> `3s`, 200 -> `3min`."""
    if seconds is None:
        return "-"
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f}{unit}"
    return f"{seconds:.0f}s"
