"""Which key may sign what in the log, and from which commit on: epochs of one key, revoked keys, operators' epochs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RetentionSettings
from diloco_cli.digests import digest
from diloco_cli.errors import RefusedError
from diloco_cli.protocol.actors import collection
from diloco_cli.protocol.actors.collection import Collector
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.requests import StandIn, ask
from diloco_cli.protocol.log.commit_log import (
    append,
    fold,
    newest_snapshot,
    read_log,
    snapshot_at,
    state_after,
    trusting_none_of,
    write_snapshot,
)
from diloco_cli.protocol.log.commits import AuthorityError
from diloco_cli.protocol.log.keys import (
    commit_key,
    fingerprint,
    incarnation_key,
    incarnation_of,
    offer_key,
    snapshot_key,
)
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Outcome, ProcessClaim, RecordError, RunFormat, encode
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import LOG
from diloco_cli.store.memory import MemoryStore
from tests.security.signed import HOST, SignedFleet, as_learner, as_signer, as_syncer, signed_run
from tests.security.test_strangers import poll, read
from tests.simulation.operated import done, stand_in, state_of
from tests.simulation.toy import make_run
from tests.unit.protocol.records import RUN as TOY
from tests.unit.protocol.records import applied, commit, genesis, offer

RUN = signed_run(TOY)
SYNCER, OTHER, RENEWED = as_syncer(RUN), as_syncer(RUN, "other"), as_syncer(RUN, made="second")
OPERATOR_KEY, FIRST_KEY, OTHER_KEY = (run.keyring.public(LOG) for run in (RUN, SYNCER, OTHER))


def after(state: RunState, writer: RunFormat, kind: str, **fields: Any) -> RunState:
    """The log with one more commit, as everybody folds it."""
    key = commit_key(state.n + 1)
    data = writer.keyring.sign(LOG, key, encode(commit(state, kind, **fields)))
    return fold(as_learner(RUN, "l0"), state, data)


def told(store: MemoryStore, steps: Steps[Any]) -> Any:
    return perform(steps, store, SystemClock(lambda: 0.0, lambda seconds: None, lambda: None))


def began(writer: RunFormat = SYNCER) -> RunState:
    return after(RunState(), writer, "epoch_start", outputs=genesis(RUN).outputs, epoch=1)


def test_commits_of_an_epoch_count_only_under_the_key_that_began_it() -> None:
    state = began()
    assert state.epoch_key == FIRST_KEY
    assert after(state, SYNCER, "skip", slot=0).slot == 1
    for writer in (OTHER, RENEWED, RUN):
        with pytest.raises(AuthorityError, match="another key than epoch 1 began under"):
            after(state, writer, "skip", slot=0)
    state = after(state, OTHER, "epoch_start", epoch=2)
    assert after(state, OTHER, "skip", slot=0).slot == 1
    with pytest.raises(AuthorityError, match="another key"):
        after(state, SYNCER, "skip", slot=0)


@pytest.mark.parametrize(("writer", "epoch"), [(SYNCER, 1), (OTHER, 1), (OTHER, 0)])
def test_an_epoch_that_has_begun_does_not_begin_again(writer: RunFormat, epoch: int) -> None:
    """Or whoever holds another syncer's key could take a living epoch over without a claim."""
    with pytest.raises(AuthorityError, match="begins epoch"):
        after(began(), writer, "epoch_start", epoch=epoch)


def test_a_snapshot_counts_only_under_the_key_of_its_commit() -> None:
    """Or whoever holds another syncer's key, a revoked one too, could tell readers of a log that never was."""
    store, state = MemoryStore(), began()
    first = commit(RunState(), "epoch_start", outputs=genesis(RUN).outputs, epoch=1)
    store.create(commit_key(0), SYNCER.keyring.sign(LOG, commit_key(0), encode(first)))
    reader, lie = as_learner(RUN, "l0"), structs.replace(state, slot=7)
    told(store, write_snapshot(OTHER, lie))
    assert told(store, snapshot_at(reader, 0)) is None
    store.delete(snapshot_key(0))
    told(store, write_snapshot(SYNCER, state))
    assert told(store, snapshot_at(reader, 0)) == state


def written(store: MemoryStore, state: RunState, writer: RunFormat, kind: str, **fields: Any) -> RunState:
    """As `after`, with the commit in the store."""
    key = commit_key(state.n + 1)
    store.create(key, writer.keyring.sign(LOG, key, encode(commit(state, kind, **fields))))
    return after(state, writer, kind, **fields)


