"""Status as a function of the facts: states, rates, ages, participation, standbys, garbage, the buckets of regions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from msgspec import structs

from diloco_cli.config.settings import RunSettings, TrainSettings
from diloco_cli.events.event import Event
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.observe.facts import LOOKS_KEPT, Heard, RunFacts, StoreClock
from diloco_cli.observe.screen import plain_line, status_text
from diloco_cli.observe.status import FORGOTTEN_S, GarbageStatus, MirrorStatus, Status, goodput, status_of
from diloco_cli.observe.summary import summary_of, summary_text
from diloco_cli.observe.unit_states import LOST_S, SUSPECT_S, syncer_state, working
from diloco_cli.protocol.actors.collection import NOT_KNOWN, kept_commits
from diloco_cli.protocol.log.heartbeats import GarbageHeartbeat, LearnerHeartbeat, MirrorHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.metrics import MergeNote, Metrics, Note
from diloco_cli.protocol.log.records import RegionStore
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from tests.cli.bucket import LAYOUT, NANO

START_S = 1_800_000_000.0
NOW_S = START_S + 100.0
RUN = replace(NANO, settings=RunSettings("nano", train=TrainSettings(tokens=20_000)))
HEARTBEAT = LearnerHeartbeat("TRAINING", 1, 9, 200, 0, 95.0, 0, loss=1.5, up_bytes=10, down_bytes=20)
SYNCER = SyncerHeartbeat("SERVING", 2, 9, "box", "2 of 2", up_bytes=5, down_bytes=7)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(START_S + seconds, UTC).isoformat()


def merge(n: int, second: float, tokens: int, *names: str) -> MergeNote:
    return MergeNote(n, n, at(second), names, 2, 1, 0.5, 0.1, tokens)


MERGES = (
    merge(1, 10, 1000, "iowa", "rhine"),
    merge(2, 50, 5000, "iowa"),
    merge(3, 90, 9000, "iowa", "rhine"),
)
STATE = RunState(
    n=9, epoch=2, slot=3, token_parameters=9000 * LAYOUT.num_parameters, merges=3,
    metrics=Metrics(participation_sum=2.5, offers_applied=5, recent_merges=MERGES, started_at=at(0), updated_at=at(90),
                    losses=((9000, 1.25),)),
    learners={"iowa": LearnerRecord(token_parameters=6000 * LAYOUT.num_parameters, merges=3)},
)  # fmt: skip


def measured(**changes) -> RunState:
    return structs.replace(STATE, metrics=structs.replace(STATE.metrics, **changes))


def facts(state=STATE, iowa=1.0, rhine=1.0, syncer: float | None = 1.0, **heartbeat) -> RunFacts:
    """Ages in seconds; None: never heard. `heartbeat` changes iowa's."""
    ages = {"iowa": iowa, "rhine": rhine}
    learners = {
        n: Heard(replace(HEARTBEAT, **heartbeat) if n == "iowa" else HEARTBEAT, a)
        for n, a in ages.items()
        if a is not None
    }
    return RunFacts("file:///b/nano", RUN, state, learners, Heard(SYNCER, syncer) if syncer else None, NOW_S)


def state_of_iowa(*words, **more) -> str:
    return status_of(facts(*words, **more)).learners[0].state


@pytest.mark.parametrize("said", ["STARTING", "TRAINING", "UPLOADING", "WAITING", "RECOVERING", "DRAINING"])
def test_a_learner_that_is_heard_is_in_the_state_it_says(said):
    spoken = facts()
    spoken.learners["iowa"] = Heard(replace(HEARTBEAT, state=said), 1.0)
    assert status_of(spoken).learners[0].state == said


@pytest.mark.parametrize(
    ("age_s", "state"),
    [
        (None, "STARTING"),
        (SUSPECT_S, "TRAINING"),
        (SUSPECT_S + 1, "SUSPECT"),
        (LOST_S, "SUSPECT"),
        (LOST_S + 1, "LOST"),
    ],
)
def test_silence_makes_suspect_and_then_lost(age_s, state):
    assert state_of_iowa(iowa=age_s) == state


