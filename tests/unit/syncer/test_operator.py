"""How long an operator's command waits for the syncer, and what it does when none answers. What commands ask for is
tested in tests/cli/test_operators.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.errors import TryAgainError, UsageError
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.actors.requests import StandIn, stop_stands
from diloco_cli.protocol.actors.standby import gone_after_s
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.runtime.daemon import perform
from diloco_cli.signing import Checksummed
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.syncer.operator import LOOK_EVERY_S, SYNCER_ANSWERS_S, Operator, max_silence_s
from tests.simulation.operated import run_that_keeps, started

RUN = run_that_keeps(grace_s=0.0, merges=60)
BEATS_EVERY_S = 5.0


class ScriptedClock:
    """Time passes while somebody sleeps; `after_s` happens meanwhile."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.after_s: dict[float, Callable[[], object]] = {}

    def now_s(self) -> float:
        return self.time_s

    def sleep_s(self, seconds: float) -> None:
        self.time_s += seconds
        for at_s in sorted(self.after_s):
            if at_s <= self.time_s:
                self.after_s.pop(at_s)()

    def check(self) -> None:
        pass


class OperatedRun:
    """A run whose syncer beats, answers or is silent as a test says, and an operator of it."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.clock, self.told = store, ScriptedClock(), list[str]()
        self.operator = Operator(RUN, store, self.clock, self.told.append)

    def beats_until(self, seconds: float) -> None:
        for beat in range(1, 1 + int(seconds / BEATS_EVERY_S)):
            self.clock.after_s[beat * BEATS_EVERY_S] = lambda beat=beat: self.beat(b'{"beat":%d}' % beat)

    def beat(self, data: bytes) -> None:
        self.store.put(heartbeat_key(SYNCER), data)

    def answer(self) -> None:
        """As a syncer does."""
        numbers = iter(range(100))
        claim = ProcessClaim(0, "syncer", "host", 1, "then", "0")
        perform(StandIn(RUN, claim, "then", lambda: f"n{next(numbers)}").serve(), self.store, ScriptedClock())


@pytest.fixture
def running() -> OperatedRun:
    store = started(RUN, 6).world.store
    assert isinstance(store, MemoryStore)
    return OperatedRun(store)


@pytest.mark.parametrize("beats_s", [0.0, 25.0])
def test_a_syncer_counts_as_gone_some_seconds_after_its_last_sign_of_life(running: OperatedRun, beats_s: float) -> None:
    running.beats_until(beats_s)
    assert running.operator.request("rollback", to=3).n > 6
    assert running.told == ["no syncer answers: doing it from here"]
    assert running.clock.time_s == pytest.approx(beats_s + SYNCER_ANSWERS_S, abs=2 * LOOK_EVERY_S)


def test_the_answer_of_a_syncer_that_beats_is_waited_for(running: OperatedRun) -> None:
    running.beats_until(100.0)
    running.clock.after_s[42.0] = running.answer
    running.operator.request("rollback", to=3)
    assert running.told == [] and running.clock.time_s == pytest.approx(42.0, abs=2 * LOOK_EVERY_S)


def test_heartbeats_that_are_not_genuine_hold_up_no_command() -> None:
    run = replace(RUN, checksums=True, keyring=Checksummed(RUN.run_id))
    store = MemoryStore()
    copy(started(run, 6).world.store, store)
    forged = OperatedRun(store)
    forged.operator = Operator(run, store, forged.clock, forged.told.append)
    forged.beats_until(1000.0)
    assert forged.operator.request("rollback", to=3).n > 6
    assert forged.clock.time_s == pytest.approx(SYNCER_ANSWERS_S, abs=2 * LOOK_EVERY_S)


def test_a_syncer_that_is_slow_at_times_gets_longer_and_that_is_told(running: OperatedRun) -> None:
    running.beat(b'{"slowest_s":40}')
    running.operator.request("rollback", to=3)
    assert running.clock.time_s == pytest.approx(80.0, abs=2 * LOOK_EVERY_S)
    assert running.told[0] == "the syncer may be at work in silence: it counts as gone after 80 s of it"


def test_a_stop_is_committed_from_here_if_nobody_does(running: OperatedRun) -> None:
    state = running.operator.stop(running.operator.head(), "enough")
    assert state.phase == RunPhase.STOPPED and running.told == ["no syncer answers: committing the stop from here"]


def test_a_run_without_a_first_version_cannot_be_stopped_by_anybody_but_its_syncer() -> None:
    store = MemoryStore()
    with pytest.raises(TryAgainError, match=r"has not begun.*the stop is asked for") as refused:
        OperatedRun(store).operator.stop(RunState(), "enough")
    assert refused.value.hint == f"diloco status {store.url}", "its name may be unknown to this machine"


def test_a_stop_that_nobody_carried_out_is_withdrawn_before_the_run_goes_on(running: OperatedRun) -> None:
    operator = running.operator
    assert not operator.withdraw_stop(operator.head())
    operator.request_stop("interrupted")
    assert operator.withdraw_stop(operator.head())
    running.answer()
    assert perform(read_log(RUN), running.store, running.clock).phase == RunPhase.RUNNING


def copy(store: Store, to: MemoryStore) -> None:
    for key in store.list("", limit=10_000):
        to.put(key, store.get(key) or b"")


def test_a_stop_stands_from_its_request_until_a_resume_is_asked_for(running: OperatedRun) -> None:
    operator = running.operator
    stands = lambda: perform(stop_stands(RUN, operator.head()), running.store, running.clock)  # noqa: E731
    assert not stands()
    operator.request_stop("interrupted")
    assert stands()
    operator.withdraw_stop(operator.head())
    assert not stands()
    operator.stop(operator.head(), "enough")
    assert stands() and operator.head().phase == RunPhase.STOPPED
    operator.withdraw_stop(operator.head())
    assert not stands()


def test_a_revoke_does_not_wait_for_a_syncer_that_beats_for_ever(running: OperatedRun) -> None:
    """It may be the very one whose key is to be revoked."""
    running.beats_until(1000.0)
    with pytest.raises(UsageError, match="not signed"):  # the answer
        running.operator.request("revoke", key="0" * 64)
    assert running.clock.time_s == pytest.approx(SYNCER_ANSWERS_S, abs=2 * LOOK_EVERY_S)


@pytest.mark.parametrize(
    ("timeout_s", "heartbeat", "silence_s"),
    [
        (None, None, 10.0),
        (None, b'{"slowest_s":3}', 10.0),
        (None, b'{"slowest_s":40}', 80.0),
        (None, b'{"slowest_s":1000000000}', 600.0),
        (None, b'{"slowest_s":40,"state":"DONE"}', 10.0),
        (0.0, b'{"slowest_s":40}', 0.0),
    ],
)
def test_a_slow_syncer_is_not_taken_for_a_dead_one(
    timeout_s: float | None, heartbeat: bytes | None, silence_s: float
) -> None:
    assert max_silence_s(timeout_s, heartbeat, RUN.layout) == pytest.approx(silence_s, abs=0.01)


@pytest.mark.parametrize(
    ("heartbeat", "command_s", "standby_s", "set_s"),
    [
        (None, 170.0, 175.0, 6.0),
        (b'{"slowest_s":40}', 170.0, 175.0, 80.0),
        (b'{"slowest_s":1000000000}', 920.0, 920.0, 920.0),
        (b'{"slowest_s":40,"state":"DONE"}', 10.0, 15.0, 6.0),
    ],
)
def test_a_syncer_may_move_a_large_version_in_silence(
    heartbeat: bytes | None, command_s: float, standby_s: float, set_s: float
) -> None:
    """A state of a billion parameters, at 50 MB/s: 160 s. A standby whose `takeover` is set waits for no version."""
    large = balanced_layout([ParameterFact("w", (10**9,), False)], 1)
    assert max_silence_s(None, heartbeat, large) == command_s
    run = replace(RUN, layout=large)
    assert gone_after_s(run, 15.0, heartbeat) == standby_s
    setting = replace(run.settings, syncer=replace(run.settings.syncer, takeover_s=6.0))
    assert gone_after_s(replace(run, settings=setting), 6.0, heartbeat) == set_s
