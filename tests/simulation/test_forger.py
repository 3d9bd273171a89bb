"""A forger beside the run: nothing that it writes counts or holds anybody up, and each defence against it, switched
off, is caught by the same histories."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from diloco_cli import signing
from diloco_cli.config.codec import replace
from diloco_cli.digests import digest
from diloco_cli.protocol.actors import collection, membership, requests
from diloco_cli.protocol.log import commit_log
from diloco_cli.protocol.log.keys import commit_key, snapshot_key
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, RecordError, decode, record_digest
from diloco_cli.signing import NOBODY, UNSIGNED, Checksummed
from tests.histories.campaign import lived
from tests.histories.options import Options, drawn_options

MERGES = 12
MAX_HISTORIES = 40


def with_forger(seed: int, signed: bool | None = None) -> Options:
    options = drawn_options(seed)
    chosen = options.signed or seed % 2 == 0 if signed is None else signed
    return replace(options, forger=True, signed=chosen, merges=max(MERGES, options.merges))


def test_a_tenth_of_the_swarm_or_so_has_a_forger_and_half_of_these_are_signed() -> None:
    drawn = [drawn_options(seed) for seed in range(1000)]
    beset = [options for options in drawn if options.forger]
    assert 50 <= len(beset) <= 110 and 0.35 <= sum(options.signed for options in beset) / len(beset) <= 0.7


def test_it_changes_nothing_and_holds_nobody_up() -> None:
    written: Counter[str] = Counter()
    for seed in range(4):
        outcome = lived(seed, with_forger(seed), other_walls=seed == 0)
        assert outcome.violation is None, (seed, outcome.violation)
        forged = [text.split()[3] for _, text, _ in outcome.tail if text.startswith("a forger wrote")]
        written.update(key.partition("/")[0] for key in forged)
    assert written.keys() == {"incarnation", "request", "join", "epoch", "snapshot"}


# -- defences switched off ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Off:
    """A defence that is replaced in every module that has it. `found`: what must break. `first`: the seed of the first
    history, where earlier ones are known to show nothing."""

    where: object
    name: str
    instead: object
    found: frozenset[str]
    signed: bool | None = None
    first: int = 0


read_request = requests._asked


def anybodys_request(run: Any, state: Any, number: int) -> Steps[Any]:
    return (yield from read_request(replace(run, keyring=UNSIGNED), state, number))


def anybodys_snapshot(run: Any, n: int) -> Steps[Any]:
    data = yield Get(snapshot_key(n), MAX_RECORD_BYTES)
    commit = yield Get(commit_key(n), MAX_RECORD_BYTES)
    if not data or commit is None:
        return None
    try:
        snapshot = decode(commit_log.Snapshot, data, snapshot_key(n))
    except RecordError:
        return None
    return snapshot.state if snapshot.commit_digest == record_digest(commit) else None


def any_two_snapshots(run: Any, floor: int, revoked: Any) -> Steps[int]:
    numbers = yield from commit_log.snapshots_between(max(0, floor - collection.LOOK_BACK), floor)
    return numbers[-2] if len(numbers) > 1 else 0


def of_no_key(run_id: str, signer: str, key: str, body: bytes) -> bytes:
    return b"\0".join([run_id.encode(), signer.encode(), body])


def sum_of_no_key(checksums: Any, key: str, body: bytes) -> bytes:
    return digest(checksums._run_id + body)[-16:].encode()


def unchecked_join(key: str, keyring: Any) -> Steps[Any]:
    data = yield Get(key, MAX_RECORD_BYTES)
    try:
        return membership.FoundJoin(key, data, decode(membership.Join, data, key).island)
    except membership.RecordError:
        return None


MINE = frozenset({"genuine", "1", "4", "6", "7", "9", "exit", "liveness", "blame", "loss", "10", "drift", "keys"})
OFF: dict[str, Off] = {
    "any bytes are a request": Off(requests, "_asked", anybodys_request, frozenset({"genuine"})),
    "a checksum is not looked at": Off(
        Checksummed, "signature", lambda self, role, key, data: NOBODY, MINE, signed=False
    ),
    "a checksum holds under any key": Off(Checksummed, "_sum", sum_of_no_key, MINE, signed=False),
    "a signature holds under any key": Off(signing, "_record_text", of_no_key, MINE, signed=True),
    "whoever has a key signs for all": Off(signing, "may_sign", lambda signer, role: True, MINE, signed=True),
    "any operator certifies": Off(signing, "is_certified", lambda *said: True, MINE, signed=True),
    "anybody's snapshot": Off(commit_log, "snapshot_at", anybodys_snapshot, MINE),
    "any two snapshots are kept": Off(collection, "kept_snapshots", any_two_snapshots, MINE, first=10),
    "anybody joins": Off(membership, "_read_join", unchecked_join, MINE),
}


def switched_off(monkeypatch: pytest.MonkeyPatch, off: Off) -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("diloco_cli.")]
    usual = getattr(off.where, off.name)
    for user in [off.where, *(module for module in modules if getattr(module, off.name, None) is usual)]:
        monkeypatch.setattr(user, off.name, off.instead)


@pytest.mark.parametrize("name", OFF)
def test_a_defence_that_is_switched_off_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off = OFF[name]
    switched_off(monkeypatch, off)
    seeds = range(off.first, off.first + MAX_HISTORIES)
    broken = ((seed, lived(seed, with_forger(seed, off.signed)).violation) for seed in seeds)
    found = next(((seed, violation) for seed, violation in broken if violation is not None), None)
    assert found is not None, f"{MAX_HISTORIES} histories, and nobody noticed"
    assert found[1].invariant in off.found and "Error" not in found[1].text, found
    print(f"{name}: seed {found[0]}, {found[1]}")
