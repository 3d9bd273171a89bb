"""`diloco status`: once, again and again, and as metrics, on buckets without any process."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from diloco_cli.cli import arguments, jobs
from diloco_cli.cli import status as command
from diloco_cli.cli import status as watching
from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.cli.status import Watcher, riding_out, with_interval
from diloco_cli.config.settings import RunSettings
from diloco_cli.engines.port import Job, JobState
from diloco_cli.errors import StoreError
from diloco_cli.observe.status import Status
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import StoreGoneError, StoreUnavailableError
from diloco_cli.store.wrappers import Deadline
from tests.cli.bucket import NANO, make_bucket, say
from tests.cli.conftest import Diloco
from tests.waiting import wait_until


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_bucket(tmp_path / "nano")


def test_nobody_heard_is_no_age(diloco: Diloco, url: str) -> None:
    data = json.loads(diloco("status", url, "--json").stdout)["data"]
    assert data["state"] == "STARTING" and data["age_s"] is None
    assert "no heartbeat yet" in diloco("status", url).stdout


def test_exit_code_5_says_so_in_one_json_object_or_as_text(diloco: Diloco, url: str, tmp_path: Path) -> None:
    for name in ("iowa", "rhine"):
        say(tmp_path / "nano", name, 1000)
    done = diloco("status", url, "--json", "--exit-code")
    body = json.loads(done.stdout)
    assert done.returncode == 5 and done.stderr == ""
    assert body["data"]["state"] == "SILENT" and body["error"]["code"] == "degraded" and body["ok"] is False
    plain = diloco("status", url, "--exit-code")
    assert plain.returncode == 5 and "SILENT" in plain.stdout and "error: run nano is SILENT" in plain.stderr
    assert diloco("status", url).returncode == 0


def test_jobs_that_wait_or_are_missing_are_said_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    islands = tuple(replace(island, infra=f"slurm/{island.region}") for island in NANO.islands)
    opened = open_run(make_bucket(tmp_path / "jobs", replace(NANO, islands=islands)))
    waits, gone = Job("iowa", "slurm", "7", JobState.QUEUED, "Resources"), Job("rhine", "slurm", "", JobState.GONE)
    killed = Job("syncer-1", "ssh/box", "71", JobState.GONE, "its process was killed")
    asked: list[OpenRun] = []

    def answer(opened: OpenRun) -> tuple[list[Job], str]:
        asked.append(opened)
        return [waits, gone, killed], "jobs: not asked: squeue"

    def look() -> Status:
        return Watcher(opened, Deadline(60.0), lambda *answer: told.append(answer)).look()

    told: list[object] = []
    monkeypatch.setattr(jobs, "asked", answer)
    for name in ("iowa", "rhine"):
        say(tmp_path / "jobs", name, 1000)
    current = look()
    assert (current.state, current.reason) == ("STARTING", "jobs wait: iowa (Resources)"), "its hooks are not called"
    assert current.jobs == [waits, gone, killed] and told == [(current.jobs, "jobs: not asked: squeue")]
    assert current.hint == f"diloco resume {opened.url}", "a syncer is lost, which nothing else shows"
    say(tmp_path / "jobs", "rhine", 1)
    assert look().jobs == [waits, killed], "it works on another cluster; of a syncer nothing else is heard"
    killed = Job("rhine", "ssh/box", "72", JobState.GONE, "its process was killed")
    assert look().jobs == [waits, killed], "what it said before that does not count"
    monkeypatch.setattr(command, "status_of", lambda *given: replace(current, hint="", state="MERGING"))
    assert look().hint == f"diloco resume {opened.url}"
    monkeypatch.setattr(command, "status_of", lambda *given: replace(current, state="STOPPED"))
    assert look() and len(asked) == 4, "of a run that is over nobody is asked"


@pytest.mark.parametrize(
    ("state", "hint"), [("RUNNING", "diloco logs rhine --run"), ("FAILED", "diloco logs rhine --run"), ("QUEUED", "")]
)
def test_why_a_job_that_began_is_not_heard_its_log_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, hint: str
) -> None:
    opened = open_run(make_bucket(tmp_path / "jobs"))
    say(tmp_path / "jobs", "iowa", 1)
    found = [Job("iowa", "ssh/box", "70", JobState.RUNNING), Job("rhine", "ssh/box", "71", JobState(state))]
    monkeypatch.setattr(jobs, "asked", lambda opened: (found, ""))
    assert Watcher(opened, Deadline(60.0)).look().hint == (f"{hint} {opened.url}" if hint else "")


def test_where_the_jobs_of_all_learners_have_failed_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_run(make_bucket(tmp_path / "jobs"))
    found = {
        name: Job(name, "slurm", "7", JobState.FAILED, "NonZeroExitCode") for name in ("iowa", "rhine", "syncer-0")
    }

    def told() -> tuple[str, str]:
        current = Watcher(opened, Deadline(60.0)).look()
        return current.state, current.hint

    monkeypatch.setattr(jobs, "asked", lambda opened: ([*found.values()], ""))
    assert told() == ("FAILED", f"diloco logs iowa --run {opened.url}"), "a resume would fail as they did"
    found["iowa"] = replace(found["iowa"], state=JobState.QUEUED)
    assert told() == ("STARTING", f"diloco logs rhine --run {opened.url}")
    found["rhine"] = replace(found["rhine"], state=JobState.QUEUED)
    assert told() == ("STARTING", f"diloco logs syncer-0 --run {opened.url}")
    found["iowa"] = found["rhine"] = replace(found["rhine"], state=JobState.FAILED)
    say(tmp_path / "jobs", "iowa", 1)
    assert told()[0] != "FAILED", "it was heard: another process works"


def test_where_this_machines_clock_is_hours_ahead_jobs_that_run_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, runs = open_run(make_bucket(tmp_path / "jobs")), ["iowa", "rhine"]
    for name in runs:
        say(tmp_path / "jobs", name, 3 * 3600)
    monkeypatch.setattr(jobs, "asked", lambda opened: ([Job(name, "x", "7", JobState.RUNNING) for name in runs], ""))
    current = Watcher(opened, Deadline(60.0)).look()
    assert current.state == "SILENT" and current.reason.endswith("is this machine's clock ahead of the store's?")
    assert current.hint == f"diloco doctor {opened.url}"
    runs.pop()
    assert Watcher(opened, Deadline(60.0)).look().hint == f"diloco resume {opened.url}"


def test_who_watches_asks_for_jobs_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, asked = open_run(make_bucket(tmp_path / "jobs")), [[Job("iowa", "slurm", "7", JobState.RUNNING)], []]
    monkeypatch.setattr(jobs, "asked", lambda opened: (asked.pop(0), ""))
    now_s = [100.0]
    monkeypatch.setattr(jobs, "monotonic_s", lambda: now_s[0])
    watcher = Watcher(opened, Deadline(60.0))
    assert [len(watcher.look().jobs) for _ in range(3)] == [1, 1, 1]
    now_s[0] += jobs.ASKED_EVERY_S
    assert watcher.look().jobs == []


def test_a_store_whose_clock_is_ahead_gives_right_ages_and_a_warning(diloco: Diloco, url: str, tmp_path: Path) -> None:
    say(tmp_path / "nano", "iowa", -600)
    say(tmp_path / "nano", "rhine", -590)
    body = json.loads(diloco("status", url, "--json").stdout)
    heard = {learner["name"]: learner["heard_s"] for learner in body["data"]["learners"]}
    assert heard["iowa"] == 0.0 and 9 < heard["rhine"] < 11
    assert 300 < body["data"]["clock_skew_s"] <= 600, "less by what passed until it was looked at"
    assert "ahead of this machine" in body["warnings"][0]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--watch"], ["--watch", "1.0"]),
        (["-w", "run"], ["-w", "1.0", "run"]),
        (["--watch", "--json"], ["--watch", "1.0", "--json"]),
        (["run", "--watch", "0.5"], ["run", "--watch", "0.5"]),
        (["--watch=3"], ["--watch=3"]),
        (["run"], ["run"]),
        ([], []),
    ],
)
def test_watch_may_stand_without_its_number(words: list[str], meant: list[str]) -> None:
    assert with_interval(words) == meant


class HangsWhenTold(LocalStore):
    """As a network file system whose server is away."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.works = threading.Event()
        self.works.set()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self.works.wait(60)
        return super().get(key, max_bytes)


