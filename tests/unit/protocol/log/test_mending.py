"""Gaps, and what a process that holds a record does about a bucket that has lost it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.errors import FencedError
from diloco_cli.protocol.actors.collection import Collector
from diloco_cli.protocol.log.commit_log import fold, read_format, read_log, write_snapshot
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat, sealed
from diloco_cli.protocol.log.keys import FORMAT_KEY, HEAD_HINT_KEY, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.mending import LOOKS_EVERY_S, RECENT, GapError, Mender, patient_log, whole_log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import COMMITS_KEPT, RecordError, RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import LOG, OPERATOR, Authenticator, Checksummed, Keyring, Secret, SignatureError, Signing
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreForbiddenError
from tests.unit.protocol.records import commit, genesis, make_run

CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
SECRET = Secret("the operator of this run and of others", "key")


def signed(run_id: str, operator: Secret = SECRET) -> Keyring:
    """The operator's keys, and those of a syncer."""
    syncer = Secret(operator.certified(run_id, {"syncer/syncer": "1" * 64}), "key")
    grants = operator.keyring(run_id).grants | syncer.keyring(run_id).grants
    return Keyring(run_id, operator.operator, grants)


KEYRINGS = {"checksums": Checksummed("id"), "signed": signed("id")}
kinds_of_run = pytest.mark.parametrize("kind", KEYRINGS)
kinds_of_look = pytest.mark.parametrize("look", ["serve", "follow"])


def log_of(commits: int, keyring: Authenticator | None = None, **fields: Any) -> tuple[RunFormat, MemoryStore]:
    """A run as its syncer has it, and its bucket."""
    keyring = keyring or Checksummed("id")
    signing = Signing(keyring.operator) if isinstance(keyring, Keyring) else None
    run = replace(make_run(), checksums=isinstance(keyring, Checksummed), signing=signing, keyring=keyring, **fields)
    bucket, state = MemoryStore(), RunState()
    run.keep(FORMAT_KEY, keyring.sign(OPERATOR, FORMAT_KEY, encode(run)))
    bucket.create(FORMAT_KEY, run.kept[FORMAT_KEY])
    for n in range(commits):
        begins = {"outputs": genesis().outputs, "format": run.format_digest}
        given: dict[str, Any] = {"slot": state.slot} if n else begins
        data = keyring.sign(LOG, commit_key(n), encode(commit(state, "skip" if n else "epoch_start", **given)))
        bucket.create(commit_key(n), data)
        state = fold(run, state, data)
        run.keep(commit_key(n), data)
    return run, bucket


class Looker:
    """One that looks at the bucket of its run every ten seconds, as a syncer (`serve`) or as others (`follow`)."""

    def __init__(self, run: RunFormat, bucket: MemoryStore, look: str = "serve") -> None:
        self.run, self.bucket, self.told, self.now_s = run, bucket, list[str](), 0.0
        self.state: RunState = done(read_log(run), bucket)
        self.mender = Mender(run, self.told.append)
        self._look = self.mender.serve if look == "serve" else self.mender.follow

    def looks(self, times: int = 7) -> list[str]:
        """What it has told in the end."""
        clock = SystemClock(lambda: self.now_s, lambda seconds: None, lambda: None)
        for _ in range(times):
            self.now_s += LOOKS_EVERY_S
            perform(self._look(self.state, self.now_s), self.bucket, clock, tries_once=self.bucket)
        return self.told


def all_of(bucket: MemoryStore) -> dict[str, bytes | None]:
    return {key: bucket.get(key) for key in bucket.list("", limit=10_000)}


def asks(run: RunFormat, bucket: MemoryStore, wants: tuple[str, ...]) -> None:
    key = heartbeat_key(SYNCER)
    bucket.put(key, sealed(run.keyring, LOG, key, SyncerHeartbeat("READING", 0, -1, "host", wants=wants)))


def moved_away(bucket: MemoryStore, instead: MemoryStore | None = None) -> dict[str, bytes | None]:
    """Removes all that lies there; another run's objects take its place."""
    for key in all_of(bucket):
        bucket.delete(key)
    for key, data in all_of(instead or MemoryStore()).items():
        bucket.create(key, data or b"")
    return all_of(bucket)


def done(steps: Steps[Any], bucket: MemoryStore) -> Any:
    return perform(steps, bucket, CLOCK)


