"""A table of what can be rented, in the shape of SkyPilot's catalogue: a row is a machine with its accelerators in a
zone, and its price there on demand and as a spot machine.

Other columns are ignored, and so are machines without accelerators. Lines that begin with `#` are comments. A column
that SkyPilot does not have may say how often a spot machine is taken away: InterruptionsPerDay."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.config.hardware import Accelerators, Device, resolve
from diloco_cli.errors import NotFoundError, UsageError, suggestion
from diloco_cli.paths import templates_directory

NEEDED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region")
OPTIONAL = ("SpotPrice", "AvailabilityZone", "InterruptionsPerDay", "Currency")
EXAMPLE = templates_directory() / "prices.csv"
NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
MAX_TABLE_BYTES = 64_000_000
MAX_SHOWN = 3
IN_CURRENCY = "of an hour, in the inventory's currency and without its sign: 32.77; empty where it is not offered"


@dataclass(frozen=True)
class Rentable:
    """One kind of machine in one zone, on demand or as a spot machine. `interruptions_per_day` of a spot machine, if
    it is known; 0: it is never taken away."""

    instance: str
    accelerators: Accelerators
    region: str
    zone: str
    price_per_h: float
    spot: bool = False
    interruptions_per_day: float | None = None


@dataclass(frozen=True)
class PriceTable:
    """`left_out`: which rows cannot be rented, for people."""

    listed: tuple[Rentable, ...]
    left_out: tuple[str, ...] = ()


Row = Mapping[str, str]


def load_prices(path: Path, devices: Mapping[str, Device]) -> PriceTable:
    """Raises NotFoundError without a file, and UsageError for one that is no such table, with the line."""
    found: list[Rentable] = []
    unknown: dict[str, str] = {}
    unpriced = shared = 0
    currencies: dict[str, str] = {}
    for where, row in _rows(path):
        if not row["AcceleratorName"]:
            continue
        if currency := row.get("Currency"):
            currencies.setdefault(currency.upper(), where)
        count = _number(row, "AcceleratorCount", where)
        if count != int(count):
            shared += 1
            continue
        try:
            accelerators = resolve(Accelerators(row["AcceleratorName"], int(count)), devices)
        except UsageError as error:
            unknown.setdefault(row["AcceleratorName"], f"{where}: {error.message}")
            continue
        if not row["InstanceType"]:
            unpriced += 1
            continue
        found += _of_row(row, accelerators, where)
    if len(currencies) > 1:
        places = ", ".join(f"{name} ({where})" for name, where in currencies.items())
        raise UsageError(f"prices in several currencies: {places}", hint="convert them to that of the inventory")
    left_out = [*list(unknown.values())[:MAX_SHOWN]]
    left_out += [f"and {len(unknown) - MAX_SHOWN} more unknown devices"] if len(unknown) > MAX_SHOWN else []
    left_out += [f"rows without InstanceType, which price accelerators alone: {unpriced}"] if unpriced else []
    left_out += [f"rows with a part of an accelerator: {shared}"] if shared else []
    if not found:
        why = f": {'; '.join(left_out)}" if left_out else ""
        raise UsageError(f"no row has a machine with accelerators{why}", where=str(path), hint=f"as in {EXAMPLE}")
    return PriceTable(tuple(found), tuple(left_out))


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each with its place. Cells that are missing are empty."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            text = stream.read(MAX_TABLE_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError("no such table of prices", where=str(path), hint=f"as in {EXAMPLE}") from None
    except OSError as error:
        raise UsageError(f"cannot read the prices: {(error.strerror or '').lower()}", where=str(path)) from None
    if len(text) > MAX_TABLE_BYTES:
        raise UsageError(f"larger than {MAX_TABLE_BYTES // 10**6} MB", where=str(path), hint="keep the rows you need")
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip() and line[0] != "#"]
    if not lines:
        raise UsageError("the table of prices is empty", where=str(path), hint=f"as in {EXAMPLE}")
    header = _cells(lines[0][1], f"{path}:{lines[0][0]}")
    missing = [name for name in NEEDED if name not in header]
    if missing:
        near = suggestion(missing[0], header)
        raise UsageError(
            f"the table has no column {' and no '.join(missing)}{near}",
            where=f"{path}:{lines[0][0]}",
            hint=f"columns: {', '.join(NEEDED)}; where known {', '.join(OPTIONAL)}; as in {EXAMPLE}",
        )
    for number, line in lines[1:]:
        where = f"{path}:{number}"
        row = _cells(line, where)
        yield where, dict(zip(header, [*row, *[""] * (len(header) - len(row))], strict=False))


def _cells(line: str, where: str) -> list[str]:
    """A row is a line, so that a quote without its end does not swallow the next."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        hint = 'a row is one line; a cell in "..." ends with its quote, and holds a quote as ""'
        raise UsageError(f"this is no row of a CSV: {error}", where=where, hint=hint) from None


def _of_row(row: Row, accelerators: Accelerators, where: str) -> Iterator[Rentable]:
    region = NOT_IN_NAMES.sub("-", row["Region"].lower()).strip("-")
    if not region:
        raise UsageError("the Region is missing", where=where, hint=f"as in {EXAMPLE}")
    given = row.get("InterruptionsPerDay")
    often = _number(row, "InterruptionsPerDay", where, may_be_0=True) if given else None
    for column, is_spot in (("Price", False), ("SpotPrice", True)):
        if row.get(column):
            price = _number(row, column, where)
            zone = row.get("AvailabilityZone", "")
            yield Rentable(row["InstanceType"], accelerators, region, zone, price, is_spot, often if is_spot else None)


def _number(row: Row, column: str, where: str, may_be_0: bool = False) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or not (value or may_be_0):
        raise UsageError(
            f"{column} must be a number {'of at least' if may_be_0 else 'above'} 0, not '{row[column]}'",
            where=where,
            hint=IN_CURRENCY if "Price" in column else None,
        )
    return value
