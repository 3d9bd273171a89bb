"""What a storm came to (`diloco chaos run`): from its strikes and the run's log, the figures, and PASS or FAIL.

All figures are of merged tokens in the log, beside the same run's rate before the storm: nobody's own word is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Literal

from diloco_cli.chaos.storm import Storm, Strike
from diloco_cli.events.event import KINDS
from diloco_cli.faults import FIGURES, SUPERVISOR, SYNCER, VERIFY, hypothesis_of
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.quantities import format_count, format_duration, parse_duration
from diloco_cli.report.history import RESTART, Mark, MergePoint, RunHistory

SETTLING_ROUNDS, LEAST_ROUNDS = 2, 4  # after a start or a fault; of a steady stretch
LONGEST_S = 600.0  # of that, beside a shorter storm
STEADY = 0.1  # by which the rates of its halves may differ
TELLS_S = 1.0  # by which an event's time may be wrong
NOT_STEADY = f"no {LEAST_ROUNDS} steady rounds before the first fault: a longer warm_up gives them"
LATE_S = 60.0  # before the run's last merge: who is struck then need not come back
MOST_SKIPPED_LINES = MOST_DEAREST = 3


@dataclass(frozen=True)
class Checked:
    """A hypothesis. `value`: what was found, as text."""

    text: str
    value: str
    ok: bool


@dataclass
class StruckUnit(Strike):
    """`recovery_s`: from the fault to the unit's next merge (a killed learner's: of its next process; the syncer's:
    anybody's). `back_s`: until its process lived again. None: not seen, or a supervisor's. `late`: struck so shortly
    before the run was finished that it need not be back. `tokens_lost`: what the run merged less than undisturbed,
    from this fault to the next one (an equal part of it, where several units are struck at once)."""

    recovery_s: float | None = None
    back_s: float | None = None
    late: bool = False
    tokens_lost: int | None = None

    @property
    def has_merges(self) -> bool:
        return self.injected and self.target != SUPERVISOR


@dataclass(frozen=True)
class RecoverySpread:
    """Of seconds; None: there was none."""

    median: float | None
    p95: float | None
    max: float | None


@dataclass(frozen=True)
class StormReport:
    """`goodput`: merged tokens per second from the first fault to the storm's end, over those of the newest steady
    stretch of the run before (None: there is none). `predicted_goodput`: the same by `simulate run`. `longest_gap_s`:
    between two merges of the storm; `healthy_gap_s`: of the steady stretch."""

    run: str
    scenario: str
    seed: int
    duration_s: float
    faults: tuple[StruckUnit, ...]
    tokens_per_s: float | None
    undisturbed_tokens_per_s: float | None
    goodput: float | None
    predicted_goodput: float | None
    participation: float | None
    tokens: dict[str, int | None]
    recovery: dict[str, RecoverySpread]
    longest_gap_s: float | None
    healthy_gap_s: float | None
    loss_before: float | None
    loss: float | None
    state: str
    verify: dict[str, object] | None
    hypotheses: tuple[Checked, ...] = ()

    @property
    def verdict(self) -> Literal["PASS", "FAIL"]:
        return "PASS" if all(checked.ok for checked in self.hypotheses) else "FAIL"


def settles_s(run: RunFormat) -> float:
    """How long a run takes, from its start or a fault on, until it has been steady for long enough."""
    return (SETTLING_ROUNDS + LEAST_ROUNDS) * max(island.local_steps * island.step_s for island in run.islands)


def steady_merges(history: RunHistory, marks: Sequence[Mark], until_s: float, storm_s: float) -> list[MergePoint]:
    """The newest steady stretch before `until_s`, as long as the storm or LONGEST_S at most: after the last start or
    fault and the rounds in which the run recovers, with halves that merge at one rate. Empty: there is none."""
    told = [*marks, *history.marks]  # the log tells when a restarted unit merges again
    faults_s = [mark.s for mark in told if KINDS[mark.kind].fault and mark.s < until_s - TELLS_S]
    since_s, num_fragments = max(faults_s, default=0.0), len(history.parameters)
    found = [merge for merge in history.merges if since_s < merge.s <= until_s][SETTLING_ROUNDS * num_fragments :]
    found = [merge for merge in found if merge.s >= until_s - max(storm_s, LONGEST_S)]
    while len(found) > LEAST_ROUNDS * num_fragments:
        middle = len(found) // 2
        first, second = _rate(found[: middle + 1]), _rate(found[middle:])
        if first and second and abs(first / second - 1) <= STEADY:
            return found
        found = found[num_fragments:]
    return []


def recovered_s(strike: Strike, history: RunHistory) -> float | None:
    """Seconds from the fault to its unit's next merge; None: there was none."""
    if strike.at_s is None:
        return None
    at_s, name = strike.at_s - history.started_s, strike.target
    ends_s = at_s if strike.kind == "kill" else (strike.healed_at_s or at_s) - history.started_s
    if name == SYNCER:
        seen = [merge.s for merge in history.merges if merge.s > at_s]
    elif strike.kind == "kill" and any(name in merge.learners for merge in history.merges if merge.s <= at_s):
        seen = [mark.s for mark in history.marks if mark.kind == RESTART and mark.unit == name and mark.s > at_s]
    else:
        seen = [merge.s for merge in history.merges if name in merge.learners and merge.s > ends_s]
    return min(seen) - at_s if seen else None


