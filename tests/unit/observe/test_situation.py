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
from diloco_cli.observe.situation import RUN_STATES, Look, State, Verdict, machine_of_syncer, refusals_of
from diloco_cli.observe.situation import verdict_of as verdict_at
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


def learner_says(spoken: RunFacts, name: str, state: str, age_s: float = 1.0, note: str = "") -> RunFacts:
    heard = Heard(replace(HEARTBEAT, state=state, note=note), age_s)
    return replace(spoken, learners={**spoken.learners, name: heard})


def syncer_says(spoken: RunFacts, age_s: float = 1.0, **changes: Any) -> RunFacts:
    return replace(spoken, syncer=Heard(replace(SYNCER, **changes), age_s))  # type: ignore[arg-type]


def loads(age_s: float) -> RunFacts:
    """A standby loads what a syncer needs, and says nothing meanwhile."""
    heard = Heard(replace(WAITING, state="CLAIMING"), age_s)
    return replace(facts(syncer=LOST_AGE_S), standbys={"standby-1": heard})


def later(spoken: RunFacts, seconds: float) -> RunFacts:
    """The same, with the newest merge so many seconds older than the 10 s of `facts`."""
    return replace(spoken, now_s=spoken.now_s + seconds)


def verdict_of(spoken: RunFacts, local: Local = Local()) -> Verdict:
    return verdict_at(Look(spoken, local))


def both_say(spoken: RunFacts, state: str, age_s: float = 1.0, note: str = "") -> RunFacts:
    return learner_says(learner_says(spoken, "iowa", state, age_s, note), "rhine", state, age_s, note)


def noted(state: RunState, *notes: Note) -> RunState:
    return structs.replace(state, metrics=structs.replace(state.metrics, notes=notes))


def here(kind: str = "learner", condition: str = "dead", supervised: bool = True, **more: Any) -> LocalUnit:
    return LocalUnit(kind, 7, condition, supervised=supervised, **{"running_s": 600.0, **more})


def one_region(spoken: RunFacts) -> RunFacts:
    islands = tuple(replace(island, region="us") for island in spoken.run.islands)
    return replace(spoken, run=replace(spoken.run, islands=islands))


def of_many(spoken: RunFacts) -> RunFacts:
    islands = tuple(replace(spoken.run.islands[0], name=f"i{n}") for n in range(8))
    return replace(spoken, run=replace(spoken.run, islands=islands))


def as_jobs(spoken: RunFacts, *names: str, infra: str = "slurm/us") -> RunFacts:
    islands = (replace(one, infra=infra) if one.name in names else one for one in spoken.run.islands)
    return replace(spoken, run=replace(spoken.run, islands=tuple(islands)))


def on_this_machine(age_s: float = 1.0) -> RunFacts:
    """Where the syncer is."""
    return syncer_says(facts(), age_s, host=os.uname().nodename)


def with_lost_guest(spoken: RunFacts, **heartbeat: Any) -> RunFacts:
    guest = Heard(replace(HEARTBEAT, **heartbeat), 500.0)
    state = structs.replace(spoken.state, members=(replace(RUN.islands[0], name="guest"),))
    return replace(spoken, state=state, learners={**spoken.learners, "guest": guest})


def written(spoken: RunFacts, *events: tuple[str, str]) -> RunFacts:
    return replace(spoken, written=[Event(at(second), *event, "") for second, event in enumerate(events)])


