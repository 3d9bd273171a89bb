"""The report as one HTML file: no script, nothing from a network, light and dark as the reader's system is.

All that came from the bucket is text, and escaped; the page's own policy forbids scripts and requests besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from diloco_cli.observe.situation import TROUBLE
from diloco_cli.report.charts import Chart, page_svg
from diloco_cli.report.numbers import Report
from diloco_cli.units import format_count, format_duration, format_size

EVENTS_SHOWN = 200
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CSS = """
:root {--ink: #24292f; --faint: #57606a; --grid: #d8dee4; --paper: #ffffff; --card: #f6f8fa; --good: #1a7f37;
  --bad: #c0392b}
@media (prefers-color-scheme: dark) {:root {--ink: #e6edf3; --faint: #9da7b3; --grid: #3d444d; --paper: #0d1117;
  --card: #161b22; --good: #3fb950; --bad: #ff7b72}}
* {box-sizing: border-box}
body {margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark}
h1 {font-size: 1.5rem; margin: 0 0 .3rem} h2 {font-size: 1.1rem; margin: 1.6rem 0 .5rem}
.state {color: var(--paper); background: var(--good); border-radius: 1rem; padding: .1rem .7rem; font-size: .9rem;
  vertical-align: middle; white-space: nowrap} .state.bad {background: var(--bad)}
p {margin: .2rem 0} .faint, figcaption {color: var(--faint); font-size: .87rem}
.figures {display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .6rem; margin: 1rem 0}
.figures div {background: var(--card); border-radius: .4rem; padding: .5rem .7rem}
.figures b {display: block; font-size: 1.2rem} .figures span {color: var(--faint); font-size: .85rem}
.charts {columns: 29rem; column-gap: 1rem}
figure {margin: 0 0 1rem; break-inside: avoid; background: var(--card); border-radius: .4rem; padding: .7rem}
figure svg {width: 100%; height: auto}
figure h3 {font-size: .98rem; margin: 0}
.wide {overflow-x: auto} table {border-collapse: collapse; font-size: .9rem; min-width: 50%}
th, td {text-align: right; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); vertical-align: top}
th:first-child, td:first-child, .words td, .words th {text-align: left} th {font-weight: 600; color: var(--faint)}
td {white-space: nowrap} .words td {white-space: normal; overflow-wrap: break-word}
summary {cursor: pointer; font-size: 1.1rem; font-weight: 600; margin: 1.6rem 0 .5rem}
code {font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere}
@media print {body {max-width: none} details {display: block}}
"""


def page_of(report: Report, charts: Sequence[Chart], generated_at: str) -> str:
    title = f"{report.run}: a run of diloco"
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{CSS}</style></head><body>",
        *_head(report),
        _figures(figures_of(report)),
        '<div class="charts">',
        *(_figure(chart) for chart in charts),
        "</div>",
        *_tables(report),
        f'<p class="faint">Made at {escape(generated_at)} by diloco from {_commits(report)} of '
        f"<code>{escape(report.url)}</code>; the run was created by diloco {escape(report.software)}.</p>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _head(report: Report) -> list[str]:
    kind = "state bad" if report.state in TROUBLE else "state"
    reason = f"<p>{escape(report.reason)}</p>" if report.reason else ""
    hint = f'<p class="faint">hint: <code>{escape(report.hint)}</code></p>' if report.hint else ""
    when = f"{escape(_minute(report.started_at))} to {escape(_minute(report.ended_at))}"
    return [
        f'<h1>{escape(report.run)} <span class="{kind}">{escape(report.state)}</span></h1>{reason}{hint}',
        f'<p class="faint">{when} UTC, {format_duration(report.wall_s)}; {_commits(report)}{_missing(report)}</p>',
    ]


def _commits(report: Report) -> str:
    return f"commits {report.first_commit:,} to {report.last_commit:,}"


def _missing(report: Report) -> str:
    if not report.missing_commits:
        return ""
    return f"; {report.missing_commits:,} commits are not in the bucket any more: the series begin at what is kept"


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def figures_of(report: Report) -> list[tuple[str, str]]:
    """(what it is, its value) of the numbers that people ask for first."""
    faults, cost = report.faults, report.cost
    moved = report.up_bytes + report.down_bytes
    times = report.data_parallel_bytes / moved if moved else 0.0
    less = f", {times:,.0f} times as many" if times >= 2 else ""
    planned = "" if report.planned_goodput is None else f", planned {100 * report.planned_goodput:.3g}%"
    return [
        ("merged tokens", f"{format_count(report.tokens)} of {format_count(report.tokens_target)}"),
        ("held-out loss, nats per token", _or_unknown(report.loss, ".4f")),
        (
            "mean merged tokens per second",
            "unknown" if report.tokens_per_s is None else format_count(report.tokens_per_s),
        ),
        (f"goodput{planned}", "unknown" if report.goodput is None else f"{100 * report.goodput:.1f}%"),
        (
            f"participation, {_or_unknown(report.participants_mean, '.2f')} learners a merge",
            "unknown" if report.participation is None else f"{100 * report.participation:.1f}%",
        ),
        ("merges", f"{report.merges:,}" + (f" ({report.skips:,} skipped)" if report.skips else "")),
        (
            "faults survived",
            f"{faults.restarts} restart{_s(faults.restarts)}, {faults.takeovers} takeover{_s(faults.takeovers)}"
            + (f", {faults.injected} injected" if faults.injected else "")
            + (f", {faults.rollbacks} rollback{_s(faults.rollbacks)}" if faults.rollbacks else "")
            + (f", {faults.refused_offers} offer{_s(faults.refused_offers)} refused" if faults.refused_offers else ""),
        ),
        (
            "without a merge, longer than usual",
            f"{format_duration(faults.outage_s)} in {faults.outages}" if faults.outages else "never",
        ),
        ("over the links, up and down", format_size(moved)),
        (f"data-parallel training would move{less}", format_size(report.data_parallel_bytes)),
        *([("cost so far, in the inventory's money", f"{cost.total:,.2f}")] if cost is not None else []),
        *([("cost of the plan, to the target", f"{cost.planned:,.2f}")] if cost is not None else []),
    ]


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _or_unknown(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _figures(figures: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for what, value in figures)
    return f'<div class="figures">{cells}</div>'


def _figure(chart: Chart) -> str:
    about = f"<figcaption>{escape(chart.about)}</figcaption>"
    return f"<figure><h3>{escape(chart.title)}</h3>{page_svg(chart)}{about}</figure>"


def _tables(report: Report) -> list[str]:
    learners = [
        (
            row.name, row.region, format_count(row.tokens), f"{100 * row.share:.1f}%", f"{row.merges:,}",
            f"{100 * row.participation:.1f}%", str(row.restarts), format_size(row.up_bytes),
            format_size(row.down_bytes),
        )
        for row in report.learners
    ]  # fmt: skip
    regions = [
        (
            row.name, str(row.learners), format_count(row.tokens), format_size(row.up_bytes),
            format_size(row.down_bytes), format_size(row.mirrored_bytes), f"{row.accelerators:,.2f}",
            f"{row.egress:,.2f}",
        )
        for row in report.regions
    ]  # fmt: skip
    events = [
        (format_duration(mark.s), mark.unit, mark.kind, mark.text) for mark in reversed(report.events[-EVENTS_SHOWN:])
    ]
    left_out = report.events_left_out + max(0, len(report.events) - EVENTS_SHOWN)
    about = f"Events ({left_out:,} older ones left out)" if left_out else "Events"
    settings = [(setting.name, setting.value, setting.origin) for setting in report.settings]
    return [
        "<h2>Learners</h2>",
        _table(("learner", "region", "tokens", "share", "merges", "took part", "restarts", "up", "down"), learners),
        "<h2>Regions</h2>",
        _table(
            ("region", "learners", "tokens", "up", "down", "between buckets", "accelerators", "egress"), regions
        ),
        f"<details open><summary>{about}</summary>",
        _table(("after", "unit", "kind", "what"), events, "words"),
        "</details><details><summary>Settings</summary>",
        _table(("setting", "value", "from"), settings, "words"),
        "</details>",
    ]  # fmt: skip


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'
