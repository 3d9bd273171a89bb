"""The situation of a run: which state follows from which facts, its reason, its time, its limit, and what helps."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.events.event import Event
from diloco_cli.observe.facts import Heard, Local, LocalUnit, RunFacts, full_disk
from diloco_cli.observe.screen import status_lines
from diloco_cli.observe.situation import RUN_STATES, State, machine_of_syncer, refusals_of, verdict_of
from diloco_cli.observe.status import status_of
from diloco_cli.observe.unit_states import LOST_S, STUCK, UNIT_STATES
from diloco_cli.plan.link import GUESSED_MACHINE, measured_by, work_of
from diloco_cli.protocol.log.health import Stability
from diloco_cli.protocol.log.metrics import Note, Sustained
from diloco_cli.protocol.log.state import LearnerRecord, LearnerState, RunState, StandbyState, SyncerState, Window
from diloco_cli.protocol.rules.capacity import shortest_slot
from diloco_cli.runtime.registry import Supervised
from tests.unit.observe.test_status import HEARTBEAT, MERGES, RUN, STATE, SYNCER, WAITING, at, facts, measured

LOST_AGE_S = LOST_S + 1


def learner_says(spoken: RunFacts, name: str, state: str, age_s: float = 1.0) -> RunFacts:
    return replace(spoken, learners={**spoken.learners, name: Heard(replace(HEARTBEAT, state=state), age_s)})


def syncer_says(spoken: RunFacts, age_s: float = 1.0, **changes: Any) -> RunFacts:
    return replace(spoken, syncer=Heard(replace(SYNCER, **changes), age_s))  # type: ignore[arg-type]


def later(spoken: RunFacts, seconds: float) -> RunFacts:
    """The same, with the newest merge so many seconds older than the 10 s of `facts`."""
    return replace(spoken, now_s=spoken.now_s + seconds)


def test_merges_that_go_on_are_merging_for_the_syncers_reason_and_have_an_eta() -> None:
    verdict = verdict_of(facts())
    assert (verdict.state, verdict.reason, verdict.hint) == (State.MERGING, "2 of 2", "")
    assert status_of(facts()).eta_s is not None


def test_a_learner_that_left_is_missing() -> None:
    verdict = verdict_of(learner_says(facts(), "rhine", LearnerState.DONE, 500.0))
    assert verdict.state == State.DEGRADED and verdict.since_s == 500.0
    assert verdict.reason == "merges go on without 1 of 2 planned islands: rhine (it has left)"


def test_silence_has_no_known_cause_in_the_bucket_and_says_so() -> None:
    verdict = verdict_of(facts(rhine=LOST_AGE_S))
    assert verdict.state == State.DEGRADED and "rhine (not heard for 26 s; why is not known" in verdict.reason
    assert verdict.hint == "diloco resume file:///b/nano --region eu"


def test_where_no_learner_is_left_the_run_stalls_at_once_and_has_no_eta() -> None:
    for state in (LearnerState.DONE, LearnerState.FAILED):
        left = learner_says(learner_says(facts(), "iowa", LearnerState.DONE), "rhine", state)
        status = status_of(left)
        assert (status.state, status.eta_s, status.since_s) == (State.STALLED, None, 10.0)
        assert status.reason.startswith("no learner is left: iowa (it has left), rhine (it has")


def test_a_stall_is_noticed_after_twice_the_usual_time_between_merges_and_names_who_is_missing() -> None:
    waiting = syncer_says(facts(rhine=LOST_AGE_S), reason="1 of the 2 offers that the quorum needs")
    assert verdict_of(later(waiting, 60.0)).state == State.DEGRADED, "merges came every 40 s"
    verdict = verdict_of(later(waiting, 63.0))
    assert (verdict.state, verdict.since_s) == (State.STALLED, 73.0)
    assert verdict.reason.startswith("1 of the 2 offers that the quorum needs; missing: rhine (not heard")


def test_a_stall_without_a_known_cause_says_so() -> None:
    verdict = verdict_of(later(facts(), 100.0))
    assert (verdict.state, verdict.reason) == (State.STALLED, "2 of 2; why is not known from the bucket")
    assert verdict.hint == "diloco logs --run file:///b/nano"
    silent = later(syncer_says(facts(), reason=""), 100.0)
    assert verdict_of(silent).reason == "why is not known from the bucket"


def test_a_failing_store_is_the_cause_of_a_stall() -> None:
    by_syncer = verdict_of(later(syncer_says(facts(), retrying="put fails: 503"), 100.0))
    assert by_syncer.reason == "the syncer's store fails: put fails: 503"
    by_learners = verdict_of(later(facts(retrying="put fails: 503"), 100.0))
    assert by_learners.reason == "the learners' store fails: iowa: put fails: 503"
    assert by_syncer.hint == by_learners.hint == "diloco doctor file:///b/nano"


def test_quarantine_of_one_degrades_and_of_all_stalls() -> None:
    kept_out = LearnerRecord(quarantined=7)
    one = structs.replace(STATE, learners={"rhine": kept_out})
    verdict = verdict_of(facts(one))
    assert (verdict.state, verdict.hint) == (State.DEGRADED, "diloco readmit rhine file:///b/nano")
    assert "its offers are refused since commit 7" in verdict.reason
    assert verdict_of(facts(structs.replace(STATE, learners=dict.fromkeys(["iowa", "rhine"], kept_out)))).state == (
        State.STALLED
    )


def test_silence_of_all_is_silent_and_a_good_end_of_all_is_told_apart() -> None:
    gone = facts(iowa=LOST_AGE_S, rhine=50.0, syncer=LOST_AGE_S)
    verdict = verdict_of(gone)
    assert (verdict.state, verdict.since_s, verdict.hint) == (State.SILENT, 26.0, "diloco resume file:///b/nano")
    assert "why is not known" in verdict.reason
    left = syncer_says(facts(), state=SyncerState.DONE)
    for name in ("iowa", "rhine"):
        left = learner_says(left, name, LearnerState.DONE)
    assert (verdict_of(left).state, verdict_of(left).reason) == (State.SILENT, "all units have left in good order")


def test_failures_of_all_learners_fail_the_run_unless_they_may_be_restarted_soon() -> None:
    for age_s, state in ((2.0, State.STALLED), (9.0, State.FAILED)):
        failed = learner_says(facts(), "iowa", LearnerState.FAILED, age_s)
        assert verdict_of(learner_says(failed, "rhine", LearnerState.FAILED, age_s)).state == state


def test_from_afar_a_run_fails_once_its_supervisors_have_given_up() -> None:
    failed = facts()
    for name in ("iowa", "rhine"):
        failed = learner_says(failed, name, LearnerState.FAILED, 9.0)
    ended = [Event(at(second), "ended", name, "status 1") for second, name in enumerate(("iowa", "rhine"))]
    assert verdict_of(replace(failed, written=ended)).state == State.STALLED, "they may be started again"
    given_up = [Event(at(9), "gave_up", name, "it ended too often") for name in ("iowa", "rhine")]
    assert verdict_of(replace(failed, written=[*ended, given_up[0]])).state == State.STALLED
    assert verdict_of(replace(failed, written=[*ended, *given_up])).state == State.FAILED


def test_a_standby_that_is_heard_will_take_over() -> None:
    spoken = replace(facts(syncer=LOST_AGE_S), standbys={"standby-1": Heard(WAITING, 1.0)})
    assert verdict_of(spoken).state == State.MERGING, "not before the next merge is overdue"
    overdue = verdict_of(later(spoken, 100.0))
    assert overdue.state == State.STALLED and overdue.reason.endswith("standby-1 will take over") and not overdue.hint
    assert WAITING.state == StandbyState.STANDING_BY


def test_a_run_drains_while_its_last_offers_are_settled() -> None:
    assert verdict_of(syncer_says(facts(), state=SyncerState.FINISHING)).state == State.DRAINING
    one = learner_says(facts(), "iowa", LearnerState.DRAINING)
    assert verdict_of(one).state == State.MERGING
    both = learner_says(one, "rhine", LearnerState.DRAINING)
    assert (verdict_of(both).state, verdict_of(both).reason) == (State.DRAINING, "told to leave: iowa, rhine")
    assert status_of(both).eta_s is None


def noted(state: RunState, *notes: Note) -> RunState:
    return structs.replace(state, metrics=structs.replace(state.metrics, notes=notes))


def test_a_stop_by_an_operator_is_told_from_one_for_a_jump_of_the_loss() -> None:
    stop = Note(at(95), "stop", "syncer", "stopped: diloco stop")
    stopped = noted(structs.replace(STATE, phase="STOPPED"), stop)
    verdict = verdict_of(facts(stopped))
    assert (verdict.state, verdict.reason, verdict.since_s) == (State.STOPPED, "stopped: diloco stop", 10.0)
    paused = verdict_of(facts(structs.replace(stopped, stability=Stability(paused=True))))
    assert paused.state == State.PAUSED and "its loss has jumped" in paused.reason
    assert verdict.hint == paused.hint == "diloco resume file:///b/nano"


def test_a_start_takes_a_while_and_then_is_a_stall() -> None:
    new = structs.replace(STATE, merges=0, metrics=structs.replace(STATE.metrics, recent_merges=(), notes=(BEGUN,)))
    spoken = replace(facts(new), now_s=facts().now_s - 40.0)
    first = verdict_of(spoken)
    assert (first.state, first.reason) == (State.STARTING, "the first merge is to come; 2 of 2")
    assert verdict_of(syncer_says(spoken, reason="")).reason == "the first merge is to come"
    assert verdict_of(replace(spoken, learners={})).reason == "waits for: iowa, rhine"
    assert verdict_of(later(spoken, 1000.0)).state == State.STALLED


BEGUN = Note(at(1), "epoch_start", "syncer", "epoch 1 starts: box pid 7")


def test_a_resumed_run_starts_until_its_first_merge() -> None:
    notes = (Note(at(91), "stop", "syncer", "stopped"), Note(at(99), "epoch_start", "syncer", "epoch 3 starts"))
    resumed = noted(STATE, *notes)
    assert verdict_of(facts(resumed)).state == State.STARTING
    assert verdict_of(facts(noted(STATE, Note(at(80), "stop", "syncer", ""), *notes[1:]))).state == State.MERGING


@pytest.mark.parametrize("hours", [-1, 1])
def test_ages_do_not_depend_on_the_clock_of_the_syncers_machine(hours: int) -> None:
    wrong = replace(facts(), now_s=facts().now_s + hours * 3600.0, commit_age_s=10.0)
    assert verdict_of(wrong).state == State.MERGING
    merge = status_of(wrong).last_merge
    assert merge is not None and merge.age_s == 10.0


def test_every_state_has_its_words() -> None:
    assert set(RUN_STATES) == set(State)
    said = {*LearnerState, *SyncerState, *StandbyState, "UPLOADING", "QUARANTINED", "SUSPECT", "LOST", "STUCK"}
    assert set(UNIT_STATES) == said and RUN.name == "nano" and measured() == STATE


def here(kind: str = "learner", condition: str = "dead", supervised: bool = True, **more: Any) -> LocalUnit:
    return LocalUnit(kind, 7, condition, supervised=supervised, **more)


END = "killed by SIGKILL after 2.0 s"
SOON = Supervised("BACKOFF", 3, f"{END}; restart in 0.5 s", END)


def test_a_dead_learner_is_known_at_once_on_its_own_machine() -> None:
    verdict = verdict_of(facts(), Local({"rhine": here(supervised=True)}))
    assert verdict.state == State.DEGRADED and "rhine (its process 7 has ended, and no supervisor" in verdict.reason
    alone = Local({"rhine": here(supervised=False)})
    assert verdict_of(facts(), alone).state == State.MERGING, "it may go on elsewhere"
    assert verdict_of(facts(rhine=9.0), alone).state == State.DEGRADED
    assert verdict_of(facts(rhine=9.0), alone).hint == "diloco resume file:///b/nano --region eu"
    all_here = Local({"iowa": here(condition="running"), "rhine": here(supervised=False)})
    assert verdict_of(facts(rhine=9.0), all_here).hint == "diloco resume file:///b/nano"


def test_a_learner_that_is_being_restarted_says_why_and_how_often() -> None:
    status = status_of(facts(), Local({"rhine": here(said=SOON, by_chaos=True)}))
    assert (status.state, status.learners[1].state) == (State.DEGRADED, LearnerState.RECOVERING)
    assert status.reason.endswith("rhine (it is being restarted, after 3 starts: killed by SIGKILL after 2.0 s; "
                                  "restart in 0.5 s (chaos))")  # fmt: skip
    assert status.hint == "diloco logs rhine --run file:///b/nano"
    again = here(condition="running", said=Supervised("RUNNING", 4, "process 8", END))
    assert verdict_of(facts(), Local({"rhine": again})).state == State.MERGING, "it is heard again"
    assert "it is being restarted, after 4 starts: k" in verdict_of(facts(rhine=9.0), Local({"rhine": again})).reason


def test_a_learner_that_lives_again_has_not_failed_though_its_last_heartbeat_says_so() -> None:
    failed = learner_says(learner_says(facts(), "iowa", LearnerState.FAILED), "rhine", LearnerState.FAILED)
    begun = here(condition="running", said=Supervised("RUNNING", 2, "process 8", END))
    given_up = here(said=Supervised("FAILED", 9, "it ended too often", END))
    status = status_of(failed, Local({"iowa": given_up, "rhine": begun}))
    assert [learner.state for learner in status.learners] == [LearnerState.FAILED, LearnerState.RECOVERING]
    assert status.state != State.FAILED


def test_a_paused_process_is_stuck_and_the_command_that_revives_it_is_named() -> None:
    status = status_of(facts(), Local({"rhine": here(condition="paused", by_chaos=True)}))
    assert status.learners[1].state == STUCK
    assert "its process 7 is paused by a signal (chaos)" in status.reason
    assert status.hint == "diloco chaos revive rhine --run nano"


def test_a_learner_that_is_heard_and_does_not_step_is_stuck() -> None:
    """A step takes it 64 tokens' time."""
    stands = facts(last_step_s=9.0, mean_tokens_per_s=1e6)
    assert status_of(stands).learners[0].state == STUCK
    verdict = verdict_of(stands)
    assert verdict.state == State.DEGRADED and "its step has not ended for 10 s: it hangs" in verdict.reason
    assert verdict.hint == "diloco logs iowa --run file:///b/nano"
    assert verdict_of(facts(last_step_s=9.0, mean_tokens_per_s=1.0)).state == State.MERGING, "its steps are long"
    assert verdict_of(facts(last_step_s=3.0, mean_tokens_per_s=1e6, iowa=6.0)).state == State.MERGING
    assert verdict_of(facts(last_step_s=9.0)).state == State.MERGING, "its first step may take longer"
    waits = learner_says(stands, "iowa", LearnerState.WAITING)
    assert verdict_of(waits).state == State.MERGING


