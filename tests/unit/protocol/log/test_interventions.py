"""Rollbacks, quarantines and floors, folded: what every reader of the log makes of them."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RetentionSettings
from diloco_cli.protocol.actors.collection import (
    Housekeeper,
    floor_by_request,
    floor_in_turn,
    floor_with,
    is_garbage,
)
from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.commits import CollectionFloor
from diloco_cli.protocol.log.health import QUARANTINE_AFTER, Evaluated, Stability
from diloco_cli.protocol.log.keys import delta_key, offer_key, snapshot_key, state_key, weights_key
from diloco_cli.protocol.log.records import SCHEMA, FragmentVersion, Outcome, RecordError, RunFormat, decode, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import due_for_quarantine, refusal, why_not_quarantined
from tests.unit.protocol.books import adopt, hear, stepped
from tests.unit.protocol.records import RUN, applied, commit, follow, genesis, make_run, merge, offer, output

PARAMETERS = 3  # of each fragment of RUN


def rolled_back(state: RunState, to: int, *shares: tuple[str, int], run: RunFormat = RUN) -> RunState:
    outputs = tuple(replace(output(f, state.n + 1, state.slot - 1), state_digest=f"old-{f}") for f in range(2))
    return follow(state, "rollback", run, outputs=outputs, to=to, shares=shares, reason="a spike")


def after_merges(count: int) -> RunState:
    """l0 alone: 8 tokens a merge, for fragments 0, 1, 0, 1, ..."""
    state = genesis()
    for k in range(count):
        base = state.outputs[k % 2].version
        state = merge(state, applied("l0", k, base=base, data_start=8 * k, data_end=8 * k + 8))
    return state


# -- rollback ---------------------------------------------------------------------------------------------------


def test_a_rollback_gives_every_fragment_its_own_number_and_takes_back_the_tokens() -> None:
    state = rolled_back(after_merges(3), 1, ("l0", 8 * PARAMETERS))
    assert [o.version for o in state.outputs] == [4, 4] and state.history == state.outputs
    assert (state.base_floor, state.rolled_back_to, state.slot) == (4, 1, 3)
    assert state.token_parameters == 8 * PARAMETERS == state.learner("l0").token_parameters
    assert state.merges == 3 and state.learner("l0").data_end == 24, "what happened is not forgotten"


def test_moments_from_before_survive_what_only_made_versions_anew() -> None:
    state = rolled_back(after_merges(3), 3)
    assert (state.base_floor, state.moments_floor) == (4, 0)
    state = rolled_back(rolled_back(state, 2), 5)
    assert (state.base_floor, state.moments_floor) == (6, 5)
    assert decode(RunState, encode(state), "a snapshot").moments_floor == 5
    assert rolled_back(state, 2).moments_floor == 7


def test_a_state_that_names_no_moments_has_those_since_its_newest_rollback() -> None:
    plain = json.loads(encode(rolled_back(after_merges(3), 1)))
    del plain["moments_from"]
    assert decode(RunState, encode(plain), "an older snapshot").moments_floor == 4


def test_a_learner_whom_it_does_not_name_has_no_share_any_more() -> None:
    state = rolled_back(after_merges(3), 0)
    assert state.token_parameters == 0 == state.learner("l0").token_parameters


def test_the_curve_of_losses_ends_where_the_tokens_do() -> None:
    state = after_merges(2)
    for tokens, loss in ((4, 3.0), (8, 2.0)):
        state = follow(state, "eval", tokens=tokens, loss=loss, evaluated=state.n)
    state = rolled_back(state, 1, ("l0", 8 * PARAMETERS))  # 4 tokens of the whole model
    assert state.metrics.losses == ((4, 3.0),) and state.metrics.loss == 3.0


@pytest.mark.parametrize("to", [4, 99, -1])
def test_nobody_goes_back_to_what_has_not_been(to: int) -> None:
    with pytest.raises(RecordError, match=f"commit {to}, which is not there"):
        rolled_back(after_merges(3), to)


def test_it_brings_every_fragment_or_is_no_rollback() -> None:
    state = after_merges(3)
    with pytest.raises(RecordError, match="brings fragments"):
        follow(state, "rollback", outputs=(output(0, 4, 2),), to=1)


def test_offers_from_before_are_refused_and_those_from_after_are_as_fresh_as_can_be() -> None:
    before = after_merges(3)
    old = offer(before, 1, slot=3, seq=9, data_start=64)
    assert refusal(old, before, RUN) is None
    state = rolled_back(before, 1)
    assert refusal(old, state, RUN) == "before_rollback"
    fresh = offer(state, 1, slot=3, seq=9, data_start=64)
    assert refusal(fresh, state, RUN) is None


def test_a_learner_counts_from_zero_offers_for_the_due_slot_and_its_schedule_goes_back() -> None:
    run = make_run(2)
    run = replace(run, settings=replace(run.settings, train=replace(run.settings.train, tokens=1000)))
    state = after_merges(3)
    progress = Progress(run, "l0", 1, state, 24)
    stepped(progress, 9)
    ahead, fraction = progress.aim.next_slot, progress.fraction()
    back = rolled_back(state, 0)
    assert progress.is_behind_rollback(back) and progress.mixing_of(back.outputs[0], back) == "replace"
    hear(progress, back)
    for fragment in range(2):
        assert adopt(progress, back, fragment) == ("replace", None)
    assert progress.aim.next_slot == back.slot < ahead and progress.fraction() < fraction
    assert [book.steps for book in progress.books] == [0, 0] and progress.position == 24 + 9 * 4
    assert not progress.is_behind_rollback(back)


def test_offers_from_before_a_rollback_hold_nothing_up_whose_word_comes_late() -> None:
    """With the next merge, which the syncer may not make without this learner."""
    state = after_merges(3)
    progress = Progress(RUN, "l0", 2, state, 24)
    drafts = stepped(progress, 4)
    assert [(draft.slot, draft.fragment) for draft in drafts] == [(3, 1), (4, 0)]
    back = rolled_back(state, 1)
    hear(progress, back)
    assert not progress.awaits_outcomes() and stepped(progress, 4) == [], "what was rolled back is not adopted yet"
    for fragment in range(2):
        assert adopt(progress, back, fragment) == ("replace", None)
    anew = stepped(progress, 4)
    assert [(draft.seq, draft.slot, draft.fragment) for draft in anew] == [(2, 3, 1), (3, 4, 0)]
    refused = follow(back, "refuse", outcomes=(Outcome("l0", 2, 0, 1, "before_rollback"),))
    hear(progress, refused)
    assert [book.waits for book in progress.books] == anew[::-1], "the word on another offer"


def test_error_feedback_owes_nothing_for_what_a_rollback_took_back() -> None:
    """A poisoned delta's rounding error would bring a part of it back."""
    run = make_run(2, error_feedback=True)
    state = genesis()
    progress = Progress(run, "l0", 1, state, 0)

    def owed_after(steps: int) -> list[int | None]:
        return [draft.applied for draft in stepped(progress, steps) if draft.fragment == 0]

    assert owed_after(4) == [None]
    state = merge(state, applied("l0", 0, base=0, data_end=8))
    hear(progress, state)
    adopt(progress, state)
    assert owed_after(4) == [0], "offer 0 was merged"
    back = rolled_back(state, 0)
    hear(progress, back)
    for fragment in range(2):
        assert adopt(progress, back, fragment) == ("replace", None)
    outcomes = tuple(Outcome("l0", 1, seq, 0, "before_rollback") for seq in range(1, progress.next_seq))
    back = follow(back, "refuse", run, outcomes=outcomes)
    hear(progress, back)
    assert owed_after(4) == [None], "the log still names the merge that was taken back"


