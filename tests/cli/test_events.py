"""`diloco events`, and what a supervision tells: who killed what was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.chaos.actions import record, record_plan
from diloco_cli.cli import events, jobs
from diloco_cli.cli.supervision import UNKNOWN, Teller
from diloco_cli.clock import monotonic_s, wall_s
from diloco_cli.events.bucket import EventReader, write_batch
from diloco_cli.events.cause import Cause
from diloco_cli.events.event import KINDS, Event, FreshEvent
from diloco_cli.observe import facts
from diloco_cli.runtime.registry import KnownRun
from diloco_cli.runtime.restart import Exit, exit_facts
from diloco_cli.runtime.supervisor import SupervisionEvent
from diloco_cli.store.local import LocalStore
from tests.cli.bucket import make_bucket
from tests.cli.conftest import Diloco, called

KILLED = "killed by SIGKILL after 3.0 s; restart in 0.2 s"
FAILED = Exit(0.0, 1, 2.0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_bucket(tmp_path / "nano")


def elsewhere(monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...], script: str) -> Any:
    monkeypatch.setattr(jobs, "log_commands", lambda *given: {units: ("sh", "-c", script)})
    monkeypatch.setattr(events, "open_known_run", lambda known: None)
    return events._logs_elsewhere(KnownRun("nano", "gs://b/nano"), None, 20, follow=False)


def test_one_connection_brings_the_logs_of_several_units(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "printf 'iowa|a|b\\nrhine|c\\nmars|x\\niowa|d\\n'; echo no such file >&2; exit 1"
    with elsewhere(monkeypatch, ("iowa", "rhine"), script) as (files, _):
        assert {name: path.read_text() for name, path in files.items()} == {"iowa": "a|b\nd\n", "rhine": "c\n"}
    assert "iowa, rhine: their logs end here: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(("refused", "status"), [(2, 255), (99, 255), (1, 3)])
def test_a_log_is_asked_for_again_where_its_host_refuses_the_connection(
    refused: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = f"cd {tmp_path}; echo >> asked; [ $(wc -l < asked) -gt {refused} ] && echo trained || exit {status}"
    with elsewhere(monkeypatch, ("iowa",), asks) as (files, _):
        assert files["iowa"].read_text() == ("trained\n" if refused == 2 else "")
    num_asked = len((tmp_path / "asked").read_text().splitlines())
    assert num_asked == {2: 3, 99: events.ATTEMPTS, 1: 1}[refused]
    assert ("its log ends here" in capsys.readouterr().err) == (refused != 2)


def told(url: str, *events: SupervisionEvent) -> tuple[list[SupervisionEvent], list[Event]]:
    """What was shown, and what the bucket has."""
    shown: list[SupervisionEvent] = []
    teller = Teller("nano", url, ["iowa", "rhine"], shown.append)
    for event in events:
        teller.tell(event)
    teller.close()
    return shown, EventReader().read(LocalStore(Path(url.removeprefix("file://"))))


def documented_data(kind: str) -> set[str]:
    return set(KINDS[kind].meaning.partition("(data: ")[2].removesuffix(")").split(", "))


def test_a_kill_by_chaos_is_told_from_others(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    record_plan("nano", "pause", "iowa", pid=7)
    record("nano", record_plan("nano", "kill", "iowa", pid=7), injected=True)
    killed = [SupervisionEvent("ended", "iowa", KILLED, {"pid": pid, "signal": "SIGKILL"}) for pid in (7, 8)]
    shown, written = told(url, *killed)
    assert shown[0].text == "killed by SIGKILL (chaos #2) after 3.0 s; restart in 0.2 s"
    assert UNKNOWN in shown[1].text
    assert [event.data["by"] for event in written] == ["chaos #2", "unknown"]
    assert written[0].data.keys() <= documented_data("ended")


def test_a_rank_that_was_killed_is_told_once(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    cause = Cause("rank 1 of 2 was killed by SIGKILL")
    _, written = told(
        url, SupervisionEvent("ended", "iowa", f"{cause.text}; {KILLED}", {"pid": 7, "signal": "SIGKILL"}, cause)
    )
    assert [event.text for event in written] == [cause.text, KILLED.replace("SIGKILL", f"SIGKILL ({UNKNOWN})")]


def test_the_bucket_has_the_error_once_and_documented_kinds(url: str) -> None:
    cause = Cause("your code: model.py:41 in batch: IndexError: x", "model.py:41")
    _, written = told(
        url,
        SupervisionEvent("started", "iowa", "process 7", {"pid": 7, "start": 1}),
        SupervisionEvent(
            "ended", "iowa", f"{cause.text}; ended with status 1", exit_facts(Exit(0.0, 1, 2.0), 7), cause
        ),
        SupervisionEvent("started", "iowa", "process 8, restart 1", {"pid": 8, "start": 2}),
        SupervisionEvent("failed", "iowa", "ended too often"),
        SupervisionEvent("leaving", None, "SIGTERM"),
    )
    assert [event.kind for event in written] == ["started", "error", "ended", "restarted", "gave_up", "leaving"]
    assert {event.kind for event in written} <= set(KINDS) and {event.unit for event in written} == {"iowa"}
    assert (written[1].text, written[2].text) == (cause.text, "ended with status 1")
    assert written[1].data == {"place": "model.py:41"}
    for event in (written[0], written[2], written[3]):
        assert event.data.keys() <= documented_data(event.kind)


def test_events_are_printed_in_order_as_text_or_json_lines_of_one_unit_or_all(diloco: Diloco, url: str) -> None:
    store = LocalStore(Path(url.removeprefix("file://")))
    long_ago = FreshEvent(monotonic_s() - 7200, "started", "long ago")
    write_batch(store, "iowa", [long_ago, FreshEvent(1e12, "ended", "bad \x1b[31m")])
    write_batch(store, "rhine", [FreshEvent(1e12, "started", "process 9", {"pid": 9})])
    plain = diloco("events", url)
    assert [line.split()[2] for line in plain.stdout.splitlines()] == ["iowa", "iowa", "rhine"]
    assert "\x1b" not in plain.stdout and "bad" in plain.stdout
    lines = [json.loads(line) for line in diloco("events", url, "--json", "--unit", "rhine").stdout.splitlines()]
    assert [(line["unit"], line["kind"], line["data"]) for line in lines] == [("rhine", "started", {"pid": 9})]
    mistyped = diloco("events", url, "--unit", "rhin")
    assert mistyped.returncode == 4 and "no unit 'rhin' is known in this run" in mistyped.stderr
    assert "rhine" in mistyped.stderr and diloco("events", url, "--unit", "syncer").returncode == 0
    recent = diloco("events", url, "--since", "1h", "--unit", "iowa").stdout.splitlines()
    assert len(recent) == 1 and "bad" in recent[0]


def test_since_counts_back_from_the_stores_time(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not from this machine's, whose clock is three hours behind."""
    store = LocalStore(Path(url.removeprefix("file://")))
    two_hours_ago = FreshEvent(monotonic_s() - 7200, "ended", "two hours ago")
    write_batch(store, "iowa", [two_hours_ago, FreshEvent(monotonic_s(), "started", "now")])
    monkeypatch.setattr(facts, "wall_s", lambda: wall_s() - 3 * 3600)
    assert called(monkeypatch, "events", url, "--since", "1h", "--unit", "iowa") == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["now"]