@pytest.mark.parametrize(
    ("since_s", "step_s", "compiles", "stuck"),
    [(50.0, 0.5, False, False), (70.0, 0.5, False, True), (70.0, 30.0, False, False), (160.0, 30.0, False, True),
     (800.0, 0.5, True, False), (1000.0, 0.5, True, True)],
)  # fmt: skip
def test_a_first_step_may_take_some_planned_ones_or_be_compiled(
    since_s: float, step_s: float, compiles: bool, stuck: bool
) -> None:
    seen = facts(last_step_s=since_s)
    settings = replace(seen.run.settings, train=replace(seen.run.settings.train, compile=compiles))
    islands = tuple(replace(island, step_s=step_s) for island in seen.run.islands)
    seen = replace(seen, run=replace(seen.run, settings=settings, islands=islands))
    assert (status_of(seen).learners[0].state == STUCK) == stuck


def test_a_process_that_lives_and_is_not_heard_hangs() -> None:
    verdict = verdict_of(facts(rhine=LOST_AGE_S), Local({"rhine": here(condition="running")}))
    assert "not heard for 26 s, though its process 7 lives: it hangs" in verdict.reason
    assert verdict.hint == "diloco logs rhine --run file:///b/nano"


def test_a_learner_that_trains_and_is_never_merged_is_missing_and_says_why() -> None:
    refused = Note(at(80), "refused", "iowa", "stale")
    ahead = structs.replace(noted(STATE, refused), n=500)
    spoken = replace(facts(ahead, step=10**6), learners=facts(step=10**6).learners)
    verdict = verdict_of(replace(spoken, learners={**spoken.learners, "rhine": Heard(replace(HEARTBEAT, step=0), 1.0)}))
    assert verdict.state == State.DEGRADED and verdict.hint == "diloco logs iowa --run file:///b/nano"
    assert verdict.reason.endswith(
        "iowa (it trains, and no offer of it has been merged for 500 commits: 1 refused: stale)"
    )
    young = structs.replace(STATE, n=4)
    assert verdict_of(facts(young, step=10**6)).state == State.MERGING, "it is too soon to say so"


