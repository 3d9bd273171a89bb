"""`diloco runs`: the runs that this directory knows."""

from __future__ import annotations

import typer

from diloco_cli.cli.output import console, print_json, talk
from diloco_cli.cli.run_argument import LOOK_S, open_known_run
from diloco_cli.cli.watch import read_status
from diloco_cli.errors import DilocoError


def runs(as_json: bool = typer.Option(False, "--json", help="One JSON object.")) -> None:
    """List the runs of this directory."""
    from diloco_cli.runtime.registry import known_runs
    from diloco_cli.store.wrappers import Deadline

    rows: list[dict[str, object]] = []
    warnings: list[str] = []
    for known in known_runs():
        try:
            current, _ = read_status(open_known_run(known, Deadline(LOOK_S)))
        except DilocoError as error:
            warnings.append(f"{known.name}: {error}")
            rows.append({"name": known.name, "url": known.url, "state": "UNREACHABLE"})
            continue
        rows.append({
            "name": known.name, "url": known.url, "state": current.state, "commit": current.commit,
            "tokens": current.tokens, "loss": current.loss, "age_s": current.age_s,
        })  # fmt: skip
    if as_json:
        print_json("runs", {"runs": rows}, warnings=warnings)
        return
    if not rows:
        talk("no runs here yet; hint: diloco launch RUN.yaml")
        return
    _print_table(rows)
    for warning in warnings:
        talk(f"warning: {warning}")


def _print_table(rows: list[dict[str, object]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "state", "commit", "tokens", "loss", "url"):
        table.add_column(name.upper())
    for row in rows:
        loss = row.get("loss")
        commit = row.get("commit", -1)
        cells = [str(row["name"]), str(row["state"]), "" if commit == -1 else str(commit), f"{row.get('tokens', 0):,}"]
        table.add_row(*cells, f"{loss:.3f}" if isinstance(loss, float) else "", str(row["url"]))
    console().print(table)
