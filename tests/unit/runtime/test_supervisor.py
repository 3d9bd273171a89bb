"""Real processes under supervision: they come back, stay down when held, and leave in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.environment import environment_with
from diloco_cli.errors import RefusedError, RunFailedError, StoreError, UsageError
from diloco_cli.runtime import supervisor, units
from diloco_cli.runtime.processes import is_alive, signal_process
from diloco_cli.runtime.registry import (
    Resuming,
    UnitRecord,
    hold,
    living_supervisor,
    log_path,
    note_resuming,
    read_unit,
    release,
    run_directory,
)
from diloco_cli.runtime.restart import RestartPolicy
from diloco_cli.runtime.supervisor import (
    Ending,
    SignalCount,
    StopPolicy,
    SupervisionEvent,
    SupervisionResult,
    WholeRun,
    begin_ending,
    ending_after_a_signal,
    supervise,
)
from diloco_cli.runtime.units import UnitSpec, diloco_command, start_detached, start_unit, thread_environment
from diloco_cli.store.port import StoreGoneError
from tests.waiting import BOUND_S, wait_until

pytestmark = pytest.mark.usefixtures("home")
RUN = "nano"
SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
FAR_S = 2 * BOUND_S  # what waits for that long is waited for in vain
STOP = StopPolicy(finish_s=0.0, leave_s=0.3, kill_s=FAR_S, give_up_s=2 * FAR_S)
SUPERVISOR = """
import sys
from diloco_cli.runtime.supervisor import StopPolicy, WholeRun, supervise
from diloco_cli.runtime.units import UnitSpec
command = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
units = [UnitSpec(name, "learner", command) for name in ("a", "b")]
def show(event):
    print(event.kind, event.unit or "", event.text, flush=True)
def stop_request():
    print("stop request written", flush=True)