def with_a_thief_s_snapshot(**lies: Any) -> tuple[MemoryStore, RunState]:
    """The key of the first syncer was stolen and is revoked; the thief has replaced the snapshot of an old commit of
    that key, and the hint. The log, and its true end."""
    store = MemoryStore()
    state = written(store, RunState(), SYNCER, "epoch_start", outputs=genesis(RUN).outputs, epoch=1)
    state = written(store, state, SYNCER, "skip", slot=0)
    told(store, write_snapshot(SYNCER, structs.replace(state, **lies)))
    state = written(store, state, RUN, "epoch_start", epoch=2, serves=False)
    state = written(store, state, RUN, "revoke", epoch=2, key=FIRST_KEY)
    state = written(store, state, OTHER, "epoch_start", epoch=3)
    return store, written(store, state, OTHER, "skip", epoch=3, slot=1)


@pytest.mark.parametrize(
    "lies",
    [
        {"token_parameters": 10**9},
        {"gc_floor": 1, "base_floor": 1},
        {"revoked": {OTHER_KEY: 1}},  # the log does not go on behind it
        {"slot": 7},
    ],
    ids=",".join,
)
def test_a_snapshot_by_a_thief_of_its_own_old_commit_counts_for_nothing_once_the_key_is_revoked(
    lies: dict[str, Any],
) -> None:
    store, truth = with_a_thief_s_snapshot(**lies)
    reader = as_learner(RUN, "l0")
    assert told(store, read_log(reader)) == truth
    assert told(store, state_after(reader, 2, truth.revoked)).slot == 1
    assert told(store, newest_snapshot(trusting_none_of(reader, truth.revoked), -1)) is None


def test_a_snapshot_that_hides_the_key_of_its_own_commit_counts_for_nothing() -> None:
    store, truth = with_a_thief_s_snapshot(epoch_key=OTHER_KEY, token_parameters=10**9)
    assert told(store, read_log(as_learner(RUN, "l0"))) == truth


