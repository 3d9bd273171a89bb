"""Prediction against reality: what a run measured beside what its plan said, and the inventory derated by it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Inventory, IslandSettings
from diloco_cli.errors import UsageError
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import DAY_S
from diloco_cli.plan.link import is_bucket, join_bytes, rtt_of
from diloco_cli.plan.plan import Plan, PlannedIsland

LEAST_FAILURES = 2  # restarts of an island before its MTBF is estimated
CALLS_APART = 3.0  # round trips that sending a delta takes at least, if it is to tell the link's rate


@dataclass(frozen=True)
class MeasuredIsland:
    """`tokens_per_s` while it trained, its throttle included; 0: never heard. `starts`: processes that it has had.
    `sent_bytes` of a mean delta in `upload_s`, adopted `adoption_s` after its merge, by its own moving averages (0:
    none yet). `down_s`: how long it was gone after an end, in the median; None: not seen."""

    name: str
    tokens_per_s: float
    up_bytes: int
    down_bytes: int
    starts: int
    sent_bytes: float = 0.0
    upload_s: float = 0.0
    adoption_s: float = 0.0
    down_s: float | None = None

    def up_bps(self, rtt_s: float) -> float | None:
        """Of its link, while a delta was sent; None where that took hardly longer than its call."""
        return 8 * self.sent_bytes / (self.upload_s - rtt_s) if self.upload_s > CALLS_APART * rtt_s > 0 else None


@dataclass(frozen=True)
class MeasuredRun:
    """A run as measured in its bucket. `wall_s` from the first commit to the last; `steady_tokens_per_s` from the first
    merge on, without the time that processes need to start; None: not known."""

    name: str
    wall_s: float
    tokens: int
    steady_tokens_per_s: float | None
    requests: int
    islands: tuple[MeasuredIsland, ...]

    @property
    def steady_s(self) -> float:
        """The time of all its tokens at the steady rate; bytes are divided by it, because they go with merges."""
        return self.tokens / self.steady_tokens_per_s if self.steady_tokens_per_s else self.wall_s


@dataclass(frozen=True)
class CalibrationRow:
    """One figure. `ratio` is measured / predicted; None if one of them is unknown."""

    what: str
    predicted: float | None
    measured: float | None
    ratio: float | None
    note: str = ""


@dataclass(frozen=True)
class Calibration:
    comparison: tuple[CalibrationRow, ...]
    inventory: Inventory


def calibrate(plan: Plan, run: MeasuredRun) -> Calibration:
    """The comparison, and the plan's inventory with measured speeds in it, the links' rates up as far as bytes and not
    calls took the time, and where there were failures the MTBF and the restart.

    Raises UsageError if the run has none of the plan's islands, or has not merged anything.
    """
    measured = {island.name: island for island in run.islands if island.tokens_per_s > 0}
    common = [island for island in plan.islands if island.name in measured]
    if not common:
        theirs = ", ".join(island.name for island in run.islands) or "none"
        raise UsageError(
            f"the run {run.name} measured none of the plan's islands; it has {theirs}",
            hint="give the inventory and the run file that it was launched with: diloco plan -f RUN --calibrate RUN",
        )
    if run.wall_s <= 0 or run.tokens <= 0:
        raise UsageError(f"the run {run.name} has merged nothing yet", hint=f"diloco status {run.name}")
    rows = _fleet_rows(plan, run)
    for island in common:
        rows += _island_rows(plan, island, measured, run)
    return Calibration(tuple(rows), _derated(plan, measured, run))


def _fleet_rows(plan: Plan, run: MeasuredRun) -> list[CalibrationRow]:
    p = plan.prediction
    rate = run.tokens / run.wall_s
    steady_percent = None if run.steady_tokens_per_s is None else 100 * run.steady_tokens_per_s / p.tokens_per_s_ideal
    steady = "from the first merge on: processes need time to start, which a long run does not notice"
    missed = "what is trained and not merged: replaced on adoption, offered too late, lost with a process"
    requests = (plan.money.class_a_per_day + plan.money.class_b_per_day) / DAY_S
    return [
        _row("merged tokens/s", p.tokens_per_s, rate),
        _row("merged tokens/s, steady", p.tokens_per_s, run.steady_tokens_per_s, steady),
        _row("goodput, percent", 100 * p.goodput, 100 * rate / p.tokens_per_s_ideal),
        _row("goodput, percent, steady", 100 * p.goodput, steady_percent, steady),
        _row("merged of what was trained, percent", 100 * p.goodput, _merged_percent(plan, run), missed),
        _row("wall time, s", run.tokens / p.tokens_per_s, run.wall_s),
        _row("requests/s", requests, run.requests / run.wall_s),
    ]


def _merged_percent(plan: Plan, run: MeasuredRun) -> float | None:
    """The share of the trained tokens that was merged; independent of speeds. None if an island was not heard."""
    rates = {island.name: island.tokens_per_s for island in run.islands}
    trained = [rates.get(island.name, 0.0) for island in plan.islands]
    if run.steady_tokens_per_s is None or not all(trained):
        return None
    return 100 * run.steady_tokens_per_s / sum(trained)


def _island_rows(
    plan: Plan, planned: PlannedIsland, measured: dict[str, MeasuredIsland], run: MeasuredRun
) -> list[CalibrationRow]:
    """A short run's bytes also hold what its processes downloaded when they joined, once each."""
    island = measured[planned.name]
    up, down = (1e6 / 8 * mbps for mbps in (planned.sent_mbps, planned.received_mbps))
    exchange_s = island.upload_s + island.adoption_s
    joining = island.starts * join_bytes(plan.model, plan.run.sync) / run.steady_s
    return [
        _row(f"{planned.name}: tokens/s", planned.tokens_per_s, island.tokens_per_s),
        _row(f"{planned.name}: bytes/s up", up, island.up_bytes / run.steady_s),
        _row(f"{planned.name}: bytes/s down", down + joining, island.down_bytes / run.steady_s),
        _row(f"{planned.name}: exchange, s", planned.transfer_s, exchange_s if island.upload_s else None, NOTICED),
    ]