@pytest.mark.parametrize("mixing", ["rebase", "replace"])
def test_without_a_rollback_a_version_is_adopted_as_the_run_says(mixing: str) -> None:
    run = make_run(2, mixing=mixing)
    state = after_merges(2)
    progress = Progress(run, "l0", 2, state, 16)
    (draft,) = [draft for draft in stepped(progress, 2) if draft.fragment == 0]
    mine = applied("l0", incarnation=2, base=1, data_start=16, data_end=draft.data_end)
    newer = merge(state, mine)
    hear(progress, newer)
    made = newer.outputs[0]
    assert progress.mixing_of(made, newer) == mixing
    assert progress.mixing_of(made, rolled_back(newer, 0)) == "replace"


# -- quarantine -------------------------------------------------------------------------------------------------


def with_bad_offers(name: str, count: int) -> RunState:
    outcomes = tuple(Outcome(name, 1, k, 0, "bad_payload") for k in range(count))
    return follow(genesis(), "refuse", outcomes=outcomes)


def test_after_so_many_bad_offers_in_a_row_it_is_due_and_after_one_fewer_it_is_not() -> None:
    assert due_for_quarantine(with_bad_offers("l1", QUARANTINE_AFTER - 1), RUN) is None
    due = due_for_quarantine(with_bad_offers("l1", QUARANTINE_AFTER), RUN)
    assert due == ("l1", "5 offers in a row that no honest learner makes")


def test_nobody_is_quarantined_whom_the_quorum_needs() -> None:
    run, state = make_run(quorum=2), with_bad_offers("l1", QUARANTINE_AFTER)
    assert due_for_quarantine(state, run) is None
    assert why_not_quarantined("l1", state, run) == "without l1 1 learners would be left, and the quorum is 2"
    assert why_not_quarantined("nobody", state, RUN) == "'nobody' is no learner of this run"
    kept_out = follow(state, "quarantine", learner="l1")
    assert why_not_quarantined("l1", kept_out, RUN) == "'l1' is quarantined already"