out = supervise(
    "nano", units, run_state=lambda: "RUNNING", on_event=show, poll_s=0.02,
    whole_run=WholeRun(tuple, stop_request),
    stop=StopPolicy(finish_s=0.0, leave_s=0.5, kill_s=120.0, give_up_s=120.0),
)
print(out.reason, out.exit_status, flush=True)
sys.exit(out.exit_status)
"""


def unit(name: str, code: str = SLEEP, kind: str = "learner") -> UnitSpec:
    return UnitSpec(name, kind, (sys.executable, "-S", "-c", code))


class Supervision:
    """`supervise` in a thread, with what it told."""

    def __init__(self, *units: UnitSpec, **options) -> None:
        self.events: list[SupervisionEvent] = []
        self.state = "RUNNING"
        self.signals = SignalCount()
        self.outcome: SupervisionResult | None = None
        self.error: Exception | None = None
        self._units = units
        self._options = {"poll_s": 0.02, "state_every_s": 0.05, "stop": STOP, **options}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Supervision:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> SupervisionResult | None:
        """As if one signal had come; until all have left."""
        self.signals.count, self.signals.first = 1, signal.SIGINT
        return self.join()

    def join(self) -> SupervisionResult | None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()
        return self.outcome

    def kinds(self, name: str | None) -> list[str]:
        return [event.kind for event in self.events if event.unit == name]

    def _run(self) -> None:
        options = {
            "run_state": lambda: self.state,
            "on_event": self.events.append,
            "signals": self.signals,
            **self._options,
        }
        try:
            self.outcome = supervise(RUN, self._units, **options)
        except Exception as error:
            self.error = error


def pid_of(name: str) -> int | None:
    record = read_unit(RUN, name)
    return record.identity.pid if isinstance(record, UnitRecord) and is_alive(record.identity) else None


def up(name: str) -> int | None:
    wait_until(lambda: pid_of(name) is not None)
    return pid_of(name)


def kill(name: str) -> None:
    record = read_unit(RUN, name)
    signal_process(record.identity, signal.SIGKILL)


def test_a_killed_unit_is_back_soon_and_the_others_are_left_alone(eventually):
    with Supervision(unit("a"), unit("b")) as run:
        first, other = up("a"), up("b")
        kill("a")
        eventually(lambda: pid_of("a") not in {None, first})
        assert pid_of("b") == other
        run.stop()
    assert run.kinds("a")[:3] == ["started", "ended", "started"]
    ended = next(event.text for event in run.events if event.kind == "ended")
    assert ended.startswith("killed by SIGKILL") and ended.endswith("restart in 0.2 s")
    assert [run.kinds(name).count("started") for name in ("a", "b")] == [2, 1]


def test_a_unit_that_always_fails_is_given_up_and_the_run_fails():
    policy = RestartPolicy(first_delay_s=0.01, second_delay_s=0.01, max_delay_s=0.02, max_restarts=3)
    with Supervision(unit("a", "raise SystemExit(1)"), unit("syncer", kind="syncer"), restart=policy) as run:
        run.join()
    assert isinstance(run.error, RunFailedError)
    assert run.error.exit_status == 12
    assert "a: ended with status 1" in str(run.error)
    assert run.kinds("a").count("started") == 4
    assert pid_of("syncer") is None


def test_a_run_goes_on_without_a_learner_that_failed(eventually):
    with Supervision(unit("a", "raise SystemExit(2)"), unit("b")) as run:
        eventually(lambda: "failed" in run.kinds("a"))
        assert pid_of("b") is not None
        run.state = "FINISHED"
        assert run.join().reason == "finished"


@pytest.fixture
def passes(monkeypatch) -> Callable[[float], None]:
    """Lets so much time pass at once for who supervises."""
    ahead: list[float] = []
    monkeypatch.setattr(supervisor, "monotonic_s", lambda: monotonic_s() + sum(ahead))
    return ahead.append


def test_units_that_stay_after_the_end_are_terminated_then_killed(eventually, passes):
    with Supervision(unit("a"), unit("b", STUBBORN)) as run:
        eventually(lambda: pid_of("a") and pid_of("b") and b"up" in log_path(RUN, "b").read_bytes())
        run.state = "FINISHED"
        eventually(lambda: "done" in run.kinds("a") and "terminated" in run.kinds("b"))
        passes(FAR_S)
        assert run.join().reason == "finished"
    assert run.kinds("a")[-2:] == ["terminated", "done"]
    assert run.kinds("b")[-3:] == ["terminated", "killed", "done"]


def test_a_held_unit_stays_down_until_it_is_released(eventually):
    with Supervision(unit("a"), unit("b")) as run:
        up("a")
        hold(RUN, "a")
        kill("a")
        eventually(lambda: "held" in run.kinds("a"))
        sleep_s(0.5)
        assert pid_of("a") is None
        release(RUN, "a")
        up("a")


def test_a_slow_or_failing_store_delays_no_restart(eventually):
    answers = threading.Event()

    def slowly() -> str:
        answers.wait(FAR_S)
        raise StoreError("the store is down")

    with Supervision(unit("a"), run_state=slowly) as run:
        first = up("a")
        kill("a")
        eventually(lambda: pid_of("a") not in {None, first})
        assert run.stop().reason == "left"
    answers.set()


def test_units_that_heed_the_stop_request_are_not_signalled(tmp_path):
    request = tmp_path / "stop"
    heedful = f"import os, time\nwhile not os.path.exists({str(request)!r}): time.sleep(0.01)"
    with Supervision(unit("a", heedful), whole_run=WholeRun(tuple, request.touch), stop=StopPolicy()) as run:
        up("a")
        run.stop()
    assert run.kinds("a") == ["started", "done"]


def test_a_stop_request_that_fails_is_told_and_the_units_are_terminated():
    def fail() -> None:
        raise StoreError("forbidden")

    late = StopPolicy(leave_s=FAR_S, kill_s=FAR_S, give_up_s=FAR_S)
    with Supervision(unit("a"), whole_run=WholeRun(tuple, fail), stop=late) as run:
        up("a")
        run.stop()
    assert "forbidden" in run.events[-1].text


def test_ctrl_c_leaves_the_run_to_those_who_joined() -> None:
    asked: list[int] = []
    with Supervision(unit("a"), whole_run=WholeRun(lambda: ["spot"], lambda: asked.append(1))) as run:
        up("a")
        outcome = run.stop()
    assert outcome is not None and (outcome.reason, outcome.left, asked) == ("left", ("a",), [])
    assert any(e.kind == "leaving" and "spot is not alive here" in e.text for e in run.events)


def test_a_syncer_lives_until_the_learners_beside_it_have_drained(tmp_path):
    order = tmp_path / "order"
    says = "import signal, sys, time\ndef end(*_):\n time.sleep({0}); open({1!r}, 'a').write({2!r}); sys.exit(143)\n"
    says += "signal.signal(signal.SIGTERM, end); print('up', flush=True)\nwhile True: time.sleep(0.05)"
    units = [unit(name, says.format(0.4, str(order), name), kind) for name, kind in (("b", "syncer"), ("a", "learner"))]
    with Supervision(*units, stop=StopPolicy(drain_s=FAR_S, kill_s=FAR_S, give_up_s=FAR_S)) as run:
        for name in ("a", "b"):
            up(name)
            wait_until(lambda name=name: b"up" in log_path(RUN, name).read_bytes())
        assert run.stop().left == ("b", "a"), "the syncer need not wait for the whole drain"
    assert order.read_text() == "ab"


def gone() -> str:
    raise StoreGoneError("no such directory", where="/b", hint="mkdir /b")


def test_restarts_end_when_the_bucket_has_been_gone_for_long_and_the_error_says_so(eventually, passes):
    with Supervision(unit("a", STUBBORN), run_state=gone, gone_after_s=FAR_S, stop=StopPolicy(gone_kill_s=0.3)) as run:
        first = up("a")
        kill("a")
        eventually(lambda: pid_of("a") not in {None, first})  # it is an outage until then
        passes(FAR_S)
        run.join()
    assert isinstance(run.error, StoreGoneError) and run.error.exit_status == 6
    assert "the bucket of run nano is gone" in str(run.error) and "diloco resume nano" in run.error.hint
    assert pid_of("a") is None


def test_a_machine_leaves_at_once_where_the_bucket_is_gone(eventually):
    asked: list[int] = []

    def asked_and_gone() -> str:
        asked.append(1)
        return gone()

    stop = StopPolicy(kill_s=FAR_S, gone_kill_s=0.3, give_up_s=FAR_S)
    with Supervision(unit("a", STUBBORN), run_state=asked_and_gone, stop=stop) as run:
        eventually(lambda: pid_of("a") and b"up" in log_path(RUN, "a").read_bytes() and len(asked) > 1)
        assert run.stop().reason == "left"
    assert any("nothing can be drained" in event.text for event in run.events)


def test_a_closed_terminal_does_not_end_the_supervision(eventually):
    def closed(event: SupervisionEvent) -> None:
        raise OSError(5, "Input/output error")

    with Supervision(unit("a"), on_event=closed) as run:
        first = up("a")
        kill("a")
        eventually(lambda: pid_of("a") not in {None, first})
    assert run.error is None


def test_a_second_supervisor_is_refused():
    with Supervision(unit("a")) as first:
        pid = up("a")
        with Supervision(unit("a")) as second:
            second.join()
        assert isinstance(second.error, RefusedError)
        assert pid_of("a") == pid
        assert first.error is None


@pytest.fixture
def supervisor_process():
    children = []

    def begin() -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True, env=environment_with()
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()
    for name in ("a", "b"):
        if pid_of(name):
            kill(name)


def test_units_outlive_a_killed_supervisor_and_the_next_one_adopts_them(supervisor_process, eventually):
    first = supervisor_process()
    pids = [up("a"), up("b")]
    first.kill()
    first.wait()
    assert [up("a"), up("b")] == pids
    kill("b")
    second = supervisor_process()
    lines = [second.stdout.readline() for _ in range(2)]
    assert lines[0].startswith(f"adopted a process {pids[0]}")
    assert lines[1].startswith("started b")
    kill("a")
    eventually(lambda: pid_of("a") not in {None, pids[0]})
    assert second.stdout.readline().startswith("ended a ended after")


@pytest.mark.parametrize(("signum", "stops"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)])
def test_one_signal_ends_what_runs_here_and_only_ctrl_c_stops_the_run(supervisor_process, signum, stops):
    child = supervisor_process()
    assert up("a") and up("b")
    child.send_signal(signum)
    told, _ = child.communicate(timeout=BOUND_S)
    assert ("stop request written" in told) == stops
    assert ("the run itself goes on" in told) != stops
    assert "killed a" not in told
    assert child.returncode == 128 + signum
    assert pid_of("a") is pid_of("b") is None


def test_a_second_ctrl_c_kills_at_once(eventually):
    code = SUPERVISOR.replace("import time; time.sleep(60)", STUBBORN.replace("'up'", "1"))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment_with())
    for name in ("a", "b"):
        assert up(name)
        eventually(lambda name=name: log_path(RUN, name).stat().st_size)
    child.send_signal(signal.SIGINT)
    assert any(line.startswith("stopping") for line in child.stdout)
    assert pid_of("a") is not None
    child.send_signal(signal.SIGINT)
    told, _ = child.communicate(timeout=BOUND_S)
    assert "killed a" in told
    assert child.returncode == 130
    assert pid_of("a") is pid_of("b") is None


def test_a_detached_supervisor_registers_and_can_be_stopped(eventually):
    identity = start_detached(RUN, (sys.executable, "-c", SUPERVISOR))
    assert living_supervisor(RUN) == identity
    assert identity.token is not None
    assert os.getsid(identity.pid) == identity.pid
    assert up("a") and up("b")
    signal_process(identity, signal.SIGTERM)
    eventually(lambda: not is_alive(identity))
    assert "left 143" in log_path(RUN, "supervisor").read_text()


def test_a_successor_goes_on_as_the_supervision_before_it(monkeypatch):
    started = []
    monkeypatch.setattr(units, "start_detached", lambda *given: started.append(given))
    units.start_successor(RUN)
    note_resuming(RUN, Resuming(("--region=eu", "--syncer=here"), {"DILOCO_WEBHOOK": "https://h"}))
    assert (run_directory(RUN) / "resuming.json").stat().st_mode & 0o077 == 0, "an address may hold a secret"
    units.start_successor(RUN)
    assert started == [
        (RUN, diloco_command("resume", RUN), {}),
        (RUN, diloco_command("resume", RUN, "--region=eu", "--syncer=here"), {"DILOCO_WEBHOOK": "https://h"}),
    ]


def test_a_detached_supervisor_that_told_an_error_passes_it_on_with_its_hint_and_status():
    code = "print('error: the bucket is gone\\nhint: make it\\nbye'); raise SystemExit(6)"
    with pytest.raises(StoreError, match=r"the bucket is gone$") as caught:
        start_detached(RUN, (sys.executable, "-S", "-c", code))
    assert (caught.value.exit_status, caught.value.hint) == (6, "make it")


def test_a_unit_has_its_own_session_bounded_threads_a_private_log_and_no_secret_in_it(home: Path):
    code = (
        "import os; print(os.getsid(0) == os.getpid(), os.environ['OMP_NUM_THREADS'], os.read(0, 1),"
        " len(os.environ['DILOCO_UNIT_TOKEN']))"
    )
    spec = UnitSpec("a", "learner", (sys.executable, "-S", "-c", code), thread_environment(2))
    child, record = start_unit(RUN, spec)
    child.wait()
    path = log_path(RUN, "a")
    assert path.read_text() == "True 2 b'' 32\n"
    assert path.stat().st_mode & 0o077 == 0
    assert record.identity.token not in " ".join(spec.command)


def test_the_log_of_a_living_unit_is_bounded(monkeypatch, eventually):
    monkeypatch.setattr("diloco_cli.runtime.units.MAX_LOG_BYTES", 1000)
    talkative = "import time\nwhile True: print('x' * 99, flush=True); time.sleep(0.005)"
    with Supervision(unit("a", talkative)):
        log = log_path(RUN, "a")
        eventually(lambda: log.with_name("a.log.1").exists())
        for _ in range(3):
            eventually(lambda: log.stat().st_size <= 1000)
        eventually(lambda: (written := log.read_text()) and set(written) == {"x", "\n"})  # or a hole: it did not append
        assert pid_of("a") is not None


def test_a_fenced_syncer_is_said_aloud_once_and_the_learners_go_on(eventually):
    with Supervision(unit("a"), unit("syncer", "raise SystemExit(9)", kind="syncer")) as run:
        eventually(lambda: "fenced" in run.kinds("syncer") and pid_of("a") is not None)
        sleep_s(0.2)
        assert run.kinds("syncer") == ["started", "done", "fenced"]
        assert "diloco syncer --standby nano" in next(e.text for e in run.events if e.kind == "fenced")
        assert pid_of("a") is not None


def test_a_unit_whose_place_is_taken_while_it_leaves_has_not_left_but_is_fenced(eventually):
    fenced = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); print('up'); time.sleep(60)"
    )
    with Supervision(unit("a", fenced)) as run:
        eventually(lambda: log_path(RUN, "a").exists() and "up" in log_path(RUN, "a").read_text())
        outcome = run.stop()
    assert outcome is not None and (outcome.reason, outcome.exit_status) == ("fenced", 9)


def test_names_must_be_unique():
    with pytest.raises(UsageError, match="unique"):
        supervise(RUN, [unit("a"), unit("a")], run_state=str, on_event=print)


def test_a_terminal_that_closes_asks_once_however_often_it_says_so():
    with SignalCount() as heard:
        for signum in (signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), signum)
        assert (heard.count, heard.first) == (1, signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.count == 2


BROKEN = """
from diloco_cli.runtime.registry import telling_why
with telling_why("memory://nowhere", "a"):
    [][41]
