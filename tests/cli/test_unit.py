"""The contract of `diloco unit` with an engine: how it ends, and what it does before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.cli import unit as in_job
from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.cli.unit import Notices, unit
from diloco_cli.config.codec import replace
from diloco_cli.engines.port import Job, JobState
from diloco_cli.engines.slurm import Slurm
from diloco_cli.environment import environment_value
from diloco_cli.errors import StoreError, TryAgainError, UsageError
from diloco_cli.runtime.registry import log_path, supervisor_lock
from diloco_cli.runtime.supervisor import Asking, Reason, SupervisionResult
from diloco_cli.runtime.units import JOB_DRAIN_S
from tests.cli.bucket import NANO, make_bucket

RUN = replace(NANO, islands=(replace(NANO.islands[0], infra="slurm/us"), NANO.islands[1]))


@pytest.mark.parametrize(
    ("reason", "signum", "status"),
    [
        ("finished", None, 0),
        ("stopped", None, 0),
        ("fenced", None, 9),
        ("finished", signal.SIGUSR2, 0),
        ("fenced", signal.SIGUSR2, 9),
        ("interrupted", signal.SIGUSR2, 0),
        ("left", signal.SIGTERM, 143),
        ("left", signal.SIGUSR2, 75),
    ],
)
@pytest.mark.parametrize("refused", [False, True])
def test_how_it_ends(
    reason: Reason,
    signum: signal.Signals | None,
    status: int,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again: list[str] = []
    state = environment_value("XDG_STATE_HOME") or ""
    monkeypatch.delenv("DILOCO_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", state)
    url = make_bucket(tmp_path / "nano", RUN)
    key = tmp_path / "diloco-nano-0e7ad4-jobs" / "iowa.key"
    key.parent.mkdir()
    key.write_text("o" * 32)
    key.chmod(0o600)
    monkeypatch.setenv("DILOCO_SIGNING_KEY_FILE", str(key))

    def supervised(at: str, units: list[Any], *, signals: Notices, **others: Any) -> SupervisionResult:
        assert 30.0 > others["stop"].kill_s > JOB_DRAIN_S
        assert (at, [one.name for one in units]) == (url, ["iowa"]) and f"--run={url}" in units[0].command
        assert units[0].environment["DILOCO_PARENT"] == str(os.getpid()), "it dies with this process"
        assert log_path(url, "iowa").is_symlink() and environment_value("XDG_STATE_HOME") != state
        if signum is not None:
            signals._hear(signum, None)
            signals._hear(signum, None)  # an engine tells as often as it likes
            assert signals.count == 1
        return SupervisionResult(reason, signum)

    def queue_again() -> None:
        again.append("now")
        if refused:
            raise TryAgainError("scontrol: no")

    monkeypatch.setattr(in_job, "supervise", supervised)
    monkeypatch.setattr(in_job, "queue_again", queue_again)
    with pytest.raises(SystemExit) as ended:
        unit("iowa", url, [], [], [])
    assert ended.value.code == status and len(again) == (status == 75)
    assert key.exists() == (status != 0), "until the run is over it comes back, and needs it"


def test_a_job_that_is_cancelled_while_it_drains_before_its_time_is_up_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervised(*given: Any, signals: Notices, **others: Any) -> SupervisionResult:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        return SupervisionResult("left", signals.first)

    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(in_job, "supervise", supervised)
    monkeypatch.setattr(in_job, "queue_again", lambda: pytest.fail("it is cancelled"))
    with pytest.raises(SystemExit) as ended:
        unit("iowa", make_bucket(tmp_path / "nano", RUN), [], [], [])
    assert ended.value.code == 128 + signal.SIGUSR2


def test_where_each_node_is_a_job_of_its_own_it_is_told_where_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervised(at: str, units: list[Any], **others: Any) -> SupervisionResult:
        assert units[0].command[-2:] == ("--rendezvous=iowa-0:29400", "--node-rank=1")
        return SupervisionResult("finished", None)

    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(in_job, "supervise", supervised)
    run = replace(RUN, islands=(replace(RUN.islands[0], nodes=2, ranks=2), RUN.islands[1]))
    with pytest.raises(SystemExit) as ended:
        unit("iowa", make_bucket(tmp_path / "nano", run), [], [], [], rendezvous="iowa-0:29400", node_rank=1)
    assert ended.value.code == 0


def test_a_job_that_begins_while_its_store_is_away_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(in_job, "supervise", lambda *given, **others: SupervisionResult("finished", None))
    tries: list[str] = []

    def mounted_late(run: str, **given: Any) -> OpenRun:
        tries.append(run)
        if len(tries) == 3:
            make_bucket(tmp_path / "nano", RUN)
        return open_run(run, **given)

    monkeypatch.setattr(in_job, "open_run", mounted_late)
    with pytest.raises(SystemExit) as ended:
        unit("iowa", f"file://{tmp_path}/nano", [], [], [])
    assert ended.value.code == 0 and len(tries) == 3
    assert capsys.readouterr().err.count("restart in ") == 2


def test_a_job_whose_time_is_up_before_its_store_answers_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []

    def away(run: str, **given: Any) -> OpenRun:
        os.kill(os.getpid(), signal.SIGUSR2)
        raise StoreError("it does not answer")

    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(in_job, "open_run", away)
    monkeypatch.setattr(in_job, "queue_again", lambda: again.append("now"))
    with pytest.raises(SystemExit) as ended:
        unit("iowa", "s3://bkt/nano", [], [], [])
    assert ended.value.code == 75 and again == ["now"]


@pytest.mark.parametrize(
    ("name", "on_learners", "every"), [("iowa", False, 0), ("syncer-0", False, 2), ("iowa", True, 1)]
)
def test_who_serves_the_run_hastens_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, on_learners: bool, every: int
) -> None:
    """`every`: how many take turns."""
    run = replace(RUN, settings=replace(RUN.settings, syncer=replace(RUN.settings.syncer, on_learners=on_learners)))
    held = [Job("rhine", "slurm", "7", JobState.QUEUED, "BeginTime")]
    hastened = threading.Event()
    waits: list[float] = []
    monkeypatch.setattr(Slurm, "jobs", lambda self, *given: held)
    monkeypatch.setattr(Slurm, "hasten", lambda self, jobs: hastened.set() if jobs is held else None)

    class NotedAsking(Asking):
        def __init__(self, ask: Callable[[], str], every_s: float) -> None:
            waits.append(every_s)
            super().__init__(ask, every_s)

    def supervised(*given: Any, **others: Any) -> SupervisionResult:
        assert not every or hastened.wait(60.0)
        return SupervisionResult("finished", None)

    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(in_job, "Asking", NotedAsking)
    monkeypatch.setattr(in_job, "supervise", supervised)
    with pytest.raises(SystemExit):
        unit(name, make_bucket(tmp_path / "nano", run), [], [], [])
    assert waits == [in_job.HASTENS_EVERY_S * every] * bool(every)


def test_a_notice_counts_though_it_was_ignored_before() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Notices() as heard:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert heard.count == 1 and heard.first == signal.SIGUSR2
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("name", ["iowa", "i*"])
def test_what_acts_beside_it_has_the_notes_of_its_supervisor_on_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Folders of supervisors that were killed lie there, too."""

    def begun(path: str, words: tuple[str, ...]) -> None:
        raise SystemExit(" ".join(words[-2:]) + f" with {Path(environment_value('XDG_STATE_HOME') or '').name}")

    monkeypatch.delenv("DILOCO_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "none")
    monkeypatch.setattr(in_job, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "execv", begun)
    for folder in ("diloco-iowa-dead", "diloco-iowa-living", "diloco-iowa-late", "diloco-ohio-other"):
        (tmp_path / folder).mkdir()
    with pytest.MonkeyPatch.context() as there:
        there.setenv("XDG_STATE_HOME", str(tmp_path / "diloco-iowa-living"))
        url = make_bucket(tmp_path / "nano", RUN)
        with supervisor_lock(url), pytest.raises(SystemExit) as ended:
            there.setenv("XDG_STATE_HOME", "none")
            unit(name, url, [], [], ["chaos", "kill"])
    assert str(ended.value) == f"chaos kill with {'diloco-iowa-living' if name == 'iowa' else 'none'}"


def test_a_run_has_certain_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    with pytest.raises(UsageError, match=r"no unit 'mars'; it has: iowa, rhine, syncer-0, syncer-1, syncer$"):
        unit("mars", make_bucket(tmp_path / "nano", RUN), [], [], [])


def test_once_the_run_is_over_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(in_job, "supervise", None)
    url = make_bucket(tmp_path / "nano", RUN)
    for phase in ("FINISHED", "STOPPED"):
        monkeypatch.setattr(in_job, "head_of", lambda opened, phase=phase: replace(in_job_state(), phase=phase))
        assert unit("iowa", url, [], [], []) is None


def in_job_state() -> Any:
    from tests.unit.observe.test_status import STATE

    return STATE