def syncer_here(unit: LocalUnit, age_s: float = 1.0) -> tuple[RunFacts, Local]:
    return syncer_says(facts(), age_s, host=os.uname().nodename), Local({"syncer": unit})


def test_a_dead_syncer_stalls_the_run_on_its_own_machine() -> None:
    spoken, local = syncer_here(here("syncer", supervised=False), age_s=9.0)
    verdict = verdict_of(spoken, local)
    assert verdict.state == State.STALLED and verdict.hint == "diloco resume file:///b/nano"
    assert verdict.reason.startswith("no syncer serves: its process 7 has ended, and no supervisor lives here")
    assert verdict_of(spoken).state == State.MERGING, "from afar it is only late"


def test_a_syncer_that_is_being_restarted_stalls_the_run_once_a_merge_is_overdue() -> None:
    spoken, local = syncer_here(here("syncer", said=SOON))
    assert verdict_of(spoken, local).state == State.MERGING
    verdict = verdict_of(later(spoken, 100.0), local)
    assert (verdict.state, verdict.hint) == (State.STALLED, "")
    assert verdict.reason.startswith("no syncer serves: it is being restarted, after 3 starts: killed by SIGKILL")


def test_a_syncer_that_is_given_up_fails_the_run_with_the_reason() -> None:
    spoken, local = syncer_here(here("syncer", supervised=False, said=Supervised("FAILED", 3, "ended with status 12")))
    verdict = verdict_of(spoken, local)
    assert (verdict.state, verdict.reason) == (State.FAILED, "the syncer has failed: ended with status 12")
    assert verdict.hint == "diloco logs syncer --run file:///b/nano"


