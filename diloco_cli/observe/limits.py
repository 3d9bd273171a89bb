"""What limits a run's pace, in words: the first cause that the facts show."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from diloco_cli.observe.facts import RunFacts
from diloco_cli.observe.look import Look, training_slot_s
from diloco_cli.observe.unit_states import STEPS
from diloco_cli.plan.syncer_pace import connections_of, machine_text, measured_by
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.states import SyncerState
from diloco_cli.protocol.rules.capacity import SlotTime, SyncerMachine, shortest_slot
from diloco_cli.units import format_count, format_duration

SLOW_BELOW = 0.8
BLOCKED_PERCENT = 20.0
DATA_PERCENT = 5.0
GRACE_SHARE = 0.25  # of the time between two merges
CROWDED_SHARE = 0.8  # of a slot: a syncer that needs more will soon limit the run


def limit_of(look: Look) -> str:
    """ "" if the facts show none. A cause comes before what it brings about: learners wait for a syncer that is slower
    than their slots."""
    facts, syncer = look.facts, look.facts.syncer
    heard = {name: heard.heartbeat for name, heard in facts.learners.items() if look.learners[name] in STEPS}
    if syncer is not None and syncer.heartbeat.retrying:
        return f"the syncer's store: {syncer.heartbeat.retrying}"
    if look.missing:
        return f"missing: {', '.join(look.missing)}"
    if syncer is not None and syncer.heartbeat.calls_a_s:
        return throttled_text(syncer.heartbeat)
    of_syncer, is_late = _of_syncer(look)
    causes = [of_syncer if is_late else "", *(_of_learner(name, said) for name, said in heard.items()), of_syncer]
    return next(filter(None, causes), "") or _of_merges(look)


def throttled_text(syncer: SyncerHeartbeat) -> str:
    return f"the store throttles: {syncer.calls_a_s:.0f} calls a second of the syncer get through"


def _of_learner(name: str, said: LearnerHeartbeat) -> str:
    if said.retrying:
        return f"the store of {name}: {said.retrying}"
    if said.tokens_per_s < SLOW_BELOW * said.mean_tokens_per_s:
        usual = format_count(said.mean_tokens_per_s)
        return f"{name} trains at {format_count(said.tokens_per_s)} tok/s, usually at {usual}"
    if said.blocked_percent > BLOCKED_PERCENT:
        return f"{name} spends {said.blocked_percent:.0f}% of its time on the exchange"
    if (said.data_percent or 0.0) > DATA_PERCENT:
        return f"{name} waits for its data {said.data_percent:.0f}% of its steps' time"
    return ""


def pace_of_syncer(look: Look) -> tuple[SlotTime, float] | None:
    """What a slot takes the syncer, by its own measurements, and the slot that the learners' training takes, in
    seconds: merges that come too late stretch the log's own slots. None before its first merge."""
    facts = look.facts
    merges, heard = facts.state.metrics.recent_merges, facts.syncer
    measured = None if heard is None else measured_by(heard.heartbeat, facts.run, merges)
    if measured is None:
        return None
    slot_s = training_slot_s(facts) or look.expected_s
    return shortest_slot(*measured, slot_s), slot_s


def machine_of_syncer(facts: RunFacts, guess: SyncerMachine) -> tuple[SyncerMachine, str]:
    """The machine of a run's syncer: as its newest heartbeat says, and a guess for what it does not. And in words,
    which it was."""
    if facts.syncer is None:
        return guess, f"its syncer has no heartbeat, so that its machine is guessed: {machine_text(guess)}"
    said = facts.syncer.heartbeat
    measured = measured_by(said, facts.run, facts.state.metrics.recent_merges)
    if measured is not None:
        return measured[1], f"its syncer's machine, as that has measured it: {machine_text(measured[1])}"
    known = replace(guess, reads_back=said.reads_back, connections=connections_of(said))
    return known, f"its syncer has measured no merge, so that its machine's speed is guessed: {machine_text(known)}"


def _of_syncer(look: Look) -> tuple[str, bool]:
    """In words, whether the syncer is nearly as slow as the slots, or slower; and whether it is slower."""
    pace = pace_of_syncer(look)
    if pace is None or pace[0].seconds < CROWDED_SHARE * pace[1]:
        return "", False
    (spent, slot_s), is_late = pace, pace[0].seconds >= pace[1]
    share = f"{100 * spent.seconds / slot_s:.0f}% of its slot of {format_duration(slot_s)}"
    return f"the syncer is {'' if is_late else 'nearly '}limited by {spent.limit}: {share}", is_late


def _of_merges(look: Look) -> str:
    """Who is often left out, and how long the syncer waits."""
    merges = look.facts.state.metrics.recent_merges
    if len(merges) < 2:
        return ""
    planned = [island.name for island in look.facts.run.islands]
    parts = {name: sum(name in merge.participants for merge in merges) for name in planned}
    rarest = min(parts, key=lambda name: parts[name])
    if parts[rarest] < SLOW_BELOW * len(merges):
        return f"{rarest} took part in {parts[rarest]} of the last {len(merges)} merges"
    grace_s = fmean(merge.grace_used_s for merge in merges)
    if grace_s > GRACE_SHARE * look.expected_s:
        return f"the grace: each merge waits {grace_s:.1f} s of {look.expected_s:.1f} s"
    return "the syncer is busy with a merge" if look.syncer == SyncerState.MERGING else ""