def awaited(strikes: Iterable[Strike], history: RunHistory) -> list[str]:
    """The units that have not merged since they were struck."""
    struck = {strike.target for strike in strikes if strike.injected and strike.target != SUPERVISOR}
    last = {strike.target: strike for strike in strikes if strike.target in struck and strike.injected}
    return sorted(name for name, strike in last.items() if recovered_s(strike, history) is None)


def storm_report(
    run: str,
    storm: Storm,
    history: RunHistory,
    marks: Sequence[Mark],
    num_islands: int,
    state: str,
    problem: str | None,
    predicted: float | None,
) -> StormReport:
    """`history`: the log to its end, `marks` what happened besides. `state`: the run's, as in `status`. `problem`: what
    `verify` found ("": nothing; None: it was not asked for)."""
    began_s, ended_s = storm.began_s - history.started_s, storm.ended_s - history.started_s
    strikes = tuple(_struck(strike, history) for strike in storm.strikes)
    first_s = min([strike.at_s - history.started_s for strike in strikes if strike.at_s is not None], default=began_s)
    before = steady_merges(history, marks, first_s, storm.scenario.duration_s)
    during = [merge for merge in history.merges if first_s < merge.s <= ended_s]
    next_s = min((merge.s for merge in history.merges if merge.s > ended_s), default=ended_s)
    if state == "FINISHED" and during:
        ended_s = during[-1].s
    undisturbed = _rate(before) if before else None
    merged = during[-1].tokens - (_last_tokens(history.merges, first_s)) if during else 0
    seconds = ended_s - first_s
    rate = merged / seconds if seconds > 0 else None
    if undisturbed is not None:
        _share_out([one for one in strikes if one.injected], history, ended_s, undisturbed)
    last_s = history.started_s + (history.merges[-1].s if history.merges else 0.0)
    for one in strikes:
        one.late = state == "FINISHED" and one.at_s is not None and last_s - one.at_s <= LATE_S
    lasted = [one for one in strikes if one.has_merges and not (one.late and one.recovery_s is None)]
    took_s = [max(0.0, last_s - (one.at_s or 0.0)) if one.recovery_s is None else one.recovery_s for one in lasted]
    back_s = [one.back_s for one in strikes if one.back_s is not None]
    losses = [point for point in history.losses if point.s <= first_s]
    shares = [len(merge.learners) / num_islands for merge in during]
    report = StormReport(
        run=run,
        scenario=storm.scenario.name,
        seed=storm.seed,
        duration_s=ended_s - began_s,
        faults=strikes,
        tokens_per_s=rate,
        undisturbed_tokens_per_s=undisturbed,
        goodput=rate / undisturbed if undisturbed and rate is not None else None,
        predicted_goodput=predicted,
        participation=sum(shares) / len(shares) if shares else None,
        tokens={"merged": merged, "lost": round(max(0.0, undisturbed * seconds - merged)) if undisturbed else None},
        recovery={"back_s": spread(back_s), "merged_again_s": spread(took_s)},
        longest_gap_s=_gap_s([first_s, *(merge.s for merge in during), ended_s if state == "FINISHED" else next_s]),
        healthy_gap_s=_gap_s([merge.s for merge in before]),
        loss_before=losses[-1].loss if losses else None,
        loss=history.losses[-1].loss if len(history.losses) > len(losses) else None,
        state=state,
        verify=None if problem is None else {"ok": not problem, "problem": problem},
    )
    checked = (*_always(report), *(_check(report, text) for text in storm.scenario.hypotheses))
    return replace(report, hypotheses=checked)