def test_learners_that_are_given_up_fail_the_run_at_once_on_their_machine() -> None:
    given_up = here(said=Supervised("FAILED", 3, "ended with status 1"), supervised=False)
    verdict = verdict_of(facts(), Local({"iowa": given_up, "rhine": given_up}))
    assert verdict.state == State.FAILED and "iowa (ended with status 1), rhine (ended with" in verdict.reason


def test_a_full_disk_is_the_cause_of_a_stall_on_this_machine() -> None:
    full = Local({"iowa": here(condition="running")}, full="no space is left in /b: 1 kB free, a merge needs 4 MB")
    assert verdict_of(facts(), full).state == State.MERGING
    verdict = verdict_of(later(facts(iowa=LOST_AGE_S, rhine=LOST_AGE_S, syncer=20.0), 70.0), full)
    assert (verdict.state, verdict.reason) == (State.STALLED, full.full)


def test_where_everything_here_has_ended_each_end_is_told() -> None:
    dead = here(supervised=False)
    spoken, _ = syncer_here(dead, age_s=9.0)
    gone = facts(iowa=9.0, rhine=9.0)
    verdict = verdict_of(
        replace(spoken, learners=gone.learners), Local(dict.fromkeys(["iowa", "rhine", "syncer"], dead))
    )
    assert verdict.state == State.SILENT and verdict.reason.startswith("iowa: its process 7 has ended, and no")