def opened(bucket: MemoryStore) -> RunFormat:
    run: RunFormat = done(read_format("run"), bucket)
    return run


@pytest.mark.parametrize(("slot_s", "soon"), [(0.5, True), (60.0, False)])
def test_a_look_at_a_slow_store_does_not_put_off_the_next_one_for_many_slots(slot_s: float, soon: bool) -> None:
    """Learners that cannot read the newest commit wait for it. Where slots are long, a look may take a hundredth of the
    time."""
    islands = tuple(replace(i, local_steps=1, step_s=slot_s * make_run().num_fragments) for i in make_run().islands)
    run, bucket = log_of(10, islands=islands)
    looker = Looker(run, bucket)
    slow = SystemClock(lambda: looker.now_s + 5.0, lambda seconds: None, lambda: None)
    perform(looker.mender.serve(looker.state, looker.now_s), bucket, slow, tries_once=bucket)
    bucket.delete(commit_key(9))
    looker.now_s += 5.0
    assert bool(looker.looks(1)) == soon


@pytest.mark.parametrize("missing", [range(1), range(19, 20), range(3, 30)], ids=str)
def test_missing_commits_are_not_the_end(missing: range) -> None:
    run, bucket = log_of(31)
    for n in missing:
        bucket.delete(commit_key(n))
    with pytest.raises(GapError) as caught:
        done(whole_log(opened(bucket)), bucket)
    error = caught.value
    assert error.where == commit_key(missing[0]) and f"commit {missing[-1] + 1} was written after it" in str(error)
    assert error.wants == tuple(map(commit_key, missing))[:16]
    assert "learner or standby" in (error.hint or "") and "older copy" not in (error.hint or "")
    asks(run, bucket, error.wants)
    told = Looker(run, bucket, "follow").looks(1)
    assert told == [f"{key} was missing: put back" for key in error.wants]
    assert all(bucket.get(key) == run.kept[key] for key in error.wants)


def test_what_a_stranger_has_left_behind_the_end_is_no_gap() -> None:
    _, bucket = log_of(5)
    bucket.create(commit_key(9), b"junk")
    bucket.create(commit_key(7), bucket.get(commit_key(3)) or b"")
    bucket.put(heartbeat_key(SYNCER), encode(SyncerHeartbeat("SERVING", 1, 99, "host")))
    assert done(whole_log(opened(bucket)), bucket).n == 4


def test_the_syncer_before_has_said_how_far_the_log_went() -> None:
    run, bucket = log_of(5)
    key = heartbeat_key(SYNCER)
    bucket.put(key, sealed(run.keyring, LOG, key, SyncerHeartbeat("SERVING", 1, 7, "host")))
    with pytest.raises(GapError, match="commit 7 was written after it: 5 to 6 must be put back") as caught:
        done(whole_log(opened(bucket)), bucket)
    assert "if the log was put back from an older copy" in (caught.value.hint or "")
    assert f"remove {key}, which alone tells of these commits" in (caught.value.hint or "")
    bucket.delete(key)
    assert done(whole_log(opened(bucket)), bucket).n == 4


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "flipped": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "truncated": lambda data: data[:-7],
    "a page": lambda data: b"<html>",
}


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize(
    ("look", "key"),
    [
        *(("serve", key) for key in (FORMAT_KEY, commit_key(0), commit_key(9))),
        *(("follow", key) for key in (FORMAT_KEY, commit_key(9))),
    ],
)
@kinds_of_run
def test_who_holds_a_record_puts_back_the_same_bytes(kind: str, look: str, key: str, how: str) -> None:
    """Each time, and tells it each time."""
    run, bucket = log_of(10, KEYRINGS[kind])
    process, before = Looker(run, bucket, look), bucket.get(key) or b""
    assert process.looks() == []
    harmed = HARMS[how](before)
    for times in (1, 2):
        bucket.delete(key) if harmed is None else bucket.put(key, harmed)
        assert process.looks() == times * [f"{key} was {'missing' if harmed is None else 'damaged'}: put back"]
        assert bucket.get(key) == before


def test_a_syncer_that_waited_long_for_its_store_looks_again_soon() -> None:
    run, bucket = log_of(4)
    syncer = Looker(run, bucket)
    waited = SystemClock(lambda: 1200.0, lambda seconds: None, lambda: None)
    perform(syncer.mender.serve(syncer.state, 600.0), bucket, waited)
    bucket.delete(commit_key(2))
    syncer.now_s = 1200.0
    assert syncer.looks() == [f"{commit_key(2)} was missing: put back"]


