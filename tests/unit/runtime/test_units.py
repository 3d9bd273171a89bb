"""Units: which start on this machine, their commands, and their processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, ModelSettings, SyncerSettings
from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.records import RegionStore, RunFormat
from diloco_cli.runtime.restart import RestartPolicy
from diloco_cli.runtime.units import (
    Child,
    UnitSpec,
    devices_of,
    end_all,
    learner_unit,
    restarted,
    starts_elsewhere,
    starts_everywhere,
    syncer_units,
    threads_of,
    units_here,
    units_of,
)
from diloco_cli.signing import Signing
from tests.cli.bucket import IOWA, NANO, RHINE
from tests.unit.runtime.test_supervisor import Supervision, kill, pid_of, unit

ECHO = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps([json.loads(line), os.getsid(0)]), flush=True)
"""
STAYS = "import signal, time\nprint('1', flush=True)\nwhile True:\n    time.sleep(60)"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the given lines can be started."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path / "told.py"


@pytest.mark.parametrize("apart", [False, True])
def test_what_it_is_told_it_answers_until_it_ends_with_its_stdin(module: Path, apart: bool) -> None:
    module.write_text(ECHO)
    child = Child("told", apart=apart)
    child.tell({"n": 1})
    said, session = child.answer(60.0)
    assert said == {"n": 1} and (session == child.process.pid) is apart
    end_all([child], 60.0)
    assert child.process.returncode == 0


def test_one_that_has_ended_by_itself_gives_no_answer(module: Path) -> None:
    module.write_text("")
    child = Child("told")
    child.process.wait()
    child.tell({"n": 1})
    assert child.answer(60.0) is None
    end_all([child], 60.0)


def test_one_that_says_nothing_is_not_waited_for_and_one_that_stays_is_killed(module: Path) -> None:
    module.write_text(STAYS)
    child = Child("told")
    assert child.answer(60.0) == 1
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        child.answer(0.01)
    end_all([child], 0.01)
    assert child.process.returncode == -9
    assert child.process.stdout is not None and child.process.stdout.closed


URL = "file:///b"
FAST = RestartPolicy(first_delay_s=0.01, second_delay_s=0.01)


def names(**settings: object) -> list[str]:
    return [spec.name for spec in syncer_units(URL, SyncerSettings(**settings))]  # type: ignore[arg-type]


def test_the_settings_say_which_syncers_are_units() -> None:
    assert names() == ["syncer"]
    assert names(standbys=2) == ["syncer", "standby-1", "standby-2"]
    assert names(on_learners=True) == []
    assert names(on_learners=True, standbys=1) == ["standby-1"]


def test_a_syncer_takes_over_at_once_and_comes_back_as_a_standby_in_place_of_its_dead_self() -> None:
    syncer, standby = syncer_units(URL, SyncerSettings(standbys=1))
    assert "--standby" not in syncer.command and "--standby" in standby.command
    again = restarted(syncer, 4711).command
    assert again[-3:] == ("--standby", "--name=syncer", "--instead-of=4711")
    assert restarted(standby, 4712).command[-2:] == ("--name=standby-1", "--instead-of=4712")
    assert restarted(syncer, None) == syncer


def test_without_standbys_a_syncer_comes_back_as_it_was() -> None:
    (syncer,) = syncer_units(URL, SyncerSettings())
    assert restarted(syncer, 4711) == syncer


def standby(name: str, code: str, later: str) -> UnitSpec:
    first = unit(name, code, "syncer")
    return replace(first, later=(sys.executable, "-S", "-c", later))


def test_commands_take_values_that_look_like_options_and_names_that_are_reserved_are_refused() -> None:
    assert learner_unit("a", "--evil", threads=1).command[-2:] == ("--run=--evil", "--name=a")
    assert syncer_units(URL, SyncerSettings())[0].command[1:] == ("-P", "-m", "diloco_cli", "syncer", f"--run={URL}")
    for name in ("syncer", "supervisor", "../a", ""):
        with pytest.raises(UsageError):
            learner_unit(name, URL, threads=1)


