"""What a resume leaves to the machines on which it works, which region it goes on with; one that is withdrawn."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_cli.cli import supervision as calling
from diloco_cli.cli.arguments import OpenRun
from diloco_cli.cli.hooks import Hooks
from diloco_cli.cli.operators import _as_before
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import SyncerSettings
from diloco_cli.errors import DilocoError, TakenError, UsageError
from diloco_cli.events.bucket import EventReader
from diloco_cli.observe.facts import Heard, Local
from diloco_cli.protocol.log.heartbeats import process_on
from diloco_cli.protocol.log.records import RegionStore
from diloco_cli.runtime.consent import NamedHere
from diloco_cli.runtime.daemon import SystemClock
from diloco_cli.runtime.processes import Identity
from diloco_cli.runtime.registry import Resuming, UnitRecord, note_resuming, note_sites, read_resuming, write_unit
from diloco_cli.runtime.supervisor import SupervisionResult
from diloco_cli.runtime.units import syncer_units, units_of
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.syncer.operator import Operator
from tests.unit.observe.test_status import STATE, SYNCER, facts
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.records import make_run

URL = "file:///bucket/toy"


@pytest.mark.parametrize(
    ("age_s", "changes", "known_here", "stands_by"),
    [
        (1.0, {}, False, True),
        (1.0, {"host": os.uname().nodename}, False, True),  # under another DILOCO_HOME
        (1.0, {"host": os.uname().nodename}, True, False),  # ours, which has just died: it comes back at once
        (1.0, {}, True, True),
        (20.0, {}, False, True),
        (1.0, {"state": "DONE"}, False, False),
        (47.0, {}, False, False),
        (None, {}, False, False),
    ],
)
def test_a_resume_throws_no_syncer_out_that_serves_elsewhere(
    age_s: float | None,
    changes: dict[str, str],
    known_here: bool,
    stands_by: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    heard = None if age_s is None else Heard(replace(SYNCER, **changes), age_s)
    seen = replace(facts(iowa=None, rhine=None), syncer=heard)  # type: ignore[arg-type]
    if known_here:
        write_unit(seen.url, UnitRecord("syncer", "syncer", Identity(1, "then"), 0.0))
    monkeypatch.setattr(calling, "boxed", lambda opened, box: SimpleNamespace(facts=lambda: seen))
    units = syncer_units(seen.url, SyncerSettings())
    opened: Any = SimpleNamespace(url=seen.url)
    [syncer] = calling._beside_others(opened, STATE, units)
    assert ("--standby" in syncer.command) == stands_by
    assert stands_by or [syncer] == units


@pytest.mark.parametrize(
    ("changes", "says"),
    [({}, "a syncer on mars serves the run"), ({"state": "DONE"}, "no syncer is left here")],
)
def test_a_machine_that_leaves_says_whether_a_syncer_serves_the_run_elsewhere(
    changes: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each learner's machine may have a syncer: with one on another machine, nobody has to start one."""
    seen = replace(facts(), syncer=Heard(replace(SYNCER, host="mars", **changes), 1.0))  # type: ignore[arg-type]
    run = replace(seen.run, settings=replace(seen.run.settings, syncer=SyncerSettings(on_learners=True)))
    opened: Any = SimpleNamespace(url=seen.url, format=run, facts=lambda: seen, local=Local)
    monkeypatch.setattr(calling, "boxed", lambda opened, box: opened)
    calling._report(opened, SupervisionResult("left", 143, ("iowa",)), [], None, "resume", False)
    told = capsys.readouterr().err
    assert "ended here: iowa" in told and says in told and told.count("syncer") == 1 + says.startswith("no")


HERE = os.uname().nodename