def test_a_sound_record_of_another_process_is_never_replaced() -> None:
    run, bucket = log_of(10)
    process = Looker(run, bucket)
    other = run.keyring.sign(LOG, commit_key(9), encode(commit(RunState(n=8, digest="other"), "skip", slot=0)))
    bucket.put(commit_key(9), other)
    assert process.looks() == [] and bucket.get(commit_key(9)) == other


def test_a_process_that_may_not_write_there_says_so_once_for_each_record_and_goes_on() -> None:
    run, bucket = log_of(10)
    process = Looker(run, bucket)

    def refuse(key: str, data: bytes) -> Any:
        raise StoreForbiddenError("403")

    bucket.create = refuse  # type: ignore[method-assign]
    for n in (4, 6):
        bucket.delete(commit_key(n))
    text = "was missing: cannot be put back by this process: the store has refused it"
    assert sorted(process.looks(30)) == [f"{commit_key(4)} {text}", f"{commit_key(6)} {text}"]


def test_a_process_holds_the_format_and_the_newest_commits() -> None:
    _, bucket = log_of(COMMITS_KEPT + 70)
    run = opened(bucket)
    done(read_log(run), bucket)
    assert set(run.kept) == {FORMAT_KEY, *(commit_key(n) for n in range(70, COMMITS_KEPT + 70))}
    assert all(bucket.get(key) == data for key, data in run.kept.items())


@pytest.mark.parametrize("new", [1, 30, COMMITS_KEPT - RECENT])
def test_what_is_harmed_while_it_is_recent_is_put_back_however_many_commits_come_before_the_next_look(new: int) -> None:
    run, bucket = log_of(200)
    process = Looker(run, bucket)
    process.looks(6)
    bucket.delete(commit_key(180))
    later, later_bucket = log_of(200 + new)
    for n in range(200, 200 + new):
        bucket.create(commit_key(n), later_bucket.get(commit_key(n)) or b"")
        run.keep(commit_key(n), later.kept[commit_key(n)])
    process.state = done(read_log(opened(later_bucket)), later_bucket)
    assert process.looks(6) == [f"{commit_key(180)} was missing: put back"]


@kinds_of_run
def test_another_format_in_the_place_of_the_runs_own_is_refused_and_put_back(kind: str) -> None:
    """This run's, or an earlier or later one's: the newest commits show that the bucket is this run's."""
    run, bucket = log_of(10, KEYRINGS[kind])
    process = Looker(run, bucket)
    same = replace(run, software="another")
    formats = [run.keyring.sign(OPERATOR, FORMAT_KEY, encode(same))]
    formats += [other_run(kind, commits=0, created_at=time)[1].get(FORMAT_KEY) or b"" for time in ("1999", "2999")]
    for times, data in enumerate(formats, 1):
        bucket.put(FORMAT_KEY, data)
        if times == 1:
            with pytest.raises(RecordError, match=r"FORMAT.json: not the one that this run began with"):
                done(read_log(opened(bucket)), bucket)
        assert process.looks(1) == times * [f"{FORMAT_KEY} was damaged: put back"]
        assert done(read_log(opened(bucket)), bucket) == process.state


def other_run(kind: str, commits: int = 20, operator: Secret = SECRET, **fields: Any) -> tuple[RunFormat, MemoryStore]:
    keyring = signed("new", operator) if kind == "signed" else Checksummed("new")
    return log_of(commits, keyring, run_id="new", **fields)


@kinds_of_look
@kinds_of_run
def test_a_run_that_was_removed_stays_removed(kind: str, look: str) -> None:
    run, bucket = log_of(10, KEYRINGS[kind])
    process = Looker(run, bucket, look)
    process.looks()
    moved_away(bucket)
    told = process.looks(40)
    assert all_of(bucket) == {} and len(told) == (2 if look == "serve" else 1)
    assert f"{FORMAT_KEY} is missing, and commit 0 or most of the newest commits are gone" in told[0]


