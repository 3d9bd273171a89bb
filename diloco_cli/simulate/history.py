"""A failure history slot by slot, for synthetic tapes: who took part in which merge, and with how much work.

    history = failure_history(chips=1_200_000, learners=4, slots=500, seed=0, steps_per_slot=2)
    for slot in history.slots:                        # one merge each, in order; slot k is for fragment k mod P
        for m, work in enumerate(slot.work):
            for share in work.step_shares:            # learner m's inner steps since the merge before
                ...                                   # one step on a batch of round(share * batch_tokens) tokens
            if work.participates:                     # its offer is among the merge's inputs
                ...

Times are the simulated fleet's (steps of 5 s unless told otherwise); a toy that trains with the history needs only the
order. A learner without a step in a slot was stopped, in `history.outages`; it lost slices and never all of them, so it
goes on as the same incarnation with the parameters it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diloco_cli.simulate.chips import MS, Constants, Learner, equal_learners
from diloco_cli.simulate.draws import generator
from diloco_cli.simulate.published import PUBLISHED
from diloco_cli.simulate.slots import MergeRules, Merges, merge_all, step_ends_ms
from diloco_cli.simulate.stepwise import walk
from diloco_cli.simulate.timeline import Timeline, fleet_goodput, fleet_uptime

SPARE = 1.5  # the horizon is stretched until it holds the slots that were asked for


@dataclass(frozen=True)
class Work:
    """What one learner did between two merges. `step_shares[i]`: the share of the full batch that its i-th finished
    step was made on (1: all slices there). Not participating: it made no report in time (it keeps its progress)."""

    participates: bool
    step_shares: tuple[float, ...]


@dataclass(frozen=True)
class Slot:
    """Merge number `slot`, `at_s` after the start. `work[m]`: learner m. At least one learner participates."""

    slot: int
    at_s: float
    work: tuple[Work, ...]

    @property
    def participants(self) -> tuple[int, ...]:
        return tuple(m for m, work in enumerate(self.work) if work.participates)


@dataclass(frozen=True)
class Outage:
    """Learner `learner` made no step in the slots [first_slot, last_slot]."""

    learner: int
    first_slot: int
    last_slot: int


@dataclass(frozen=True)
class FailureHistory:
    """`goodput` and `uptime` are shares of chip time and of time over the slots; `participation` as in `status`."""

    chips: int
    learners: int
    seed: int
    constants: Constants
    rules: MergeRules
    slots: tuple[Slot, ...]
    outages: tuple[Outage, ...]
    goodput: float
    uptime: float
    participation: float
    failures: int


def failure_history(
    chips: int,
    learners: int,
    slots: int,
    seed: int,
    constants: Constants = PUBLISHED,
    rules: MergeRules | None = None,
    steps_per_slot: int = 1,
) -> FailureHistory:
    """The first `slots` merges of a fleet of `chips` chips in `learners` equal learners. The same arguments give the
    same history. `chips=0`: nothing ever fails. `rules`: quorum, overlap, grace; then `steps_per_slot` is theirs."""
    rules = rules or MergeRules(steps_per_slot=steps_per_slot)
    fleet = equal_learners(chips, learners, constants)
    horizon_ms = round(slots * rules.steps_per_slot * constants.step_s * MS)
    while True:
        timelines = [_walk(learner, horizon_ms, seed, index) for index, learner in enumerate(fleet)]
        merges = merge_all(timelines, rules)
        if len(merges.at_ms) >= slots:
            break
        horizon_ms = round(horizon_ms * SPARE) + fleet[0].step_ms
    made = _slots(timelines, merges, slots)
    return FailureHistory(
        chips=chips,
        learners=learners,
        seed=seed,
        constants=constants,
        rules=rules,
        slots=made,
        outages=_outages(made, learners),
        goodput=fleet_goodput(timelines),
        uptime=fleet_uptime(timelines),
        participation=merges.participation,
        failures=sum(timeline.failures for timeline in timelines),
    )


def _walk(learner: Learner, horizon_ms: int, seed: int, index: int) -> Timeline:
    return walk(learner, horizon_ms, generator(seed, index))


def _slots(timelines: list[Timeline], merges: Merges, count: int) -> tuple[Slot, ...]:
    at_ms = np.array(merges.at_ms[:count])
    cut, shares = [], []
    for index, timeline in enumerate(timelines):
        phase_ms = timeline.learner.step_ms * index // len(timelines)
        blocks = list(step_ends_ms(timeline))
        ends = np.concatenate([block for block, _ in blocks]) + phase_ms
        cut.append([0, *np.searchsorted(ends, at_ms, side="right").tolist()])
        active = np.concatenate([block for _, block in blocks])
        shares.append((active / timeline.learner.slices).tolist())
    return tuple(
        Slot(
            slot,
            merges.at_ms[slot] / MS,
            tuple(
                Work(bool(merges.present[slot] >> m & 1), tuple(shares[m][cut[m][slot] : cut[m][slot + 1]]))
                for m in range(len(timelines))
            ),
        )
        for slot in range(count)
    )


def _outages(slots: tuple[Slot, ...], learners: int) -> tuple[Outage, ...]:
    found = []
    for m in range(learners):
        since: int | None = None
        for slot in slots:
            stopped = not slot.work[m].step_shares
            if stopped and since is None:
                since = slot.slot
            if not stopped and since is not None:
                found.append(Outage(m, since, slot.slot - 1))
                since = None
        if since is not None:
            found.append(Outage(m, since, slots[-1].slot))
    return tuple(sorted(found, key=lambda outage: (outage.first_slot, outage.learner)))
