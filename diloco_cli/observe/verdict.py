"""The verdict on a run: how it is, why, and what helps. Headline, ETA, JSON and exit status follow from it.

A pure function of the facts from the bucket, and of what this machine knows of its own units, where it has some. The
checks are asked in the order of CHECKS; the first that answers decides, and without an answer merges go on. A run
stalls when no merge comes for STALLS_AFTER of its usual time between merges, and for at least WRITTEN_S if the cause is
written or known here, or SILENT_S if nothing but silence tells it (look.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from diloco_cli.observe.facts import RunFacts
from diloco_cli.observe.limits import SLOW_BELOW, limit_of
from diloco_cli.observe.local import Local
from diloco_cli.observe.look import SYNCER_GONE, WRITTEN_S, Look
from diloco_cli.observe.unit_states import LOST, LOST_S, QUARANTINED, SUSPECT, syncer_here
from diloco_cli.protocol.log.states import LearnerState, RunPhase, SyncerState
from diloco_cli.protocol.rules.divergence import concern
from diloco_cli.units import format_duration


class State(StrEnum):
    STARTING = "STARTING"
    MERGING = "MERGING"
    SLOW = "SLOW"
    DEGRADED = "DEGRADED"
    STALLED = "STALLED"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    SILENT = "SILENT"
    FAILED = "FAILED"
    FINISHED = "FINISHED"


MEANINGS = {
    State.STARTING: "no merge yet since the launch or the resume, and not for longer than a start takes",
    State.MERGING: "merges go on",
    State.SLOW: "merges go on, below 0.8 of the best pace that as many learners sustained in this run",
    State.DEGRADED: "merges go on without some of the planned islands",
    State.STALLED: "no merge for longer than expected, or none can come",
    State.PAUSED: "the syncer has stopped the run, because its loss jumped",
    State.DRAINING: "the last offers are settled: the target is reached, or the learners were told to leave",
    State.STOPPED: "an operator has stopped the run; it waits in its bucket",
    State.SILENT: "no unit is heard",
    State.FAILED: "all learners, or all syncers, have ended for good with an error",
    State.FINISHED: "the target is reached",
}
TROUBLE = frozenset({State.DEGRADED, State.STALLED, State.SILENT, State.FAILED})  # `--exit-code` gives 5
MERGES = frozenset({State.MERGING, State.SLOW, State.DEGRADED})  # an ETA means something


@dataclass(frozen=True)
class Verdict:
    """`reason`: in plain words, with the cause where it is known; `since_s`: for so long, if that is known; `hint`: one
    command, or ""; `limit`: what limits the pace, or ""."""

    state: State
    reason: str
    since_s: float | None = None
    hint: str = ""
    limit: str = ""


def verdict_of(facts: RunFacts, local: Local = Local()) -> Verdict:
    return verdict_at(Look(facts, local))


def verdict_at(look: Look) -> Verdict:
    for check in CHECKS:
        verdict = check(look)
        if verdict is not None:
            return verdict
    reason = no_syncer(look) if look.syncer in (*SYNCER_GONE, SUSPECT) else look.stated
    return Verdict(State.MERGING, reason, limit=limit_of(look))


def _over(look: Look) -> Verdict | None:
    """What the log says of a run that does not run."""
    facts, state = look.facts, look.facts.state
    if state.phase == RunPhase.RUNNING:
        return None
    since_s = facts.seconds_since(state.metrics.updated_at)
    told = next((n.text for n in reversed(state.metrics.notes) if n.kind in ("stop", "finish")), "")
    if state.phase == RunPhase.FINISHED:
        return Verdict(State.FINISHED, told, since_s, f"diloco export {facts.url}")
    if state.stability.paused:
        return Verdict(State.PAUSED, concern(state, facts.run), since_s, _resume(look))
    return Verdict(State.STOPPED, told, since_s, _resume(look))


def _failed(look: Look) -> Verdict | None:
    """Here it is known that nothing is restarted. In the bucket a supervisor says that it gave a learner up; where none
    has told of one, nothing was restarted for a while."""
    here = syncer_here(look.facts, look.local)
    if look.unserved and here is not None and here.gave_up:
        return Verdict(State.FAILED, f"the syncer has failed: {here.said.reason}", None, _logs(look, "syncer"))
    if not look.learners or any(state != LearnerState.FAILED for state in look.learners.values()):
        return None
    ages = [heard.age_s for heard in look.facts.learners.values()]
    given_up = any(unit.gave_up and unit.kind == "learner" for unit in look.local.units.values())
    if not given_up and (min(ages, default=0.0) <= WRITTEN_S or look.may_be_restarted):
        return None
    return Verdict(State.FAILED, f"all learners have failed: {look.absences}", min(ages, default=None), _logs(look))


def _silent(look: Look) -> Verdict | None:
    facts = look.facts
    if not look.unserved or any(state not in SILENCE for state in look.learners.values()):
        return None
    if any(not unit.dead for unit in look.local.units.values()):
        return None  # what hinders them is known here
    ages = [heard.age_s for heard in facts.learners.values()] + [heard.age_s for heard in facts.standbys.values()]
    ages += [facts.syncer.age_s] if facts.syncer is not None else []
    ended = any(state == LOST for state in look.learners.values()) or look.syncer == LOST
    if look.starts and not look.overdue and not ended:
        return None
    if not ages:
        return Verdict(State.SILENT, "no unit has been heard yet", look.idle_s, _resume(look))
    since_s = min(ages)
    states = {**look.learners, **({"syncer": look.syncer} if look.syncer else {})}
    left = [name for name, state in states.items() if state == LearnerState.DONE]
    if len(left) == len(states):
        return Verdict(State.SILENT, "all units have left in good order", since_s, _resume(look))
    if look.local.units and all(unit.dead for unit in look.local.units.values()):
        accounts = "; ".join(f"{name}: {unit.account}" for name, unit in look.local.units.items())
        return Verdict(State.SILENT, accounts, since_s, _resume(look))
    reason = f"no unit has been heard for {format_duration(since_s)}; why is not known from the bucket"
    reason = f"{', '.join(left)} left in good order; {reason}" if left else reason
    return Verdict(State.SILENT, reason, since_s, _resume(look))


def _draining(look: Look) -> Verdict | None:
    if look.syncer == SyncerState.FINISHING:
        return Verdict(State.DRAINING, "the target is reached: the last evaluation, and the last offers' outcomes")
    present = {name: state for name, state in look.learners.items() if state not in SILENCE}
    if present and all(state == LearnerState.DRAINING for state in present.values()):
        return Verdict(State.DRAINING, f"told to leave: {', '.join(present)}", None, _resume(look))
    return None


def _starting(look: Look) -> Verdict | None:
    if not look.starts or look.overdue:
        return None
    waits = [name for name, state in look.learners.items() if state == LearnerState.STARTING]
    waits += ["syncer"] if look.syncer is None else []
    reason = f"waits for: {', '.join(waits)}" if waits else _clauses("the first merge is to come", look.stated)
    return Verdict(State.STARTING, reason)


def _stalled(look: Look) -> Verdict | None:
    """Also before it is overdue, where no merge can come: no syncer serves, or no learner is left."""
    if not (look.overdue or look.unserved or look.left):
        return None
    reason, hint = _why_no_merge(look)
    return Verdict(State.STALLED, reason, look.idle_s, hint, reason)


def _why_no_merge(look: Look) -> tuple[str, str]:
    """(reason, hint): the first cause that explains it."""
    facts, doctor = look.facts, f"diloco doctor {look.facts.url}"
    if look.local.full:
        return look.local.full, ""
    if look.syncer in (*SYNCER_GONE, SUSPECT):
        return no_syncer(look), _brings_syncer_back(look)
    if facts.syncer is not None and facts.syncer.heartbeat.retrying:
        return f"the syncer's store fails: {facts.syncer.heartbeat.retrying}", doctor
    if look.left:
        return f"no learner is left: {look.absences}", _brings_back(look)
    if look.missing:
        return _clauses(look.stated, f"missing: {look.absences}"), _brings_back(look)
    retrying = {name: heard.heartbeat.retrying for name, heard in facts.learners.items() if heard.heartbeat.retrying}
    if retrying or look.local.store:
        trouble = "; ".join(f"{name}: {text}" for name, text in retrying.items()) or look.local.store
        return f"the learners' store fails: {trouble}", doctor
    return _clauses(look.stated, "why is not known from the bucket"), _logs(look)


def _clauses(*texts: str) -> str:
    """The syncer may state nothing."""
    return "; ".join(filter(None, texts))


def no_syncer(look: Look) -> str:
    """In words: what has become of the syncer, and whether a standby will take over."""
    facts, here = look.facts, syncer_here(look.facts, look.local)
    waiting = [name for name, heard in sorted(facts.standbys.items()) if heard.age_s <= LOST_S]
    if here is not None and here.account:
        who = f"no syncer serves: {here.account}"
    elif facts.syncer is None:
        who = "no syncer has been heard yet"
    else:
        last = facts.syncer.heartbeat
        gone = "has left" if look.syncer == SyncerState.DONE else f"was heard {facts.syncer.age_s:.0f} s ago"
        state = "the syncer is silent" if look.syncer == SUSPECT else "no syncer serves"
        who = f"{state}: {last.unit} on {last.host} {gone}"
        who += f"; {look.local.store}" if look.local.store else ""
    return f"{who}; {', '.join(waiting)} will take over" if waiting else who


def _brings_syncer_back(look: Look) -> str:
    here = syncer_here(look.facts, look.local)
    if here is not None and (here.condition == "paused" or here.said.state == "HELD"):
        return f"diloco chaos revive syncer --run {look.facts.run.name}"
    if not look.unserved:
        return ""
    return f"diloco syncer {look.facts.url}" if here is None or here.supervised else _resume(look)


def _degraded(look: Look) -> Verdict | None:
    if not look.missing:
        return None
    planned = len(look.facts.run.islands)
    reason = f"merges go on without {len(look.missing)} of {planned} planned islands: {look.absences}"
    ages = [heard.age_s for name, heard in look.facts.learners.items() if name in look.missing]
    return Verdict(State.DEGRADED, reason, max(ages, default=None), _brings_back(look), limit_of(look))


def _slow(look: Look) -> Verdict | None:
    share, limit = look.share_of_best, limit_of(look)
    if share is None or share >= SLOW_BELOW:
        return None
    reason = f"merges go on at {share:.2f} of the best pace that as many learners sustained in this run"
    return Verdict(State.SLOW, reason, None, "" if limit else _logs(look), limit or "why is not known from the bucket")


def _brings_back(look: Look) -> str:
    """The command that helps the first missing island."""
    name = next(iter(look.missing))
    state, here = look.learners[name], look.local.units.get(name)
    if state == QUARANTINED:
        return f"diloco readmit {name} {look.facts.url}"
    if here is not None and (here.condition == "paused" or here.said.state == "HELD"):
        return f"diloco chaos revive {name} --run {look.facts.run.name}"
    if state in (LOST, LearnerState.DONE) and (here is None or here.dead):
        regions = {island.name: island.region for island in look.facts.run.islands}
        elsewhere = len(set(regions.values())) > 1 and not set(regions) <= set(look.local.units)
        return f"{_resume(look)} --region {regions[name]}" if elsewhere and name in regions else _resume(look)
    return _logs(look, name)


def _resume(look: Look) -> str:
    return f"diloco resume {look.facts.url}"


def _logs(look: Look, unit: str = "") -> str:
    return f"diloco logs {unit} --run {look.facts.url}" if unit else f"diloco logs --run {look.facts.url}"


SILENCE = frozenset({LOST, LearnerState.DONE, LearnerState.FAILED, LearnerState.FENCED, LearnerState.STARTING})
CHECKS: tuple[Callable[[Look], Verdict | None], ...] = (
    _over, _failed, _silent, _draining, _starting, _stalled, _degraded, _slow,
)  # fmt: skip