@pytest.mark.parametrize(("parameters", "state"), [(10**6, "LOST"), (10**9, "SUSPECT")])
def test_a_unit_may_move_a_large_version_in_silence(parameters, state):
    """A billion parameters of a state are 8 GB: 160 s. Nobody starts a second syncer beside one that reads them."""
    layout = balanced_layout([ParameterFact("w", (parameters,), False)], 1)
    run, old_s = replace(RUN, layout=layout), LOST_S + 100.0
    seen = replace(facts(iowa=old_s, syncer=old_s), run=run)
    assert (status_of(seen).learners[0].state, syncer_state(seen)) == (state, state)


def test_a_syncer_that_is_silent_now_and_then_is_not_lost_each_time():
    said = replace(SYNCER, slowest_s=60.0)
    assert [syncer_state(replace(facts(), syncer=Heard(said, s))) for s in (100.0, 130.0)] == ["SUSPECT", "LOST"]


def test_who_left_has_left_or_failed_however_long_ago():
    for phase, said, state in (
        ("RUNNING", "DONE", "LEFT"), ("STOPPED", "DONE", "LEFT"), ("FINISHED", "DONE", "DONE"),
        ("RUNNING", "FAILED", "FAILED"), ("FINISHED", "FAILED", "FAILED"),
    ):  # fmt: skip
        left = facts(structs.replace(STATE, phase=phase), iowa=1e6)
        left.learners["iowa"] = Heard(replace(HEARTBEAT, state=said, note="by Ctrl-C"), 1e6)
        left = replace(left, syncer=Heard(replace(SYNCER, state=said), 1e6))
        learner = status_of(left).learners[0]
        assert (learner.state, learner.note) == (state, "by Ctrl-C")
        assert said == "FAILED" or syncer_state(left) == state
    finished = facts(structs.replace(STATE, phase="FINISHED"), iowa=1e6)
    assert status_of(finished).learners[0].state == "DONE"
    never = status_of(replace(finished, learners={})).learners[0]
    assert (never.state, never.note) == ("LOST", "it was never heard")


def test_who_joined_and_is_gone_or_was_never_let_in_is_no_headline() -> None:
    guest = replace(RUN.islands[0], name="guest")
    grown = structs.replace(STATE, members=(guest,))
    errors = [Event(at(95), "error", name, "a bug") for name in ("iowa", "guest", "hmoe")]
    for guest_s, later_s, told in (
        (1.0, 0.0, {"iowa", "guest", "hmoe"}), (1.0, 700.0, {"iowa", "guest"}), (700.0, 700.0, {"iowa"}),
    ):  # fmt: skip
        seen = replace(facts(grown), now_s=NOW_S + later_s, written=errors)
        status = status_of(replace(seen, learners={**seen.learners, "guest": Heard(HEARTBEAT, guest_s)}))
        assert {error.unit for error in status.errors} == told
        assert ("diloco quarantine guest" in status.learners[2].note) == (guest_s > LOST_S)


@pytest.mark.parametrize("name", ["syncer-0", "standby-1", "standby-cpu-0"])
def test_why_a_syncer_ended_is_told_until_it_is_heard_again(name: str) -> None:
    seen = replace(facts(), now_s=NOW_S + 3 * 86_400.0, written=[Event(at(95), "error", name, "a bug")])
    said = replace(SYNCER, unit=name)
    for standbys, told in (
        ({}, [name]),
        ({name: Heard(said, 5 * 86_400.0)}, [name]),
        ({name: Heard(replace(said, state="FAILED"), 1.0)}, [name]),
        ({name: Heard(said, 1.0)}, []),
    ):
        assert [error.unit for error in status_of(replace(seen, standbys=standbys)).errors] == told
    assert status_of(replace(seen, syncer=Heard(said, 1.0))).errors == []


