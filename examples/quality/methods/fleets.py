"""A fleet in virtual time that trains nothing and steps as it is told to: the product's learners and syncer, and the
tape that their bucket tells.

The same arguments give the same tape, to the byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from math import inf

from diloco_cli.config.settings import Link
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.forecast.stand_ins import BITS, Condition, Sizes, VirtualTraining
from diloco_cli.protocol.actors.ports import Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import MAX_EXACT, RunFormat
from diloco_cli.protocol.log.tape import Tape
from diloco_cli.tapes.recorder import record

from .pacing import TOLERANCE_S, Pacing, StepClock

SETTLES_SLOTS = 4  # after the last step: what is on its way is merged
STANDS_STILL_ROUNDS = 100  # without a step; then the fleet is taken to be stuck
FOR_EVER_S = 1e12


@dataclass
class PacedFleet(SimulatedFleet):
    """Its learners step as their pacings say, in batches that are whole multiples of `quantum_tokens`, until together
    they have processed `budget` tokens. `stepped_s`: when the last step ended; `stepping`: the stretches in which each
    made one step after the other, from and to."""

    pacings: dict[str, Pacing] = field(default_factory=dict)
    quantum_tokens: int = 1
    budget: float = inf
    processed: int = 0
    stepped_s: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    stepping: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_spent(self) -> bool:
        return self.processed >= self.budget

    def training_of(self, condition: Condition) -> VirtualTraining:
        return PacedTraining(condition, self)

    def note_step(self, name: str, end_s: float) -> None:
        self.steps[name] += 1
        self.stepped_s = end_s
        stretches, start_s = self.stepping[name], end_s - self.pacings[name].step_s
        if stretches and start_s <= stretches[-1][1] + TOLERANCE_S:
            start_s = stretches.pop()[0]
        stretches.append((start_s, end_s))


class PacedTraining(VirtualTraining):
    """Steps end for good when the fleet's budget is spent."""

    def __init__(self, condition: Condition, fleet: PacedFleet) -> None:
        super().__init__(condition)
        self._name, self._fleet = condition.island.name, fleet
        self._clock = StepClock(fleet.pacings[self._name], fleet.quantum_tokens)

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        now_s = yield Now()
        timed = None if self._fleet.is_spent else self._clock.next_step(now_s, batch_tokens)
        if timed is None:
            yield Sleep(FOR_EVER_S)
            raise AssertionError("no history lasts so long")
        self._fleet.processed += timed.batch_tokens
        yield Sleep(timed.end_s - now_s)
        self._fleet.note_step(self._name, timed.end_s)
        return self.stepped(timed.batch_tokens)


def play_fleet(run: RunFormat, pacings: tuple[Pacing, ...], tokens: int, quantum_tokens: int = 1) -> PacedFleet:
    """Until the learners together have processed `tokens`. Raises UsageError for `adaptive` mixing: how deltas agree is
    known only where an island trains."""
    if run.settings.sync.mixing == "adaptive":
        raise UsageError(
            "a fleet that trains nothing cannot mix by `adaptive`: it asks how the learners' deltas agree",
            hint="sync.mixing: replace, blend or rebase",
        )
    train = replace(run.settings.train, tokens=MAX_EXACT - 1)  # the budget ends the run
    islands = tuple(
        replace(island, step_s=pacing.step_s, link=_link(pacing))
        for island, pacing in zip(run.islands, pacings, strict=True)
    )
    fleet = PacedFleet(
        run=replace(run, settings=replace(run.settings, train=train), islands=islands),
        sizes=Sizes((1.0,) * run.num_fragments, (1.0,) * run.num_fragments, 0.0),
        hardware={},
        latency_s=0.0,
        pacings={island.name: pacing for island, pacing in zip(islands, pacings, strict=True)},
        quantum_tokens=quantum_tokens,
        budget=tokens,
    )
    fleet.start()
    slot_s = max(i.local_steps * i.step_s for i in islands) / run.num_fragments
    round_s = max(run.settings.sync.every * p.step_s + p.upload_s + p.download_s for p in pacings)
    still_s = STANDS_STILL_ROUNDS * round_s + run.settings.sync.skip_after_s
    fleet.world.run(lambda: fleet.is_spent or fleet.world.now_s > fleet.stepped_s + still_s, inf)
    fleet.world.run_for(SETTLES_SLOTS * slot_s + max(p.step_s + p.upload_s + p.download_s for p in pacings))
    if not fleet.is_spent or not fleet.state.merges:
        raise RunFailedError(
            f"the fleet stopped after {fleet.processed:,} of {tokens:,} tokens and {fleet.state.merges} merges: "
            "nobody can go on",
            hint="lower sync.quorum, or give the learners more time",
        )
    return fleet


def tape_of(fleet: SimulatedFleet, run: RunFormat) -> Tape:
    """What the bucket tells. Its versions have no bytes that a player could compare."""
    tape = record(fleet.world.store, fleet.run)
    return replace(tape, run=run, merges=tuple(replace(merge, state_digest=None) for merge in tape.merges))


def _link(pacing: Pacing) -> Link:
    """Over which one payload, here of one byte, takes as long as the pacing says."""
    up_bps = BITS / pacing.upload_s if pacing.upload_s else None
    return Link(up_bps, BITS / pacing.download_s if pacing.download_s else None)
