"""How many round trips a newcomer's start takes: `python -m tests.benchmarks.newcomer [--commits N] [--learners M]`.

A log of 100,000 commits, in the newest of which all of 1,000 learners took part, is joined in virtual time by the
product's functions: the log is read, an incarnation claimed, the newest version of each fragment fetched. Each call
takes one unit of time, so the time is the round trips in turn; the bytes of the weights come in addition. Once as a
learner's first process and once as its second, after a round of the first one's offers that nobody has answered. Goal:
at most 60.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from diloco_cli.protocol.actors.joining import fetch_weights, join
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import offer_key, weights_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.places import claim_incarnation
from diloco_cli.protocol.log.records import Offer, ProcessClaim, RunFormat
from diloco_cli.protocol.log.snapshots import SNAPSHOT_EVERY
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.together import MAX_AT_ONCE, together
from diloco_cli.protocol.log.wire import encode
from diloco_cli.signing import UNSIGNED, learner_signer
from diloco_cli.store.local import LocalStore
from diloco_cli.virtual.world import World
from tests.benchmarks import resume
from tests.benchmarks.measure import machine

MOST = 60
OFFERS = 24  # of a learner's process before, one of each fragment


def build(directory: Path, commits: int, learners: int) -> RunFormat:
    """Merges of two learners, and of all in the newest, beyond the last two snapshots."""

    def draft(run: RunFormat, state: RunState) -> Commit:
        everybody = state.n >= commits - 2 * SNAPSHOT_EVERY
        return resume.next_commit(run, state, learners if everybody else 2)

    run = resume.build(directory, commits, resume.make_run(learners), draft)
    for version in range(commits - 2 * run.num_fragments, commits):
        data, fragment = b"%d" % (version - 1), (version - 1) % run.num_fragments
        LocalStore(directory).create(weights_key(fragment, version, 1, resume.digest(data)), data)
    return run


def claim(nonce: str) -> ProcessClaim:
    return ProcessClaim(0, nonce, "here", 1, "2026-01-01T00:00:00.000Z", "bench")


def started(run: RunFormat, learner: str, nonce: str) -> Steps[int]:
    """The bytes of weights that a new process has when it begins to train."""
    joined = yield from join(run, learner, claim(nonce))
    found = yield from together([fetch_weights(run, output) for output in joined.state.outputs])
    return sum(len(data) for data in found if data is not None)


def round_trips(store: LocalStore, steps: Steps[int]) -> float:
    world = World(store, latency_s=lambda actor, operation: 1.0, connections=MAX_AT_ONCE)
    actor = world.start("newcomer", steps)
    if not world.run(lambda: actor.ended, 1e6) or actor.error is not None or not actor.result:
        raise RuntimeError("the newcomer did not start") from actor.error
    return world.now_s


def left_behind(store: LocalStore, run: RunFormat, learner: str) -> None:
    """What an earlier process of this learner has left: its claim, and offers that nobody has answered."""
    world = World(store)
    world.start("before", claim_incarnation(UNSIGNED, learner, claim("before"), 0))
    reader = world.start("reader", read_log(run))
    world.run_for(60.0)
    begins = reader.result.learner(learner).next_seq
    for seq in range(begins - 1, begins + OFFERS):  # the last answered one is kept
        offer = Offer(learner, 1, seq, seq, seq % run.num_fragments, 0, "", 0, 1, 1, 1, resume.digest(b""), 1, "n")
        key = offer_key(*offer.id)
        store.create(key, UNSIGNED.sign(learner_signer(learner), key, encode(offer)))


def measured(commits: int, learners: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        run = build(Path(folder), commits, learners)
        first = round_trips(store, started(run, f"l{learners - 1}", "first"))
        left_behind(store, run, "l1")
        return {"a first process": first, "a second process": round_trips(store, started(run, "l1", "second"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--learners", type=int, default=1_000)
    options = parser.parse_args()
    print(machine())
    found = measured(options.commits, options.learners)
    for name, trips in found.items():
        print(
            f"{name} of {options.learners} learners, {options.commits:,} commits: {trips:.0f} round trips (<= {MOST})"
        )
    sys.exit(0 if max(found.values()) <= MOST else 1)


if __name__ == "__main__":
    main()
