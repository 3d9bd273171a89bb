"""What every daemon shares: hearing a stop, and a log that cannot kill."""

from __future__ import annotations

import os
import signal

import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import TerminatedError
from diloco_cli.runtime.daemon import StopSignal, say


def test_nothing_happens_until_somebody_asks() -> None:
    stop = StopSignal()
    stop.check()
    assert not stop.is_set()


def test_a_stop_ends_the_next_step_and_cuts_sleep_short() -> None:
    stop = StopSignal()
    stop.ask()
    started_s = monotonic_s()
    stop.wait(60)
    assert monotonic_s() - started_s < 5
    with pytest.raises(TerminatedError):
        stop.check()


def test_what_is_being_finished_has_its_grace() -> None:
    stop = StopSignal()
    stop.ask()
    stop.check(grace_s=60)
    with pytest.raises(TerminatedError):
        stop.check(grace_s=0)


def test_a_patient_stop_lets_things_finish_and_then_is_due() -> None:
    stop, impatient = StopSignal(patience_s=0.2), StopSignal()
    assert not stop.is_due() and not impatient.is_due()
    stop.ask()
    impatient.ask()
    assert stop.is_set() and not stop.is_due() and impatient.is_due()
    stop.check()
    started_s = monotonic_s()
    stop.wait(60)
    assert 0.1 < monotonic_s() - started_s < 5, "it sleeps as usual while there is patience, and no longer"
    with pytest.raises(TerminatedError):
        stop.check()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_only_ask_and_the_exit_status_says_which_it_was(number: signal.Signals, status: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal()
    try:
        stop.hear_signals()
        os.kill(os.getpid(), number)
        stop.wait(5)
        assert stop.is_set() and stop.error().exit_status == status
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_a_line_appears_whole(capfd: pytest.CaptureFixture[str]) -> None:
    say("commit 3")
    assert capfd.readouterr().out == "commit 3\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_log_that_cannot_be_written_loses_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr("diloco_cli.runtime.daemon.STDOUT", full.fileno())
        say("commit 3")
