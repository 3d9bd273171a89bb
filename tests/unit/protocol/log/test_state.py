"""The folded log: what is refused, and what stays bounded; and the tables of states."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log import state as state_tables
from diloco_cli.protocol.log.commit_log import BAD_READS_S, Snapshot, append, kept_versions
from diloco_cli.protocol.log.commits import Commit, Skip, apply
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.metrics import RECENT_MERGES, RECENT_NOTES
from diloco_cli.protocol.log.records import Outcome, ProcessClaim, RecordError, decode, encode
from diloco_cli.protocol.log.state import (
    LEARNER,
    STANDBY,
    SYNCER,
    IllegalStateError,
    LearnerRecord,
    LearnerState,
    RunPhase,
    RunState,
    StandbyState,
    SyncerState,
    Window,
    moved,
)
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import KINDS, RUN, applied, commit, follow, genesis, make_run, merge, output


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"n": 2}, "chain"),
        ({"n": 0}, "chain"),
        ({"previous": "other"}, "chain"),
        ({"epoch": 0}, "older than epoch"),
        ({"slot": 1}, "slot 0 is due"),
        ({"slot": None}, "slot 0 is due"),
    ],
)
def test_a_record_that_does_not_continue_this_log_is_refused(broken: dict[str, Any], text: str) -> None:
    fields = {"slot": 0, "inputs": (applied(),), "outputs": (output(0, 1, 0),), **broken}
    with pytest.raises(RecordError, match=text):
        follow(genesis(), "merge", **fields)


@pytest.mark.parametrize("outputs", [(), (output(9, 1, 0),)], ids=["none", "foreign"])
def test_a_merge_without_an_output_of_this_layout_is_a_record_error(outputs: Any) -> None:
    with pytest.raises(RecordError):
        follow(genesis(), "merge", slot=0, inputs=(applied(),), outputs=outputs)


@pytest.mark.parametrize("outputs", [(), (output(0, 0, -1),)], ids=["none", "one of two"])
def test_the_first_commit_must_bring_all_fragments(outputs: Any) -> None:
    with pytest.raises(RecordError, match=r"instead of \[0, 1\]"):
        follow(RunState(), "epoch_start", outputs=outputs)


def test_a_merge_moves_slot_tokens_and_version_on() -> None:
    state = merge(genesis(), applied(tokens=8), applied("l1", tokens=6))
    assert (state.slot, state.merges, state.metrics.offers_applied) == (1, 1, 2)
    assert state.tokens(RUN.layout) == 14 * 3 // 6
    assert [o.version for o in state.outputs] == [1, 0]
    assert state.learner("l0").applied[0].produced == 1 and state.participation == 1.0


def test_the_newest_merge_says_when_the_next_windows_are() -> None:
    """Nothing else does: neither a skip nor a rollback changes what it said."""
    state = genesis()
    assert state.window is None
    said = {"opens_s": 1.5, "slot_s": 2.0, "grace_s": 0.25}
    state = follow(state, "merge", slot=0, inputs=(applied(),), outputs=(output(0, 1, 0),), **said)
    assert state.window == Window(**said)
    assert follow(state, "skip", slot=1).window == Window(**said)
    assert merge(state, applied("l1", base=0)).window == Window(0.0, 0.0, 0.0)


def test_tokens_are_counted_without_rounding() -> None:
    state = genesis()
    for seq in range(9):
        state = merge(state, applied(seq=seq, tokens=1))
    assert state.token_parameters == 27 and state.tokens(RUN.layout) == 4


def test_a_outcome_settles_only_its_offer_and_the_first_gap_stays_open() -> None:
    state = merge(genesis(), applied(seq=2), outcomes=(Outcome("l0", 1, 0, 0, "superseded"),))
    known = state.learner("l0")
    assert [known.has_outcome(seq) for seq in range(4)] == [True, False, True, False]
    assert (known.next_seq, known.settled, known.refused) == (1, (2,), 1)


def test_a_new_incarnation_starts_its_numbers_anew_and_forgets_older_ones() -> None:
    state = merge(genesis(), applied(seq=0), outcomes=(Outcome("l0", 2, 1, 0, "bad_record"),))
    known = state.learner("l0")
    assert (known.floor, known.next_seq, known.settled) == (2, 0, (1,))
    again = merge(state, applied("l1"), outcomes=(Outcome("l0", 1, 5, 0, "superseded"),)).learner("l0")
    assert (again.floor, again.next_seq, again.settled) == (2, 0, (1,))


def test_outcomes_in_any_order_leave_a_bounded_memory() -> None:
    shuffled = list(range(300))
    generator = random.Random(7)
    for start in range(0, 300, 10):  # as the bound of outstanding offers lets them come: out of order, but nearby
        block = shuffled[start : start + 10]
        generator.shuffle(block)
        shuffled[start : start + 10] = block
    state = genesis()
    for seq in shuffled:
        state = follow(state, "skip", slot=state.slot, outcomes=(Outcome("l0", 1, seq, 0, "late"),))
        assert len(state.learner("l0").settled) < 10
    assert (state.learner("l0").next_seq, state.learner("l0").settled) == (300, ())
    assert len(state.metrics.notes) == RECENT_NOTES


def test_refusals_of_one_learner_for_one_reason_are_one_note_and_push_out_no_other() -> None:
    state = follow(genesis(), "refuse", time="2026-01-01T00:00:00Z", reason="asked in vain")
    for seq in range(100):
        outcome = Outcome("l0", 1, seq, 0, "late")
        at = f"2026-01-01T00:{seq // 10:02}:00Z"
        state = follow(state, "skip", slot=state.slot, time=at, outcomes=(outcome,))
    told = [note.text for note in state.metrics.notes]
    assert [note.count for note in state.metrics.notes if note.kind == "skip"] == [100]
    (refused,) = (note for note in state.metrics.notes if note.kind == "refused")
    assert "asked in vain" in told and (refused.count, refused.unit, refused.text) == (100, "l0", "late")
    assert (refused.since, refused.time) == ("2026-01-01T00:00:00Z", "2026-01-01T00:09:00Z")
    later = follow(state, "refuse", time="2026-01-01T00:20:00Z", outcomes=(Outcome("l0", 1, 200, 0, "late"),))
    assert later.metrics.notes[-1].count == 1


def test_history_keeps_the_newest_versions_of_each_fragment() -> None:
    state = genesis()
    for seq in range(20):
        state = merge(state, applied(seq=seq))
    kept = [o.version for o in state.history if o.fragment == 0]
    assert len(kept) == kept_versions(RUN) and kept == sorted(kept) and kept[-1] == state.outputs[0].version
    assert len(state.metrics.recent_merges) == RECENT_MERGES


def test_losses_stay_bounded_and_keep_the_newest() -> None:
    state = genesis()
    for n in range(1200):
        state = follow(state, "eval", loss=float(n), evaluated=n, tokens=n)
    losses = state.metrics.losses
    assert len(losses) <= 512 and losses[-1][1] == 1199.0 and losses[0][1] == 0.0


def test_stop_start_and_finish_move_the_phase() -> None:
    state = follow(genesis(), "stop", request=4)
    assert (state.phase, state.next_request) == ("STOPPED", 5)
    state = follow(state, "epoch_start", epoch=2)
    assert (state.phase, state.epoch) == ("RUNNING", 2)
    assert follow(state, "finish").phase == "FINISHED"


def test_apply_changes_nothing_of_the_state_before() -> None:
    state = genesis()
    before = encode(Snapshot(state, "", ""))
    merge(state, applied(), outcomes=(Outcome("l1", 1, 0, 0, "superseded"),))
    assert encode(Snapshot(state, "", "")) == before


def test_a_snapshot_holds_the_whole_state_through_its_bytes() -> None:
    state = genesis()
    for seq in range(15):
        state = merge(state, applied(seq=seq), applied("l1", seq + 1), outcomes=(Outcome("l1", 2, 3, 1, "bad_norms"),))
        state = follow(state, "eval", loss=0.5, evaluated=state.n, tokens=seq)
    state = follow(state, "quarantine", learner="l1", reason="why")
    snapshot = Snapshot(state, state.digest, "id")
    read = decode(Snapshot, encode(snapshot), "snapshot")
    assert read == snapshot and encode(read) == encode(snapshot)


def test_the_counts_of_the_largest_runs_come_back() -> None:
    """Tokens times parameters: 2^64 of these are 18 billion tokens of a model of a billion parameters."""
    count = 15 * 10**12 * 10**13
    state = structs.replace(genesis(), token_parameters=count, learners={"l0": LearnerRecord(token_parameters=count)})
    assert decode(Snapshot, encode(Snapshot(state, "", "id")), "snapshot").state == state
    record = commit(state, "rollback", to=0, outputs=state.outputs, shares=(("l0", count),), reason="asked")
    back = apply(state, decode(Commit, encode(record), "commit"), "d", RUN.layout, 4)
    assert back.token_parameters == back.learners["l0"].token_parameters == count


def test_apply_needs_nothing_but_its_arguments() -> None:
    record = commit(genesis(), "skip", slot=0, reason="why")
    results = [apply(genesis(), record, "d", RUN.layout, 4) for _ in range(2)]
    assert results[0] == results[1] and results[0].metrics.skips == 1


def test_a_log_begins_with_an_epoch() -> None:
    single = make_run(fragments=1)
    with pytest.raises(RecordError, match="the log begins with a merge"):
        follow(RunState(), "merge", single, inputs=(applied(),))


def test_a_commit_of_no_kind_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="one of the kinds"):
        Commit()


def test_what_cannot_be_folded_is_not_written() -> None:
    """Else no reader would get past it."""
    store, clock = MemoryStore(), SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
    state = genesis()
    with pytest.raises(RecordError, match="slot 9"):
        perform(append(RUN, state, Skip(epoch=1, slot=9)), store, clock)
    assert not store.list("")
    after, mine = perform(append(RUN, state, Skip(epoch=1, slot=0)), store, clock)
    assert mine and after.slot == 1


def test_a_syncer_that_finds_a_damaged_log_says_so_and_nothing_of_a_successor() -> None:
    store, slept = MemoryStore(), [0.0]
    clock = SystemClock(lambda: sum(slept), slept.append, lambda: None)
    store.create(commit_key(0), encode(commit(RunState(), "epoch_start", outputs=genesis().outputs)))
    store.create(commit_key(1), b'{"kind":"skip"}')
    claim = ProcessClaim(0, "nonce", "host", 1, "then", "test")
    run = replace(RUN, kept={})  # of this log
    syncer = Syncer(run, claim, arithmetic=None, evaluator=None, time_text=str, nonce=str)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="not a commit"):
        perform(syncer.serve(), store, clock)
    assert syncer.doing == "READING" and sum(slept) == BAD_READS_S


def test_a_run_that_has_grown_is_the_same_for_every_offer_and_another_for_other_members() -> None:
    joined = replace(RUN.islands[0], name="joined")
    state = RunState(members=(joined,))
    grown = state.with_members(RUN)
    assert grown is state.with_members(RUN) and grown is state.with_members(grown)
    assert [island.name for island in grown.all_islands] == ["l0", "l1", "joined"]
    assert RunState(members=(joined, replace(joined, name="later"))).with_members(RUN).island("later") is not None
    assert RunState().with_members(RUN) is RUN


def test_refusals_of_one_learner_in_one_commit_are_one_note_and_only_the_newest_learners_are_told() -> None:
    outcomes = tuple(Outcome(f"l{place // 3:02}", 1, place % 3, 0, "late") for place in range(3 * 2 * RECENT_NOTES))
    notes = follow(genesis(), "refuse", outcomes=outcomes).metrics.notes
    assert [(note.unit, note.count) for note in notes] == [
        (f"l{n:02}", 3) for n in range(RECENT_NOTES, 2 * RECENT_NOTES)
    ]


TABLES: dict[Any, Any] = {LearnerState: LEARNER, SyncerState: SYNCER, StandbyState: STANDBY, RunPhase: state_tables.RUN}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: str(kind.__name__))
def test_every_state_has_a_row_and_is_reached_from_the_first(kind: Any) -> None:
    table, first = TABLES[kind], next(iter(kind))
    table = {a: set(ways.values()) if isinstance(ways, dict) else ways for a, ways in table.items()}
    assert set(table) == set(kind)
    reached, waiting = {first}, [first]
    while waiting:
        new = set(table[waiting.pop()]) - reached
        reached |= new
        waiting += new
    assert reached == set(kind)


def test_a_process_that_is_over_stays_so() -> None:
    for state in (LearnerState.DONE, LearnerState.FENCED, LearnerState.FAILED):
        assert not LEARNER[state]
    for syncer in (SyncerState.DONE, SyncerState.FENCED):
        assert not SYNCER[syncer]


def test_a_way_that_the_table_does_not_have_is_an_error_that_names_those_it_has() -> None:
    assert moved(SYNCER, SyncerState.MERGING, SyncerState.SERVING) is SyncerState.SERVING
    assert moved(SYNCER, SyncerState.DONE, SyncerState.DONE) is SyncerState.DONE, "where it is already"
    with pytest.raises(IllegalStateError, match="from MERGING to FINISHING; allowed: DONE, FENCED, SERVING") as caught:
        moved(SYNCER, SyncerState.MERGING, SyncerState.FINISHING)
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("ending", "phase"), [("stop", "STOPPED"), ("finish", "FINISHED")])
def test_after_the_end_of_a_run_its_log_does_not_go_on_but_for_an_epoch_after_a_stop(
    kind: str, ending: str, phase: str
) -> None:
    state = follow(genesis(), ending)
    assert state.phase == phase
    fields: dict[str, dict[str, Any]] = {
        "skip": {"slot": 0},
        "eval": {"evaluated": 0, "loss": 1.0, "tokens": 1},
        "merge": {"inputs": (None,)},
        "membership": {"islands": (None,)},
        "quarantine": {"learner": "l0"},
        "readmit": {"learner": "l0"},
        "revoke": {"key": "a1" * 32},
        "rollback": {"to": 0, "outputs": genesis().outputs},
        "gc_floor": {"floor": 1},
    }
    if (ending, kind) == ("stop", "epoch_start"):
        assert follow(state, kind).phase == RunPhase.RUNNING
        return
    with pytest.raises(RecordError, match=f"a {kind}, comes after the run was {phase}"):
        follow(state, kind, **fields.get(kind, {}))
