"""Whether the syncer keeps pace with many learners and a far bucket: python -m tests.benchmarks.pace [--case M,S,N]

The product's syncer and learners in virtual time, 40 ms a store call, arithmetic and links included: a delta takes a
fifth of a slot on a learner's link, a merge a twentieth at the syncer. Goals: a merge at most every 1.05 slots, with at
least 0.95 of the learners in the mean, and a flat backlog: in the last third of the time the bucket holds in the mean
at most a tenth more deltas, offers, weights and states than in the first (from when the first garbage is gone). Ends
with status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from statistics import mean

from diloco_cli.config.settings import Link, RetentionSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.forecast.stand_ins import Sizes
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import MAX_AT_ONCE
from diloco_cli.protocol.log.records import Island, RunFormat, decode
from diloco_cli.protocol.rules.capacity import MergeWork, SyncerMachine
from tests.benchmarks.measure import machine

CASES = ((8, 1.0, 3000), (16, 1.0, 3000), (32, 1.0, 3000), (64, 2.0, 3000), (256, 5.0, 500))
FRAGMENTS, STEPS_A_SLOT, BATCH_TOKENS = 8, 2, 1000
CALL_S = 0.04
LINK_BPS = 1e9
UPLOAD_SHARE, MERGE_SHARE = 0.2, 0.05  # of a slot
WARM_UP = 4 * FRAGMENTS  # merges
NEAR_S, WEIGHTS_SHARE = 0.005, 0.2  # of a learner's call; of a version: bf16 beside float32 with momentum
MAX_SLOTS, LEAST_INPUTS, MAX_GROWTH = 1.05, 0.95, 1.1
KINDS = ("delta", "offer", "weights", "state")
LOOKS = 60  # at the bucket, evenly spread
KEPT_ROUNDS = 8


@dataclass(frozen=True)
class PaceFound:
    """`slots`: of a merge, in the mean; `inputs`: the learners' share; `kept`: objects of each kind in the bucket, in
    the mean of the first third of the time and of the last."""

    slots: float
    inputs: float
    kept: dict[str, tuple[float, float]]

    @property
    def holds(self) -> bool:
        flat = all(last <= MAX_GROWTH * first for first, last in self.kept.values())
        return self.slots <= MAX_SLOTS and self.inputs >= LEAST_INPUTS and flat


def make_run(learners: int, slot_s: float, rtt_s: float = CALL_S) -> RunFormat:
    step_s, every = slot_s / STEPS_A_SLOT, STEPS_A_SLOT * FRAGMENTS
    settings = RunSettings(
        name="pace",
        train=TrainSettings(tokens=1 << 60, batch_tokens=BATCH_TOKENS),
        sync=SyncSettings(every=every, fragments=FRAGMENTS),
        retention=RetentionSettings(rounds=KEPT_ROUNDS, grace_s=30.0),
    )
    link = Link(up_bps=LINK_BPS, down_bps=LINK_BPS, rtt_s=rtt_s)
    islands = tuple(
        Island(f"l{i:04d}", "far", BATCH_TOKENS, every, BATCH_TOKENS / step_s, step_s, link=link)
        for i in range(learners)
    )
    layout = balanced_layout([ParameterFact(f"w{i}", (100,), False) for i in range(FRAGMENTS)], FRAGMENTS)
    return RunFormat("pace", settings.name, "", settings, islands, layout, "bench")


def play(learners: int, slot_s: float, merges: int) -> PaceFound:
    size = UPLOAD_SHARE * slot_s * LINK_BPS / 8
    sizes, run = Sizes((size,) * FRAGMENTS, (size,) * FRAGMENTS, 0.0), make_run(learners, slot_s)
    fleet = SimulatedFleet(run, sizes, {}, merge_s=MERGE_SHARE * slot_s, latency_s=CALL_S)
    fleet.start()
    world, at_s, kept = fleet.world, dict[int, float](), list[dict[str, int]]()
    filled = round(KEPT_ROUNDS * FRAGMENTS * 1.5 + 60.0 / slot_s)  # then as much goes as comes
    looks = [min(filled, merges // 2) + k * (merges - min(filled, merges // 2)) // LOOKS for k in range(1, LOOKS + 1)]
    for target in (WARM_UP, *looks):
        if not world.run(lambda: fleet.state.merges >= target, 20 * merges * slot_s):  # noqa: B023
            raise RuntimeError(f"no {target} merges by {world.now_s:.0f} s: {fleet.state.merges}")
        at_s[target] = world.now_s
        if target > WARM_UP:
            kept.append({kind: len(world.store.list(f"{kind}/", limit=1 << 20)) for kind in KINDS})
            print(f"{learners} learners, {target} of {merges} merges, {world.now_s:.0f} s", file=sys.stderr, flush=True)
    thirds = kept[: LOOKS // 3], kept[-(LOOKS // 3) :]
    means = {kind: (mean(at[kind] for at in thirds[0]), mean(at[kind] for at in thirds[1])) for kind in KINDS}
    read = (decode(Commit, world.store.get(commit_key(n)) or b"", "log") for n in range(fleet.state.n + 1))
    inputs = [len(commit.inputs) for commit in read if commit.kind == "merge"][WARM_UP:]
    slots = (at_s[merges] - at_s[WARM_UP]) / (merges - WARM_UP) / slot_s
    return PaceFound(slots, mean(inputs) / learners, means)


@dataclass(frozen=True)
class Syncing:
    """Learners near a bucket that is far from the syncer: `call_s` and `bps` are the syncer's own, `merge_s` the
    arithmetic of one merge."""

    learners: int
    slot_s: float
    call_s: float
    delta_bytes: float = 0.0
    version_bytes: float = 0.0
    bps: float | None = None
    merge_s: float = 0.0
    reads_back: bool = True
    connections: int = MAX_AT_ONCE

    @property
    def work(self) -> MergeWork:
        return MergeWork(self.learners, self.merge_s, self.delta_bytes, self.version_bytes)

    @property
    def machine(self) -> SyncerMachine:
        return SyncerMachine(self.call_s, self.bps, self.bps, float(self.learners), self.reads_back, self.connections)


def served_every(case: Syncing, merges: int = 24) -> float:
    """Seconds from merge to merge, once everybody has joined, in virtual time."""
    run = make_run(case.learners, case.slot_s, NEAR_S)
    weights, state = WEIGHTS_SHARE * case.version_bytes, (1 - WEIGHTS_SHARE) * case.version_bytes
    sizes = Sizes((case.delta_bytes,) * FRAGMENTS, (weights,) * FRAGMENTS, 0.0, (state,) * FRAGMENTS)
    link = Link(case.bps, case.bps)
    fleet = SimulatedFleet(run, sizes, {}, merge_s=case.merge_s, latency_s=case.call_s, syncer_link=link)
    fleet.world.checks_uploads, fleet.world.connections = not case.reads_back, case.connections
    fleet.start()
    at_s = []
    for target in (2 * FRAGMENTS, 2 * FRAGMENTS + merges):
        if not fleet.world.run(lambda: fleet.state.merges >= target, 1e5):  # noqa: B023
            raise RuntimeError(f"no {target} merges by {fleet.world.now_s:.0f} s: {fleet.state.merges}")
        at_s.append(fleet.world.now_s)
    return (at_s[1] - at_s[0]) / merges


def case_of(text: str) -> tuple[int, float, int]:
    learners, slot_s, merges = text.split(",")
    return int(learners), float(slot_s), int(merges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", type=case_of, action="append", help="instead of all: learners, seconds a slot, merges"
    )
    options = parser.parse_args()
    print(machine())
    gc.set_threshold(1_000_000)  # nearly all objects live on: looking through them again and again finds nothing
    holds = True
    for learners, slot_s, merges in options.case or CASES:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        found = play(learners, slot_s, merges)
        holds &= found.holds
        verdict = "holds" if found.holds else "MISSED"
        kept = ", ".join(f"{kind} {first:.0f} and {last:.0f}" for kind, (first, last) in found.kept.items())
        print(
            f"{learners:5d} learners, slot {slot_s:g} s, {merges} merges: one every {found.slots:.3f} slots, inputs "
            f"{found.inputs:.3f}; in the first third and the last are kept {kept}: {verdict}"
            f" ({time.perf_counter() - began_s:.0f} s, {time.process_time() - began_cpu_s:.0f} s of CPU)",
            flush=True,
        )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
