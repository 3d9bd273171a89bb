"""The comparison that reality.sh made, as a short table: python examples/plan/reality.py CALIBRATION.json OUT.md

Only figures that can be compared: from the first merge on, without the time that processes need to start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEADY = {
    "merged tokens/s, steady": "merged tokens/s",
    "goodput, percent, steady": "goodput, percent",
    "merged of what was trained, percent": "merged of what was trained, percent",
}
OF_ISLANDS = (": tokens/s", ": bytes/s up", ": bytes/s down")
HEAD = """# Prediction against reality

The quickstart, planned from a probe of one machine and run there; `examples/plan/reality.sh` wrote this. From the first
merge on: a short run also waits for its processes to start. Ratio: measured / predicted.

A plan knows speeds, links and failures, and takes every offer to be in time. On a machine with more processes than
cores steps take now longer, now shorter: some offers miss their merge (what was trained is then not merged), and
whoever is first sets the pace of the slots, so that a few more versions travel than planned.

| figure | predicted | measured | ratio |
|---|---:|---:|---:|
"""


def table(comparison: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `diloco plan --calibrate --json` that are of the steady run."""
    lines = []
    for row in comparison:
        name = STEADY.get(row["what"], row["what"])
        if row["what"] in STEADY or row["what"].endswith(OF_ISLANDS):
            lines.append(
                f"| {name} | {_number(row['predicted'])} | {_number(row['measured'])} | {_ratio(row['ratio'])} |"
            )
    return HEAD + "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def main() -> None:
    calibration, out = map(Path, sys.argv[1:])
    body = json.loads(calibration.read_text(encoding="utf-8"))
    out.write_text(table(body["data"]["calibration"]), encoding="utf-8")


if __name__ == "__main__":
    main()
