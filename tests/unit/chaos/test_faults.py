"""Chaos breaks what was meant, proves it, writes it down first, and heals it whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from diloco_cli.chaos import faults
from diloco_cli.chaos.actions import (
    MAX_PAUSE_S,
    execute,
    execute_pause,
    hint_for,
    overview,
    plan_disturbance,
    plan_kill,
    plan_pause,
    plan_revive,
    read_entries,
    record_plan,
    refusal,
    revive,
)
from diloco_cli.chaos.faults import Target, find_target
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.environment import environment_with
from diloco_cli.errors import RefusedError
from diloco_cli.runtime.processes import Identity, is_alive, is_paused, own_identity
from diloco_cli.runtime.registry import UnitRecord, hold, is_held, log_path, run_directory, write_unit
from diloco_cli.runtime.restart import RestartPolicy
from diloco_cli.runtime.units import UnitSpec, start_unit

pytestmark = pytest.mark.usefixtures("home")
RUN = "nano"
ALIVE = Target(RUN, "iowa", "learner", Identity(500, "boot:7", "secret"), "running")
DEAD = replace(ALIVE, condition="dead", why="no process has pid 500")
PAUSED = replace(ALIVE, condition="paused")
SUPERVISOR = replace(ALIVE, name="supervisor", kind="supervisor")
PAUSER = """
from diloco_cli.chaos.actions import execute_pause, plan_pause
execute_pause(plan_pause("nano", "iowa", for_s=60), on_paused=lambda entry: print("paused", flush=True))
"""


@pytest.mark.parametrize(
    ("action", "target", "options", "part"),
    [
        ("kill", replace(ALIVE, condition="unknown", why="no unit"), {}, "no unit"),
        ("kill", replace(ALIVE, untouchable="an ancestor"), {}, "an ancestor"),
        ("kill", DEAD, {}, "does not run"),
        ("kill", SUPERVISOR, {"hold": True}, "--hold means nothing"),
        ("pause", PAUSED, {}, "paused already"),
        ("pause", DEAD, {}, "does not run"),
        ("pause", ALIVE, {"for_s": 0.0}, "must last"),
        ("pause", ALIVE, {"for_s": MAX_PAUSE_S + 1}, "must last"),
        ("pause", ALIVE, {"for_s": float("nan")}, "must last"),
        ("disturb", PAUSED, {}, "makes no calls"),
        ("disturb", DEAD, {}, "does not run"),
        ("disturb", SUPERVISOR, {}, "no calls to disturb"),
        ("revive", ALIVE, {}, "runs, and nothing holds it"),
        ("revive", DEAD, {}, "not held"),
        ("revive", replace(DEAD, supervised=False), {}, "no supervisor lives"),
        ("revive", replace(SUPERVISOR, condition="dead"), {}, "replaced"),
    ],
)
def test_rails_refuse_with_a_reason(action, target, options, part):
    assert part in refusal(action, target, **options)
    assert "`diloco " in hint_for(action, target)


@pytest.mark.parametrize(
    ("action", "target", "options"),
    [
        ("kill", ALIVE, {"hold": True}),
        ("kill", PAUSED, {}),
        ("kill", SUPERVISOR, {}),
        ("pause", ALIVE, {"for_s": 10.0}),
        ("pause", SUPERVISOR, {}),
        ("disturb", ALIVE, {}),
        ("revive", PAUSED, {}),
        ("revive", replace(ALIVE, disturbed="slow"), {}),
        ("revive", replace(DEAD, held=True), {}),
    ],
)
def test_rails_let_the_rest_pass(action, target, options):
    assert refusal(action, target, **options) is None


def test_a_kill_is_verified_and_on_the_record(start_unit_of, home):
    child, identity = start_unit_of(RUN, "iowa")
    entry = execute(plan_kill(RUN, "iowa"))
    assert child.wait() == -signal.SIGKILL
    assert not is_alive(identity)
    assert (entry.fault, entry.target, entry.injected, entry.verified) == ("kill", "iowa", True, True)
    lines = [json.loads(line) for line in (run_directory("nano") / "chaos.jsonl").read_text().split("\n") if line]
    assert [line["injected"] for line in lines] == [None, True]
    assert {"time", "seed", "fault", "target", "injected", "verified", "healed"} <= lines[0].keys()
    assert "secret" not in (run_directory("nano") / "chaos.jsonl").read_text()
    assert read_entries(RUN) == [entry]


CALLER = """
import time
from diloco_cli.errors import DilocoError
from diloco_cli.store.open import open_store
while True:
    try:
        open_store({url!r}).get("k")
        print("answered", flush=True)
    except DilocoError as error:
        print(error, flush=True)
    time.sleep(0.01)