def test_the_disk_is_full_if_one_merge_does_not_fit(tmp_path: Path) -> None:
    assert full_disk([tmp_path, tmp_path / "gone"], 1) == ""
    assert full_disk([tmp_path], 1 << 62).startswith(f"no space is left in {tmp_path}: ")


def paced(tokens: int, seconds: float, best: float = 100.0, of: int = 2) -> RunState:
    """A window of 100 s at the best pace of 100 tokens/s `of` so many learners, and then `tokens` in `seconds`."""
    known = Sustained(at(100.0 - seconds - 10.0), tokens, 3, of, (100.0, 10_000), bests=((of, best),))
    return measured(sustained=known)


def test_a_pace_below_four_fifths_of_the_best_sustained_one_is_slow_and_says_what_limits_it() -> None:
    assert verdict_of(facts(paced(6_500, 100.0))).state == State.MERGING
    verdict = verdict_of(facts(paced(5_500, 100.0)))
    assert verdict.state == State.SLOW and verdict.reason.startswith("merges go on at 0.78 of the best pace")
    assert verdict.limit == "rhine took part in 2 of the last 3 merges"
    throttled = verdict_of(facts(paced(5_500, 100.0), tokens_per_s=10.0, mean_tokens_per_s=95.0))
    assert throttled.limit == "iowa trains at 10 tok/s, usually at 95"
    retries = verdict_of(syncer_says(facts(paced(5_500, 100.0)), retrying="put fails for 3 s: 503"))
    assert retries.limit == "the syncer's store: put fails for 3 s: 503"
    few = syncer_says(facts(), calls_a_s=34.6)
    assert verdict_of(few).limit == "the store throttles: 35 calls a second of the syncer get through"
    assert (store := status_of(few).store) is not None and store.calls_a_s == 34.6
    assert verdict_of(learner_says(few, "rhine", LearnerState.DONE)).limit == "missing: rhine"
    assert verdict_of(facts(paced(0, 100.0, best=0.0))).state == State.MERGING, "nothing to compare with"
    assert verdict_of(facts(paced(5_500, 100.0, of=3))).state == State.MERGING, "a guest took part then, and has left"