URL = "file:///b/nano"
RESUME, DOCTOR, LOGS = f"diloco resume {URL}", f"diloco doctor {URL}", f"diloco logs --run {URL}"
LOGS_OF_IOWA, LOGS_OF_RHINE = (f"diloco logs {name} --run {URL}" for name in ("iowa", "rhine"))
END = "killed by SIGKILL after 2.0 s"
SOON = Supervised("BACKOFF", 3, f"{END}; restart in 0.5 s", END)
AGAIN = here(condition="running", said=Supervised("RUNNING", 4, "process 8", END), running_s=5.0)
NEWBORN = here(condition="running", running_s=2.0)
GIVEN_UP = here(said=Supervised("FAILED", 3, "ended with status 1"), supervised=False)
DEAD = here(supervised=False)
FULL = Local({"iowa": here(condition="running")}, full="no space is left in /b: 1 kB free, a merge needs 4 MB")
WAITS = syncer_says(facts(rhine=LOST_AGE_S), reason="1 of the 2 offers that the quorum needs")
BEGUN = Note(at(1), "epoch_start", "syncer", "epoch 1 starts: box pid 7")
NEW = structs.replace(STATE, merges=0, metrics=structs.replace(STATE.metrics, recent_merges=(), notes=(BEGUN,)))
YOUNG = replace(facts(NEW), now_s=facts().now_s - 40.0)
RESUMED = (Note(at(91), "stop", "syncer", "stopped"), Note(at(99), "epoch_start", "syncer", "epoch 3 starts"))
STOPPED = noted(structs.replace(STATE, phase="STOPPED"), Note(at(95), "stop", "syncer", "stopped: diloco stop"))
ANEW = both_say(facts(measured(resumed_at=at(78))), LearnerState.DONE, 200.0, "the run was stopped")
FAILING_GUEST = with_lost_guest(facts(), state="DONE", retrying="put fails: 503")
KEPT_OUT = LearnerRecord(quarantined=7)
STANDS = facts(last_step_s=9.0, mean_tokens_per_s=1e6)
FAILED = both_say(facts(), LearnerState.FAILED, 9.0)
COVERED = replace(facts(syncer=LOST_AGE_S), standbys={"standby-1": Heard(WAITING, 1.0)})
UNMERGED = replace(
    facts(structs.replace(noted(STATE, Note(at(80), "refused", "iowa", "stale")), n=500), step=10**6),
    learners={**facts(step=10**6).learners, "rhine": Heard(replace(HEARTBEAT, step=0), 1.0)},
)
NOBODY, NONE = Local(), "none"
CASES: list[tuple[RunFacts, Local, State, str, str]] = [
    # from the bucket alone
    (facts(), NOBODY, State.MERGING, "2 of 2", NONE),
    (learner_says(facts(), "rhine", LearnerState.DONE), NOBODY, State.DEGRADED,
     "merges go on without 1 of 2 planned islands: rhine (it has left)", f"{RESUME} --region eu"),
    (learner_says(facts(), "rhine", LearnerState.DONE, note="stopped by Ctrl-C"), NOBODY, State.DEGRADED,
     "rhine (it has left: stopped by Ctrl-C)", f"{RESUME} --region eu"),
    (learner_says(facts(), "rhine", LearnerState.DONE, note="told to leave by SIGTERM"),
     Local({"rhine": here(said=Supervised("DONE", 1, "ended with status 143 after 40.2 s"), supervised=False)}),
     State.DEGRADED, "rhine (it has left: told to leave by SIGTERM)", ""),
    (ANEW, NOBODY, State.MERGING, "2 of 2", NONE),  # a merge of what was offered before the stop
    (with_lost_guest(both_say(facts(), LearnerState.DONE)), NOBODY, State.STALLED, "no learner is left: iowa", ""),
    (with_lost_guest(replace(YOUNG, learners={})), NOBODY, State.STARTING, "waits for: iowa, rhine", ""),
    (later(ANEW, 20.0), NOBODY, State.MERGING, "2 of 2", NONE),
    (later(ANEW, 39.0), NOBODY, State.STALLED, "no learner is left: iowa (it has left: the run was stopped)", ""),
    (facts(rhine=LOST_AGE_S), NOBODY, State.DEGRADED, "rhine (not heard for 26 s; why is not known",
     f"{RESUME} --region eu"),
    (learner_says(both_say(facts(), LearnerState.DONE), "rhine", LearnerState.FAILED), NOBODY, State.STALLED,
     "no learner is left: iowa (it has left), rhine (it has", f"{RESUME} --region us"),
    (learner_says(facts(), "rhine", LearnerState.FAILED, note="the loss is nan"), NOBODY, State.DEGRADED,
     "rhine (it has ended with an error: the loss is nan)", ""),
    (later(WAITS, 60.0), NOBODY, State.DEGRADED, "merges go on", f"{RESUME} --region eu"),  # merges came every 40 s
    (later(WAITS, 63.0), NOBODY, State.STALLED,
     "1 of the 2 offers that the quorum needs; missing: rhine (not heard", f"{RESUME} --region eu"),
    (later(facts(), 100.0), NOBODY, State.STALLED, "2 of 2; why is not known from the bucket", LOGS),
    (later(syncer_says(facts(), reason=""), 100.0), NOBODY, State.STALLED, "why is not known from the bucket", LOGS),
    (later(syncer_says(facts(), reason="commit 9: missing", wants=("9",), epoch=0), 100.0), NOBODY, State.STALLED,
     "the log has lost records, and who has them is asked: commit 9: missing", LOGS),
    (later(syncer_says(facts(), retrying="put fails: 503"), 100.0), NOBODY, State.STALLED,
     "the syncer's store fails: put fails: 503", DOCTOR),
    (later(facts(retrying="put fails: 503"), 100.0), NOBODY, State.STALLED,
     "the learners' store fails: iowa: put fails: 503", DOCTOR),
    (later(FAILING_GUEST, 100.0), NOBODY, State.STALLED, "2 of 2; why is not known", ""),  # it has left
    (facts(structs.replace(STATE, learners={"rhine": KEPT_OUT})), NOBODY, State.DEGRADED,
     "its offers are refused since commit 7", f"diloco readmit rhine {URL}"),
    (facts(structs.replace(STATE, learners={"iowa": KEPT_OUT, "rhine": KEPT_OUT})), NOBODY, State.STALLED,
     "no learner is left", f"diloco readmit iowa {URL}"),
    (facts(iowa=LOST_AGE_S, rhine=50.0, syncer=LOST_AGE_S), NOBODY, State.SILENT, "why is not known", RESUME),
    (syncer_says(both_say(facts(), LearnerState.DONE), state=SyncerState.DONE), NOBODY, State.SILENT,
     "all units have left in good order", RESUME),
    (syncer_says(facts(), state=SyncerState.DONE, reason="told to leave by SIGTERM"), NOBODY, State.STALLED,
     "no syncer serves: syncer on box has left: told to leave by SIGTERM", f"diloco syncer --standby {URL}"),
    (later(loads(LOST_AGE_S), 200.0), NOBODY, State.STALLED, "standby-1 will take over", NONE),
    (later(loads(61.0), 200.0), NOBODY, State.STALLED, "no syncer serves", f"diloco syncer --standby {URL}"),
    (both_say(facts(), LearnerState.FAILED, 2.0), NOBODY, State.STALLED, "no learner is left", LOGS_OF_IOWA),
    (FAILED, NOBODY, State.FAILED, "all learners have failed", LOGS),
    (written(FAILED, ("ended", "iowa"), ("ended", "rhine")), NOBODY, State.STALLED, "", LOGS_OF_IOWA),
    (written(FAILED, ("ended", "rhine"), ("gave_up", "iowa")), NOBODY, State.STALLED, "", LOGS_OF_IOWA),
    (written(FAILED, ("gave_up", "rhine"), ("gave_up", "iowa")), NOBODY, State.FAILED, "", LOGS),
    (COVERED, NOBODY, State.MERGING, "", ""),
    (later(COVERED, 100.0), NOBODY, State.STALLED, "standby-1 will take over", NONE),
    (syncer_says(facts(), state=SyncerState.FINISHING), NOBODY, State.DRAINING, "the target is reached", ""),
    (learner_says(facts(), "iowa", LearnerState.DRAINING), NOBODY, State.MERGING, "", ""),
    (both_say(facts(), LearnerState.DRAINING), NOBODY, State.DRAINING, "told to leave: iowa, rhine", RESUME),
    (facts(STOPPED), NOBODY, State.STOPPED, "stopped: diloco stop", RESUME),
    (facts(STOPPED), Local({"iowa": here(supervised=False)}), State.STOPPED, "stopped: diloco stop", RESUME),
    (facts(STOPPED), Local({"iowa": here(condition="running")}), State.STOPPED, "stopped: diloco stop", NONE),
    (facts(structs.replace(STOPPED, stability=Stability(paused=True))), NOBODY, State.PAUSED,
     "its loss has jumped", RESUME),
    (YOUNG, NOBODY, State.STARTING, "the first merge is to come; 2 of 2", ""),
    (replace(YOUNG, learners={}), NOBODY, State.STARTING, "waits for: iowa, rhine", ""),
    (replace(of_many(YOUNG), learners={}, syncer=None), NOBODY, State.STARTING, "waits for: syncer, i0, i1 and 6", ""),
    (later(YOUNG, 1000.0), NOBODY, State.STALLED, "", LOGS),
    (facts(noted(STATE, *RESUMED)), NOBODY, State.STARTING, "", ""),
    (facts(noted(STATE, structs.replace(RESUMED[0], time=at(80)), RESUMED[1])), NOBODY, State.MERGING, "", ""),
    (STANDS, NOBODY, State.DEGRADED, "its step has not ended for 10 s: it hangs", LOGS_OF_IOWA),
    (facts(last_step_s=9.0, mean_tokens_per_s=1.0), NOBODY, State.MERGING, "", ""),  # its steps are long
    (facts(last_step_s=3.0, mean_tokens_per_s=1e6, iowa=6.0), NOBODY, State.MERGING, "", ""),
    (facts(last_step_s=9.0), NOBODY, State.MERGING, "", ""),  # its first step may take longer
    (learner_says(STANDS, "iowa", LearnerState.WAITING), NOBODY, State.MERGING, "", ""),
    (UNMERGED, NOBODY, State.DEGRADED,
     "iowa (it trains, and no offer of it has been merged for 500 commits: 1 refused: stale)", LOGS_OF_IOWA),
    (facts(structs.replace(STATE, n=4), step=10**6), NOBODY, State.MERGING, "", ""),  # too soon to say so
    # with what this machine knows
    (facts(), Local({"rhine": here()}), State.DEGRADED, "rhine (its process 7 has ended, and no supervisor", ""),
    (facts(), Local({"rhine": DEAD}), State.MERGING, "", ""),  # it may go on elsewhere
    (facts(rhine=9.0), Local({"rhine": DEAD}), State.DEGRADED, "", f"{RESUME} --region eu"),
    (facts(rhine=9.0), Local({"iowa": here(condition="running"), "rhine": DEAD}), State.DEGRADED, "", RESUME),
    (facts(), Local({"rhine": here(said=SOON, by_chaos=True)}), State.DEGRADED,
     f"rhine (it is being restarted, after 3 starts: {END}; restart in 0.5 s (chaos))", LOGS_OF_RHINE),
    (facts(), Local({"rhine": AGAIN}), State.MERGING, "", ""),  # it is heard again
    (facts(rhine=9.0), Local({"rhine": AGAIN}), State.DEGRADED, "it is being restarted, after 4 starts: k", ""),
    (facts(rhine=9.0), Local({"rhine": replace(AGAIN, running_s=60.0)}), State.MERGING, "", ""),  # that end is past
    (learner_says(facts(), "rhine", LearnerState.DONE, 9.0), Local({"rhine": here(condition="running", running_s=5.0)}),
     State.MERGING, "", ""),  # it has come back since
    (learner_says(facts(), "rhine", LearnerState.DONE), Local({"rhine": here(condition="running", running_s=5.0)}),
     State.DEGRADED, "it has left", ""),
    (on_this_machine(9.0), Local({"syncer": replace(AGAIN, kind="syncer", running_s=60.0)}), State.MERGING,
     "the syncer is silent: syncer on", NONE),
    (later(facts(syncer=LOST_AGE_S), 100.0), Local(store="iowa: put fails: disk is read-only"), State.STALLED,
     "no syncer serves", DOCTOR),
    (as_jobs(facts(rhine=LOST_AGE_S), "iowa", "rhine"), NOBODY, State.DEGRADED, "", RESUME),  # no other job is doubled
    (as_jobs(facts(rhine=LOST_AGE_S), "rhine"), NOBODY, State.DEGRADED, "", f"{RESUME} --region eu"),
    (one_region(facts(rhine=LOST_AGE_S)), NOBODY, State.DEGRADED, "", f"diloco learner --run {URL} --name rhine"),
    (as_jobs(facts(rhine=LOST_AGE_S), "rhine", infra="loop/addressed"), NOBODY, State.DEGRADED, "",
     f'in its own script: join("{URL}", name="rhine", ...)'),  # `diloco learner` refuses it, `resume` starts no loop
    (as_jobs(replace(facts(), learners={"iowa": facts().learners["iowa"]}), "rhine", infra="loop/addressed"), NOBODY,
     State.DEGRADED, "not heard yet", f'in its own script: join("{URL}", name="rhine", ...)'),
    (one_region(facts(iowa=LOST_AGE_S, rhine=LOST_AGE_S)), NOBODY, State.STALLED, "", RESUME),
    (both_say(facts(), LearnerState.FAILED), Local({"iowa": GIVEN_UP, "rhine": replace(AGAIN, running_s=0.5)}),
     State.STALLED, "", ""),
    (facts(), Local({"rhine": here(condition="paused", by_chaos=True)}), State.DEGRADED,
     "its process 7 is paused by a signal (chaos)", f"diloco chaos revive rhine --run {URL}"),
    (facts(rhine=LOST_AGE_S), Local({"rhine": here(condition="running")}), State.DEGRADED,
     "not heard for 26 s, though its process 7 lives: it hangs", LOGS_OF_RHINE),
    (facts(rhine=500.0), Local({"rhine": NEWBORN}), State.DEGRADED,
     "rhine (its process 7 was started 2 s ago, and is not heard yet)", LOGS_OF_RHINE),
    (on_this_machine(500.0), Local({"syncer": replace(NEWBORN, kind="syncer")}), State.MERGING, "", ""),
    (on_this_machine(9.0), Local({"syncer": here("syncer", supervised=False)}), State.STALLED,
     "no syncer serves: its process 7 has ended, and no supervisor lives here", RESUME),
    (on_this_machine(9.0), NOBODY, State.MERGING, "", ""),  # from afar it is only late
    (on_this_machine(), Local({"syncer": here("syncer", said=SOON)}), State.MERGING, "", ""),
    (later(on_this_machine(), 100.0), Local({"syncer": here("syncer", said=SOON)}), State.STALLED,
     "no syncer serves: it is being restarted, after 3 starts: killed by SIGKILL", NONE),
    (on_this_machine(), Local({"syncer": replace(GIVEN_UP, kind="syncer")}), State.FAILED,
     "the syncer has failed: ended with status 1", f"diloco logs syncer --run {URL}"),
    (facts(), Local({"iowa": GIVEN_UP, "rhine": GIVEN_UP}), State.FAILED,
     "iowa (ended with status 1), rhine (ended with", LOGS),
    (facts(), FULL, State.MERGING, "", ""),
    (later(facts(iowa=LOST_AGE_S, rhine=LOST_AGE_S, syncer=20.0), 70.0), FULL, State.STALLED, FULL.full, ""),
    (replace(on_this_machine(9.0), learners=facts(iowa=9.0, rhine=9.0).learners),
     Local({"iowa": DEAD, "rhine": DEAD, "syncer": DEAD}), State.SILENT, "iowa: its process 7 has ended, and", RESUME),
]  # fmt: skip


