"""The bytes of every kind of record, as files: what is written today can be read by whoever has this schema.

A file changes only together with a schema number in protocol/log/records.py, or by a key with a default that an older
version may ignore; then write them anew:

    python -m tests.unit.protocol.log.test_golden
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from diloco_cli.protocol.log.commit_log import HeadHint, Snapshot
from diloco_cli.protocol.log.commits import (
    CollectionFloor,
    Commit,
    EpochStart,
    Evaluation,
    Finish,
    Membership,
    Merge,
    Quarantine,
    Readmit,
    Refuse,
    Revoke,
    Rollback,
    Skip,
    Stop,
)
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, MirrorHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Island,
    Join,
    MergedOffer,
    Offer,
    Outcome,
    ProcessClaim,
    Request,
    Timings,
    decode,
    encode,
)
from tests.unit.protocol.records import RUN, applied, genesis, merge

GOLDEN = Path(__file__).parent / "golden"
TIME = "2026-01-02T03:04:05.678Z"
HEADER: dict[str, Any] = {
    "n": 7, "epoch": 2, "nonce": "c0ffee", "previous": "blake3-1111", "time": TIME, "software": "diloco 1.2.3",
    "reason": "why", "request": 3, "outcomes": (Outcome("l1", 2, 3, 1, "bad_norms"),),
}  # fmt: skip
VERSIONS = (
    FragmentVersion(0, 7, 5, 2, "blake3-2222", "blake3-3333"),
    FragmentVersion(1, 7, 5, 2, "blake3-4444", "blake3-5555"),
)
INPUT = MergedOffer(
    "l0", 1, 4, 6, 128, 256, 128, 32, 512.0, "blake3-6666", 4096, 0.25, 0.5,
    norm=1.25, cosine=0.75, believed=96, proven=12.5,
)  # fmt: skip
ISLAND = Island("iowa", "us", 4, 12, 100.5, 0.125, "h100", 8, micro_batch_tokens=2, nodes=2, ranks=8)
COMMITS: list[Commit] = [
    EpochStart(**HEADER, outputs=VERSIONS, serves=False, format="blake3-7777"),
    Merge(
        **HEADER,
        slot=6,
        inputs=(INPUT,),
        outputs=VERSIONS[:1],
        tokens=96,
        quorum=1,
        alive=2,
        grace_s=0.5,
        grace_used_s=0.25,
        opens_s=-0.125,
        slot_s=1.5,
    ),
    Skip(**HEADER, slot=6),
    Refuse(**HEADER),
    Membership(**HEADER, islands=(ISLAND,)),
    Evaluation(**HEADER, evaluated=6, loss=2.5, tokens=1024, jumped=True),
    Quarantine(**HEADER, learner="l1"),
    Readmit(**HEADER, learner="l1"),
    Revoke(**HEADER, key="a1" * 32, learner="l1"),
    Rollback(**HEADER, to=4, outputs=VERSIONS, shares=(("l0", 1024), ("l1", 512)), evaluated=6),
    CollectionFloor(**HEADER, floor=5),
    Stop(**HEADER, diverged=True),
    Finish(**HEADER),
]
OFFER = Offer(
    "l0", 1, 4, 6, 0, 6, "blake3-3333", 128, 256, 128, 32, "blake3-6666", 4096, "c0ffee",
    Timings(0.25, 1.5, 0.125, 0.5), 2.25, "inner/l0/00000001/000000000096-blake3-7777", 3,
)  # fmt: skip
OTHERS: dict[str, Any] = {
    "format": RUN,
    "claim": ProcessClaim(2, "c0ffee", "host", 4242, TIME, "diloco 1.2.3"),
    "offer": OFFER,
    "request": Request(3, "rollback", "c0ffee", TIME, "a spike", "l1", 4, "a1" * 32),
    "join": Join(ISLAND, 2, 1, "c0ffee", TIME),
    "snapshot": Snapshot(merge(genesis(), applied(), applied("l1")), "blake3-8888", "id"),
    "hint": HeadHint(64),
    "learner-heartbeat": LearnerHeartbeat(
        "TRAINING", 1, 7, 96, 384, 100.5, 1, 99.5, 2.25, 4096, 2048, 12, 0.5, "", "", 6
    ),
    "syncer-heartbeat": SyncerHeartbeat("SERVING", 2, 7, "host", mirrors=(MirrorHeartbeat("eu", 6, 1, 0.5),)),
}
RECORDS: dict[str, Any] = {f"commit-{commit.kind}": commit for commit in COMMITS} | OTHERS


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_written_as_it_always_was_and_read_back(name: str) -> None:
    golden = (GOLDEN / f"{name}.json").read_bytes()
    assert encode(RECORDS[name]) == golden
    assert decode(type(RECORDS[name]), golden, name) == RECORDS[name]


def test_there_is_a_file_for_every_kind_of_commit_and_no_other() -> None:
    assert {type(commit) for commit in COMMITS} == set(Commit.__subclasses__())
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECORDS)


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: str(commit.kind))
def test_a_commit_read_as_any_commit_is_of_its_own_kind(commit: Commit) -> None:
    assert decode(Commit, encode(commit), "log") == commit


def test_a_merge_without_inputs_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="at least one input"):
        Merge(slot=6, inputs=(), outputs=VERSIONS[:1])


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: str(commit.kind))
def test_every_field_of_a_golden_commit_differs_from_its_default(commit: Commit) -> None:
    """Or the file would not notice a field that is no longer written."""
    same = [one.name for one in fields(commit) if getattr(commit, one.name) == one.default]
    assert same == ["schema"]


if __name__ == "__main__":
    for path in GOLDEN.iterdir():
        path.unlink()
    for name, record in RECORDS.items():
        (GOLDEN / f"{name}.json").write_bytes(encode(record))