def test_quarantined_its_offers_are_refused_whatever_they_are_and_readmitted_they_are_not() -> None:
    state = follow(with_bad_offers("l0", 8), "quarantine", learner="l0", reason="bad")
    assert state.learner("l0").quarantined == state.n and state.metrics.notes[-1].text == "quarantined: bad"
    fresh = offer(state, seq=8)
    assert refusal(fresh, state, RUN) == "quarantined"
    state = follow(state, "readmit", learner="l0", reason="mended")
    assert refusal(fresh, state, RUN) is None


@pytest.mark.parametrize("kinds", [["readmit"], ["quarantine", "quarantine"]])
def test_a_readmission_of_one_who_is_not_kept_out_and_a_second_quarantine_do_not_fit(kinds: list[str]) -> None:
    state = genesis()
    for kind in kinds[:-1]:
        state = follow(state, kind, learner="l0")
    with pytest.raises(RecordError, match="does not fit"):
        follow(state, kinds[-1], learner="l0")


# -- floors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "floor", "rounds", "expected"),
    [
        (100, 0, 8, 84),  # 16 commits are kept; nothing else decides
        (100, 77, 8, None),
        (100, 76, 8, 84),  # 8 commits on, the least
        (100, 0, 49, None),  # it would rise by less than a quarter of what is kept
        (100, 0, 1, 96),  # two rounds stay in any case
        (100, 0, "all", None),
    ],
)
def test_in_turn_the_floor_leaves_what_is_kept_for_any_number_of_rounds(
    head: int, floor: int, rounds: int, expected: int | None
) -> None:
    run = replace(RUN, settings=replace(RUN.settings, retention=RetentionSettings(rounds)))
    assert floor_in_turn(run, RunState(n=head, gc_floor=floor)) == expected


@pytest.mark.parametrize(("slot_s", "rises_s"), [(1.0, 30.0), (600.0, 1800.0)])
def test_a_run_is_idle_when_nothing_came_for_half_a_minute_and_three_slots(slot_s: float, rises_s: float) -> None:
    """In an idle run the floor follows each commit, to make room. A run whose slots take minutes is not idle between
    its merges: a floor after each would leave half of the kept rounds to the floors' own commits."""
    run = replace(RUN, settings=replace(RUN.settings, retention=RetentionSettings(8)))
    keeper, state = Housekeeper(run), RunState(n=100, gc_floor=80)
    found = [keeper.due(state, now_s, slot_s) for now_s in (0.0, rises_s - 0.1, rises_s)]
    assert found[:2] == [None, None] and isinstance(found[2], CollectionFloor)


def test_a_run_whose_fast_islands_wait_for_slow_ones_is_not_idle_between_its_merges() -> None:
    """The fastest needs 100 s for a slot, the slowest 300 s."""
    slow = tuple(replace(island, local_steps=RUN.num_fragments, step_s=300.0) for island in RUN.islands)
    run = replace(RUN, islands=slow, settings=replace(RUN.settings, retention=RetentionSettings(8)))
    keeper, state = Housekeeper(run), RunState(n=100, gc_floor=80)
    assert [keeper.due(state, now_s, 100.0) for now_s in (0.0, 899.0)] == [None, None]
    assert keeper.due(state, 900.0, 100.0) is not None


def test_the_floor_does_not_pass_the_commit_that_a_rollback_may_need() -> None:
    good = (Evaluated(60, 2.0, 1),)
    state = RunState(n=100, stability=Stability(good=good))
    assert floor_with(RUN, state, 4) == floor_by_request(RUN, state) == 60
    state = structs.replace(state, gc_floor=59)
    assert floor_with(RUN, state, 4) == 60
    assert "commit 60, the last one that evaluated well" in str(floor_by_request(RUN, state))


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([(0, 60), (0, 97), (1, 70), (1, 98)], 60),  # from commit 60 on, commit 97's version can be made anew
        ([(0, 0), (1, 0)], None),  # restarts, refusals and evaluations made all commits since
        ([(0, 90), (1, 90)], 89),  # a rollback's: they can be made anew from what it went back to
    ],
)
def test_the_floor_leaves_each_fragment_what_its_newest_version_is_made_of(
    versions: list[tuple[int, int]], expected: int | None
) -> None:
    history = tuple(FragmentVersion(fragment, n, n, 1, "", "") for fragment, n in versions)
    outputs = tuple({version.fragment: version for version in history}.values())
    state = RunState(n=100, outputs=outputs, history=history)
    assert floor_with(RUN, state, 4) == expected
    assert isinstance(floor_by_request(RUN, state), str) == (expected is None)
    assert "is at commit 50 already" in str(floor_by_request(RUN, structs.replace(state, gc_floor=50), 50))