def test_what_the_syncer_waited_for_is_not_told_of_a_run_that_is_over() -> None:
    waits = Heard(SyncerHeartbeat("SERVING", 1, 3, "host", reason="0 of the 1 offers that the quorum needs"), 1.0)
    notes = []
    for state in (STATE, structs.replace(STATE, phase="FINISHED"), structs.replace(STATE, phase="STOPPED")):
        syncer = status_of(replace(facts(state), syncer=waits)).syncer
        notes.append(syncer and syncer.note)
    assert notes == ["0 of the 1 offers that the quorum needs", "", ""]


def test_goodput_is_merged_tokens_over_planned_tokens_since_launch():
    assert goodput(facts()) == pytest.approx(9000 / (200.0 * 100.0))
    over = structs.replace(STATE, phase="FINISHED")
    assert goodput(facts(over)) == pytest.approx(9000 / (200.0 * 90.0)), "time after the end does not count"
    assert goodput(facts(measured(started_at=""))) is None
    assert goodput(facts(measured(rested_s=50.0))) == pytest.approx(9000 / (200.0 * 50.0)), "nor does a stop"


def test_the_rate_is_of_the_last_merges_and_gives_the_eta():
    status = status_of(facts())
    assert status.tokens_per_s == pytest.approx(8000 / 80)
    assert status.eta_s == pytest.approx((20_000 - 9000) / 100)
    assert status_of(facts(measured(recent_merges=MERGES[:1]))).eta_s is None
    assert status_of(facts(structs.replace(STATE, phase="STOPPED"))).eta_s is None
    assert status_of(facts(structs.replace(STATE, token_parameters=10**9))).eta_s == 0.0


def test_participation_and_the_last_merges():
    status = status_of(facts())
    assert status.participation == pytest.approx(2.5 / 3)
    iowa, rhine = status.learners
    assert (iowa.in_last_10, iowa.attendance) == (3, "###")
    assert (rhine.in_last_10, rhine.attendance) == (2, "#.#")
    assert status.last_merge is not None
    assert (status.last_merge.age_s, status.last_merge.participants, status.last_merge.alive) == (10.0, 2, 2)


def test_ages_are_those_of_who_was_heard_last_and_none_if_nobody_was():
    assert status_of(facts(iowa=7.0, rhine=3.0, syncer=5.0)).age_s == 3.0
    assert status_of(facts(iowa=None, rhine=None, syncer=None)).age_s is None


def looks(*each: tuple[float, float, dict[str, float]]) -> list[float]:
    """The store's time at looks of one process: this machine's clock, one that nobody sets, and what changed when."""
    clock = StoreClock()
    return [clock.now_s(wall_s, steady_s, (wall_s, steady_s), seen) for wall_s, steady_s, seen in each]


def test_the_stores_time_is_never_before_its_newest_change():
    assert looks((100.0, 1.0, {"a": 90.0, "b": 99.0})) == looks((100.0, 1.0, {})) == [100.0]
    assert looks((100.0, 1.0, {"a": 90.0, "b": 160.0})) == [160.0]


def test_a_second_look_corrects_a_clock_of_this_machine_that_is_ahead():
    """All units looked lost, and `status` advised to start another syncer, as long as the screen was watched."""
    first = (700.0, 1.0, {"a": 99.0, "b": 95.0})
    assert looks(first, (705.0, 6.0, {"a": 102.0, "b": 95.0}), (710.0, 11.0, {"a": 102.0})) == [700.0, 108.0, 113.0]
    assert looks(first, (705.0, 6.0, first[2]))[1] == 705.0, "nothing has changed: it may be true"
    assert looks(first, (705.0, 6.0, {**first[2], "new": 60.0}))[1] == 705.0, "it may have been there before"
    assert looks((100.0, 1.0, {"a": 95.0}), (105.0, 6.0, {"a": 98.0}))[1] == 105.0, "it changed between the looks"


def test_a_machine_that_slept_or_whose_clock_was_set_begins_anew():
    ahead = [(700.0, 1.0, {"a": 99.0}), (705.0, 6.0, {"a": 102.0})]
    assert looks(*ahead, (110.0, 11.0, {"a": 105.0}))[-1] == 110.0, "it was set right"
    assert looks((100.0, 1.0, {"a": 99.0}), (4000.0, 2.0, {"a": 300.0}))[-1] == 4000.0, "all ended while it slept"