@pytest.mark.parametrize(("spoken", "local", "state", "reason", "hint"), CASES)
def test_the_verdict_follows_from_the_facts(
    spoken: RunFacts, local: Local, state: State, reason: str, hint: str
) -> None:
    verdict = verdict_of(spoken, local)
    assert verdict.state == state, verdict
    assert reason in verdict.reason and (not hint or verdict.hint == hint.replace(NONE, ""))
    may_have_eta = state in (State.MERGING, State.SLOW, State.DEGRADED)
    assert may_have_eta or status_of(spoken, local).eta_s is None


def test_the_time_in_a_state_is_told_where_it_is_known() -> None:
    assert verdict_of(learner_says(facts(), "rhine", LearnerState.DONE, 500.0)).since_s == 500.0
    assert verdict_of(later(WAITS, 63.0)).since_s == 73.0
    assert verdict_of(facts(iowa=LOST_AGE_S, rhine=50.0, syncer=LOST_AGE_S)).since_s == 26.0
    assert verdict_of(facts(STOPPED)).since_s == 10.0


def test_units_that_live_again_or_are_held_have_their_own_words() -> None:
    failed = both_say(facts(), LearnerState.FAILED)
    status = status_of(failed, Local({"iowa": GIVEN_UP, "rhine": AGAIN}))
    assert [learner.state for learner in status.learners] == [LearnerState.FAILED, LearnerState.RECOVERING]
    assert status_of(facts(), Local({"rhine": here(condition="paused")})).learners[1].state == STUCK


