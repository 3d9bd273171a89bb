"""A storm strikes what it planned and nothing else, keeps to its rails, and heals however it ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.chaos import storm
from diloco_cli.chaos.actions import execute, plan_kill, plan_pause, read_entries, record_plan
from diloco_cli.chaos.faults import Kill, Target, find_target
from diloco_cli.chaos.storm import (
    LOADS,
    SILENT,
    Storm,
    forbidden,
    heal_after_death,
    not_training,
    refuse_untouchable,
    storm_lock,
)
from diloco_cli.cli.arguments import open_run
from diloco_cli.environment import environment_with
from diloco_cli.errors import RefusedError, TryAgainError
from diloco_cli.events.bucket import EventReader
from diloco_cli.faults import Constraints, FaultRule, Injection, Scenario
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, process_on
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import encode
from diloco_cli.runtime.processes import Identity, is_paused
from diloco_cli.runtime.registry import is_held, remember_run
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.syncer.operator import Operator
from tests.cli.bucket import make_bucket
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("home")
SUPERVISED = """
import sys
from diloco_cli.runtime.supervisor import supervise
from diloco_cli.runtime.units import UnitSpec
command = (sys.executable, "-S", "-c", "import time; time.sleep(300)")
units = [UnitSpec("iowa", "learner", command), UnitSpec("ohio", "learner", command)]
supervise(sys.argv[1], units, run_state=lambda: "RUNNING", on_event=lambda event: None, poll_s=0.02)
"""
STORM = """
import sys
from diloco_cli.chaos.storm import Storm
from diloco_cli.faults import FaultRule, Injection, Scenario
faults = [
    Injection(0, 0.0, "pause", ("iowa",), for_s=300.0), Injection(1, 0.0, "kill", ("ohio",), revive_after_s=300.0)
]
rule = FaultRule("kill", "all", at_s=0.0)
Storm(sys.argv[1], Scenario("x", 300.0, (rule,)), 5, faults, lambda line: print(line, flush=True)).run()
"""


def story(duration_s: float = 1.0, **constraints: object) -> Scenario:
    return Scenario("x", duration_s, (FaultRule("kill", "all", at_s=0.0),), constraints=Constraints(**constraints))  # type: ignore[arg-type]


def unit(name: str, condition: str = "running", kind: str = "learner") -> Target:
    return Target("u", name, kind, None, condition)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path, start) -> Iterator[str]:
    """The URL of a run of two supervised learners that do nothing."""
    (tmp_path / "bucket/nano").mkdir(parents=True)
    url = f"file://{tmp_path}/bucket/nano"
    remember_run(url)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISED, url], env=environment_with())
    try:
        wait_until(lambda: all(runs(url, name) for name in ("iowa", "ohio")))
        yield url
    finally:
        supervisor.kill()
        supervisor.wait()
        for name in ("iowa", "ohio"):
            if find_target(url, name).condition in ("running", "paused"):
                execute(plan_kill(url, name))


def runs(url: str, name: str) -> bool:
    return find_target(url, name).condition == "running"


@pytest.mark.parametrize(
    ("targets", "constraints", "part"),
    [
        ([unit("a"), unit("b", "dead")], {"min_alive": 1}, "fewer than 1 learners"),
        ([unit("a"), unit("b", "paused")], {"min_alive": 1}, "fewer than 1 learners"),
        ([unit("a"), unit("b"), unit("syncer", kind="syncer")], {"min_alive": 2}, "fewer than 2 learners"),
        ([unit("a"), unit("b"), unit("c", "dead")], {"max_concurrent": 1}, "more than 1 units"),
        ([unit("a"), unit("b")], {"min_alive": 1, "max_concurrent": 1}, ""),
    ],
)
def test_rails_count_what_lives_now(targets: list[Target], constraints: dict[str, int], part: str) -> None:
    said = forbidden(Injection(0, 0.0, "kill", ("a",)), targets, story(**constraints))
    assert part in said and bool(said) == bool(part)


def test_a_learner_that_loads_is_not_alive_for_min_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what its present process has said counts."""
    url, own = make_bucket(tmp_path / "bucket/nano"), os.getpid()
    store = LocalStore(tmp_path / "bucket/nano")

    def says(name: str, state: str, pid: int) -> None:
        said = LearnerHeartbeat(state, 1, 0, 1, 0, 1.0, 0, process=process_on(os.uname().nodename, pid))
        store.put(heartbeat_key(name), encode(said))

    names = ("trains", "waits", "loads", "before", "silent")
    for name, state, pid in zip(
        names, ("UPLOADING", "WAITING", "RECOVERING", "TRAINING"), (own, own, own, 7), strict=False
    ):
        says(name, state, pid)
    targets = [Target(url, name, "learner", Identity(own, ""), "running") for name in names]
    trained = set[tuple[str, int | None]]()
    unready = not_training(url, targets, trained)
    assert unready == dict.fromkeys(("loads", "before", "silent"), LOADS) and trained == {
        ("trains", own),
        ("waits", own),
    }
    fault = Injection(0, 0.0, "kill", ("trains",))
    assert forbidden(fault, targets, story(min_alive=1), unready) == ""
    assert forbidden(fault, targets, story(min_alive=2), unready) == "fewer than 2 learners would train here"
    cut = Injection(0, 0.0, "partition", ("loads",), for_s=1.0)
    assert forbidden(cut, targets, story(), unready).startswith("loads does not train yet")

    class Silent(LocalStore):
        def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
            raise StoreUnavailableError("no answer")

    monkeypatch.setattr(storm, "open_store", lambda url: Silent(tmp_path / "bucket/nano"))
    unready = not_training(url, targets, trained)
    assert unready == dict.fromkeys(("loads", "before", "silent"), SILENT), "what has said that it trains does so still"
    assert forbidden(fault, targets, story(min_alive=1), unready) == ""
    said = forbidden(fault, targets, story(min_alive=2), unready)
    assert said == f"fewer than 2 learners would train here; of before, loads, silent {SILENT}"
    assert forbidden(cut, targets, story(), unready) == f"loads may not train yet: {SILENT}"


