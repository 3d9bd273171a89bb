"""`diloco verify` on a real run's bucket in which one thing is wrong: every kind of damage is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco_cli.cli.arguments import OpenRun
from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.observe.replay import LogVerifier, Replay, lost, rebuilt_state
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key, offer_key
from diloco_cli.protocol.log.records import RunFormat, encode
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from tests.numerics.harness import (
    CLOCK,
    commits,
    copy_of,
    key_of_delta,
    key_of_state,
    key_of_weights,
    make_run,
    merges,
    run_to_end,
)
from tests.numerics.test_identities import CONSTANT

Bucket = tuple[RunFormat, Store]
Plain = dict[str, Any]


@pytest.fixture(scope="module")
def finished() -> Bucket:
    sync = SyncSettings(every=4, fragments=2, overlap=0, quorum=2)
    run = make_run(2, 3, sync, OuterSettings("nesterov", 0.7, 0.9), CONSTANT)
    return run, run_to_end(run)[0]


@pytest.fixture
def store(finished: Bucket) -> MemoryStore:
    return copy_of(finished[1])


def a_merge(store: Store) -> Commit:
    """Not the first: its fragment has a history."""
    return merges(store)[2]


def key_of(store: Store, what: str) -> str:
    merge = a_merge(store)
    item, output = merge.inputs[0], merge.outputs[0]
    first = commits(store)[0].outputs[0]
    return {
        "state": key_of_state(output),
        "weights": key_of_weights(output),
        "delta": key_of_delta(item),
        "offer": offer_key(item.learner, item.incarnation, item.seq),
        "commit": commit_key(merge.n),
        "first state": key_of_state(first),
        "first weights": key_of_weights(first),
        "last commit": commit_key(commits(store)[-1].n),
    }[what]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :]


def verified(run: RunFormat, store: Store) -> Replay:
    return LogVerifier(store, run).replay()


def test_the_undamaged_run_agrees(finished: Bucket, store: MemoryStore) -> None:
    found = verified(finished[0], store)
    assert found.ok and found.merges >= 6, found


OBJECTS = ["state", "weights", "delta", "offer", "commit", "first state", "first weights", "last commit"]


@pytest.mark.parametrize("what", OBJECTS)
def test_a_missing_object_is_named(finished: Bucket, store: MemoryStore, what: str) -> None:
    key = key_of(store, what)
    store.delete(key)
    assert key in verified(finished[0], store).missing


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], flipped, lambda data: b""])
@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_with_other_bytes_is_named(
    finished: Bucket, store: MemoryStore, what: str, damage: Callable[[bytes], bytes]
) -> None:
    key = key_of(store, what)
    store.put(key, damage(store.get(key) or b""))
    assert any(key in text for text in verified(finished[0], store).mismatches)


def test_the_last_commit_with_other_words_is_told_by_its_snapshot(finished: Bucket, store: MemoryStore) -> None:
    key = key_of(store, "last commit")
    plain = json.loads(store.get(key) or b"")
    store.put(key, encode({**plain, "reason": "enough"}))
    assert any(key in text and "snapshot" in text for text in verified(finished[0], store).mismatches)


def rewrite(store: MemoryStore, n: int, change: Callable[[Plain], object]) -> None:
    """Change commit n and mend the hash chain behind it, as a faulty syncer would have written it."""
    previous, last = "", len(store.list("commit/"))
    for number in range(last):
        plain = json.loads(store.get(commit_key(number)) or b"")
        if number == n:
            change(plain)
        if number > n:
            plain["previous"] = previous
        data = encode(plain)
        if number >= n:
            store.put(commit_key(number), data)
        previous = digest(store.get(commit_key(number)) or b"")
    for key in store.list("snapshot/"):
        store.delete(key)


def one_input(**changes: Any) -> Callable[[Plain], object]:
    return lambda plain: plain["inputs"][0].update(changes)


LIES: dict[str, tuple[Callable[[Plain], object], str]] = {
    "no outputs": (lambda plain: plain.update(outputs=[]), "Expected `array` of length 1"),
    "another fragment": (lambda plain: plain["outputs"][0].update(fragment=7), "brings fragments [7]"),
    "another version": (lambda plain: plain["outputs"][0].update(version=1), "version of another commit"),
    "another state": (lambda plain: plain["outputs"][0].update(state_digest=digest(b"")), "parameters differ"),
    "another weights": (lambda plain: plain["outputs"][0].update(weights_digest=digest(b"")), "weights differ"),
    "quorum": (lambda plain: plain.update(quorum=1), "quorum 1, but the run's is 2"),
    "too few inputs": (lambda plain: plain["inputs"].pop(), "1 inputs, quorum 2"),
    "the sum of tokens": (lambda plain: plain.update(tokens=1), "1 tokens, but 32 of its inputs are believed"),
    "an input's tokens": (one_input(tokens=1), "counts 1 tokens in a data range of"),
    "no tokens": (one_input(tokens=0), "counts 0 tokens"),
    "absurd numbers": (one_input(tokens=-(1 << 60), steps=1 << 60), "tokens in"),
    "scale": (one_input(scale=0.5), "replayed parameters differ"),
    "cosine": (lambda plain: one_input(cosine=plain["inputs"][0]["cosine"] + 1e-3)(plain), "delta has the cosine"),
    "norm, by a change that moves no decision": (
        lambda plain: one_input(norm=plain["inputs"][0]["norm"] * (1 + 1e-5))(plain),
        "has the norm",
    ),
    "weight": (one_input(weight=1.0), "has weight 1.0 instead of"),
    "base": (one_input(base=999), "uses base 999, which fragment"),
    "payload digest": (one_input(payload_digest="a/../b"), "impossible key"),
    "data seen": (one_input(data_start=0), "has already seen"),
    "no such learner": (one_input(learner="stranger"), "a learner that the run does not have"),
    "slot": (lambda plain: plain.update(slot=77), "slot 77 where"),
    "epoch": (lambda plain: plain.update(epoch=9), "of epoch 9 after epoch 1"),
    "applied and refused": (
        lambda plain: plain.update(outcomes=[{**plain["inputs"][0], "fragment": 0, "reason": "non_finite"}]),
        "is refused and was applied",
    ),
    "not a merge": (lambda plain: plain.update(kind="skip"), "uses base"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_log_that_breaks_a_rule_is_found_out(finished: Bucket, store: MemoryStore, lie: str) -> None:
    change, finding = LIES[lie]
    rewrite(store, a_merge(store).n, change)
    mismatches = verified(finished[0], store).mismatches
    assert any(finding in text for text in mismatches), mismatches
    assert not any("hash chain" in text for text in mismatches), "the damage is in the words, not in the chain"


def test_an_offer_refused_first_and_applied_later_is_found_out(finished: Bucket, store: MemoryStore) -> None:
    merge = a_merge(store)
    applied = json.loads(store.get(commit_key(merge.n)) or b"")["inputs"][0]
    outcome = {**applied, "fragment": 0, "reason": "superseded"}
    rewrite(store, merge.n - 1, lambda plain: plain.update(outcomes=[outcome]))
    assert any("is applied and was refused" in text for text in verified(finished[0], store).mismatches)


def test_the_same_offer_applied_twice_is_counted(finished: Bucket, store: MemoryStore) -> None:
    again = json.loads(store.get(commit_key(merges(store)[0].n)) or b"")["inputs"]
    rewrite(store, a_merge(store).n, lambda plain: plain.update(inputs=again))
    assert verified(finished[0], store).duplicates == 2


def test_a_commit_after_the_finish_is_found_out(finished: Bucket, store: MemoryStore) -> None:
    last = commits(store)[-1]
    plain = json.loads(store.get(commit_key(last.n)) or b"")
    more = {**plain, "n": last.n + 1, "kind": "refuse", "previous": digest(store.get(commit_key(last.n)) or b"")}
    store.put(commit_key(last.n + 1), encode(more))
    assert any("after the run had finished" in text for text in verified(finished[0], store).mismatches)


def test_json_of_a_failed_verify_is_one_object_with_data_and_error(
    finished: Bucket, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer
    from typer.testing import CliRunner

    from diloco_cli.cli import run_data

    store.delete(key_of(store, "delta"))
    opened = OpenRun("tiny", "memory://tiny", store, finished[0], CLOCK)
    monkeypatch.setattr(run_data, "open_run", lambda text: opened)
    app = typer.Typer()
    app.command()(run_data.verify)
    done = CliRunner().invoke(app, ["--json"])
    body = json.loads(done.stdout)
    assert done.exit_code == 11
    assert body["ok"] is False and body["data"]["ok"] is False and body["error"]["code"] == "data_check"
    assert body["data"]["missing"] == 1 and body["data"]["commits"] == len(commits(store))
    assert isinstance(body["data"]["mismatches"], list)


@pytest.mark.parametrize("num_lost", [1, 2, 100], ids=["the newest", "two", "every state"])
def test_a_lost_state_is_rebuilt_from_the_deltas(finished: Bucket, store: MemoryStore, num_lost: int) -> None:
    run = finished[0]
    wanted = merges(store)[-1].outputs[0]
    mine = [o for c in commits(store) for o in c.outputs if o.fragment == wanted.fragment]
    for output in mine[-num_lost:]:
        store.delete(key_of_state(output))
    rebuilt = rebuilt_state(run, store, wanted)
    assert rebuilt is not None and digest(rebuilt) == wanted.state_digest


def test_a_lost_state_names_the_commit_to_go_back_to(finished: Bucket, store: MemoryStore) -> None:
    last = merges(store)[-1]
    error = lost("gs://b/toy", last.outputs[0])
    assert error.exit_status == 11 and f"fragment {last.outputs[0].fragment} is lost or damaged" in error.message
    assert f"diloco rollback gs://b/toy --to {last.n - 1}; then: diloco resume gs://b/toy" in (error.hint or "")
    assert "restore that object" in (lost("gs://b/toy", commits(store)[0].outputs[0]).hint or "")


def test_a_state_whose_delta_is_damaged_too_is_not_rebuilt(finished: Bucket, store: MemoryStore) -> None:
    merge = a_merge(store)
    store.delete(key_of(store, "state"))
    store.put(key_of(store, "delta"), b"damage")
    assert rebuilt_state(finished[0], store, merge.outputs[0]) is None
