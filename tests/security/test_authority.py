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
from diloco_cli.protocol.actors.request_handler import StandIn
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.authority import AuthorityError
from diloco_cli.protocol.log.commit_log import append, fold, read_log, state_after, trusting_none_of
from diloco_cli.protocol.log.keys import commit_key, incarnation_key, offer_key, placed_key, snapshot_key
from diloco_cli.protocol.log.operations import Create, Steps
from diloco_cli.protocol.log.places import ClaimWatch
from diloco_cli.protocol.log.records import ProcessClaim, RunFormat
from diloco_cli.protocol.log.snapshots import newest_snapshot, snapshot_at, write_snapshot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import encode
from diloco_cli.protocol.rules.polling import fence_check_every_s
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import LOG, Unsigned
from diloco_cli.store.memory import MemoryStore
from diloco_cli.virtual.world import Actor
from tests.security.signed import HOST, SignedFleet, as_learner, as_signer, as_syncer, signed_run
from tests.security.test_strangers import poll, read
from tests.simulation.operated import done, stand_in, state_of
from tests.simulation.toy import ToyProcess, make_run
from tests.unit.protocol.records import RUN as TOY
from tests.unit.protocol.records import commit, genesis, offer

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
    with pytest.raises(AuthorityError, match="serves merges under the operator's key"):
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


def test_offers_of_a_revoked_key_are_as_if_they_were_not_there() -> None:
    """Those that were read before are let go, and what has no outcome yet is read again: no outcome names them, so they
    raise no floor, and the learner's next key may use their numbers."""
    old, new, at = as_learner(RUN, "l0"), as_learner(RUN, "l0", "second"), offer_key("l0", 1, 0)
    before = genesis()
    store, inbox = MemoryStore(), Inbox(RUN)
    theirs, own = (replace(offer(before), payload_digest=digest(b""), nonce=nonce) for nonce in ("old", "new"))
    store.create(at, old.keyring.sign("learner/l0", at, encode(theirs)))
    inbox.open(before, 0.0)
    poll(store, inbox)
    assert [box.pending for box in inbox.mailboxes.values() if box.pending] == [[theirs]]
    later = structs.replace(before, revoked={old.keyring.public("learner/l0"): 1})
    inbox.judge_anew(later, 1.0)
    read(store, inbox.poll(later, 2.0, 0.0))
    assert not any(box.pending for box in inbox.mailboxes.values()) and inbox.outcomes == []
    store.create(placed_key(at, 1), new.keyring.sign("learner/l0", at, encode(own)))
    read(store, inbox.poll(later, 3.0, 0.0))
    assert [box.pending for box in inbox.mailboxes.values() if box.pending] == [[own]] and inbox.outcomes == []


def test_a_revoked_keys_claim_ends_no_process_of_the_learner() -> None:
    run = signed_run(make_run())
    fleet = SignedFleet(run)
    old, new = as_learner(run, "l0"), as_learner(run, "l0", "second")
    key = incarnation_key("l0", 2)
    claim = ProcessClaim(2, "n", "host", 1, "then", "test")
    fleet.world.store.create(key, old.keyring.sign("learner/l0", key, encode(claim)))

    def replaced(keyring: Unsigned) -> bool:
        return done(fleet, fleet.world.start("l0", ClaimWatch(keyring, "l0", 1).look())).result is not None

    assert replaced(new.keyring) and not replaced(new.keyring.without({old.keyring.public("learner/l0")}))


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


def steal(fleet: SignedFleet, number: int) -> None:
    """Who has l0's first key claims this number."""
    key = incarnation_key("l0", number)
    claim = ProcessClaim(number, f"thief {number}", "host", 1, "then", "test")
    fleet.world.store.create(key, as_learner(fleet.run, "l0").keyring.sign("learner/l0", key, encode(claim)))


def between(fleet: SignedFleet) -> None:
    """A process of l0 under its second key lives as incarnation 4: who has its first key claimed 2 and 3."""
    fleet.restart = False
    fleet.kill("l0")
    for number in (2, 3):
        steal(fleet, number)
    fleet.made["l0"] = "second"
    fleet.learner("l0")
    assert fleet.world.run(lambda: fleet.world.store.get(incarnation_key("l0", 4)) is not None, 30)