@pytest.mark.parametrize("created_at", ["1999", "2999"])
@pytest.mark.parametrize("commits", [0, 5, 20])
@kinds_of_look
@kinds_of_run
def test_another_run_in_the_place_of_this_one_ends_its_processes_and_stays_as_it_is(
    kind: str, look: str, commits: int, created_at: str
) -> None:
    run, bucket = log_of(10, KEYRINGS[kind])
    process = Looker(run, bucket, look)
    process.looks(1)
    there = moved_away(bucket, other_run(kind, commits, created_at=created_at)[1])
    with pytest.raises(FencedError, match="another run was begun in the place of this one"):
        process.looks()
    assert all_of(bucket) == there


@kinds_of_run
def test_a_commit_that_was_on_its_way_does_not_make_another_run_this_one(kind: str) -> None:
    run, bucket = log_of(10, KEYRINGS[kind])
    process = Looker(run, bucket)
    other = other_run(kind, commits=5)[1]
    other.create(commit_key(9), run.kept[commit_key(9)])
    there = moved_away(bucket, other)
    with pytest.raises(FencedError):
        process.looks(1)
    assert all_of(bucket) == there


@pytest.mark.parametrize("follows", [True, False])
def test_who_reads_the_log_of_another_run_finds_out_at_once(follows: bool) -> None:
    run, bucket = log_of(3)
    state = done(read_log(run), bucket) if follows else None
    there = moved_away(bucket, other_run("checksums")[1])
    passed: list[float] = []
    with pytest.raises(FencedError):
        perform(patient_log(run, state), bucket, SystemClock(lambda: sum(passed), passed.append, lambda: None))
    assert passed == []
    assert all_of(bucket) == there


def test_a_log_ends_nowhere_before_the_admission_of_its_reader() -> None:
    """An island reads the log once to be admitted, and once more to begin: what is lost between is put back."""
    run, bucket = log_of(10)
    state = done(read_log(run), bucket)
    member = replace(run.islands[0], name="newcomer")
    admits = encode(commit(state, "membership", islands=(member,), reason="there is room"))
    bucket.create(commit_key(10), run.keyring.sign(LOG, commit_key(10), admits))
    whole = done(read_log(run), bucket)
    bucket.delete(commit_key(4))
    assert done(patient_log(whole.with_members(run)), bucket) == whole
    assert bucket.get(commit_key(4)) == run.kept[commit_key(4)]


STRANGER = Secret("another operator, who may write here, too", "key")


@pytest.mark.parametrize("there", ["unsigned", "another operator's", "of later software"])
@kinds_of_look
def test_what_may_be_another_run_neither_ends_a_signed_one_nor_is_replaced(look: str, there: str) -> None:
    run, bucket = log_of(10, KEYRINGS["signed"])
    process = Looker(run, bucket, look)
    instead = other_run("checksums" if there == "unsigned" else "signed", operator=STRANGER)[1]
    if there == "of later software":
        instead.put(FORMAT_KEY, b'{"schema":1000}')
    before = moved_away(bucket, instead)
    (told,) = process.looks(40)[:1]
    what = "damaged" if there == "of later software" else "another run's, not signed by this one's operator"
    assert f"{FORMAT_KEY} is {what}, and commit 0 or most of the newest commits are gone" in told
    assert all_of(bucket) == before


@kinds_of_look
@kinds_of_run
def test_a_format_that_is_the_first_to_go_is_not_put_back(kind: str, look: str) -> None:
    """As where a bucket is emptied, in the order of its keys, while processes go on to write commits."""
    run, bucket = log_of(30, KEYRINGS[kind])
    process = Looker(run, bucket, look)
    process.looks()
    bucket.delete(FORMAT_KEY)
    assert process.looks(1) == [] and bucket.get(FORMAT_KEY) is None
    bucket.delete(commit_key(0))
    told = [text for text in process.looks(50) if text.startswith(FORMAT_KEY)]
    assert len(told) == 1 and "and commit 0 or most of the newest commits are gone" in told[0]
    assert FORMAT_KEY not in all_of(bucket) and commit_key(0) not in all_of(bucket)