def test_a_clock_that_is_slewed_back_is_believed_again_after_some_looks():
    ahead = [(700.0, 1.0, {"a": 99.0}), (705.0, 6.0, {"a": 102.0})]
    right = [(705.0 + 5.0 * n, 6.0 + 5.0 * n, {"a": 703.0 + 5.0 * n}) for n in range(1, LOOKS_KEPT + 1)]
    assert looks(*ahead, *right)[-1] == right[-1][0]


def test_a_screen_has_aligned_columns_a_bar_and_no_control_characters():
    noisy = facts(note="\x1b[31mred\x07", iowa=1.0)
    status = replace(status_of(noisy), recent=[])
    rows = status_text(status).splitlines()
    assert all(character.isprintable() for row in rows for character in row)
    header = next(row for row in rows if row.startswith("LEARNER"))
    table = rows[rows.index(header) : rows.index(header) + 3]
    for name in ("STATE", "IN LAST 10", "NOTE"):
        column = header.index(name)
        assert all(len(row) <= column or row[column - 1] == " " for row in table[1:])
    assert table[2][header.index("IN LAST 10") :].startswith("█·█")
    assert "\\x1b[31mred\\x07" in table[1]


def test_notes_of_the_log_cannot_steer_a_terminal_either():
    noted = measured(notes=(Note(at(1), "epoch_start", "syncer", "a\x1b]0;title\x07b"),))
    text = status_text(status_of(facts(noted)))
    assert "\x1b" not in text and "\x07" not in text and "a\\x1b]0;title\\x07b" in text


def test_a_plain_line_has_the_state_the_tokens_and_every_learner():
    line = plain_line(status_of(facts(iowa=LOST_S + 1)))
    assert line.startswith("nano DEGRADED") and "\n" not in line
    for part in ("tokens 9k / 20k (45.0%)", "loss 1.250", "goodput 45.0%", "iowa:lost", "rhine:training"):
        assert part in line
    nobody = plain_line(status_of(facts(iowa=None, rhine=None, syncer=None)))
    assert "no heartbeat yet" in nobody


def test_the_summary_tells_shares_bytes_and_what_data_parallel_would_move():
    summary = summary_of(facts(structs.replace(STATE, phase="FINISHED")))
    assert (summary.tokens, summary.commits, summary.merges, summary.wall_s) == (9000, 10, 3, 90.0)
    assert [learner.share for learner in summary.learners] == [pytest.approx(2 / 3), 0.0]
    assert (summary.up_bytes, summary.down_bytes, summary.syncer_up_bytes) == (20, 40, 5)
    steps = 9000 / 2048
    assert summary.data_parallel_bytes == int(2 * steps * 2 * LAYOUT.num_parameters * 2)
    text = summary_text(summary)
    for part in ("run nano FINISHED in 90 s", "1.2500 nats per token", "9,000 merged", "66.7%", "file:///b/nano"):
        assert part in text
    assert "not evaluated" in summary_text(replace(summary, loss=None, goodput=None))


WAITING = SyncerHeartbeat("STANDING_BY", 2, 9, "laptop", "takes over after 18 s of silence", unit="standby-1")