@pytest.mark.usefixtures("home")
class TestUnderASupervisor:
    def test_a_killed_syncer_is_started_anew_with_the_pid_of_its_dead_self(self, eventually) -> None:  # type: ignore[no-untyped-def]
        wait = "import time; time.sleep(60)"
        with Supervision(standby("syncer", wait, wait), restart=FAST) as run:
            eventually(lambda: pid_of("syncer") is not None)
            first = pid_of("syncer")
            kill("syncer")
            eventually(lambda: pid_of("syncer") not in (None, first))
            words = psutil.Process(pid_of("syncer")).cmdline()
            assert words[-1] == f"--instead-of={first}"
            eventually(lambda: run.kinds("syncer") == ["started", "ended", "started"])

    def test_a_fenced_syncer_stands_by_from_then_on(self, eventually) -> None:  # type: ignore[no-untyped-def]
        fenced = standby("syncer", "raise SystemExit(9)", "import time; time.sleep(60)")
        with Supervision(unit("a"), fenced, restart=FAST) as run:
            eventually(lambda: run.kinds("syncer") == ["started", "ended", "fenced", "started"])
            assert any("stands by from now on" in event.text for event in run.events)

    def test_one_of_two_syncers_may_fail_for_good(self, eventually) -> None:  # type: ignore[no-untyped-def]
        broken = unit("standby-1", "raise SystemExit(2)", "syncer")
        with Supervision(unit("a"), unit("syncer", kind="syncer"), broken, restart=FAST) as run:
            eventually(lambda: "failed" in run.kinds("standby-1"))
            assert run.outcome is None and pid_of("syncer") is not None and run.kinds(None) == []


def names_here(region: str | None, **changes) -> list[str]:
    return [unit.name for unit in units_here(replace(NANO, **changes), "file:///b", region, str)]


def test_the_syncer_starts_in_the_home_region_also_where_no_island_lies() -> None:
    assert names_here(None) == ["iowa", "rhine", "syncer"]
    assert names_here("us", home_region="us") == ["iowa", "syncer"]
    assert names_here("eu", home_region="us") == ["rhine"]
    assert names_here("asia", home_region="asia") == ["syncer"]
    assert names_here("eu") == ["rhine", "syncer"], "with no home region, the first one"
    with pytest.raises(UsageError, match="no region 'mars'; it has: asia, eu, us"):
        names_here("mars", home_region="asia")


def test_a_region_without_the_syncer_says_where_it_is_expected() -> None:
    run = replace(NANO, home_region="us", islands=(IOWA, replace(RHINE, infra="ssh")))
    talk = "\n".join(starts_elsewhere(run, "gs://b/nano", "eu"))
    assert "rhine (ssh)" in talk and "diloco learner --run gs://b/nano --name rhine" in talk
    assert "region us, with the syncer: unless it runs already: diloco resume gs://b/nano --region us" in talk
    (other,) = starts_elsewhere(replace(NANO, home_region="us"), "gs://b/nano", "us")
    assert other == "region eu: unless it runs already: diloco resume gs://b/nano --region eu"
    assert not [*starts_elsewhere(NANO, "gs://b/nano", None)]


@pytest.mark.parametrize(("tokens", "consents"), [("gs://home/tokens", False), ("gs://far/tokens", True)])
def test_another_machine_is_told_to_consent_to_data_that_are_not_beside_the_run(tokens: str, consents: bool) -> None:
    settings = replace(NANO.settings, data=DataSettings(tokens=tokens))
    (other,) = starts_elsewhere(replace(NANO, settings=settings, home_region="us"), "gs://home/nano", "us")
    assert ("--allow-code blake3-" in other) == consents


def planned(run: RunFormat, **given: object) -> dict[str, str]:
    return {unit.name: unit.infra for unit in units_of(run, "file:///b", **given)}  # type: ignore[arg-type]


def test_where_islands_are_jobs_the_syncers_are_too_each_with_an_engine_of_its_own_that_may_take_it() -> None:
    jobs = replace(NANO, home_region="us", islands=(replace(IOWA, infra="slurm/us"), replace(RHINE, infra="slurm/eu")))
    learners = {"iowa": "slurm/us", "rhine": "slurm/eu"}
    assert planned(jobs) == {**learners, "syncer-0": "slurm/us", "syncer-1": "slurm/eu"}
    assert planned(jobs, region="us") == {"iowa": "slurm/us", "syncer-0": "slurm/us", "syncer-1": "slurm/us"}
    assert planned(jobs, region="eu") == {"rhine": "slurm/eu"}, "the home region has the syncers"
    assert planned(jobs, syncer_here=True) == {**learners, "syncer": "local"}
    mixed = replace(jobs, islands=(IOWA, jobs.islands[1]))
    assert planned(mixed) == {"iowa": "local", "rhine": "slurm/eu", "syncer-0": "slurm/eu", "syncer-1": "slurm/eu"}
    assert [unit.name for unit in units_here(mixed, "file:///b", None, str)] == ["iowa"]
    assert planned(NANO) == {"iowa": "local", "rhine": "local", "syncer": "local"}
    hosted = replace(jobs, settings=replace(jobs.settings, syncer=SyncerSettings(on_learners=True)))
    assert planned(hosted) == learners
    drains = {unit.name: unit.spec.command[5] for unit in units_of(mixed, "file:///b") if unit.island is not None}
    assert drains == {"iowa": "--drain=3.5s", "rhine": "--drain=20s"}, "a cluster lets it save what it has"
    assert not [*starts_elsewhere(jobs, "gs://b/nano", None)], "nothing is left to a person"