@pytest.mark.parametrize("hours", [-1, 1])
def test_ages_do_not_depend_on_the_clock_of_the_syncers_machine(hours: int) -> None:
    wrong = replace(facts(), now_s=facts().now_s + hours * 3600.0, commit_age_s=10.0)
    assert verdict_of(wrong).state == State.MERGING
    merge = status_of(wrong).last_merge
    assert merge is not None and merge.age_s == 10.0


def test_every_state_has_its_words() -> None:
    assert set(RUN_STATES) == set(State)
    said = {*LearnerState, *SyncerState, *StandbyState, "UPLOADING", "QUARANTINED", "SUSPECT", "LOST", "STUCK"}
    assert set(UNIT_STATES) == said | {"UNKNOWN", "LEFT"}


def test_what_a_slow_store_did_not_show_is_said_and_not_taken_for_silence() -> None:
    spoken = facts(iowa=None, rhine=1.0, syncer=None)
    unread = status_of(replace(spoken, unread=frozenset({"iowa", "syncer"})))
    assert unread.state == State.MERGING and "no heartbeat was read of iowa, syncer" in unread.partial
    assert [learner.state for learner in unread.learners] == ["UNKNOWN", "TRAINING"]
    late = later(facts(), 1000.0)
    assert verdict_of(late).state == State.STALLED
    cut = replace(late, cut=True)
    assert verdict_of(cut).state == State.MERGING and "was read to commit" in status_of(cut).partial
    assert verdict_of(replace(cut, syncer=Heard(SYNCER, LOST_AGE_S))).state == State.STALLED


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