def with_standby(spoken: RunFacts, age_s: float = 1.0, **heartbeat: str) -> RunFacts:
    return replace(spoken, standbys={"standby-1": Heard(replace(WAITING, **heartbeat), age_s)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("age_s", "said", "state"),
    [
        (SUSPECT_S, "STANDING_BY", "STANDING_BY"),
        (SUSPECT_S + 1, "STANDING_BY", "SUSPECT"),
        (LOST_S + 1, "STANDING_BY", "LOST"),
        (FORGOTTEN_S + 1, "STANDING_BY", None),
        (1.0, "DONE", None),
    ],
)
def test_standbys_are_shown_by_age_and_those_that_took_over_are_not(age_s: float, said: str, state: str | None) -> None:
    shown = status_of(with_standby(facts(), age_s, state=said)).standbys
    assert [item.state for item in shown] == ([] if state is None else [state])
    assert all((item.note == "") == (state == "LOST") for item in shown), "what a lost one said last is not so any more"


def test_nobody_stands_by_for_a_run_that_is_over() -> None:
    assert status_of(with_standby(facts(structs.replace(STATE, phase="FINISHED")))).standbys == []


def test_where_no_syncer_serves_the_reason_says_so_and_what_comes_next() -> None:
    lost = status_of(facts(syncer=47.0))
    assert lost.reason == "no syncer serves: syncer on box was heard 47 s ago"
    assert lost.hint == "diloco syncer --standby file:///b/nano"
    covered = status_of(with_standby(facts(syncer=SUSPECT_S + 1)))
    assert covered.reason.startswith(
        "the syncer is silent: syncer on box was heard 9 s ago"
    ) and covered.reason.endswith("standby-1 will take over")
    unheard = status_of(with_standby(facts(syncer=None)))
    assert unheard.reason == "no syncer has been heard yet; standby-1 will take over" and not unheard.hint
    assert status_of(with_standby(facts(syncer=47.0), LOST_S + 1)).hint == "diloco syncer --standby file:///b/nano"
    assert status_of(facts(structs.replace(STATE, phase="STOPPED"), syncer=47.0)).reason == ""


def test_the_screen_names_who_serves_and_who_waits() -> None:
    spoken = with_standby(facts())
    assert spoken.syncer is not None
    serving = replace(spoken.syncer, heartbeat=replace(spoken.syncer.heartbeat, unit="standby-iowa"))
    rows = status_text(status_of(replace(spoken, syncer=serving))).splitlines()
    assert any(row.startswith("syncer ") and "epoch 2 by standby-iowa" in row for row in rows)
    assert any(row.startswith("standby-1 ") and "STANDING_BY" in row and "on laptop" in row for row in rows)
    nobody = status_text(status_of(facts(syncer=None))).splitlines()
    assert any(row.startswith("syncer ") and "not heard yet" in row for row in nobody)


def test_units_that_work_elsewhere_are_told_from_those_that_have_left() -> None:
    """Before a resume takes their places."""
    here = ["iowa", "rhine", "syncer", "ohio"]
    assert working(facts(), here) == ["iowa", "rhine", SYNCER.unit]
    assert working(facts(iowa=11.0, syncer=None), here) == ["rhine"]
    assert working(facts(state=STATE), ["iowa"]) == ["iowa"]
    left = facts()
    left.learners["rhine"] = Heard(replace(HEARTBEAT, state="DONE"), 1.0)
    assert working(left, here) == ["iowa", SYNCER.unit]


KEPT = kept_commits(RUN) or 0


def told(commits: int) -> Status:
    garbage = GarbageHeartbeat(objects=1234, commits=commits, per_h=60.0)
    return status_of(replace(facts(), syncer=Heard(replace(SYNCER, garbage=garbage), 1.0)))


def test_what_waits_is_shown_with_its_trend_and_is_no_warning() -> None:
    status = told(KEPT)
    assert status.garbage == GarbageStatus(1234, KEPT, 60.0, "")
    assert "garbage: about 1,234 objects wait to be deleted, +60 an hour" in status_text(status)


def test_more_than_the_run_keeps_is_a_warning() -> None:
    status = told(KEPT + 1)
    assert status.garbage is not None and f"more than the {KEPT:,} commits" in status.garbage.note
    assert f"garbage: {status.garbage.note}" in status_text(status)


def test_before_a_syncer_s_first_sweep_has_ended_it_is_not_known_and_said_so() -> None:
    """In a run that has no floor yet, nothing can wait."""
    found = told(NOT_KNOWN)
    assert found.garbage == GarbageStatus(1234, 0, 0.0, "")
    collected = facts(structs.replace(STATE, gc_floor=5))
    spoken = replace(SYNCER, garbage=GarbageHeartbeat(objects=0, commits=NOT_KNOWN))
    status = status_of(replace(collected, syncer=Heard(spoken, 1.0)))
    assert status.garbage == GarbageStatus(0, None, None, "")
    assert "garbage: how much waits to be deleted is not known yet, 0 objects were found so far" in status_text(status)


def test_where_nothing_waits_or_no_syncer_speaks_there_is_no_line() -> None:
    assert "garbage" not in status_text(status_of(facts())) + status_text(status_of(facts(syncer=None)))
    assert status_of(facts(syncer=None)).garbage is None


EU = MirrorHeartbeat("eu", n=9, offers=4, up_bytes=2_000_000_000, down_bytes=3_000_000_000, requests=1200, writes=300)


def with_region(heartbeat: MirrorHeartbeat | None, syncer_age_s: float = 1.0, phase: str = "RUNNING") -> RunFacts:
    run = replace(RUN, regions=(RegionStore("eu", "s3://far/nano", 0.1),), home_egress_per_gb=0.5)
    said = replace(SYNCER, mirrors=() if heartbeat is None else (heartbeat,))
    state = structs.replace(STATE, phase=phase)  # type: ignore[arg-type]
    return replace(facts(), run=run, state=state, syncer=Heard(said, syncer_age_s))


def mirror_of(known: RunFacts) -> MirrorStatus:
    return status_of(known).mirrors[0]


@pytest.mark.parametrize(
    ("heartbeat", "age_s", "phase", "state", "behind"),
    [
        (EU, 1.0, "RUNNING", "FOLLOWS", 0),
        (replace(EU, n=7), 1.0, "RUNNING", "FOLLOWS", 0),  # the heartbeat is older than the newest commits
        (replace(EU, n=8, behind=1, behind_s=0.2), 1.0, "RUNNING", "FOLLOWS", 1),
        (replace(EU, n=5, behind=4, behind_s=20.0), 1.0, "RUNNING", "BEHIND", 4),
        (replace(EU, n=5, behind=4, error="put fails"), 1.0, "RUNNING", "BEHIND", 4),
        (replace(EU, n=5), 1.0, "STOPPED", "BEHIND", 4),
        (replace(EU, n=5, behind=4, stopped=True, error="other bytes"), 1.0, "RUNNING", "STOPPED", 4),
        (EU, LOST_S + 1, "RUNNING", "UNKNOWN", 0),
        (EU, LOST_S + 1, "FINISHED", "FOLLOWS", 0),
        (None, 1.0, "RUNNING", "UNKNOWN", 0),
    ],
)
def test_a_mirror_is_as_far_as_the_syncer_says(
    heartbeat: MirrorHeartbeat | None, age_s: float, phase: str, state: str, behind: int
) -> None:
    found = mirror_of(with_region(heartbeat, age_s, phase))
    assert (found.state, found.commits_behind) == (state, behind)


def test_what_crosses_is_counted_and_priced_by_where_it_leaves() -> None:
    found = mirror_of(with_region(EU))
    assert (found.up_bytes, found.down_bytes, found.offers) == (2_000_000_000, 3_000_000_000, 4)
    assert (found.requests, found.writes) == (1200, 300)
    assert found.egress_cost == pytest.approx(2 * 0.5 + 3 * 0.1)
    assert status_of(facts()).mirrors == [], "a run without regions' buckets says nothing of them"


def test_screens_tell_the_lag_and_the_last_error_without_control_characters() -> None:
    late = with_region(replace(EU, behind=4, behind_s=61.0, error="create fails:\x1b[2J 503"))
    line = next(line for line in status_text(status_of(late)).splitlines() if line.startswith("region eu"))
    assert line.startswith("region eu   behind   4 commits behind for 61 s   4 offers carried home")
    assert "2 GB to it, 3 GB from it   1,200 requests, 300 of them writes   egress costs 1.3" in line
    assert "\\x1b[2J 503" in line and "\x1b" not in line
    summary = summary_of(with_region(EU, phase="FINISHED"))
    assert summary.mirrors[0].region == "eu" and "region eu   follows   4 offers" in summary_text(summary)


def test_a_learner_that_is_not_heard_is_named_with_what_to_do() -> None:
    known = with_region(replace(EU, unheard={"rhine": "offer/rhine/1/3: other bytes; start rhine again"}))
    status = status_of(known)
    assert status.mirrors[0].state == "FOLLOWS", "the region's other learners go on"
    assert "not heard: rhine" in status_text(status)
    (note,) = [learner.note for learner in status.learners if learner.name == "rhine"]
    assert note == "not heard: offer/rhine/1/3: other bytes; start rhine again"


# -- stated and believed work -----------------------------------------------------------------------------------


def worked(**learners: LearnerRecord) -> RunState:
    return structs.replace(
        STATE, learners=learners, token_parameters=sum(k.token_parameters for k in learners.values())
    )


def test_who_states_more_than_is_believed_is_named_with_both_shares():
    liar = LearnerRecord(token_parameters=3000, doubted=84_000)
    status = status_of(facts(worked(iowa=liar, rhine=LearnerRecord(token_parameters=6600))))
    iowa, rhine = status.learners
    assert (iowa.stated_share, iowa.believed_share) == (pytest.approx(0.9295, abs=1e-4), pytest.approx(0.3125))
    assert iowa.note == "states 93 % of the tokens, 31 % believed" and iowa.note in status_text(status)
    assert rhine.note == "" and rhine.believed_share == pytest.approx(0.6875)


def test_a_little_that_is_not_believed_is_chance():
    assert status_of(facts(worked(iowa=LearnerRecord(token_parameters=990, doubted=10)))).learners[0].note == ""


@pytest.mark.parametrize(
    ("known", "mean", "said"),
    [
        ({"proven": 2000.0}, 1100.0, ""),
        ({"proven": 5000.0}, 5000.0, "iowa has shown 2.5 times its planned speed"),
        ({}, 400.0, "iowa trains at 0.2 of its planned speed"),
        ({}, 0.0, ""),
    ],
)
def test_an_island_far_from_its_planned_speed_is_a_warning(known, mean, said):
    islands = tuple(replace(island, batch_tokens=2000, step_s=1.0) for island in RUN.islands)
    seen = facts(worked(iowa=LearnerRecord(**known)), mean_tokens_per_s=mean)
    status = status_of(replace(seen, run=replace(RUN, islands=islands)))
    assert status.doubts == said and (f"plan: {said}" in status_text(status)) == bool(said)


@pytest.mark.parametrize(
    ("merged", "mean", "said"),
    [
        (1000, 100.0, "iowa merged the work of 10% of the time: it came late or stood still; rhine has merged nothing"),
        (1000, 10.0, "iowa trains at 0.1 of its planned speed; rhine has merged nothing"),
        (9900, 100.0, ""),
    ],
)
def test_a_low_goodput_has_its_reasons(merged, mean, said):
    """`mean`: of iowa's tokens/s while it trains."""
    iowa = LearnerRecord(token_parameters=merged * LAYOUT.num_parameters, merges=90)
    learners = {"iowa": iowa} if said else {"iowa": iowa, "rhine": iowa}
    state = structs.replace(worked(**learners), merges=90)
    run = replace(RUN, islands=tuple(replace(island, batch_tokens=100, step_s=1.0) for island in RUN.islands))
    assert status_of(replace(facts(state, mean_tokens_per_s=mean), run=run)).doubts == said
    went_back = facts(structs.replace(state, rollbacks=((3, 9),)), mean_tokens_per_s=mean)
    assert ("still, or its work was rolled back" in status_of(replace(went_back, run=run)).doubts) == ("still" in said)
    young = facts(structs.replace(state, merges=1), mean_tokens_per_s=mean)
    assert "merged" not in status_of(replace(young, run=run)).doubts


def test_more_than_the_planned_islands_train_is_an_alarm():
    many = structs.replace(STATE, token_parameters=30_000 * LAYOUT.num_parameters)
    assert status_of(facts(many)).doubts == "goodput 150%: more counts than the planned islands train undisturbed"
    assert status_of(facts()).doubts == ""