"""


def test_an_error_of_the_users_code_is_told_with_its_line_and_soon_ends_the_restarts(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BROKEN)
    broken = UnitSpec("a", "learner", (sys.executable, str(tmp_path / "model.py")))
    policy = RestartPolicy(first_delay_s=0.01, second_delay_s=0.01)
    with Supervision(broken, unit("syncer", kind="syncer"), restart=policy) as run:
        run.join()
    assert run.kinds("a") == ["started", "ended", "started", "ended", "started", "failed"]
    cause = "your code: model.py:4 in <module>: IndexError: list index out of range"
    assert isinstance(run.error, RunFailedError)
    assert run.error.exit_status == 12 and f"a: {cause}; ended with status 1" in str(run.error)
    assert "3 times at the same place without progress" in str(run.error)
    assert run.error.hint == "mend model.py:4, then `diloco resume nano`"
    ended = next(event for event in run.events if event.kind == "ended")
    assert ended.cause is not None and ended.cause.text == cause and ended.data["status"] == 1


POLICY = StopPolicy()


def ending_by(signum: int, whole: bool = True, away: tuple[str, ...] = (), before: Ending | None = None) -> Ending:
    return ending_after_a_signal(before, signum, whole, away, 10.0, POLICY)


def test_only_ctrl_c_in_the_launch_that_has_all_of_the_run_stops_it() -> None:
    stops = ending_by(signal.SIGINT)
    assert stops.reason == "interrupted" and stops.terminate_at_s == 10.0 + POLICY.leave_s
    for ending, why in (
        (ending_by(signal.SIGTERM), "SIGTERM ends what runs here"),
        (ending_by(signal.SIGHUP), "SIGHUP ends what runs here"),
        (ending_by(signal.SIGINT, whole=False), "only in the `launch` that has all of it"),
        (ending_by(signal.SIGINT, away=("ohio",)), "ohio is not alive here"),
        (ending_by(signal.SIGINT, away=("ohio", "spot")), "ohio and spot are not alive here"),
    ):
        assert ending.reason == "left" and why in ending.text


def test_where_a_machine_leaves_learners_are_asked_first_and_syncers_once_they_have_gone() -> None:
    ending = ending_by(signal.SIGTERM)
    assert ending.terminates("learner", True, 10.0) and not ending.terminates("syncer", True, 15.9)
    assert ending.terminates("syncer", False, 10.1) and ending.terminates("syncer", True, 16.0)
    assert ending.syncers_at_s < ending.kill_at_s < ending.give_up_at_s <= 20.0


def test_a_signal_while_the_run_ends_does_not_prolong_that() -> None:
    finished = begin_ending("finished", "the run is FINISHED", 30.0, POLICY.leave_s, POLICY)
    ending = ending_by(signal.SIGINT, before=finished)
    assert ending.reason == "interrupted" and ending.terminate_at_s == 10.0 and ending.kill_at_s < finished.kill_at_s
