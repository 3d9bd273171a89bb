"""Many objects under keys that somebody reads one after the other."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from diloco_cli.protocol.actors.evaluating import NoEvaluator
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.keys import incarnation_key
from diloco_cli.protocol.log.records import ProcessClaim, encode
from diloco_cli.signing import learner_signer
from diloco_cli.virtual.world import World
from tests.histories.integers import IntegerArithmetic
from tests.security.attacks.stage import NAME, AttackedRun, AttackSeen, ask_to_join, running
from tests.simulation.toy import ToyFleet, make_run

JOINS = CLAIMS = 20_000
DEAD = 1_000
STOPPED_WITHIN_S, STARTED_WITHIN_S, MERGED_WITHIN_S = 10.0, 30.0, 10.0
RTT_S = 0.04


def join_requests(directory: Path, number: int = JOINS) -> AttackSeen:
    """As many islands ask to join; then the operator stops the run."""
    with running(AttackedRun(directory)) as stage:
        ask_to_join(stage, *(f"x{index}" for index in range(number)))
        before, started_s = stage.head, time.monotonic()
        done = stage.diloco("stop", NAME, "--timeout", "60")
        took_s = time.monotonic() - started_s
        grown = stage.head - before
        seen = f"stop ended with {done.returncode} after {took_s:.1f} s; the log grew by {grown} commits meanwhile"
        return AttackSeen(done.returncode == 0 and took_s <= STOPPED_WITHIN_S, seen)


def claims_under_an_own_prefix(directory: Path, number: int = CLAIMS) -> AttackSeen:
    """Signed run. As many forged claims under l0's prefix; then l0 is restarted."""
    with running(AttackedRun(directory, signed=True)) as stage:
        flood(stage.bucket / "incarnation" / "l0", number)
        stage.signal("l0", signal.SIGKILL)
        started_s = time.monotonic()
        goes_on = stage.merges_on(2, name="l0", within_s=120.0)
        took_s = time.monotonic() - started_s
        seen = f"l0 is merged again after {took_s:.0f} s" if goes_on else f"l0 is not merged within {took_s:.0f} s"
        return AttackSeen(goes_on and took_s <= STARTED_WITHIN_S, seen)


def flood(folder: Path, number: int) -> None:
    for index in range(2, number + 2):
        (folder / f"{index:08d}.json").write_bytes(b'{"number":%d}' % index)


def dead_incarnations(directory: Path, number: int = DEAD) -> AttackSeen:
    """So many genuine incarnations of l0 died; in virtual time, a store call takes 40 ms."""
    run = make_run(merges=8)
    fleet = ToyFleet(run, World(latency_s=lambda actor, operation: RTT_S))
    claim = ProcessClaim(1, "dead", "host", 1, "then", "test")
    for index in range(1, number + 1):
        key = incarnation_key("l0", index)
        fleet.world.store.create(key, run.keyring.sign(learner_signer("l0"), key, encode(claim)))
    syncer = Syncer(run, fleet.claim(), IntegerArithmetic(run), NoEvaluator(), lambda: "then", fleet.nonce)
    fleet.world.start("syncer", syncer.serve())
    fleet.start_learners()
    merged = fleet.world.run(lambda: any("l0" in names(record) for record in fleet.records()), 3600.0)
    took_s = fleet.world.now_s
    return AttackSeen(merged and took_s <= MERGED_WITHIN_S, f"l0's first merge after {took_s:.1f} virtual s")


def names(record: dict[str, object]) -> set[object]:
    return {item["learner"] for item in record.get("inputs", ())}  # type: ignore[attr-defined]