def test_a_floor_that_only_a_revoked_keys_snapshots_lead_to_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log that is longer than a look back: to fold it from its first commit would take half an hour at a million.
    A later floor, behind snapshots by the new key, takes all with it."""
    monkeypatch.setattr(collection, "LOOK_BACK", 50)
    store = MemoryStore()
    head = written(store, RunState(), SYNCER, "epoch_start", outputs=genesis(RUN).outputs, epoch=1)

    def skips(head: RunState, count: int, writer: RunFormat) -> RunState:
        for _ in range(count):
            head = written(store, head, writer, "skip", slot=head.slot, epoch=head.epoch)
            if head.n % 10 == 0:
                told(store, write_snapshot(writer, head))
        return head

    head = written(store, skips(head, 100, SYNCER), OTHER, "epoch_start", epoch=2)
    head = written(store, head, OTHER, "revoke", epoch=2, key=FIRST_KEY)
    collector = Collector(replace(RUN, settings=replace(RUN.settings, retention=RetentionSettings(2, 0.0))))

    def works_at(head: RunState, floor: int) -> bool:
        head = structs.replace(head, gc_floor=floor)
        collector.look(head, 0.0)
        works: bool = told(store, collector.work(head, 0.0, 60.0))
        assert collector.is_done(head)
        return works

    assert not works_at(head, 90) and collector.sweep is None
    head = skips(head, 40, OTHER)
    assert works_at(head, 130) and collector.sweep is not None
    assert snapshot_key(50) not in store.list("snapshot/") and snapshot_key(130) in store.list("snapshot/")


def test_only_an_epoch_start_begins_an_epoch() -> None:
    with pytest.raises(AuthorityError, match="epoch 2"):
        after(began(), SYNCER, "skip", slot=0, epoch=2)


def test_under_the_operators_key_nothing_is_merged() -> None:
    state = began()
    with pytest.raises(AuthorityError, match="the operator, who only answers requests"):
        after(state, RUN, "epoch_start", epoch=2)
    state = after(state, RUN, "epoch_start", epoch=2, serves=False)
    for kind, fields in (
        ("skip", {"slot": 0}), ("finish", {}), ("quarantine", {"learner": "l0"}),
        ("eval", {"evaluated": 0, "loss": 1.0, "tokens": 1}),
    ):  # fmt: skip
        with pytest.raises(AuthorityError, match="only answers requests"):
            after(state, RUN, kind, **fields)
    assert after(state, RUN, "stop").phase == "STOPPED"
    assert after(state, RUN, "revoke", key=FIRST_KEY).revoked == {FIRST_KEY: 2}


def test_a_revoked_syncers_epoch_ends_with_the_commit_that_says_so() -> None:
    state = after(began(), SYNCER, "revoke", key=FIRST_KEY)
    assert state.revoked == {FIRST_KEY: 1}
    for kind, fields in (("skip", {"slot": 0}), ("epoch_start", {"epoch": 2})):
        with pytest.raises(AuthorityError, match="a key that commit 1 revoked"):
            after(state, SYNCER, kind, **fields)
    renewed = after(state, RENEWED, "epoch_start", epoch=2)
    assert after(renewed, RENEWED, "skip", slot=0).slot == 1


def test_what_a_key_signed_before_it_was_revoked_counts_on() -> None:
    state = after(after(began(), SYNCER, "skip", slot=0), SYNCER, "revoke", key=FIRST_KEY)
    assert (state.slot, state.n) == (1, 2)


def test_a_process_whose_key_is_revoked_writes_nothing_more_and_says_so() -> None:
    state = after(began(), SYNCER, "revoke", key=FIRST_KEY)
    with pytest.raises(RefusedError, match="was revoked by commit 1") as refused:
        next(append(SYNCER, state, commit(state, "skip", slot=0)))
    assert "diloco key request" in (refused.value.hint or "")


# -- learners -------------------------------------------------------------------------------------------------------


OLD, NEW = as_learner(RUN, "l0"), as_learner(RUN, "l0", "second")
OLD_KEY = OLD.keyring.public("learner/l0")
STOLEN = incarnation_of(1, fingerprint(OLD_KEY))


def test_what_a_revoked_key_has_offered_is_refused_and_nothing_below_it_is_read_any_more() -> None:
    store, inbox, at = MemoryStore(), Inbox(RUN), offer_key("l0", STOLEN, 0)
    before = structs.replace(genesis(), learners={"l0": LearnerRecord(floor=STOLEN)})
    theirs = replace(offer(before), incarnation=STOLEN, payload_digest=digest(b""))
    store.create(at, OLD.keyring.sign("learner/l0", at, encode(theirs)))
    inbox.open(before, 0.0)
    poll(store, inbox)
    assert [box.pending for box in inbox.mailboxes.values() if box.pending] == [[theirs]]
    later = structs.replace(before, revoked={OLD_KEY: 1})
    inbox.sort_out(later)
    assert [(one.seq, one.reason) for one in inbox.outcomes] == [(0, "key_revoked")]
    assert all(box.learner != "l0" for box in inbox.mailboxes.values())
    reads = read(store, inbox.look_for_incarnations(later, 9.0)) + read(store, inbox.poll(later, 10.0, 0.0))
    assert reads == 1, "the listing of certificates"


def test_an_offer_under_a_revoked_key_is_in_no_log_after_the_revocation() -> None:
    state = after(began(), SYNCER, "revoke", key=OLD_KEY, learner="l0")
    inputs = (applied("l0", incarnation=STOLEN),)
    with pytest.raises(RecordError, match="under a key that was revoked"):
        after(state, SYNCER, "merge", slot=0, inputs=inputs, outputs=(replace(state.outputs[0], version=2, slot=0),))
    refused = after(state, SYNCER, "refuse", outcomes=(Outcome("l0", STOLEN, 0, 0, "key_revoked"),))
    assert refused.learner("l0").floor == 0, "it raises no floor"


def revoke(fleet: SignedFleet, run: RunFormat, role: str) -> int:
    """As an operator asks; the number of the request."""
    steps = ask(
        state_of(fleet), "revoke", fleet.nonce(), "then", revoke=run.keyring.public(role), keyring=fleet.run.keyring
    )  # fmt: skip
    number: int = done(fleet, fleet.world.start("operator", steps)).result
    return number


def until_answered(fleet: SignedFleet, number: int) -> None:
    assert fleet.world.run(lambda: state_of(fleet).next_request > number, 30)


def test_a_learner_goes_on_under_a_new_key_and_its_old_one_ends() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(5)
    old = as_learner(fleet.run, "l0")
    until_answered(fleet, revoke(fleet, old, "learner/l0"))
    assert fleet.world.run(lambda: not fleet.living("l0"), 30)
    assert [type(error) for error in fleet.errors()] == [RefusedError]
    fleet.made["l0"] = "second"
    fleet.learner("l0")
    fleet.finish()
    since = next(record["n"] for record in fleet.records() if record["kind"] == "revoke")
    merged = [r for r in fleet.records()[since:] for item in r.get("inputs", ()) if item["learner"] == "l0"]
    assert merged and fleet.kinds()[-1] == "finish"


def test_who_has_stolen_a_key_that_is_revoked_can_do_nothing_any_more() -> None:
    """It claims the learner's next numbers and offers, under the stolen key; the learner goes on under a new one."""
    fleet = SignedFleet(signed_run(make_run(merges=48))).start().until_commits(5)
    fleet.restart = False
    fleet.kill("l0")
    thief = as_learner(fleet.run, "l0").keyring
    until_answered(fleet, revoke(fleet, as_learner(fleet.run, "l0"), "learner/l0"))
    since = state_of(fleet)
    for number in range(2, 20):
        stolen = incarnation_of(number, fingerprint(thief.public("learner/l0")))
        claim, first = incarnation_key("l0", stolen), offer_key("l0", stolen, 0)
        body = encode(ProcessClaim(stolen, f"thief {number}", "host", 1, "then", "test"))
        fleet.world.store.create(claim, thief.sign("learner/l0", claim, body))
        theirs = replace(offer(genesis()), incarnation=stolen)
        fleet.world.store.create(first, thief.sign("learner/l0", first, encode(theirs)))
    fleet.made["l0"] = "second"
    fleet.learner("l0")
    fleet.finish()
    own = incarnation_of(2, fingerprint(as_learner(fleet.run, "l0", "second").keyring.public("learner/l0")))
    settled = {
        item["incarnation"]
        for record in fleet.records()[since.n + 1 :]
        for item in (*record.get("inputs", ()), *record["outcomes"])
        if item["learner"] == "l0"
    }
    assert fleet.errors() == [] and settled == {own}