def store_calls() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "store-call"]


def test_watching_a_store_that_hangs_takes_one_thread_and_shows_it_when_it_comes_back(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = HangsWhenTold(tmp_path / "nano")
    monkeypatch.setattr(arguments, "open_store", lambda url: hung)
    box = Deadline(20)
    watcher, said = Watcher(open_run(url, box), box), []
    assert watcher.look().state == "STARTING"
    monkeypatch.setattr(watching, "LOOK_S", 0.2)
    hung.works.clear()
    try:
        for _ in range(4):
            with riding_out("status", said.append):
                watcher.look()
        assert len(said) == 4 and all("no answer within 200 ms" in line for line in said)
        wait_until(lambda: len(store_calls()) == 1)  # a call that was answered may still be ending
    finally:
        hung.works.set()
    wait_until(lambda: not store_calls())
    say(tmp_path / "nano", "iowa", 0)
    monkeypatch.setattr(watching, "LOOK_S", 20)
    assert next(found.heard_s for found in watcher.look().learners if found.name == "iowa") is not None


def test_watching_prints_an_object_a_line_and_ends_quietly_when_interrupted(url: str) -> None:
    words = [sys.executable, "-m", "diloco_cli", "status", "-w", url, "--json"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(2):
        assert json.loads(child.stdout.readline())["command"] == "status"
    child.send_signal(signal.SIGINT)
    _, talk = child.communicate(timeout=10)
    assert (child.returncode, talk) == (130, "")


def test_a_buckets_path_and_a_run_file_name_a_run_that_this_directory_does_not_know(
    diloco: Diloco, quickstart: Path, tmp_path: Path
) -> None:
    make_bucket(
        quickstart / "bucket" / "quickstart", replace(NANO, name="quickstart", settings=RunSettings("quickstart"))
    )
    home = {"DILOCO_HOME": str(tmp_path / "none")}
    for text in ("q/run.yaml", "q/bucket/quickstart", f"{tmp_path}/q/bucket/quickstart/"):
        done = diloco("status", text, "--json", **home)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["data"]["run"] == "quickstart"


def test_a_run_file_of_a_run_that_was_never_started_is_not_found(diloco: Diloco, quickstart: Path) -> None:
    done = diloco("status", "q/run.yaml")
    assert done.returncode in (4, 6) and "hint:" in done.stderr and "Traceback" not in done.stderr
    os.makedirs(quickstart / "bucket" / "quickstart")
    assert diloco("status", "q/run.yaml").returncode == 4


def test_a_path_without_a_run_is_told_as_such(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        done = diloco("status", str(path))
        assert done.returncode == 4 and "no run is there: it holds no FORMAT.json" in done.stderr
        assert str(path) in done.stderr and "diloco runs" in done.stderr


def test_a_path_whose_disk_is_gone_is_told_as_its_url_is(diloco: Diloco, tmp_path: Path) -> None:
    for word in (f"{tmp_path}/nas/run", f"file://{tmp_path}/nas/run"):
        done = diloco("status", word)
        assert done.returncode == 6 and "hint: mount the disk" in done.stderr


WATCH = [sys.executable, "-m", "diloco_cli", "status", "--watch", "0.2"]


def test_watching_a_run_before_its_launch_says_so_and_waits(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nano"
    child = subprocess.Popen([*WATCH, url, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    assert "waiting for it (Ctrl-C ends)" in child.stderr.readline()
    make_bucket(tmp_path / "nano")
    assert json.loads(child.stdout.readline())["data"]["state"] == "STARTING"
    child.send_signal(signal.SIGINT)
    _, talk = child.communicate(timeout=30)
    assert (child.returncode, talk) == (130, ""), "it says so once"


def read_until(terminal: int, words: str) -> str:
    seen = ""
    while words not in seen:
        seen += os.read(terminal, 65_536).decode(errors="replace")
    return seen


def test_ctrl_c_leaves_the_live_screen_as_it_was_found(tmp_path: Path) -> None:
    url, (ours, theirs) = make_bucket(tmp_path / "nano"), pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    child = subprocess.Popen(
        [*WATCH, url], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    begun = read_until(ours, "STARTING")
    assert "\x1b[?1049h" in begun, "on the alternate screen"
    child.send_signal(signal.SIGINT)
    ended = read_until(ours, "\x1b[?1049l")
    assert child.wait(30) == 130 and "Traceback" not in ended


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The states of the next looks; then the run stays as it is."""
    states = ["MERGING", "FINISHED"]
    read = watching.read_status

    def read_next(opened: OpenRun, known: RunState | None = None, ask: object = None) -> tuple[Status, RunState]:
        current, state = read(opened, known)
        return replace(current, state=states.pop(0)), state

    monkeypatch.setattr(watching, "read_status", read_next)
    yield states
    assert not states


@pytest.mark.parametrize("as_json", [True, False])
def test_watching_ends_with_the_run(
    ends: list[str], as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bucket(tmp_path / "nano")
    command.status(f"{tmp_path}/nano", watch=0.0, as_json=as_json, exit_code=False, serve=None, textfile=None)
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert [json.loads(line)["data"]["state"] for line in lines] == ["MERGING", "FINISHED"]
    else:
        assert lines[0].startswith("nano MERGING") and lines[1].startswith("nano FINISHED")
        assert lines[2].startswith("run nano "), "the summary"


SAMPLE = 'diloco_tokens_merged_total{run="nano"} 0.0\n'


def test_the_endpoint_says_where_it_is_and_serves_until_ctrl_c(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "diloco_cli", "status", make_bucket(tmp_path / "nano"), "--serve", "0"]
    environment = os.environ | {"DILOCO_HOME": str(tmp_path / "home")}
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stderr is not None
    found = re.search(r"(http://127\.0\.0\.1:\d+/metrics), with the bearer token in (.+)\n", child.stderr.readline())
    assert found is not None
    token = Path(found[2]).read_text()
    with urlopen(Request(found[1], headers={"Authorization": f"Bearer {token}"}), timeout=30) as answer:
        assert SAMPLE in answer.read().decode()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130


def test_a_textfile_is_written_whole_and_nothing_else_is(diloco: Diloco, tmp_path: Path) -> None:
    url = make_bucket(tmp_path / "nano")
    (tmp_path / "out").mkdir()
    done = diloco("status", url, "--textfile", str(tmp_path / "out" / "diloco.prom"))
    assert (done.returncode, done.stdout) == (0, "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diloco.prom"]
    text = (tmp_path / "out" / "diloco.prom").read_text()
    assert SAMPLE in text and text.endswith("# EOF\n")
    nowhere = diloco("status", url, "--textfile", str(tmp_path / "none" / "diloco.prom"))
    assert nowhere.returncode == 2 and "cannot write" in nowhere.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--serve"], ["--serve", "127.0.0.1:9464"]),
        (["--serve", "run"], ["--serve", "127.0.0.1:9464", "run"]),
        (["--serve", "gs://b/run"], ["--serve", "127.0.0.1:9464", "gs://b/run"]),
        (["run", "--serve", "0.0.0.0:80"], ["run", "--serve", "0.0.0.0:80"]),
        (["--serve", "[::1]:80", "run"], ["--serve", "[::1]:80", "run"]),
        (["--serve", "80"], ["--serve", "80"]),
    ],
)
def test_serve_may_stand_without_its_address(words: list[str], meant: list[str]) -> None:
    assert with_interval(words) == meant


def test_a_bucket_that_is_gone_ends_them() -> None:
    told: list[str] = []
    with riding_out("events", told.append):
        raise StoreUnavailableError("no answer", where="gs://b")
    with pytest.raises(StoreError), riding_out("events", told.append):
        raise StoreGoneError("no such bucket", where="gs://b")
    assert told == ["events: gs://b: no answer"]