def everybody_merged(**heartbeat: Any) -> RunFacts:
    """All take part, and 40 steps of the planned second take a learner a slot of 40 s."""
    merges = tuple(structs.replace(merge, participants=("iowa", "rhine")) for merge in MERGES)
    return facts(measured(recent_merges=merges), **{"tokens_per_s": 1024.0, **heartbeat})


def test_a_syncer_that_needs_most_of_its_slot_nearly_limits_the_run() -> None:
    """Of two learners it needs 5 calls, and some beside, for each slot of 40 s."""
    run = everybody_merged()
    late = syncer_says(run, call_s=4.0, bytes_s=1.0, processor_s=0.5)
    assert verdict_of(late).limit == "the syncer is nearly limited by calls: 94% of its slot of 40 s"
    found = status_of(late).syncer
    assert found is not None and (found.limit, found.calls_s, found.bytes_s) == ("calls", 36.0, 1.0)
    assert found.busy_percent == pytest.approx(100 * 37.5 / 40)
    checked = status_of(syncer_says(run, call_s=4.0, bytes_s=1.0, processor_s=0.5, reads_back=False)).syncer
    assert checked is not None and checked.calls_s == 32.0
    busy = syncer_says(run, call_s=0.04, bytes_s=3.0, processor_s=35.0)
    assert verdict_of(busy).limit.startswith("the syncer is nearly limited by processor: 96% of its slot")
    idle = status_of(syncer_says(run, call_s=0.04, bytes_s=3.0, processor_s=0.5))
    assert "syncer" not in idle.limit
    assert idle.syncer is not None and idle.syncer.limit == "bytes" and idle.syncer.slot_s == 40.0
    shown = "\n".join(line.plain for line in status_lines(idle))
    assert "the syncer needs 10% of its slot of 40 s, most of it for bytes" in shown
    unmeasured = status_of(run).syncer
    assert unmeasured is not None and unmeasured.busy_percent is None


def test_a_syncer_slower_than_the_slots_comes_before_the_waits_that_it_causes() -> None:
    """And one that is not, after what the learners say."""
    slow, nearly = ({"call_s": call_s, "bytes_s": 1.0, "processor_s": 0.5} for call_s in (20.0, 4.0))
    for waits in ({"data_percent": 6.0}, {"blocked_percent": 80.0}):
        run = everybody_merged(**waits)
        assert verdict_of(syncer_says(run, **slow)).limit.startswith("the syncer is limited by calls: 4")
        assert verdict_of(syncer_says(run, **nearly)).limit.startswith("iowa ")


def test_the_slot_is_that_of_the_training_and_not_what_an_overload_has_stretched_it_to() -> None:
    """The log's slots have become as long as the syncer's merges: 400 s, where the steps of a slot take 40 s."""
    window = Window(1.0, 400.0, 40.0)
    run = everybody_merged()
    run = replace(run, state=structs.replace(run.state, window=window))
    stretched = syncer_says(run, call_s=0.04, bytes_s=390.0, processor_s=1.0)
    assert verdict_of(stretched).limit == "the syncer is limited by bytes: 978% of its slot of 40 s"
    steps_are_slower = replace(stretched, learners=facts(tokens_per_s=102.4).learners)
    found = status_of(steps_are_slower).syncer
    assert found is not None and found.slot_s == 400.0, "than planned: a merge every 400 s is all that is needed"


def test_the_grace_and_the_exchange_are_limits_too() -> None:
    everybody = [structs.replace(merge, participants=("iowa", "rhine"), grace_used_s=20.0) for merge in MERGES]
    assert verdict_of(facts(measured(recent_merges=tuple(everybody)))).limit == (
        "the grace: each merge waits 20.0 s of 40.0 s"
    )
    assert verdict_of(facts(blocked_percent=43.0)).limit == "iowa spends 43% of its time on the exchange"
    assert verdict_of(facts(data_percent=12.0)).limit == "iowa waits for its data 12% of its steps' time"