def _struck(strike: Strike, history: RunHistory) -> StruckUnit:
    back_s = None if strike.healed_at_s is None or strike.at_s is None else strike.healed_at_s - strike.at_s
    return StruckUnit(**vars(strike), recovery_s=recovered_s(strike, history), back_s=back_s)


def _share_out(struck: Sequence[StruckUnit], history: RunHistory, ended_s: float, undisturbed: float) -> None:
    """What each fault cost. `struck`: injected ones, in the order of their times."""
    began_s = {one.number: (one.at_s or 0.0) - history.started_s for one in reversed(struck)}
    for at_s, until_s in pairwise([*sorted({*began_s.values()}), ended_s]):
        at_once = [one for one in struck if began_s[one.number] == at_s]
        merged = _last_tokens(history.merges, until_s) - _last_tokens(history.merges, at_s)
        for one in at_once:
            one.tokens_lost = round(max(0.0, undisturbed * (until_s - at_s) - merged) / len(at_once))


def spread(values: Sequence[float]) -> RecoverySpread:
    """By nearest rank: values that were seen."""
    if not values:
        return RecoverySpread(None, None, None)
    return RecoverySpread(*(sorted(values)[ceil(share * len(values)) - 1] for share in (0.5, 0.95, 1.0)))


def _rate(merges: Sequence[MergePoint]) -> float | None:
    seconds = merges[-1].s - merges[0].s
    return (merges[-1].tokens - merges[0].tokens) / seconds if seconds > 0 else None


def _last_tokens(merges: Sequence[MergePoint], s: float) -> int:
    return max((merge.tokens for merge in merges if merge.s <= s), default=0)


def _gap_s(times: Sequence[float]) -> float | None:
    return max((b - a for a, b in pairwise(times)), default=None)


# -- the verdict --------------------------------------------------------------------------------------------------


def _always(report: StormReport) -> list[Checked]:
    """What every storm must show, whatever its file says."""
    struck = [one for one in report.faults if one.injected]
    sure = sum(one.verified for one in struck)
    back = sum(one.healed is True or one.late for one in struck)
    newest = list({one.target: one for one in struck if one.has_merges}.values())
    merged = sum(one.recovery_s is not None or one.late for one in newest)
    return [
        Checked("faults happen", f"{sure} of {len(struck)}", 0 < len(struck) == sure),
        Checked("units are back", f"{back} of {len(struck)}", back == len(struck)),
        Checked("units merge again", f"{merged} of {len(newest)}", merged == len(newest)),
    ]


