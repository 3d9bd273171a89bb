"""What a merge costs a syncer beyond its payloads: `python -m tests.benchmarks.bookkeeping [--learners N ...]`.

A log of so many learners, half of which have joined since the launch, with every fragment merged once. Then, merge by
merge: the commit's bytes are decoded and folded, and the inbox is sorted out, in which every learner has an offer for
the next slot. CPU milliseconds: `apply` and `sort_out` grow with the learners that a commit names, and must not grow
faster than these. Each learner reads and folds the same bytes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from statistics import median

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.log.commit_log import kept_versions
from diloco_cli.protocol.log.commits import Commit, EpochStart, Merge, apply
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Island,
    MergedOffer,
    Offer,
    RunFormat,
    decode,
    encode,
    fragment_of_slot,
    record_digest,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import packed, unpacked
from tests.benchmarks.measure import machine, row
from tests.unit.protocol.records import make_run

LEARNERS = (128, 512, 2048)
FRAGMENTS = 24
MAX_MS = 15.0  # a merge of 2,048 learners, beyond decoding its inputs
STEPS, BATCH_TOKENS = 4, 4
TIME = "2026-01-02T03:04:05.678Z"


@dataclass
class GrowingLog:
    """A log that goes on by one merge of all learners at a time."""

    run: RunFormat
    state: RunState = field(default_factory=RunState)

    @property
    def names(self) -> list[str]:
        return sorted(island.name for island in self.state.with_members(self.run).all_islands)

    def version(self, fragment: int, slot: int) -> FragmentVersion:
        n = self.state.n + 1
        return FragmentVersion(fragment, n, slot, 1, digest(b"s%d" % n), digest(b"w%d/%d" % (n, fragment)))

    def offers(self) -> list[Offer]:
        """One of each learner for the due slot."""
        slot = self.state.slot
        base = self.state.outputs[fragment_of_slot(slot, FRAGMENTS)]
        start = slot * STEPS * BATCH_TOKENS
        end = start + STEPS * BATCH_TOKENS
        return [
            Offer(
                name, 1, slot, slot, base.fragment, base.version, base.weights_digest, start, end, end - start, STEPS,
                digest(name.encode()), 100, "nonce",
            )
            for name in self.names
        ]  # fmt: skip

    def merge(self, offers: list[Offer]) -> Merge:
        inputs = tuple(
            MergedOffer(
                o.learner, o.incarnation, o.seq, o.base, o.data_start, o.data_end, o.tokens, o.steps, 64.0,
                o.payload_digest, o.payload_bytes, 0.5 + place / 9999, norm=1.0 + place / 7777, cosine=0.25,
            )
            for place, o in enumerate(offers)
        )  # fmt: skip
        made = self.version(offers[0].fragment, self.state.slot)
        return Merge(
            **self._header(), slot=made.slot, inputs=inputs, outputs=(made,), alive=len(offers),
            tokens=sum(item.tokens for item in inputs), slot_s=1.0,
        )  # fmt: skip

    def begin(self) -> None:
        outputs = tuple(self.version(fragment, -1) for fragment in range(FRAGMENTS))
        self.go_on(EpochStart(**self._header(), outputs=outputs))

    def _header(self) -> dict[str, object]:
        return {"n": self.state.n + 1, "previous": self.state.digest, "epoch": 1, "time": TIME, "nonce": "nonce"}

    def go_on(self, commit: Commit, data: bytes = b"") -> None:
        self.state = apply(self.state, commit, record_digest(data), self.run.layout, kept_versions(self.run))


def made_log(learners: int, merges: int = FRAGMENTS) -> GrowingLog:
    """`merges`: of the first fragments."""
    run = make_run(FRAGMENTS)
    islands = tuple(
        Island(f"island-{number:05}", "here", BATCH_TOKENS, STEPS, 100.0, 0.1) for number in range(learners)
    )
    log = GrowingLog(replace(run, islands=islands[: learners // 2]))
    log.state = RunState(members=islands[learners // 2 :])
    log.begin()
    for _ in range(merges):
        log.go_on(log.merge(log.offers()))
    return log


@dataclass
class Times:
    """CPU milliseconds, merge by merge."""

    decode: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    sort_out: list[float] = field(default_factory=list)

    unpack: list[float] = field(default_factory=list)

    read: list[float] = field(default_factory=list)
    """Kilobytes of the commit in the bucket."""

    written: list[float] = field(default_factory=list)
    """Kilobytes of the commit before compression."""

    @property
    def beyond_decoding(self) -> list[float]:
        return [a + b for a, b in zip(self.apply, self.sort_out, strict=True)]


def _ms(began_s: float) -> float:
    return 1000 * (time.process_time() - began_s)


def times(log: GrowingLog, merges: int) -> Times:
    found = Times()
    for _ in range(merges):
        data = encode(log.merge(log.offers()))
        there = packed(data)
        found.read.append(len(there) / 1000)
        found.written.append(len(data) / 1000)
        began_s = time.process_time()
        assert unpacked(there) == data
        found.unpack.append(_ms(began_s))
        began_s = time.process_time()
        commit = decode(Commit, data, "log")
        found.decode.append(_ms(began_s))
        began_s = time.process_time()
        log.go_on(commit, data)
        found.apply.append(_ms(began_s))
        inbox = Inbox(log.run)
        for offer in log.offers():
            inbox.deliver(offer)
        began_s = time.process_time()
        inbox.sort_out(log.state)
        found.sort_out.append(_ms(began_s))
        assert len(list(inbox.pending())) == len(commit.inputs), inbox.outcomes[:1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=LEARNERS)
    parser.add_argument("--merges", type=int, default=25)
    asked = parser.parse_args()
    print(machine())
    for learners in asked.learners:
        found = times(made_log(learners), asked.merges)
        print(row(f"M = {learners}: decode, ms a merge", found.decode, "", None))
        print(row("  apply", found.apply, "", None))
        print(row("  sort_out", found.sort_out, "", None))
        holds = median(found.beyond_decoding) <= MAX_MS if learners >= max(LEARNERS) else None
        goal = "" if holds is None else f"<= {MAX_MS:g}"
        print(row("  apply and sort_out together", found.beyond_decoding, goal, holds))
        print(row("  to decompress it, ms", found.unpack, "", None))
        print(row("  the commit in the bucket, KB", found.read, "", None))
        print(row("  before compression, KB", found.written, "", None))


if __name__ == "__main__":
    main()
