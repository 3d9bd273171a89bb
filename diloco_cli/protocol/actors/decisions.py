"""Decisions of a training loop between its steps, beside its books (progress.py). Pure.

is_over          the run has ended, for this process
phase_for        the run's phase, for this process
may_serve_again  a syncer that was fenced goes on, under a new epoch
awaits_last      a learner that leaves waits for the outcomes of its last offers
merge_is_due     `at_tau`: the merge of an own offer is to be adopted before the next step
waited_for       whether that merge is here, is still to come, or never comes
save_is_due      the inner optimizer's moments go to the store
OfferDraft       what a learner decided to offer, before there is a payload
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.records import FragmentVersion
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import RunPhase


@dataclass(frozen=True)
class OfferDraft:
    """A decision to offer fragment `fragment` for slot `slot`, as offer number `seq`. `applied`: the seq of the newest
    own offer of the fragment that is known to be merged."""

    seq: int
    slot: int
    fragment: int
    base: FragmentVersion
    data_start: int
    data_end: int
    steps: int
    applied: int | None


def is_over(state: RunState, joined_at: int) -> bool:
    """Whether the run has ended for a process that began at commit `joined_at`. A stop that was in the log before does
    not concern it: the run is being resumed."""
    return state.phase == RunPhase.FINISHED or (state.phase == RunPhase.STOPPED and state.n > joined_at)


def phase_for(state: RunState, joined_at: int) -> RunPhase:
    """The run's phase for a process that began at commit `joined_at`: RUNNING until the run `is_over` for it."""
    return state.phase if is_over(state, joined_at) else RunPhase.RUNNING


def may_serve_again(state: RunState, epoch: int) -> bool:
    """Whether a syncer of this epoch, which was fenced, may claim another one: it was fenced by a command, which merges
    nothing and leaves, and no syncer has come since."""
    return state.epoch > epoch and not state.served and state.phase == RunPhase.RUNNING


def awaits_last(awaits_outcomes: bool, may_drain: bool, state: RunState, joined_at: int) -> bool:
    """Whether a learner that leaves stays: while the outcome of an own offer is unknown, there is time, and the run
    goes on. It only reads the log and adopts nothing, because it trains no more."""
    return awaits_outcomes and may_drain and not is_over(state, joined_at)


def merge_is_due(sync: SyncSettings, draft: OfferDraft, next_slot: int) -> bool:
    """Whether a learner at `next_slot` has to adopt the merge of this offer before it goes on: exactly tau slots after
    the offer's own. Only with `at_tau`; with `on_arrival` a learner never waits for a merge."""
    return sync.adoption == "at_tau" and sync.overlap != "auto" and draft.slot + 1 + sync.overlap <= next_slot


def waited_for(
    draft: OfferDraft, base: FragmentVersion, arrived: FragmentVersion | None, state: RunState
) -> Literal["here", "to come", "never"]:
    """Where the merge of this offer, or a later merge of its fragment, is; `base`: the fragment's adopted version,
    `arrived`: its newest version that has arrived. `never` if a rollback came after the offer's base, because then the
    offer is refused, or if its slot was skipped, or if such a merge is adopted already."""
    if draft.base.version < state.base_floor or base.slot >= draft.slot:
        return "never"
    if arrived is not None and arrived.slot >= draft.slot:
        return "here"
    return "never" if state.outputs[draft.fragment].slot < draft.slot < state.slot else "to come"


def save_is_due(steps: int, local_steps: int, every_rounds: int, saved_at: int) -> bool:
    """Once every so many rounds of `local_steps` own steps each (0: never); `saved_at`: the steps at the last save."""
    every = every_rounds * local_steps
    return every > 0 and steps // every > saved_at // every