def merged_of(fleet: SignedFleet, incarnation: int) -> int:
    merged = [item for record in fleet.records() for item in record.get("inputs", ()) if item["learner"] == "l0"]
    return sum(item["incarnation"] == incarnation for item in merged)


def test_a_learner_whose_claim_lies_behind_those_of_a_revoked_key_goes_on_as_that() -> None:
    """The syncer finds its claim behind the gaps; so must the learner itself, when it hears of the revocation."""
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(5)
    between(fleet)
    until_answered(fleet, revoke(fleet, as_learner(fleet.run, "l0"), "learner/l0"))
    before = merged_of(fleet, 4)
    fleet.finish()
    assert fleet.errors() == [] and merged_of(fleet, 4) > before + 4


def test_a_learner_that_starts_where_gaps_lie_before_the_newest_claim_takes_the_number_after_that() -> None:
    """Else the claim behind the gaps would end it as one whose place is taken, and it would not start again."""
    fleet = SignedFleet(signed_run(make_run(merges=24))).start().until_commits(5)
    between(fleet)
    fleet.kill("l0")
    until_answered(fleet, revoke(fleet, as_learner(fleet.run, "l0"), "learner/l0"))
    fleet.learner("l0")
    fleet.finish()
    assert fleet.errors() == [] and merged_of(fleet, 5) > 4


def started_anew() -> tuple[SignedFleet, ToyProcess]:
    """A fleet whose l0 works as incarnation 2 under its second key, and that process."""
    fleet = SignedFleet(signed_run(make_run(merges=240))).start().until_commits(5)
    fleet.restart = False
    fleet.kill("l0")
    fleet.made["l0"] = "second"
    actor = fleet.learner("l0")
    assert fleet.world.run(lambda: merged_of(fleet, 2) > 0, 30)
    return fleet, actor.owner


def revoke_first(fleet: SignedFleet) -> None:
    until_answered(fleet, revoke(fleet, as_learner(fleet.run, "l0"), "learner/l0"))


def steal_offer(fleet: SignedFleet) -> str:
    """Who has l0's first key writes the next offer of incarnation 2. Returns its second place."""
    key = offer_key("l0", 2, len(fleet.world.store.list("offer/l0/00000002/", limit=1000)))
    keyring = as_learner(fleet.run, "l0").keyring
    fleet.world.store.create(key, keyring.sign("learner/l0", key, encode(offer(genesis()))))
    return placed_key(key, 1)


def goes_on(fleet: SignedFleet) -> bool:
    before = merged_of(fleet, 2)
    fleet.finish()
    return not fleet.errors() and merged_of(fleet, 2) > before + 4


def test_a_thief_does_not_end_a_learner_that_has_not_heard_yet_that_its_key_is_revoked() -> None:
    fleet, process = started_anew()
    fleet.pause(process.threads[0])
    revoke_first(fleet)
    steal(fleet, 3)
    fleet.world.run_for(fence_check_every_s(0.0))  # so that its next look is for claims
    fleet.resume(process.threads[0])
    assert goes_on(fleet)


def test_nor_does_a_thief_that_takes_the_number_of_its_next_offer() -> None:
    fleet, process = started_anew()
    fleet.pause(process.threads[0])
    revoke_first(fleet)
    place = steal_offer(fleet)
    fleet.resume(process.threads[0])
    follower = process.threads[1]
    fleet.world.pause(follower)  # it might hear first
    assert fleet.world.run(lambda: fleet.world.store.get(place) is not None, 5)
    fleet.world.resume(follower)
    assert goes_on(fleet)


def test_nor_one_that_takes_it_while_the_payload_is_on_its_way_and_the_follower_hears() -> None:
    fleet, process = started_anew()

    def uploads() -> list[Actor]:
        calls = [(thread, call.operation) for thread in process.threads if not thread.ended for call in thread.calls]
        return [thread for thread, call in calls if isinstance(call, Create) and call.key.startswith("delta/")]

    assert fleet.world.run(lambda: bool(uploads()), 10)
    (upload,) = uploads()
    fleet.world.pause(upload)
    revoke_first(fleet)
    fleet.world.run_for(1.0)
    place = steal_offer(fleet)
    fleet.world.resume(upload)
    assert fleet.world.run(lambda: fleet.world.store.get(place) is not None, 5)
    assert goes_on(fleet)


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
