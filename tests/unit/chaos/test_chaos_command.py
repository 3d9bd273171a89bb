"""`diloco chaos` and `diloco logs` as a person meets them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from diloco_cli.cli import chaos as command
from diloco_cli.cli import jobs
from diloco_cli.cli.main import add_command
from diloco_cli.engines.port import Job, JobState
from diloco_cli.errors import NotFoundError, RefusedError
from diloco_cli.events.bucket import EventReader
from diloco_cli.events.event import KINDS
from diloco_cli.runtime.registry import log_path, remember_run, run_directory
from diloco_cli.store.local import LocalStore

URL = "file:///bucket/nano"
pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def invoke():
    app = typer.Typer()
    for name in ("chaos", "logs"):
        add_command(app, name)
    remember_run(URL)

    def run(*words: str, error: type[Exception] | None = None) -> str:
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, error) if error else result.exception is None
        return result.stdout

    return run


def test_a_dry_run_does_nothing(invoke, start_unit_of, home):
    child, _ = start_unit_of(URL, "iowa")
    invoke("chaos", "kill", "iowa", "--dry-run")
    invoke("chaos", "pause", "iowa", "-n", "--for", "10s")
    assert child.poll() is None
    assert not (run_directory(URL) / "chaos.jsonl").exists()


def test_kill_answers_in_json(invoke, start_unit_of):
    child, _ = start_unit_of(URL, "iowa")
    body = json.loads(invoke("chaos", "kill", "iowa", "--hold", "--json"))
    assert child.wait() == -9
    fault = body["data"]["faults"][0]
    assert (body["command"], fault["fault"], fault["target"]) == ("chaos kill", "kill", "iowa")
    assert (fault["injected"], fault["verified"]) == (True, True)
    unit = json.loads(invoke("chaos", "list", "--json"))["data"]["units"][0]
    assert (unit["state"], unit["held"], unit["last_fault"]["fault"]) == ("dead", True, "kill")
    assert json.loads(invoke("chaos", "revive", "iowa", "--json"))["data"]["released"] is True


def test_a_pause_with_a_duration_is_healed(invoke, start_unit_of):
    start_unit_of(URL, "iowa")
    assert "injected, verified, healed" in invoke("chaos", "pause", "iowa", "--for", "100ms", "--run", "nano")
    assert "running" in invoke("chaos", "list")


def test_the_bucket_is_told_of_a_fault_and_its_end(invoke, start_unit_of, tmp_path):
    (tmp_path / "bucket/nano").mkdir(parents=True)
    url = f"file://{tmp_path}/bucket/nano"
    remember_run(url)
    start_unit_of(url, "iowa")
    invoke("chaos", "pause", "iowa", "--for", "100ms")
    invoke("chaos", "kill", "iowa")
    told = EventReader().read(LocalStore(tmp_path / "bucket/nano"))
    assert [event.kind for event in told] == ["chaos", "revived", "chaos"]
    assert told[2].text.startswith("on purpose (chaos #2): kill iowa") and told[2].text.endswith("with SIGKILL")
    assert told[2].data == {"number": 2, "fault": "kill"} and "(data: number, fault)" in KINDS["chaos"].meaning
    assert {event.unit for event in told} == {"iowa"}


def test_what_the_rails_refuse_is_an_error(invoke):
    invoke("chaos", "kill", "iowa", error=RefusedError)
    invoke("chaos", "kill", "iowa", "--run", "other", error=NotFoundError)


def test_logs_name_their_units_if_there_are_several(invoke):
    for unit in ("iowa", "syncer"):
        log_path(URL, unit).parent.mkdir(parents=True, exist_ok=True)
        log_path(URL, unit).write_text(f"one\n\x1b[31m{unit}\n")
    assert invoke("logs", "--lines", "1") == "iowa   | \\x1b[31miowa\nsyncer | \\x1b[31msyncer\n"
    assert invoke("logs", "syncer") == "one\n\\x1b[31msyncer\n"


def test_a_unit_that_is_a_job_is_broken_in_its_job(invoke, monkeypatch):
    asked, unit = [], SimpleNamespace(url=URL, infra="slurm/us")
    job = Job("iowa", "slurm", "7", JobState.RUNNING, node="us0")

    def beside(unit, job, words, within_s):
        asked.append((*words, within_s - command.ANSWERS_WITHIN_S))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return "in the job\n"

    monkeypatch.setattr(command, "open_known_run", lambda known: None)
    monkeypatch.setattr(jobs, "job_of", lambda opened, name: (unit, job) if name == "iowa" else None)
    monkeypatch.setattr(jobs, "run_beside", beside)
    assert invoke("chaos", "kill", "iowa", "--hold", "-n") == "in the job\n"
    invoke("chaos", "revive", "iowa", "--json")
    invoke("chaos", "pause", "iowa")
    invoke("chaos", "pause", "iowa", "--for", "30 s", error=SystemExit)
    run = f"--run={URL}"
    assert asked == [
        ("chaos", "kill", "iowa", run, "--hold", "--dry-run", 0.0),
        ("chaos", "revive", "iowa", run, "--json", 0.0),
        ("chaos", "pause", "iowa", run, 0.0),
        ("chaos", "pause", "iowa", run, "--for=30 s", 30.0),
        ("chaos", "revive", "iowa", run, 30.0),
    ], "a pause that is cut short is healed"


def test_a_job_is_taken_away_by_its_engine(invoke, monkeypatch):
    taken, told = [], []
    job = Job("iowa", "slurm", "7", JobState.RUNNING)
    found = {"iowa": (SimpleNamespace(infra="slurm/us"), job)}
    monkeypatch.setattr(command, "open_known_run", lambda known: None)
    monkeypatch.setattr(command, "tell_event", lambda *words: told.append(words[:4]))
    monkeypatch.setattr(jobs, "job_of", lambda opened, name: found.get(name))
    monkeypatch.setattr(jobs, "engine_for", lambda url, infra: SimpleNamespace(preempt=taken.append))
    assert "would: slurm takes job 7 away" in invoke("chaos", "preempt", "iowa", "-n") and not taken
    invoke("chaos", "preempt", "iowa")
    assert taken == [job]
    assert told == [(URL, "chaos", "iowa", "on purpose: slurm takes job 7 away, and queues it again")]
    invoke("chaos", "preempt", "rhine", error=RefusedError)
    invoke("chaos", "preempt", "supervisor", error=RefusedError)