"""


def test_the_calls_of_a_living_unit_are_disturbed_until_it_is_revived(tmp_path, eventually):
    """The variable that its supervisor gives it is all that it needs."""
    spec = UnitSpec("iowa", "learner", (sys.executable, "-c", CALLER.format(url=tmp_path.as_uri())))
    child, _ = start_unit(RUN, spec)
    try:
        eventually(lambda: b"answered" in log_path(RUN, "iowa").read_bytes())
        entry = execute(plan_disturbance(RUN, "iowa", "partition", 60.0), seed=5)
        assert entry.verified and find_target(RUN, "iowa").disturbed == "partition"
        log_path(RUN, "iowa").write_bytes(b"")
        eventually(lambda: b"cut off from the store" in log_path(RUN, "iowa").read_bytes())
        assert revive(plan_revive(RUN, "iowa")).cleared and not find_target(RUN, "iowa").disturbed
        log_path(RUN, "iowa").write_bytes(b"")
        eventually(lambda: b"answered" in log_path(RUN, "iowa").read_bytes())
        assert next((one.fault, one.healed) for one in read_entries(RUN)) == ("partition", True)
    finally:
        child.kill()
        child.wait()


def test_a_unit_that_makes_no_calls_was_not_disturbed(start_unit_of, monkeypatch):
    monkeypatch.setattr(faults, "CALLS_WITHIN_S", 0.1)
    start_unit_of(RUN, "iowa")
    fault = plan_disturbance(RUN, "iowa", "errors", 60.0, share=0.5)
    assert execute(fault).verified is False
    fault.heal()
    assert not find_target(RUN, "iowa").disturbed


def test_only_the_registered_process_dies_among_decoys(start_unit_of, start):
    decoys = [start(token, "import time; time.sleep(60)", "iowa") for token in (None, "", "other") * 5]
    child, _ = start_unit_of(RUN, "iowa")
    other, _ = start_unit_of(RUN, "ohio", "second-secret")
    execute(plan_kill(RUN, "iowa"))
    child.wait()
    assert [decoy.poll() for decoy in [*decoys, other]] == [None] * 16


@pytest.mark.parametrize("change", [{"token": "other"}, {"start_time": "boot:1"}])
def test_a_record_that_points_at_a_stranger_is_refused(start_unit_of, change):
    child, identity = start_unit_of(RUN, "iowa")
    write_unit(RUN, UnitRecord("iowa", "learner", replace(identity, **change), 0.0))
    for plan in (plan_kill, plan_pause):
        with pytest.raises(RefusedError, match="refused to") as error:
            plan(RUN, "iowa")
        assert error.value.exit_status == 8
    assert child.poll() is None
    assert read_entries(RUN) == []


def test_chaos_does_not_kill_itself_or_its_ancestors():
    write_unit(RUN, UnitRecord("iowa", "learner", own_identity(), 0.0))
    with pytest.raises(RefusedError, match="this command itself"):
        plan_kill(RUN, "iowa")


def test_a_stranger_that_takes_the_place_after_planning_is_not_touched(start_unit_of):
    child, identity = start_unit_of(RUN, "iowa")
    fault = plan_kill(RUN, "iowa", hold=True)
    swapped = replace(fault, target=replace(fault.target, identity=replace(identity, token="other")))
    with pytest.raises(RefusedError):
        execute(swapped)
    assert child.poll() is None
    assert not is_held(RUN, "iowa")
    assert (read_entries(RUN)[0].injected, bool(read_entries(RUN)[0].skipped)) == (False, True)


def test_a_held_kill_is_revived(start_unit_of):
    child, _ = start_unit_of(RUN, "iowa")
    execute(plan_kill(RUN, "iowa", hold=True))
    child.wait()
    assert is_held(RUN, "iowa")
    revival = revive(plan_revive(RUN, "iowa"))
    assert (revival.released, revival.continued, revival.restarts) == (True, False, False)
    assert not is_held(RUN, "iowa")
    assert read_entries(RUN)[0].healed is True


def test_a_pause_without_end_lasts_until_it_is_revived(start_unit_of):
    _, identity = start_unit_of(RUN, "iowa")
    assert execute_pause(plan_pause(RUN, "iowa")).verified is True
    assert is_paused(identity)
    assert find_target(RUN, "iowa").condition == "paused"
    revival = revive(plan_revive(RUN, "iowa"))
    assert revival.continued
    assert not is_paused(identity)
    assert is_alive(identity)


def test_a_pause_that_does_not_end_is_told_beside_calls_that_are_healed(start_unit_of, monkeypatch):
    _, identity = start_unit_of(RUN, "iowa")
    monkeypatch.setattr(faults, "CALLS_WITHIN_S", 0.1)
    disturbance = plan_disturbance(RUN, "iowa", "slow", 60.0, factor=2.0)
    execute(disturbance)
    execute_pause(plan_pause(RUN, "iowa"))
    with monkeypatch.context() as deaf:
        deaf.setattr(faults, "resume_process", lambda identity: False)
        revival = revive(plan_revive(RUN, "iowa"))
    assert (revival.continued, revival.cleared, revival.entry.verified) == (False, True, False)
    assert is_paused(identity) and all(entry.healed is None for entry in read_entries(RUN))
    assert revive(plan_revive(RUN, "iowa")).continued


def test_a_pause_with_an_end_lasts_as_long_as_asked(start_unit_of):
    _, identity = start_unit_of(RUN, "iowa")
    times: list[float] = []
    entry = execute_pause(plan_pause(RUN, "iowa", for_s=0.5), on_paused=lambda _: times.append(monotonic_s()))
    assert 0.45 < monotonic_s() - times[0] < 30
    assert (entry.verified, entry.healed) == (True, True)
    assert is_alive(identity)
    assert not is_paused(identity)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_pause_is_healed_when_the_chaos_command_is_ended(start_unit_of, eventually, signum):
    _, identity = start_unit_of(RUN, "iowa")
    command = [sys.executable, "-c", PAUSER]
    pauser = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment_with())
    assert pauser.stdout.readline() == b"paused\n"
    assert is_paused(identity)
    os.kill(pauser.pid, signum)
    pauser.communicate()
    eventually(lambda: not is_paused(identity))
    assert is_alive(identity)
    eventually(lambda: read_entries(RUN)[0].healed is True)


def test_a_paused_unit_that_dies_ends_its_pause(start_unit_of):
    child, _ = start_unit_of(RUN, "iowa")
    entry = execute_pause(plan_pause(RUN, "iowa", for_s=0.3), on_paused=lambda _: child.kill())
    assert entry.healed is True


def test_the_overview_tells_state_hold_and_last_fault(start_unit_of):
    start_unit_of(RUN, "iowa")
    start_unit_of(RUN, "ohio", "second-secret")
    execute(plan_kill(RUN, "ohio", hold=True))
    targets = {target.name: target for target, _ in overview(RUN)}
    last_faults = {target.name: fault for target, fault in overview(RUN)}
    assert [targets[name].condition for name in ("iowa", "ohio", "supervisor")] == ["running", "dead", "unknown"]
    assert targets["ohio"].held
    assert last_faults["ohio"].fault == "kill"
    assert last_faults["iowa"] is None


def test_an_unknown_unit_names_the_known_ones(start_unit_of):
    start_unit_of(RUN, "iowa")
    with pytest.raises(RefusedError, match="units: iowa, supervisor"):
        plan_kill(RUN, "home")


def test_torn_lines_of_the_journal_hide_no_others(home):
    first = record_plan(RUN, "kill", "iowa", pid=5)
    with (run_directory("nano") / "chaos.jsonl").open("a") as file:
        file.write('null\n[1]\n{"id": 3}\n{"id": "x", "ti')
    second = record_plan(RUN, "kill", "ohio", pid=6)
    assert read_entries(RUN) == [first, second]


SUPERVISED = """
import sys
from diloco_cli.runtime.supervisor import supervise
from diloco_cli.runtime.units import UnitSpec
unit = UnitSpec("iowa", "learner", (sys.executable, "-S", "-c", "import time; time.sleep(60)"))
supervise("nano", [unit], run_state=lambda: "RUNNING", on_event=lambda event: None, poll_s=0.02)
"""


def test_a_supervised_unit_comes_back_but_not_while_it_is_held(eventually):
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISED], env=environment_with())

    def running() -> bool:
        return find_target(RUN, "iowa").condition == "running"

    try:
        eventually(running)
        execute(plan_kill(RUN, "iowa"))
        eventually(running)
        execute(plan_kill(RUN, "iowa", hold=True))
        sleep_s(3 * RestartPolicy().second_delay_s)
        assert not running()
        assert revive(plan_revive(RUN, "iowa")).restarts
        eventually(running)
        hold(RUN, "iowa")
        revive(plan_revive(RUN, "iowa"))
        assert running()
        with pytest.raises(RefusedError, match="--hold"):
            plan_kill(RUN, "supervisor", hold=True)
        assert execute(plan_kill(RUN, "supervisor")).verified
        assert running()
    finally:
        supervisor.kill()
        supervisor.wait()
        if running():
            execute(plan_kill(RUN, "iowa"))