GUESS = replace(GUESSED_MACHINE, call_s=0.123)
MEASURED = {"call_s": 0.04, "bytes_s": 0.3, "processor_s": 0.2, "reads_back": False, "connections": 1}


def test_a_simulation_of_a_run_has_the_slot_that_its_status_tells() -> None:
    run = syncer_says(everybody_merged(), **MEASURED)
    machine, source = machine_of_syncer(run, GUESS)
    said = status_of(run).syncer
    assert said is not None and said.slot_s is not None and said.calls_s is not None
    spent = shortest_slot(work_of(RUN.layout.num_parameters, 2, RUN.settings.sync), machine, said.slot_s)
    assert (said.calls_s, said.bytes_s, said.processor_s) == (spent.calls_s, spent.bytes_s, spent.processor_s)
    assert said.bytes_s == pytest.approx(0.3) and said.processor_s == pytest.approx(0.2)
    merge, beside = 2 + 4 + 2 + 1, 2 + 2 + 1  # calls; those of looks and a heartbeat come in some turns
    assert merge * 0.04 < said.calls_s < (merge + beside) * 0.04
    assert "as that has measured it: 40 ms a call, 1 at a time" in source and "versions are not read back" in source


@pytest.mark.parametrize("figure", [-1.0, math.inf, math.nan])
def test_figures_that_no_syncer_measures_count_as_none(figure: float) -> None:
    for name in ("call_s", "bytes_s", "processor_s"):
        machine, source = machine_of_syncer(syncer_says(everybody_merged(), **{**MEASURED, name: figure}), GUESS)
        assert machine.call_s == GUESS.call_s and "speed is guessed" in source


def test_means_of_several_merges_are_not_those_of_the_last_one() -> None:
    """A merge that half of the learners missed makes the machine no slower."""
    run = syncer_says(everybody_merged(), **MEASURED)
    heartbeat, notes = run.syncer, run.state.metrics.recent_merges * 4
    missed = structs.replace(notes[-1], participants=notes[-1].participants[:1])
    assert heartbeat is not None
    whole, partly = (measured_by(heartbeat.heartbeat, run.run, some) for some in (notes, (*notes[:-1], missed)))
    assert whole is not None and whole == partly


def test_a_number_of_connections_that_no_syncer_has_harms_no_reader() -> None:
    found = []
    for connections in (-1, 0, 1, 48, 1 << 40):
        said = status_of(syncer_says(everybody_merged(), **{**MEASURED, "connections": connections})).syncer
        assert said is not None
        found.append(said.calls_s)
        guessed, _ = machine_of_syncer(syncer_says(facts(), connections=connections), GUESS)
        assert 1 <= guessed.connections <= 48
    assert found[0] == found[1] == found[2] > found[3] == found[4]


def test_a_syncer_without_a_merge_says_what_it_has_tried_and_its_speed_is_guessed() -> None:
    for run in (
        syncer_says(facts(), reads_back=False, connections=5),
        syncer_says(replace(facts(), state=type(facts().state)()), **{**MEASURED, "connections": 5}),
    ):
        machine, source = machine_of_syncer(run, GUESS)
        assert machine == replace(GUESS, reads_back=False, connections=5)
        assert "its machine's speed is guessed: 123 ms a call, 5 at a time" in source


def test_a_run_whose_syncer_nobody_heard_has_a_guessed_machine() -> None:
    machine, source = machine_of_syncer(replace(facts(), syncer=None), GUESS)
    assert machine == GUESS
    assert "its machine is guessed: 123 ms a call, 48 at a time, 3.5 Gbps up, 3.5 Gbps down" in source


def test_refusals_of_one_learner_are_summed_up_by_reason_the_most_frequent_first() -> None:
    notes = [
        Note("then", "refused", "l0", "bad_payload", 3),
        Note("then", "refused", "l0", "late", 2),
        Note("then", "refused", "l0", "bad_payload", 4),
        Note("then", "refused", "l0", "wrong_base"),
        Note("then", "refused", "l1", "bad_norms", 90),
        Note("then", "rollback", "l0", "late", 90),
    ]
    told = refusals_of(notes, "l0")
    first, second = told.split("; ")
    assert first.startswith("7 refused: bad_payload (its payload's header is not the one that the layout gives")
    assert second.startswith("2 refused: late (it came when its slot had been merged")
    assert refusals_of(notes, "l2") == ""