@kinds_of_look
@kinds_of_run
@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_rule_that_deletes_what_is_old_is_told_from_an_emptied_bucket(kind: str, look: str, is_emptied: bool) -> None:
    """Both take FORMAT.json and commit 0, and in both the processes go on writing commits."""
    run, bucket = log_of(30, KEYRINGS[kind])
    later = {commit_key(n): bucket.get(commit_key(n)) or b"" for n in range(10, 30)}
    for key in later:
        bucket.delete(key)
    process = Looker(run, bucket, look)
    process.looks()
    if is_emptied:
        moved_away(bucket)
    for key in (FORMAT_KEY, *map(commit_key, range(5))):
        bucket.delete(key)
    for key, data in later.items():
        bucket.create(key, data)
    process.looks(50)
    assert FORMAT_KEY not in all_of(bucket)
    process.looks(50)
    assert bucket.get(FORMAT_KEY) == (None if is_emptied else run.kept[FORMAT_KEY])


@kinds_of_look
@kinds_of_run
def test_commits_do_not_come_back_where_most_are_gone_unless_a_syncer_wants_them(kind: str, look: str) -> None:
    run, bucket = log_of(10, KEYRINGS[kind])
    process = Looker(run, bucket, look)
    process.looks(1)
    for n in range(10):
        bucket.delete(commit_key(n))
    assert "records are missing, and commit 0 or most of the newest commits are gone" in process.looks(20)[0]
    assert bucket.list("commit/", limit=1) == []
    if look == "follow":
        asks(run, bucket, (commit_key(8),))
        process.looks(1)
        assert bucket.list("commit/") == [commit_key(8)]


def test_a_syncer_tells_of_what_vanishes_behind_it_once() -> None:
    run, bucket = log_of(100)
    told: list[str] = []
    mender, state = Mender(run, told.append), done(read_log(run), bucket)
    for now_s in range(10, 1000, 10):
        if now_s == 200:
            bucket.delete(commit_key(0))
        done(mender.serve(state, float(now_s)), bucket)
        assert bool(told) == (now_s >= 310)
    assert len(told) == 1 and "a rule of the bucket that deletes what is old (lifecycle, expiration)" in told[0]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_log_whose_beginning_cannot_be_read_is_read_from_its_newest_snapshot(damaged: bool) -> None:
    """As a rule of the bucket leaves it that deletes what is old, or a bad disk; the hint may be as old."""
    run, bucket = log_of(150)
    at_128 = RunState()
    for n in range(129):
        at_128 = fold(run, at_128, bucket.get(commit_key(n)) or b"")
    done(write_snapshot(run, at_128), bucket)
    whole = done(read_log(run), bucket)
    bucket.delete(HEAD_HINT_KEY)
    for n in range(1 if damaged else 100):
        bucket.put(commit_key(n), b"damaged") if damaged else bucket.delete(commit_key(n))
    assert done(whole_log(opened(bucket)), bucket) == whole


def test_a_format_that_is_gone_is_told_from_a_run_that_never_was() -> None:
    _, bucket = log_of(3)
    bucket.delete(FORMAT_KEY)
    with pytest.raises(RecordError, match=r"run/FORMAT.json: missing, though commits of a run lie there"):
        opened(bucket)


def test_a_snapshot_of_a_revoked_key_does_not_count_where_the_beginning_is_damaged() -> None:
    """Neither is it read for ever."""
    run, bucket = log_of(8, KEYRINGS["signed"])
    state = done(read_log(run), bucket)
    done(write_snapshot(run, state), bucket)
    another = Secret(SECRET.certified("id", {"syncer/syncer": "2" * 64}), "key").keyring("id")
    for kind, given in (("epoch_start", {"epoch": 2}), ("revoke", {"key": state.epoch_key})):
        data = another.sign(LOG, commit_key(state.n + 1), encode(commit(state, kind, **given)))
        bucket.create(commit_key(state.n + 1), data)
        state = fold(run, state, data)
    assert done(read_log(opened(bucket)), bucket) == state
    bucket.put(commit_key(0), b"damaged")
    bucket.delete(HEAD_HINT_KEY)
    with pytest.raises(SignatureError):
        done(read_log(opened(bucket)), bucket)


def test_garbage_behind_a_damaged_commit_waits_for_a_later_floor_and_does_not_end_the_syncer() -> None:
    run, bucket = log_of(10)
    state = structs.replace(done(read_log(run), bucket), gc_floor=5)
    run.kept.clear()
    bucket.put(commit_key(0), b"x")
    collector = Collector(run)
    collector.look(state, 0.0)
    collector.look(state, collector.grace_s)
    assert done(collector.work(state, collector.grace_s, 1.0), bucket) is False
    assert collector.is_done(state)