def _check(report: StormReport, text: str) -> Checked:
    wanted = hypothesis_of(text)
    if wanted.figure == VERIFY:
        found = report.verify or {"ok": False, "problem": "not asked for"}
        return Checked(text, str(found["problem"]) or "ok", bool(found["ok"]))
    value = _figure(report, wanted.figure)
    if value is None:
        of_steady = wanted.figure in ("goodput", "tokens_lost") and report.undisturbed_tokens_per_s is None
        return Checked(text, f"unknown: {NOT_STEADY if of_steady else 'no merge after a fault'}", False)
    ok = value >= wanted.bound if wanted.at_least else value <= wanted.bound
    return Checked(text, format_duration(value) if FIGURES[wanted.figure] is parse_duration else f"{value:.4g}", ok)


def _figure(report: StormReport, name: str) -> float | None:
    figures: dict[str, float | None] = {
        "goodput": report.goodput,
        "participation": report.participation,
        "recovery_p50": report.recovery["merged_again_s"].median,
        "recovery_p95": report.recovery["merged_again_s"].p95,
        "longest_gap": report.longest_gap_s,
        "tokens_lost": report.tokens["lost"],
        "loss": report.loss,
    }
    return figures[name]


# -- for people ---------------------------------------------------------------------------------------------------


def storm_text(report: StormReport) -> str:
    """One screen."""
    struck = [one for one in report.faults if one.injected]
    skipped = Counter(f"{one.skipped}" for one in report.faults if one.skipped)
    of, back, again = _or_unknown, report.recovery["back_s"], report.recovery["merged_again_s"]
    lines = [
        f"{report.verdict}  run {report.run}, storm {report.scenario}, seed {report.seed}, "
        f"{format_duration(report.duration_s)}; now {report.state}",
        f"  faults     {len(report.faults)} planned, {len(struck)} injected, "
        f"{sum(one.verified for one in struck)} verified, {sum(bool(one.healed) for one in struck)} healed, "
        f"{sum(skipped.values())} skipped",
        *(f"             {count} skipped: {why}" for why, count in skipped.most_common(MOST_SKIPPED_LINES)),
        f"  recovery   back {of(back.median, format_duration)} (median), {of(back.p95, format_duration)} (p95), "
        f"merged again {of(again.median, format_duration)}, {of(again.p95, format_duration)}",
        f"  tokens     {format_count(report.tokens['merged'] or 0)} merged, {of(report.tokens['lost'], format_count)} "
        f"lost: {of(report.tokens_per_s, format_count)}/s, undisturbed "
        f"{of(report.undisturbed_tokens_per_s, format_count)}/s",
        *([f"  dearest    {_dearest(struck)}"] if any(one.tokens_lost for one in struck) else []),
        f"  goodput    {of(report.goodput, '{:.3f}'.format)}; by simulate run "
        f"{of(report.predicted_goodput, '{:.3f}'.format)}"
        + (f" ({NOT_STEADY})" if report.undisturbed_tokens_per_s is None else ""),
        f"  merges     participation {of(report.participation, '{:.3f}'.format)}; longest gap "
        f"{of(report.longest_gap_s, format_duration)}, before {of(report.healthy_gap_s, format_duration)}",
        f"  loss       {of(report.loss_before, '{:.4f}'.format)} before, {of(report.loss, '{:.4f}'.format)} at the end",
    ]
    lines += [f"  {'ok  ' if it.ok else 'FAIL'}  {it.text}: {it.value}" for it in report.hypotheses]
    return "\n".join(lines)


def _dearest(struck: Sequence[StruckUnit]) -> str:
    """The faults that cost most, with their tokens."""
    lost: Counter[str] = Counter()
    for number in {one.number for one in struck}:
        same = [one for one in struck if one.number == number]
        what = f"#{number} {same[0].kind} {', '.join(one.target for one in same)}"
        lost[what] = sum(one.tokens_lost or 0 for one in same)
    return "; ".join(f"{what} {format_count(tokens)}" for what, tokens in lost.most_common(MOST_DEAREST) if tokens)


def _or_unknown(value: float | None, form: Callable[[float], str]) -> str:
    return "unknown" if value is None else form(value)
