"""A run's series as CSV: a row for each stretch of time, which a spreadsheet or pandas reads as it is."""

from __future__ import annotations

import csv
import io

from diloco_cli.report.history import Bin, RunHistory

HEADINGS = ("time_s", "tokens", "merges", "participants_mean", "participants_min", "alive_mean", "loss")


def csv_of(history: RunHistory) -> str:
    """Rows end on the history's bins; those without a merge or a loss are left out. `tokens` are those merged by then;
    `loss` is the newest of its row's time."""
    losses = {int(point.s / history.width_s): point.loss for point in history.losses}
    stream, tokens = io.StringIO(), 0
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(HEADINGS)
    for index in sorted(history.bins.keys() | losses.keys()):
        bin_ = history.bins.get(index)
        tokens = bin_.tokens if bin_ is not None else tokens
        writer.writerow(
            [(index + 1) * history.width_s, history.tokens_before + tokens, *_merged(bin_), losses.get(index, "")]
        )
    return stream.getvalue()


def _merged(bin_: Bin | None) -> list[object]:
    if bin_ is None:
        return [0, "", "", ""]
    return [
        bin_.merges, round(bin_.participants / bin_.merges, 4), bin_.fewest, round(bin_.alive / bin_.merges, 4)
    ]  # fmt: skip
