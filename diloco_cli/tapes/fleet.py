"""A fleet in virtual time that trains nothing: the product's learners and syncer, and the tape that their bucket tells.

The same arguments give the same tape, to the byte.
"""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.config.settings import Link
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.protocol.records import MOST, RunFormat
from diloco_cli.protocol.tape import Tape
from diloco_cli.simulate.fleet import SimulatedFleet
from diloco_cli.simulate.island import BITS, Budget, Sizes
from diloco_cli.simulate.pacing import Pacing
from diloco_cli.tapes.recorder import record

SETTLES_SLOTS = 4  # after the last step: what is on its way is merged
STANDS_STILL_ROUNDS = 100  # without a step; then the fleet is taken to be stuck


def play_fleet(
    run: RunFormat, pacings: tuple[Pacing, ...], tokens: int, quantum_tokens: int = 1
) -> SimulatedFleet:  # fmt: skip
    """Until the learners together have processed `tokens`. Batches are whole multiples of `quantum_tokens`. Raises
    UsageError for `adaptive` mixing: how deltas agree is known only where somebody trains."""
    if run.settings.sync.mixing == "adaptive":
        raise UsageError(
            "a fleet that trains nothing cannot mix by `adaptive`: it asks how the learners' deltas agree",
            hint="sync.mixing: replace, blend or rebase",
        )
    train = replace(run.settings.train, tokens=MOST - 1)  # the budget ends the run
    islands = tuple(
        replace(island, step_s=pacing.step_s, link=_link(pacing))
        for island, pacing in zip(run.islands, pacings, strict=True)
    )
    fleet = SimulatedFleet(
        run=replace(run, settings=replace(run.settings, train=train), islands=islands),
        sizes=Sizes((1.0,) * run.num_fragments, (1.0,) * run.num_fragments, 0.0),
        hardware={},
        latency_s=0.0,
        pacings={island.name: pacing for island, pacing in zip(islands, pacings, strict=True)},
        quantum_tokens=quantum_tokens,
        budget=Budget(tokens),
    )
    fleet.start()
    slot_s = max(i.local_steps * i.step_s for i in islands) / run.num_fragments
    steps = tokens / min(island.batch_tokens for island in islands)
    within_s = (steps + STANDS_STILL_ROUNDS * run.settings.sync.every) * max(p.step_s for p in pacings)
    spent = fleet.world.run(lambda: fleet.budget.is_spent, 10 * within_s)
    fleet.world.run_for(SETTLES_SLOTS * slot_s + max(p.step_s + p.upload_s + p.download_s for p in pacings))
    if not spent or not fleet.state.merges:
        raise RunFailedError(
            f"the fleet stopped after {fleet.budget.processed:,} of {tokens:,} tokens and {fleet.state.merges} merges: "
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