def test_units_that_die_together_die_at_once(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are signalled before any death is waited for."""
    seen: list[str] = []

    def verify(self: Kill) -> bool:
        seen.append(f"{self.target.name} " + str([runs(run, name) for name in ("iowa", "ohio")]))
        return real_verify(self)

    real_verify = Kill.verify
    monkeypatch.setattr(Kill, "verify", verify)
    faults = [Injection(0, 0.0, "kill", ("iowa", "ohio", "nobody"), revive_after_s=0.1)]
    happens = Storm(run, story(), 5, faults, lambda line: None)
    happens.run()
    assert [line.split()[0] for line in seen] == ["iowa", "ohio"] and not any("True" in line for line in seen[1:])
    assert [(one.injected, bool(one.skipped)) for one in happens.strikes] == [(True, False)] * 2 + [(False, True)]
    assert happens.strikes[0].at_s == happens.strikes[1].at_s


def test_a_storm_strikes_its_units_among_decoys_and_all_live_again(run: str, start) -> None:
    decoys = [start(token, "import time; time.sleep(300)", "iowa") for token in (None, "", "other") * 17]
    faults = [
        Injection(0, 0.0, "kill", ("iowa",), revive_after_s=0.5),
        Injection(1, 0.1, "kill", ("elsewhere",)),
        Injection(2, 0.2, "pause", ("ohio",), for_s=0.3),
        Injection(3, 0.3, "kill", ("ohio",), skipped="planned so"),
    ]
    said: list[str] = []
    happens = Storm(run, story(), 5, faults, said.append)
    happens.run()
    done = {strike.number: strike for strike in happens.strikes}
    assert [(done[n].injected, done[n].verified, done[n].healed) for n in (0, 2)] == [(True, True, True)] * 2
    assert "no unit elsewhere" in done[1].skipped and done[3].skipped == "planned so"
    assert all(runs(run, name) for name in ("iowa", "ohio")) and len(said) == 6
    assert [decoy.poll() for decoy in decoys] == [None] * 51
    entries = [entry for entry in read_entries(run) if entry.fault != "revive"]
    assert [(entry.target, entry.seed, entry.healed) for entry in entries] == [("iowa", 5, True), ("ohio", 5, True)]
    told = EventReader().read(LocalStore(Path(run.removeprefix("file://"))))
    assert {(event.unit, event.data["number"]) for event in told if event.kind == "chaos"} == {("iowa", 0), ("ohio", 2)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_storm_that_is_ended_is_healed(run: str, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STORM, run], env=environment_with(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert all(b"verified" in process.stdout.readline() for _ in range(2))
    assert is_paused(find_target(run, "iowa").identity) and is_held(run, "ohio")  # type: ignore[arg-type]
    with pytest.raises(TryAgainError, match="another storm"), storm_lock(run):
        pass
    heal_after_death(run)
    assert is_held(run, "ohio"), "a living storm's faults stay"
    os.kill(process.pid, number)
    process.communicate()
    wait_until(lambda: all(runs(run, name) for name in ("iowa", "ohio")))
    assert not is_held(run, "ohio")


def test_what_a_storm_and_its_guardian_left_is_healed_by_the_next_command(run: str) -> None:
    with storm_lock(run):
        execute(plan_pause(run, "iowa"), seed=5)
        execute(plan_kill(run, "ohio", hold=True), seed=5)
    execute(plan_kill(run, "iowa"))  # a person's own fault is left alone
    heal_after_death(run)
    wait_until(lambda: runs(run, "ohio"))
    assert [entry.healed for entry in read_entries(run) if entry.seed == 5] == [True, True]


@pytest.mark.parametrize("stops", [True, False])
def test_a_dead_supervisor_gets_a_successor_but_a_stopped_run_stays_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Also while it still drains: what counts is that somebody has asked."""
    started: list[str] = []
    monkeypatch.setattr(storm, "start_successor", started.append)
    url = make_bucket(tmp_path / "bucket/nano")
    remember_run(url)
    if stops:
        opened = open_run(url)
        Operator(opened.format, opened.store, opened.clock, print).request_stop("enough")
    with storm_lock(url):
        record_plan(url, "kill", "supervisor", pid=7, seed=5)
    heal_after_death(url)
    assert started == [url] * (not stops)
    heal_after_death(url)
    assert started == [url] * (not stops), "once"


def test_what_cannot_be_healed_keeps_nothing_else_from_it(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(url: str, name: str) -> None:
        if name == "iowa":
            raise OSError(errno.ENOSPC, "no space left")
        heal_unit(url, name)

    heal_unit = storm.heal_unit
    monkeypatch.setattr(storm, "heal_unit", heal)
    monkeypatch.setattr(storm, "HEALS_WITHIN_S", 0.5)
    faults = [Injection(n, 0.0, "pause", (name,), for_s=0.2) for n, name in enumerate(("iowa", "ohio"))]
    said: list[str] = []
    Storm(run, story(), 5, faults, said.append).run()
    assert not is_paused(find_target(run, "ohio").identity)  # type: ignore[arg-type]
    assert any("not healed: " in line and "no space left" in line for line in said)


def test_a_run_that_is_elsewhere_or_has_no_supervisor_is_refused(home: Path, start_unit_of) -> None:
    with pytest.raises(RefusedError, match="no unit that may be killed on this machine: none was started here"):
        refuse_untouchable("nano")
    start_unit_of("nano", "iowa")
    with pytest.raises(RefusedError, match="no supervisor of run nano lives here"):
        refuse_untouchable("nano")
