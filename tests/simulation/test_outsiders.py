"""Forgers and flooders beside the run: nothing that they write counts or holds anybody up, and each defence against
them, switched off, is caught by the same histories."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import pytest

from diloco_cli import signing
from diloco_cli.config.codec import replace
from diloco_cli.digests import digest
from diloco_cli.protocol.actors import collection, inbox, membership, requests
from diloco_cli.protocol.log import claims, commit_log
from diloco_cli.protocol.log.keys import commit_key, incarnation_of, read_join_key, snapshot_key
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, RecordError, decode, record_digest
from diloco_cli.signing import NOBODY, UNSIGNED, Checksummed
from tests.histories.campaign import lived
from tests.histories.options import Options, drawn_options
from tests.histories.replayer import FLOODER, in_one

MERGES = 12
MAX_HISTORIES = 40


def with_outsiders(seed: int, forger: bool, flooder: bool, signed: bool | None = None) -> Options:
    options = drawn_options(seed)
    chosen = options.signed or seed % 2 == 0 if signed is None else signed
    return replace(options, forger=forger, flooder=flooder, signed=chosen, merges=max(MERGES, options.merges))


def test_a_tenth_of_the_swarm_or_so_has_outsiders_and_half_of_these_are_signed() -> None:
    drawn = [drawn_options(seed) for seed in range(1000)]
    beset = [options for options in drawn if options.forger or options.flooder]
    assert 50 <= len(beset) <= 110 and 0.35 <= sum(options.signed for options in beset) / len(beset) <= 0.7
    assert any(options.forger and options.flooder for options in beset)


@pytest.mark.parametrize(("forger", "flooder"), [(True, False), (False, True), (True, True)])
def test_they_change_nothing_and_hold_nobody_up(forger: bool, flooder: bool) -> None:
    written: Counter[str] = Counter()
    for seed in range(4):
        outcome = lived(seed, with_outsiders(seed, forger, flooder), other_walls=seed == 0)
        assert outcome.violation is None, (seed, outcome.violation)
        forged = [text.split()[3] for _, text, _ in outcome.tail if text.startswith("a forger wrote")]
        written.update(key.partition("/")[0] for key in forged)
        outcomes = [item for data in outcome.log for item in in_one(data)["outcomes"]]
        written[FLOODER] += sum(item["learner"] == FLOODER for item in outcomes)
    assert (written[FLOODER] > 100) == flooder, "it is heard, and refused"
    kinds = {"incarnation", "request", "join", "epoch", "snapshot"} if forger else set()
    assert written.keys() - {FLOODER} == kinds


# -- defences switched off ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Off:
    """A defence that is replaced in every module that has it. `found`: what must break. `first`: the seed of the first
    history, where earlier ones are known to show nothing."""

    where: object
    name: str
    instead: object
    found: frozenset[str]
    needs: Callable[[Options], bool] = lambda options: True
    forger: bool = True
    flooder: bool = False
    signed: bool | None = None
    also: tuple[tuple[object, str, object], ...] = ()
    first: int = 0


read_request = requests._asked


def anybodys_request(run: Any, state: Any, number: int) -> Steps[Any]:
    return (yield from read_request(replace(run, keyring=UNSIGNED), state, number))


def one_by_one(known: int, reach: int, look: Any) -> Steps[Any]:
    found = None
    for number in count(known + 1):
        there = yield from look(number)
        if there is None:
            return found
        found = number, there
    return None


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


_PORTION = inbox.Inbox._fetch_portion


def whole_portion(box_of: Any, box: Any, state: Any, now_s: float, slot_s: float, members: Any) -> Steps[bool]:
    return _PORTION(box_of, box, state, now_s, slot_s, None)


def of_no_key(run_id: str, signer: str, key: str, body: bytes) -> bytes:
    return b"\0".join([run_id.encode(), signer.encode(), body])


def sum_of_no_key(checksums: Any, key: str, body: bytes) -> bytes:
    return digest(checksums._run_id + body)[-16:].encode()


def unchecked_join(queue: Any, key: str, keyring: Any) -> Steps[Any]:
    data = yield Get(key, MAX_RECORD_BYTES)
    try:
        return membership.FoundJoin(key, data, decode(membership.Join, data, key).island)
    except membership.RecordError:
        return None


def of_any_epoch(queue: Any, key: str, run: Any) -> bool:
    named = read_join_key(key)
    return named is not None and run.island(named[0]) is None


def _hands_over(options: Options) -> bool:
    return {"join", "kill"} <= set(options.nemesis_events)


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
    "anybody joins": Off(membership.JoinQueue, "_read", unchecked_join, MINE),
    "joins of earlier epochs act": Off(
        membership.JoinQueue,
        "_counts",
        of_any_epoch,
        frozenset({"genuine"}),
        _hands_over,
        forger=False,
        flooder=True,
        first=31,
    ),
    "a flood of joins is read at once": Off(
        membership,
        "JUNK_PER_LOOK",
        1 << 30,
        frozenset({"liveness"}),
        forger=False,
        flooder=True,
        first=2,
    ),
    "a flood of offers is read at once": Off(
        inbox,
        "MAX_OFFERS_PER_POLL",
        1 << 30,
        frozenset({"liveness"}),
        forger=False,
        flooder=True,
        also=((inbox, "MAX_PENDING_ROUNDS", 1 << 30), (inbox.Inbox, "_fetch_portion", whole_portion)),
        first=37,
    ),
    "claims are read one by one": Off(
        claims, "furthest", one_by_one, frozenset({"liveness"}), forger=False, flooder=True, first=3
    ),
    "every mailbox is kept": Off(
        inbox,
        "kept_mailboxes",
        lambda key, known, newest: [incarnation_of(n, key) for n in range(known + 1, newest + 1)],
        frozenset({"liveness"}),
        forger=False,
        flooder=True,
        also=((inbox, "replaced", lambda old, newest, now_s: []),),
        first=7,
    ),
}


def switched_off(monkeypatch: pytest.MonkeyPatch, off: Off) -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("diloco_cli.")]
    for where, name, instead in ((off.where, off.name, off.instead), *off.also):
        usual = getattr(where, name)
        for user in [where, *(module for module in modules if getattr(module, name, None) is usual)]:
            monkeypatch.setattr(user, name, instead)


def fitting(off: Off) -> Iterator[tuple[int, Options]]:
    drawn = ((seed, with_outsiders(seed, off.forger, off.flooder, off.signed)) for seed in count(off.first))
    return islice(((seed, options) for seed, options in drawn if off.needs(options)), MAX_HISTORIES)


@pytest.mark.parametrize("name", OFF)
def test_a_defence_that_is_switched_off_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off = OFF[name]
    switched_off(monkeypatch, off)
    broken = ((seed, lived(seed, options).violation) for seed, options in fitting(off))
    found = next(((seed, violation) for seed, violation in broken if violation is not None), None)
    assert found is not None, f"{MAX_HISTORIES} histories, and nobody noticed"
    assert found[1].invariant in off.found and "Error" not in found[1].text, found
    print(f"{name}: seed {found[0]}, {found[1]}")