def test_a_syncer_whose_key_is_revoked_leaves_and_another_goes_on() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(5)
    until_answered(fleet, revoke(fleet, as_syncer(fleet.run), LOG))
    assert fleet.world.run(lambda: not fleet.living("syncer"), 30)
    fleet.made["syncer"] = "second"
    fleet.syncer()
    fleet.finish()
    assert [type(error) for error in fleet.errors()] == [RefusedError] and fleet.kinds()[-1] == "finish"
    kinds = fleet.kinds()
    assert kinds[kinds.index("revoke") + 1] == "epoch_start", "nothing came between"


def test_an_operator_revokes_a_syncer_that_does_not_answer_by_a_command_of_its_own() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(5)
    fleet.restart = False
    frozen = fleet.living("syncer")[0]
    fleet.world.pause(frozen)
    revoke(fleet, as_syncer(fleet.run), LOG)
    done(fleet, fleet.world.start("operator", stand_in(fleet)))
    state = state_of(fleet)
    assert as_syncer(fleet.run).keyring.public(LOG) in state.revoked and state.epoch_key == OPERATOR_KEY
    fleet.world.resume(frozen)
    fleet.made["syncer"] = "second"
    fleet.syncer(delay_s=1.0)
    fleet.finish()
    assert {type(error).__name__ for error in fleet.errors()} <= {"FencedError", "DisplacedError", "RefusedError"}


@pytest.mark.parametrize(
    ("key", "refused"), [("x", "no public key"), (None, "no public key"), (OPERATOR_KEY, "operator's own key")]
)
def test_what_cannot_be_revoked_is_refused_with_the_reason(key: str | None, refused: str) -> None:
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(3)
    steps = ask(state_of(fleet), "revoke", fleet.nonce(), "then", revoke=key, keyring=fleet.run.keyring)
    until_answered(fleet, done(fleet, fleet.world.start("operator", steps)).result)
    assert any(refused in record["reason"] for record in fleet.records() if record["kind"] == "refuse")


def test_only_the_operator_revokes() -> None:
    fleet = SignedFleet(signed_run()).start().until_commits(3)
    for run in (as_learner(fleet.run, "l0"), as_syncer(fleet.run)):
        with pytest.raises(RefusedError):
            next(ask(state_of(fleet), "revoke", "n", "then", revoke="a" * 64, keyring=run.keyring))


def test_an_operators_stand_in_signs_as_the_operator() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(5)
    fleet.restart = False
    fleet.kill("syncer")
    done(fleet, fleet.world.start("operator", ask(
        state_of(fleet), "stop", fleet.nonce(), "then", keyring=fleet.run.keyring)))  # fmt: skip
    done(fleet, fleet.world.start("operator", StandIn(fleet.run, fleet.claim(), "then", fleet.nonce).serve()))
    mine = [record for record in fleet.records() if record["signature"].startswith("operator:")]
    assert [(record["kind"], record.get("serves")) for record in mine] == [("epoch_start", False), ("stop", None)]


def test_a_machine_with_a_key_of_its_own_signs_the_log_with_that() -> None:
    assert len({OPERATOR_KEY, FIRST_KEY, OTHER_KEY}) == 3
    assert as_signer(RUN, HOST).keyring.public(LOG) == FIRST_KEY