def test_who_waits_for_a_unit_that_fell_silent_is_not_told_that_merges_go_on() -> None:
    state = paced(5_500, 100.0)
    merges = tuple(structs.replace(merge, time=at(84.0 + 2.0 * i)) for i, merge in enumerate(MERGES))
    late = structs.replace(state, metrics=structs.replace(state.metrics, recent_merges=merges))
    verdict = verdict_of(facts(late, syncer=12.0))
    said = "no merge for 12 s, usually one in 2 s; not heard for more than 8 s: syncer"
    assert (verdict.state, verdict.reason) == (State.SLOW, said)


def everybody_merged(**heartbeat: Any) -> RunFacts:
    """All take part, and 40 steps of the planned second take a learner a slot of 40 s."""
    merges = tuple(structs.replace(merge, participants=("iowa", "rhine")) for merge in MERGES)
    return facts(measured(recent_merges=merges), **{"tokens_per_s": 1024.0, **heartbeat})


def test_a_syncer_that_needs_most_of_its_slot_limits_the_run_whatever_the_learners_wait_for() -> None:
    """Of two learners it needs 5 calls, and some beside, for each slot of 40 s."""
    run = everybody_merged(data_percent=6.0, blocked_percent=80.0)
    late = syncer_says(run, call_s=4.0, bytes_s=1.0, processor_s=0.5)
    assert verdict_of(late).limit == "the syncer needs 94% of its slot of 40 s, most of it for calls"
    found = status_of(late).syncer
    assert found is not None and found.limit == "calls" and found.busy_percent == pytest.approx(100 * 37.5 / 40)
    checked = status_of(syncer_says(run, call_s=4.0, bytes_s=1.0, processor_s=0.5, reads_back=False)).syncer
    assert checked is not None and checked.busy_percent == pytest.approx(100 * 33.5 / 40)
    idle = status_of(syncer_says(run, call_s=0.04, bytes_s=3.0, processor_s=0.5))
    assert idle.limit.startswith("iowa ")
    assert idle.syncer is not None and idle.syncer.limit == "bytes" and idle.syncer.slot_s == 40.0
    shown = "\n".join(line.plain for line in status_lines(idle))
    assert "the syncer needs 10% of its slot of 40 s, most of it for bytes" in shown
    unmeasured = status_of(run).syncer
    assert unmeasured is not None and unmeasured.busy_percent is None