@pytest.mark.parametrize(
    ("error", "host", "known_here", "started"),
    [
        (TakenError("iowa takes part already"), "another", False, ["rhine"]),
        (TakenError("iowa takes part already"), "another", True, ["rhine"]),  # it was here once
        (TakenError("iowa takes part already"), HERE, False, ["rhine"]),  # under another DILOCO_HOME
        (StoreUnavailableError("away"), "another", False, ["rhine"]),  # nobody can say whether it still lives
        (None, "another", False, ["iowa", "rhine"]),  # it was heard a moment ago, and is not heard again
        (TakenError("iowa takes part already"), HERE, True, ["iowa", "rhine"]),  # ours: adopted, or back at once
    ],
)
def test_a_resume_takes_no_living_learners_place(
    error: DilocoError | None,
    host: str,
    known_here: bool,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    seen = facts(rhine=None, syncer=None, process=process_on(host, 7))
    if known_here:
        write_unit(seen.url, UnitRecord("iowa", "learner", Identity(1, "then"), 0.0))

    def perform(steps: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(calling, "boxed", lambda opened, box: SimpleNamespace(facts=lambda: seen))
    opened: Any = SimpleNamespace(url=seen.url, format=seen.run, perform=perform)
    learners = [unit.spec for unit in units_of(seen.run, seen.url) if unit.island is not None]
    assert [unit.name for unit in calling._beside_others(opened, STATE, learners)] == started
    assert ("iowa works on another machine" in capsys.readouterr().err) == ("iowa" not in started)


@pytest.mark.parametrize(
    ("noted", "typed", "begun"),
    [
        ((), None, (None, False)),
        (("--region=eu",), None, ("eu", False)),
        (("--region=eu", "--syncer=here"), None, ("eu", True)),
        (("--region=eu", "--syncer=here"), "us", ("us", False)),
    ],
)
def test_a_resume_goes_on_with_what_this_machine_had(
    noted: tuple[str, ...],
    typed: str | None,
    begun: tuple[str | None, bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    note_resuming(URL, Resuming(noted))
    assert _as_before(SimpleNamespace(url=URL), typed, False) == begun
    monkeypatch.setattr("diloco_cli.cli.operators.is_started_by_diloco", lambda: True)
    assert _as_before(SimpleNamespace(url=URL), typed, False) == (typed, False), "a successor has all its words"


def test_a_resume_whose_engine_is_away_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    log = WrittenLog(replace(run, islands=tuple(replace(island, infra="slurm/us") for island in run.islands)))
    log.append("stop")
    clock = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
    opened = OpenRun("toy", URL, log.store, log.run, clock, EventReader())
    note_sites(URL, {"slurm/us": None})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="no command squeue") as refused:
        calling.go_on(opened, None, True, False, "resume", NamedHere((), None))
    assert "where the cluster's commands are" in (hint := refused.value.hint or "") and "`via` of a site" in hint
    assert not log.store.list("request/")


@pytest.mark.parametrize(
    ("region", "syncer_here", "words"), [("eu", True, ("--region=eu", "--syncer=here")), (None, False, ())]
)
def test_a_supervision_notes_how_a_successor_goes_on(
    region: str | None, syncer_here: bool, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    log = WrittenLog(make_run())
    clock = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
    opened = OpenRun("toy", URL, log.store, log.run, clock, EventReader())
    here = syncer_units(URL, SyncerSettings())
    for name, answer in (("units_here", here), ("units_of", []), ("consented", None), ("supervise_run", 0)):
        monkeypatch.setattr(calling, name, lambda *given, answer=answer, **named: answer)
    hooks = Hooks(webhook="https://h/secret")
    assert calling.go_on(opened, region, False, False, "resume", NamedHere((), None), hooks, syncer_here) == 0
    assert read_resuming(URL) == Resuming(words, {"DILOCO_WEBHOOK": "https://h/secret"})


@pytest.mark.parametrize("is_home", [True, False])
def test_a_resume_that_is_withdrawn_before_a_syncer_serves_ends_what_runs_here(is_home: bool) -> None:
    log = WrittenLog(make_run())
    log.append("stop")
    run = log.run if is_home else replace(log.run, home_url="file:///home", regions=(RegionStore("eu", URL, 0.1),))
    clock = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
    operator = Operator(run, log.store, clock, lambda text: None)
    assert operator.withdraw_stop(log.state)
    followed = calling.FollowedLog(OpenRun("toy", URL, log.store, run, clock, EventReader()))
    assert followed.phase() == "RUNNING", "it is being resumed"
    assert operator.keep_stopped(log.state)
    assert followed.phase() == ("STOPPED" if is_home else "RUNNING")


def test_a_second_resume_waits_for_nothing_while_the_first_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log says STOPPED until a syncer has carried the first one out."""
    log = WrittenLog(make_run())
    log.append("stop")
    clock = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
    opened = OpenRun("toy", URL, log.store, log.run, clock, EventReader())
    waited: list[float] = []
    monkeypatch.setattr(calling, "living_supervisor", lambda url: Identity(1, "then"))
    monkeypatch.setattr(calling, "open_known_run", lambda known: opened)
    monkeypatch.setattr(calling, "refuse_supervised", lambda url, patience_s: waited.append(patience_s))
    calling.refuse_unless_free(URL)
    assert waited == [calling.ENDS_WITHIN_S] and "was just stopped" in capsys.readouterr().err
    assert Operator(log.run, log.store, clock, lambda text: None).withdraw_stop(log.state)
    calling.refuse_unless_free(URL)
    assert waited[1:] == [0.0] and not capsys.readouterr().err


def test_a_detached_run_says_how_to_leave_it_here_and_how_to_stop_it_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calling, "start_successor", lambda url: Identity(4711, "now"))
    opened: Any = SimpleNamespace(url=URL, name="toy", word="toy")
    assert calling._detached(opened, False, "launch") == 0
    hint = capsys.readouterr().err
    assert "diloco stop toy; or, to end only what runs here: kill 4711" in hint
