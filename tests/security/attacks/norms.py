"""A hostile learner of three against real processes: two `diloco learner`, `diloco syncer`, and attacks/hostile.py.

The syncer is killed and started as the strategy wants it. Afterwards the held-out loss of every merge is computed from
the bucket.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from diloco_cli.config.codec import replace
from diloco_cli.protocol.log.commit_log import next_commit
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import decode, encode
from diloco_cli.runtime.daemon import perform
from diloco_cli.signing import Checksummed
from diloco_cli.store.open import open_store
from tests.security.attacks.hostile import Strategy, as_json, honest_of
from tests.security.attacks.stage import STARTED_WITHIN_S, AttackSeen
from tests.security.contest import (
    FRAGMENTS,
    LOCAL_STEPS,
    TASK,
    HeldOutJudge,
    Score,
    contest_run,
    honest_tokens,
    judged,
    target_tokens,
)
from tests.studies.launched import CLOCK
from tests.studies.toy_runs import spawned

STEP_S = 0.15
SLOT_S = LOCAL_STEPS * STEP_S / FRAGMENTS
MAX_RISE = 0.02
ALLOWED = f"--allow-code={TASK}"

AFTER_A_RESTART = Strategy(scale=1e4, in_silence=True, waits=False, ahead=3, restart_every=24, outage_slots=6.0)
THREE_REFUSALS = Strategy(scale=1e3, waits=False)
A_BATCH_IN_A_SLOT = Strategy(scale=1e3, copies=4, waits=False)
PAID_BACK = Strategy(scale=1e3, honest_between=1, copies=4)


def after_a_restart(directory: Path) -> AttackSeen:
    return verdict(directory, AFTER_A_RESTART)


def three_refusals(directory: Path) -> AttackSeen:
    return verdict(directory, THREE_REFUSALS)


def a_batch_in_a_slot(directory: Path) -> AttackSeen:
    return verdict(directory, A_BATCH_IN_A_SLOT)


def paid_back(directory: Path) -> AttackSeen:
    return verdict(directory, PAID_BACK)


def verdict(directory: Path, strategy: Strategy, rounds: int = 9) -> AttackSeen:
    score = replayed(directory, strategy, rounds)
    blamed = f", quarantined: {', '.join(score.blamed)}" if score.blamed else ""
    stalled = "" if score.reached else f"; stalled, {score.phase}"
    seen = (
        f"worst merge {score.worst_rise:+.2%}, loss {score.losses[0]:.2f} -> {score.final:.2f} in {len(score.losses)} "
        f"merges, {score.applied} of its offers merged, {score.rollbacks} rollbacks{blamed}{stalled}"
    )
    return AttackSeen(score.worst_rise <= MAX_RISE and score.reached, seen)


def replayed(directory: Path, strategy: Strategy, rounds: int, seed: int = 0, absent: bool = False) -> Score:
    """`absent`: without the hostile learner, with the same restarts of the syncer."""
    fleet = RealFleet(directory, strategy, seed, absent)
    try:
        fleet.play(rounds)
    finally:
        fleet.end()
    return fleet.score(rounds)


class RealFleet:
    def __init__(self, directory: Path, strategy: Strategy, seed: int, absent: bool) -> None:
        self.directory, self.strategy, self.absent = directory, strategy, absent
        self.url = (directory / "bucket").as_uri()
        self.store, run = open_store(self.url, create=True), slow(contest_run(seed))
        kept = tuple(island for island in run.islands if not absent or island.name in honest_of(run))
        self.run = replace(run, islands=kept)  # the same shards, and nobody to wait for
        self.store.create(FORMAT_KEY, self.run.keyring.sign("log", FORMAT_KEY, encode(self.run)))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log: list[tuple[Commit, RunState]] = []

    def play(self, rounds: int) -> None:
        self._start("syncer", "diloco_cli", "syncer", self.url, ALLOWED)
        for name in honest_of(self.run):
            self._start(name, "diloco_cli", "learner", "--run", self.url, "--name", name, ALLOWED)
        plan = self.strategy
        if not self.absent:
            self._start("x0", "tests.security.attacks.hostile", self.url, "x0", as_json(plan))
        restarts_at = plan.restart_every or 1 << 30
        ends_s = time.monotonic() + STARTED_WITHIN_S + 12.0 * rounds * FRAGMENTS * SLOT_S
        while time.monotonic() < ends_s and not self._reaches(self._head(), rounds):
            if self._head().slot >= restarts_at:
                restarts_at = self._head().slot + plan.restart_every
                self._restart_syncer(plan.outage_slots * SLOT_S)
            time.sleep(0.05)

    def _reaches(self, state: RunState, rounds: int) -> bool:
        return honest_tokens(self.run, state) >= target_tokens(self.run, rounds)

    def _restart_syncer(self, outage_s: float) -> None:
        self.processes["syncer"].kill()
        self.processes["syncer"].wait()
        time.sleep(outage_s)
        self._start("syncer", "diloco_cli", "syncer", self.url, ALLOWED)

    def _start(self, name: str, *words: str) -> None:
        home = str(self.directory / "home")
        self.processes[name] = spawned(self.directory / f"{name}.log", *words, DILOCO_HOME=home)

    def _head(self) -> RunState:
        state = self.log[-1][1] if self.log else RunState()
        while (later := perform(next_commit(self.run, state), self.store, CLOCK)) is not None:
            data = self.store.get(commit_key(later.n)) or b""
            self.log.append((decode(Commit, data, "log"), later))
            state = later
        return state

    def end(self) -> None:
        self._head()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def score(self, rounds: int) -> Score:
        """Up to the merge that has all the honest tokens."""
        end = next((place for place, (_, state) in enumerate(self.log, 1) if self._reaches(state, rounds)), None)
        score = judged(HeldOutJudge(self.run, self.store), self.log[:end], self.strategy.begins)
        score.reached = end is not None
        return score


def slow(run: RunFormat) -> RunFormat:
    """The same run with steps that take their time: as planned, and as they are."""
    data = replace(run.settings.data, args={**run.settings.data.args, "step_s": STEP_S})
    settings = replace(run.settings, data=data)
    islands = tuple(replace(island, step_s=STEP_S, tokens_per_s=island.batch_tokens / STEP_S) for island in run.islands)
    return replace(run, settings=settings, islands=islands, checksums=True, keyring=Checksummed(run.run_id))