def test_the_slot_is_that_of_the_training_and_not_what_an_overload_has_stretched_it_to() -> None:
    """The log's slots have become as long as the syncer's merges: 400 s, where the steps of a slot take 40 s."""
    window = Window(1.0, 400.0, 40.0)
    run = everybody_merged()
    run = replace(run, state=structs.replace(run.state, window=window))
    stretched = syncer_says(run, call_s=0.04, bytes_s=390.0, processor_s=1.0)
    assert verdict_of(stretched).limit == "the syncer needs 978% of its slot of 40 s, most of it for bytes"
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
    assert said is not None and said.slot_s is not None and said.busy_percent is not None
    spent = shortest_slot(work_of(RUN.layout.num_parameters, 2, RUN.settings.sync), machine, said.slot_s)
    assert said.busy_percent == pytest.approx(100 * spent.seconds / said.slot_s)
    merge, beside = 2 + 4 + 2 + 1, 2 + 2 + 1  # calls; those of looks and a heartbeat come in some turns
    assert merge * 0.04 < spent.seconds - 0.3 - 0.2 < (merge + beside) * 0.04
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
        found.append(said.busy_percent)
        guessed, _ = machine_of_syncer(syncer_says(facts(), connections=connections), GUESS)
        assert 1 <= guessed.connections <= 48
    assert found[0] == found[1] == found[2] > found[3] == found[4]  # type: ignore[operator]


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