NOTICED = "a delta up and its version back; the measured one includes noticing the merge"


def _row(what: str, predicted: float, measured: float | None, note: str = "") -> CalibrationRow:
    ratio = measured / predicted if measured is not None and predicted > 0 else None
    return CalibrationRow(what, predicted, measured, ratio, note)


def _derated(plan: Plan, measured: dict[str, MeasuredIsland], run: MeasuredRun) -> Inventory:
    """The inventory with measured values in place of the catalogue's and guesses. A measured speed includes the
    throttle and other islands on the machine; the inventory's is without them."""
    shares = {c.island.name: c.share for c in candidates(plan.run, plan.inventory, plan.model)}
    islands = [
        _measured_island(island, measured[island.name], shares[island.name], run, plan.inventory.store.url)
        if island.name in measured
        else island
        for island in plan.inventory.islands
    ]
    return replace(plan.inventory, islands=tuple(islands))


def _measured_island(
    island: IslandSettings, found: MeasuredIsland, share: float, run: MeasuredRun, url: str
) -> IslandSettings:
    changed = replace(island, tokens_per_s=found.tokens_per_s * island.slowdown / share)
    up_bps = found.up_bps(rtt_of(island.link, url)) if is_bucket(url) or island.link.up_bps else None
    if up_bps is not None and not island.link.emulate:  # which is as it is stated
        changed = replace(changed, link=replace(island.link, up_bps=up_bps))
    failures = found.starts - 1
    if failures < LEAST_FAILURES:
        return changed
    restart_s = island.restart_s if found.down_s is None else found.down_s
    return replace(changed, mtbf_s=run.wall_s / failures, restart_s=restart_s)