def test_syncers_alike_stand_by_and_come_back_as_what_they_were() -> None:
    units = syncer_units(URL, SyncerSettings(standbys=2), alike=True)
    assert [unit.name for unit in units] == ["syncer-0", "syncer-1", "syncer-2"]
    assert all(unit.command[-3:] == ("--standby", f"--name={unit.name}", "--alike") for unit in units)
    assert restarted(units[0], 4711).command == (*units[0].command, "--instead-of=4711")


def test_an_island_with_a_loop_of_its_owners_is_joined_in_a_script() -> None:
    run = replace(NANO, islands=(IOWA, replace(RHINE, infra="loop/addressed")))
    assert names_here(None, islands=run.islands) == ["iowa", "syncer"]
    (said,) = starts_elsewhere(run, "gs://b/nano", None)
    assert said == 'rhine (loop/addressed): in its own script: join("gs://b/nano", name="rhine", ...)'


def test_of_a_run_that_was_created_alone_everything_has_to_be_started() -> None:
    url, islands = "gs://b/nano", (IOWA, replace(RHINE, infra="loop/addressed"))
    assert [*starts_everywhere(replace(NANO, islands=islands), url)] == [
        f"the syncer, anywhere: diloco syncer --run {url}",
        f"iowa (local): start it there: diloco learner --run {url} --name iowa",
        f'rhine (loop/addressed): in its own script: join("{url}", name="rhine", ...)',
    ]


def test_jobs_of_a_run_that_was_created_alone_are_submitted_and_what_is_none_is_started() -> None:
    run = replace(NANO, islands=(IOWA, replace(RHINE, infra="slurm/eu")))
    assert [*starts_everywhere(run, "gs://b/nano")] == [
        "the jobs rhine, syncer-0, syncer-1, where they are submitted: diloco resume gs://b/nano",
        "iowa (local): start it there: diloco learner --run gs://b/nano --name iowa",
    ]


def test_what_is_started_elsewhere_has_its_regions_store_its_consent_and_its_key() -> None:
    data, model = DataSettings(tokens="gs://far/tokens"), ModelSettings(preset="gpt-pico")
    run = replace(NANO, settings=replace(NANO.settings, data=data, model=model))
    syncer, evaluates, *learners = starts_everywhere(run, "gs://b/nano")
    assert syncer.endswith("diloco syncer --run gs://b/nano") and "--allow-code blake3-" in evaluates
    assert len(learners) == 2 and all("--allow-code blake3-" in line for line in learners)
    regions = (RegionStore("eu", "s3://eu/nano"),)
    signed = replace(NANO, regions=regions, home_url="gs://b/nano", home_region="us", signing=Signing("0" * 64))
    said = "\n".join(starts_everywhere(signed, "gs://b/nano"))
    assert "diloco syncer --run gs://b/nano --allow-code blake3-" in said
    assert "diloco learner --run s3://eu/nano --name rhine" in said
    assert "diloco key request gs://b/nano syncer NAME FILE" in said
    assert "diloco key request s3://eu/nano learner rhine FILE" in said
    hosted = replace(NANO, settings=replace(NANO.settings, syncer=replace(NANO.settings.syncer, on_learners=True)))
    assert not [line for line in starts_everywhere(hosted, "gs://b/nano") if "diloco syncer" in line]


def test_cores_of_a_cpu_island_are_threads() -> None:
    assert threads_of(replace(IOWA, num_accelerators=4), 1) == 4
    assert threads_of(replace(IOWA, num_accelerators=2), 3) == 3
    assert threads_of(replace(IOWA, accelerator="H100-SXM", num_accelerators=8), 1) == 1
    four = replace(NANO, islands=(replace(IOWA, num_accelerators=4),))
    assert units_here(four, "file:///b", None, str)[0].environment["OMP_NUM_THREADS"] == "4"


def test_several_cuda_islands_of_a_machine_get_a_device_each() -> None:
    a, b = (replace(IOWA, name=name, accelerator="H100-SXM") for name in ("a", "b"))
    warned: list[str] = []
    assert devices_of([a, IOWA, b], warned.append, None) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert devices_of([a, IOWA], warned.append, None) == [{}, {}], "one alone sees what there is"
    assert [found["CUDA_VISIBLE_DEVICES"] for found in devices_of([a, b], warned.append, "5,7")] == ["5", "7"]
    assert not warned
    devices_of([a, b], warned.append, "5")
    assert warned == ["2 islands share 1 visible devices"]