@pytest.mark.parametrize("floor", [0, 5, 99])
def test_a_floor_rises_and_lies_behind_its_commit(floor: int) -> None:
    state = follow(after_merges(6), "gc_floor", floor=5)
    assert state.gc_floor == 5
    with pytest.raises(RecordError, match="floor"):
        follow(state, "gc_floor", floor=floor)


def test_behind_a_floor_nobody_goes_back() -> None:
    state = follow(after_merges(6), "gc_floor", floor=5)
    with pytest.raises(RecordError, match="not there"):
        rolled_back(state, 4)


def key_of(what: str, made: FragmentVersion, epoch: int = 1) -> str:
    if what == "state":
        return state_key(made.fragment, made.version, epoch, made.state_digest)
    return weights_key(made.fragment, made.version, epoch, made.weights_digest)


def test_what_is_garbage_and_what_is_not() -> None:
    """The floor's state: fragment 0 merged as versions 1, 3, 5, 7, 9; fragment 1 as 2, 4, 6, 8. Four of each can be
    the base of a delta (staleness 2 rounds)."""
    state = after_merges(9)
    garbage = {version: is_garbage(key_of("state", output(0, version, 0)), state, 1) for version in (0, 1, 7, 9, 11)}
    assert garbage == {0: True, 1: True, 7: True, 9: False, 11: False}
    garbage = {version: is_garbage(key_of("weights", output(0, version, 0)), state, 1) for version in (0, 1, 3, 9, 11)}
    assert garbage == {0: True, 1: True, 3: False, 9: False, 11: False}


def test_what_nobody_committed_is_garbage_once_its_epoch_is_over() -> None:
    state = after_merges(9)
    orphan = replace(output(0, 9, 0), state_digest="other")
    assert not is_garbage(key_of("state", orphan, epoch=2), state, 2), "its writer may be about to read it back"
    assert is_garbage(key_of("state", orphan, epoch=2), state, 3)
    assert not is_garbage(key_of("state", replace(orphan, version=10), epoch=2), state, 3), "not behind the floor"


def test_deltas_are_garbage_once_they_have_a_outcome() -> None:
    state = follow(after_merges(2), "refuse", outcomes=(Outcome("l1", 2, 0, 0, "superseded"),))
    cases = {("l0", 1, 0): True, ("l0", 1, 1): True, ("l0", 1, 2): False, ("l0", 2, 0): False, ("l1", 1, 7): True,
             ("l1", 2, 0): True, ("l1", 2, 1): False, ("nobody", 1, 0): False}  # fmt: skip
    assert {case: is_garbage(delta_key(*case, "d"), state, 9) for case in cases} == cases


@pytest.mark.parametrize(
    "key", ["state/0000/x", "delta/l0/1/2", "weights/0099/000000000001-0000000001-d", "snapshot/x"]
)
def test_what_cannot_be_read_stays(key: str) -> None:
    assert not is_garbage(key, after_merges(9), 9)


def test_offers_are_garbage_before_the_last_one_that_precedes_those_without_an_outcome() -> None:
    state = follow(after_merges(3), "refuse", outcomes=(Outcome("l0", 1, 4, 0, "late"), Outcome("l1", 2, 0, 0, "late")))
    cases = {("l0", 0, 9): True, ("l0", 1, 0): True, ("l0", 1, 1): True, ("l0", 1, 2): False, ("l0", 1, 3): False,
             ("l0", 1, 4): False, ("l1", 1, 7): True, ("l1", 2, 0): False, ("nobody", 1, 0): False}  # fmt: skip
    assert {case: is_garbage(offer_key(*case), state, 9) for case in cases} == cases


def test_snapshots_before_those_that_are_kept_are_garbage() -> None:
    state = after_merges(9)
    assert [is_garbage(snapshot_key(n), state, 1, snapshot=8) for n in (7, 8, 9)] == [True, False, False]
    assert not is_garbage(snapshot_key(9), state, 1, snapshot=12), "none beyond the floor"


# -- newer writers ----------------------------------------------------------------------------------------------


def test_a_commit_of_a_newer_schema_or_of_an_unknown_kind_is_refused() -> None:
    state = structs.replace(genesis(), digest="")
    plain = json.loads(encode(commit(state, "refuse")))
    assert fold(RUN, state, encode(plain)).n == 1
    with pytest.raises(RecordError, match="reads up to") as newer:
        fold(RUN, state, encode({**plain, "schema": SCHEMA + 1, "kind": "teleport"}))
    assert newer.value.hint == "take a newer diloco from where this one came; this one: diloco --version"
    with pytest.raises(RecordError, match="teleport"):
        fold(RUN, state, encode({**plain, "kind": "teleport"}))
