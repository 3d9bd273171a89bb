"""Long commits: divided, read whole or by one learner, and damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diloco_cli.digests import digest
from diloco_cli.protocol.log.commit_log import append, fold, fold_own, read_log
from diloco_cli.protocol.log.commits import Commit, Merge, Refuse
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.narrowed import NarrowState, narrowed
from diloco_cli.protocol.log.operations import Get
from diloco_cli.protocol.log.parts import HEAD_BYTES, MAX_PARTS, WHOLE_ENTRIES
from diloco_cli.protocol.log.records import MergedOffer, Outcome
from diloco_cli.protocol.log.signed import read_own
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import RecordError, decode, decode_own, encode, has_its_parts, told_in
from diloco_cli.runtime.driver import SystemClock, perform
from diloco_cli.signing import LOG, Checksummed, SignatureError
from diloco_cli.store.memory import MemoryStore
from tests.histories.lines import in_one
from tests.unit.protocol.records import RUN, applied, commit, follow, genesis, merge, output

KEY = commit_key(1)


def names(many: int) -> list[str]:
    return [f"l{number:05}" for number in range(many)]


def long_merge(state: RunState, many: int, outcomes: tuple[Outcome, ...] = (), **fields: Any) -> Merge:
    inputs = tuple(applied(name, step_s=1.0 + place, tokens=8 + place) for place, name in enumerate(names(many)))
    record: Merge = commit(state, "merge", inputs=inputs, outcomes=outcomes, **fields)
    return record


def lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")


@pytest.mark.parametrize("many", [1, WHOLE_ENTRIES])
def test_a_commit_with_few_entries_is_one_line(many: int) -> None:
    data = encode(long_merge(genesis(), many))
    assert b"\n" not in data and b'"parts"' not in data


@pytest.mark.parametrize("many", [WHOLE_ENTRIES + 1, 500])
def test_a_long_commit_is_read_back_as_it_was(many: int) -> None:
    outcomes = tuple(Outcome(f"l{number:05}", 1, 3, 0, "late") for number in range(0, many, 7))
    record = long_merge(genesis(), many, outcomes)
    data = encode(record)
    assert len(lines(data)) > 2 and decode(Commit, data, KEY) == decode(Merge, data, KEY) == record
    assert in_one(data)["inputs"] == msgspec.to_builtins(list(record.inputs))
    assert in_one(data)["outcomes"] == msgspec.to_builtins(list(record.outcomes))


@pytest.mark.parametrize("many", [50, 2000, 8000])
def test_head_and_parts_are_bounded(many: int) -> None:
    head, *parts = lines(encode(long_merge(genesis(), many)))
    assert len(head) < HEAD_BYTES - 512 and len(parts) <= MAX_PARTS
    assert max(map(len, parts)) < 300 * max(17, many / MAX_PARTS + 1)


def test_all_entries_of_a_learner_are_in_one_part() -> None:
    rng = random.Random(1)
    outcomes = tuple(sorted((Outcome(f"l{rng.randrange(40):05}", 1, n, 0, "late") for n in range(300)), key=ordered))
    data = encode(long_merge(genesis(), 45, outcomes))
    seen: set[str] = set()
    for line in lines(data)[1:]:
        part = in_one(line)
        mine = {item["learner"] for name in ("inputs", "outcomes") for item in part[name]}
        assert not mine & seen
        seen |= mine
    assert seen == set(names(45))


def ordered(one: Outcome) -> tuple[str, int, int]:
    return one.learner, one.incarnation, one.seq


def test_a_commit_that_is_not_sorted_by_learner_is_written_in_one_line() -> None:
    outcomes = tuple(Outcome(name, 1, 0, 0, "late") for name in reversed(names(40)))
    data = encode(commit(genesis(), "refuse", outcomes=outcomes))
    assert b"\n" not in data and decode(Refuse, data, KEY).outcomes == outcomes


# -- damage -------------------------------------------------------------------------------------------------------


def tampering() -> Iterator[tuple[str, bytes]]:
    data, other = encode(long_merge(genesis(), 60)), encode(long_merge(genesis(), 61, reason="other"))
    head, *parts = lines(data)
    yield "a value of a part is changed", data.replace(b'"tokens":30', b'"tokens":31')
    yield "a part is missing", b"\n".join([head, *parts[:-1]])
    yield "no part is there", head
    yield "parts are swapped", b"\n".join([head, parts[1], parts[0], *parts[2:]])
    yield "a part of another commit", b"\n".join([head, *parts[:-1], lines(other)[-1]])
    yield "a part more", b"\n".join([head, *parts, parts[-1]])
    yield "a line behind a whole commit", encode(long_merge(genesis(), 2)) + b"\n{}"
    yield "the head counts other tokens", data.replace(b'"tokens":2250}', b'"tokens":2251}')
    first = parts[0].replace(b'"learner":"l00000"', b'"learner":"l00099"')  # sorted behind the next part
    yield (
        "learners of one part in another",
        data.replace(parts[0], first).replace(digest(parts[0]).encode(), digest(first).encode()),
    )


TAMPERED = dict(tampering())


@pytest.mark.parametrize("data", TAMPERED.values(), ids=TAMPERED)
def test_a_changed_part_is_found_by_whoever_reads_all(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode(Commit, data, KEY)


@pytest.mark.parametrize("num_bytes", [-1, 0, 1 << 40])
def test_no_learner_reads_as_many_bytes_as_a_forged_head_asks_for(num_bytes: int) -> None:
    head, *_ = lines(encode(long_merge(genesis(), 60)))
    plain = json.loads(head)
    plain["parts"]["index"][0]["num_bytes"] = num_bytes
    forged = encode(plain) + b"\n{}"
    assert told_in(encode(plain)) is None
    with pytest.raises(RecordError):
        decode_own(own_bytes(forged, "l00000"), KEY, "l00000", 9)


def test_what_tampering_changes_is_there_to_be_changed() -> None:
    data = encode(long_merge(genesis(), 60))
    assert data not in TAMPERED.values() and len({*TAMPERED.values()}) == len(TAMPERED) == 9
    assert b'"tokens":2250}' in data and has_its_parts(data)
    assert [has_its_parts(other) for other in TAMPERED.values()] == [False] * 7 + [True] * 2


def test_a_learner_finds_that_its_own_part_is_changed() -> None:
    head, *parts = lines(encode(long_merge(genesis(), 60)))
    assert decode_own(b"\n".join([head, parts[0]]), KEY, "l00003", 9).inputs[0].learner == "l00003"
    for wrong in (parts[1], parts[0].replace(b'"tokens":11', b'"tokens":12')):
        with pytest.raises(RecordError):
            decode_own(b"\n".join([head, wrong]), KEY, "l00003", 9)
    with pytest.raises(RecordError):
        decode_own(head, KEY, "l00003", 9)


def test_signature_and_hash_chain_cover_the_head_which_covers_the_parts() -> None:
    run = replace(RUN, checksums=True, keyring=Checksummed(RUN.run_id))
    state, store = genesis(), MemoryStore()
    record = long_merge(state, 60, outputs=(output(0, 1, 0),))
    after, mine = perform(append(run, state, record), store, clock())
    data = store.get(KEY) or b""
    assert mine and run.keyring.authenticates(LOG, KEY, data) and after.digest == digest(lines(data)[0])
    changed = data.replace(b'"tokens":30', b'"tokens":31')
    with pytest.raises(RecordError):
        fold(run, state, changed)
    with pytest.raises(SignatureError):
        fold(run, state, data.replace(b'"tokens":2250}', b'"tokens":2251}'))


# -- one learner --------------------------------------------------------------------------------------------------


def clock() -> SystemClock:
    return SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)


def same_but_for_paces(one: RunState, other: NarrowState) -> bool:
    return {n: getattr(one, n) for n in RunState.__struct_fields__} == {
        n: getattr(other, n) for n in RunState.__struct_fields__
    }


@pytest.mark.parametrize("name", ["a-first", "l00000", "l00003", "l00038", "l00077", "z-last"])
def test_a_learner_folds_from_head_and_part_what_the_whole_log_says_of_it_and_of_the_run(name: str) -> None:
    rng = random.Random(name)
    whole: RunState = genesis()
    mine: RunState = whole
    for slot in range(40):
        many = rng.choice([3, 40, 78])
        chosen = sorted(rng.sample(names(78), many))
        inputs = tuple(some_input(one, slot, rng) for one in chosen)
        outcomes = tuple(Outcome(one, 1, 1000 + slot, 0, "late") for one in chosen[::3])
        record = commit(
            whole, "merge", inputs=inputs, outcomes=outcomes, outputs=(output(slot % 2, whole.n + 1, whole.slot),)
        )
        data = encode(record)
        whole, mine = fold(RUN, whole, data), fold_own(RUN, mine, own_bytes(data, name), name)
        if many > WHOLE_ENTRIES:
            assert isinstance(mine, NarrowState)
        if isinstance(mine, NarrowState):
            assert same_but_for_paces(narrowed(whole, name), mine)
    assert mine.tokens(RUN.layout) == whole.tokens(RUN.layout) > 0 and mine.learners.keys() <= {name}


def some_input(learner: str, slot: int, rng: random.Random) -> MergedOffer:
    return applied(learner, slot, step_s=rng.choice([0.0, 0.5, 1.0]), tokens=rng.randrange(1, 99), data_end=8 * slot)


def own_bytes(data: bytes, learner: str) -> bytes:
    store = MemoryStore()
    store.create(KEY, data)
    return perform(read_own(RUN.keyring, KEY, learner), store, clock()) or b""


@pytest.mark.parametrize("many", [40, 2000])
def test_a_learner_reads_head_and_part_alone_however_many_others_there_are(many: int) -> None:
    data, read = encode(long_merge(genesis(), many)), list[int]()
    steps = read_own(RUN.keyring, KEY, names(many)[-1])
    operation, store = next(steps), MemoryStore()
    store.create(KEY, data)
    while True:
        assert isinstance(operation, Get)
        start = operation.start
        answer = store.get_range(KEY, start, start + operation.max_bytes)
        read.append(len(answer or b""))
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            found: bytes = stop.value
            break
    assert sum(read) <= HEAD_BYTES + 12_000 and len(read) <= 2
    parts = told_in(lines(found)[0])
    assert parts is not None and parts.inputs == many and len(lines(found)) == 2


@pytest.mark.parametrize("broken", [1, 2])
def test_a_part_that_is_damaged_in_the_read_is_read_again(broken: int) -> None:
    data = encode(long_merge(genesis(), 2000))
    steps, turn, found = read_own(RUN.keyring, KEY, "l01999"), 0, b""
    operation: Any = next(steps)
    while not found:
        assert isinstance(operation, Get)
        turn += 1
        end = operation.start + operation.max_bytes + (operation.start == 0)
        answer = data[operation.start : end]
        damaged = operation.start > 0 and turn <= 2 * broken
        try:
            operation = steps.send(answer[:-1] + b" " if damaged else answer)
        except StopIteration as stop:
            found = stop.value
    assert turn == 2 * broken + 2 and found == own_bytes(data, "l01999")


def test_the_fastest_of_late_is_known_from_what_heads_say() -> None:
    state: RunState = genesis()
    mine: RunState = state
    for slot, fastest in enumerate([3.0, 1.0, 2.0]):
        inputs = tuple(applied(name, slot, step_s=fastest + place) for place, name in enumerate(names(40)))
        record = commit(state, "merge", inputs=inputs, outputs=(output(slot % 2, state.n + 1, slot),))
        state, mine = (
            fold(RUN, state, encode(record)),
            fold_own(RUN, mine, own_bytes(encode(record), "l00039"), "l00039"),
        )
    assert [min(mine.recent_paces(last)) for last in (1, 2, 3)] == [2.0, 1.0, 1.0]
    assert min(narrowed(state, "l00039").recent_paces(1)) == min(state.recent_paces(1)) == 2.0


def test_what_a_narrow_state_does_not_know_is_not_asked_for() -> None:
    mine = narrowed(merge(genesis(), applied("l0"), applied("l1")), "l0")
    assert mine.learner("l0").merges == 1 and narrowed(mine, "l0") is mine
    with pytest.raises(LookupError):
        mine.learner("l1")


@pytest.mark.parametrize("kind", ["quarantine", "revoke"])
def test_what_befalls_another_learner_changes_nothing_in_a_narrow_state(kind: str) -> None:
    fields = {"quarantine": {"learner": "l1"}, "revoke": {"learner": "l1", "key": "ab", "floor": 3}}[kind]
    whole = merge(genesis(), applied("l0"), applied("l1"))
    record = commit(whole, kind, **fields)
    mine = fold_own(RUN, narrowed(whole, "l0"), encode(record), "l0")
    assert isinstance(mine, NarrowState) and same_but_for_paces(narrowed(fold(RUN, whole, encode(record)), "l0"), mine)
    own = commit(whole, kind, **{**fields, "learner": "l0"})
    after = fold_own(RUN, narrowed(whole, "l0"), encode(own), "l0")
    assert after.learner("l0") == fold(RUN, whole, encode(own)).learner("l0") != mine.learner("l0")


def test_a_learner_reads_the_log_to_its_end_from_heads_and_parts() -> None:
    store, state = MemoryStore(), RunState()
    begins = commit(state, "epoch_start", outputs=(output(0, 0, -1), output(1, 0, -1)))
    state, _ = perform(append(RUN, state, begins), store, clock())
    for slot in range(5):
        inputs = tuple(applied(name, slot) for name in names(50))
        record = Merge(slot=slot, epoch=1, inputs=inputs, outputs=(output(slot % 2, state.n + 1, slot),), time="t")
        state, _ = perform(append(RUN, state, record), store, clock())
    mine = perform(read_log(RUN, learner="l00007"), store, clock())
    assert isinstance(mine, NarrowState) and same_but_for_paces(narrowed(state, "l00007"), mine)
    assert perform(read_log(RUN), store, clock()) == state
    assert follow(mine, "stop").phase == "STOPPED"
