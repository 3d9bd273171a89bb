"""A long log as a run leaves it, for `report` and `status`: merges of 8 of 64 learners, with evaluations, restarts,
takeovers and outages, built with the product's own records, without a syncer and without fsync."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, heartbeat_key
from diloco_cli.protocol.log.records import RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from tests.benchmarks import resume

LEARNERS, PARTICIPANTS, SLOT_S = 64, 8, 2.5
START_S = 1_790_000_000.0
EVALUATE_EVERY, RESTART_EVERY, TAKEOVER_EVERY = 50, 700, 9000


def draft(run: RunFormat, state: RunState) -> Commit:
    """8 learners that take turns, so that all 64 are known; each incarnation of one is a little longer than a day."""
    n, epoch = state.n + 1, 1 + (state.n + 1) // TAKEOVER_EVERY
    time = datetime.fromtimestamp(START_S + SLOT_S * n + 120 * (n // TAKEOVER_EVERY), UTC).isoformat()
    said = resume.header(state, time, epoch)
    if n == 0:
        return resume.first(run, said)
    if n % TAKEOVER_EVERY == 0:
        return EpochStart(**said, reason="the syncer before it was not heard for 120 s")
    if n % EVALUATE_EVERY == 0:
        tokens = state.tokens(run.layout)
        return Evaluation(**said, evaluated=n - 1, loss=1.5 + 4 / (1 + tokens / 2e6), tokens=tokens)
    turn = n // 400
    names = [run.islands[(turn + PARTICIPANTS * i) % LEARNERS].name for i in range(PARTICIPANTS)]
    return resume.merge(run, state, said, dict.fromkeys(sorted(names), 1 + n // RESTART_EVERY))


def build(directory: Path, commits: int) -> RunFormat:
    run = resume.make_run(LEARNERS)
    resume.build(directory, commits, run, draft)
    (directory / FORMAT_KEY).write_bytes(encode(run))
    (directory / "heartbeat").mkdir()
    for island in run.islands:
        said = LearnerHeartbeat("TRAINING", 1, commits, 100, 0, 400.0, 0, 400.0, 1.5, 10**9, 2 * 10**9, 10**6)
        (directory / heartbeat_key(island.name)).write_bytes(encode(said))
    (directory / heartbeat_key(SYNCER)).write_bytes(encode(SyncerHeartbeat("SERVING", 1, commits, "bench")))
    return run
