"""What a learner's process says of itself: in its log, and in its heartbeats.

A thread that waits for a store's call shows that it lives.

A learner keeps a standby beside it: restarted when it dies, gone when the learner is.

What a learner's process and a user's loop are told of an island that is not theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, Link, ModelSettings
from diloco_cli.errors import StoreError, UsageError
from diloco_cli.learner import daemon as hosting
from diloco_cli.learner.daemon import (
    AttendedStore,
    Facts,
    HostedSyncer,
    Newcomer,
    _with_island,
    behind_its_link,
    heartbeat_unless_it_fails,
    refuse_another_regions_bucket,
    refuse_own_loop,
)
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.log.records import RegionStore, RunFormat
from diloco_cli.runtime.daemon import SystemClock
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.open import FAULT_VARIABLE, disturbable
from diloco_cli.store.wrappers import DisturbedStore, EmulatedLink
from tests.numerics.tiny import Regression
from tests.unit.protocol.integer_ports import UnitTraining, WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import RUN, applied, make_run, with_inner

FACTS_RUN = make_run(fragments=1)


@pytest.mark.parametrize(
    ("run", "merged_by", "moments"),
    [
        (FACTS_RUN, None, "new"),
        (FACTS_RUN, "l1", "none yet, warming up"),
        (FACTS_RUN, "l0", "lost, warming up anew"),
        (with_inner(FACTS_RUN, name="sgd"), "l0", "none"),
    ],
)
def test_it_says_how_it_joins(
    run: RunFormat, merged_by: str | None, moments: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log = WrittenLog(run)
    if merged_by is not None:
        log.merge(90, applied(merged_by))
    living = Living(log, UnitTraining(1, keeps_moments=run.settings.train.inner.name != "sgd"))
    Facts("l0").began(living.learner)
    said = "".join(capfd.readouterr())
    start, incarnation = (8, 2) if merged_by == "l0" else (0, 1)
    assert (
        f"l0: incarnation {incarnation} of run toy joins at commit {log.state.n}, data from token {start}, inner"
        in said
    )
    assert said.strip().endswith(f"inner moments {moments}")


def test_rates_are_of_its_busy_time_and_what_the_exchange_takes_is_told() -> None:
    """Two steps of 1 s on 100 tokens, half a second of exchange, a wait of 1.5 s: 200 tokens in 4 s."""
    facts = Facts("l0")
    found = facts.heartbeat(0.25)
    assert (found["tokens_per_s"], found["mean_tokens_per_s"], found["blocked_percent"]) == (0.0, 0.0, 0.0)
    assert found["note"] == "in its first step: 25% of the batch"
    for between in (("offer", 0.5), ("wait", 1.5)):
        facts.stepped(0, 100)
        facts.took("step", 1.0)
        facts.took(*between)  # type: ignore[arg-type]
    found = facts.heartbeat(0.25)
    assert (found["tokens_per_s"], found["mean_tokens_per_s"], found["blocked_percent"]) == (100.0, 50.0, 50.0)
    assert "note" not in found


def test_what_steps_waited_for_their_data_is_a_share_of_the_steps() -> None:
    """The first opens the data: neither its wait nor its time counts."""
    facts = Facts("l0")
    assert facts.heartbeat(0.0, 0.0)["data_percent"] is None, "no step has ended"
    for seconds in (50.0, 1.0, 1.0):
        assert facts.heartbeat(0.0, 0.0)["data_percent"] in (None, 0.0)
        facts.took("step", seconds)
    facts.took("wait", 1.0)
    assert facts.heartbeat(0.0, 0.01)["data_percent"] == 0.5
    assert facts.heartbeat(0.0)["data_percent"] is None, "a loop of its user's own reads its data itself"


def test_shares_of_time_are_of_the_last_minute_however_long_it_has_run() -> None:
    """Two hours without a wait; then the disk and the link become slow; then all is well again."""
    facts, data_s = Facts("l0"), 0.0

    def minutes(number: int, blocked: float, waits: float) -> tuple[float, float]:
        nonlocal data_s
        found = {}
        for _ in range(20 * number):
            facts.took("step", 3.0 * (1.0 - blocked))
            facts.took("offer", 3.0 * blocked)
            data_s += 3.0 * (1.0 - blocked) * waits
            found = facts.heartbeat(0.0, data_s)
        return found["blocked_percent"], found["data_percent"]

    assert minutes(120, 0.0, 0.0) == (0.0, 0.0)
    assert minutes(2, 0.5, 0.4) == pytest.approx((50.0, 40.0))
    assert minutes(2, 0.0, 0.0) == (0.0, 0.0)


class SlowStore(MemoryStore):
    """Its calls end when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        assert self.may_end.wait(10)
        if key == "broken":
            raise StoreError("broken")
        return super().get(key, max_bytes)


def test_a_long_call_is_attended_by_the_calling_thread() -> None:
    below, seen = SlowStore(), list[int]()

    def attend() -> None:
        seen.append(threading.get_ident())
        if len(seen) == 3:
            below.may_end.set()

    store = AttendedStore(below, attend, every_s=0.01)
    below.create("a", b"1")
    assert store.get("a") == b"1" and set(seen) == {threading.get_ident()} and len(seen) >= 3
    with pytest.raises(StoreError, match="broken"):
        store.get("broken")


def test_a_call_that_hangs_is_not_attended_for_ever() -> None:
    below, seen = SlowStore(), list[int]()
    timer = threading.Timer(0.3, below.may_end.set)
    timer.start()
    assert AttendedStore(below, lambda: seen.append(1), every_s=0.01, most_s=0.0).get("a") is None
    assert not seen


def test_who_attends_may_leave_a_call_and_no_later_call_waits_for_it() -> None:
    below, before, gone = SlowStore(), set(threading.enumerate()), ["a rank"]

    def attend() -> None:
        if gone:
            raise StoreError(f"{gone.pop()} is gone")

    store = AttendedStore(below, attend, every_s=0.01)
    try:
        with pytest.raises(StoreError, match="a rank is gone"):
            store.get("a")
        begun = set(threading.enumerate()) - before
        assert begun and all(thread.daemon for thread in begun), "it keeps no process from ending"
        store.create("a", b"1")
        assert below.list("") == ["a"]
    finally:
        below.may_end.set()


Eventually = Callable[[Callable[[], bool]], None]
# What a hosted syncer does: note that it began, and for whom; leave when its host closes stdin.
NOTE = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} {sys.argv[2]}\\n'); "
CHILD, STUBBORN, DONE = NOTE + "sys.stdin.read(); sys.exit(143)", NOTE + "time.sleep(60)", NOTE + "sys.exit(0)"
HOST = """
import sys, time
from diloco_cli.learner.daemon import HostedSyncer
child, noted = sys.argv[1:]
HostedSyncer(lambda dead_pid: [sys.executable, "-S", "-c", child, noted, str(dead_pid)], print)
time.sleep(60)
"""


class Notes:
    """What the children wrote: a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[tuple[int, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(int(pid), dead) for pid, dead in (line.split() for line in lines)]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    yield Notes(tmp_path / "notes")


def host(notes: Notes, code: str = CHILD) -> HostedSyncer:
    return HostedSyncer(lambda dead: [sys.executable, "-S", "-c", code, str(notes.path), str(dead)], lambda line: None)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_child_that_dies_is_replaced_and_the_next_one_is_told(notes: Notes, eventually: Eventually) -> None:
    hosted = host(notes)
    eventually(lambda: len(notes.read()) == 1)
    first = notes.read()[0][0]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: len(notes.read()) == 2)
    second, dead = notes.read()[1]
    assert dead == str(first) and os.getpgid(second) == second, "Ctrl-C is for the learner alone"
    hosted.close(0.0)
    assert not alive(second)


def test_a_child_whose_run_is_over_is_not_replaced(notes: Notes, eventually: Eventually) -> None:
    hosted = host(notes, DONE)
    hosted.close(10.0)
    assert len(notes.read()) == 1


def test_closing_ends_even_a_child_that_does_not_listen(
    notes: Notes, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "KILLED_AFTER_S", 0.1)
    hosted = host(notes, STUBBORN)
    eventually(lambda: len(notes.read()) == 1)
    hosted.close(0.0)
    assert not alive(notes.read()[0][0]) and len(notes.read()) == 1


def test_the_child_leaves_when_its_host_is_killed(notes: Notes, eventually: Eventually) -> None:
    learner = subprocess.Popen([sys.executable, "-c", HOST, CHILD, str(notes.path)])
    try:
        eventually(lambda: len(notes.read()) == 1)
    finally:
        learner.kill()
        learner.wait()
    eventually(lambda: not alive(notes.read()[0][0]))


HOME, EU = "gs://home/toy", "gs://eu/toy"
OWN = replace(RUN.islands[0], region="eu", infra="loop/addressed")


def test_a_learner_that_cannot_write_its_claim_writes_no_heartbeat_meanwhile() -> None:
    """It holds no incarnation yet, and the store's retries ask for a heartbeat."""
    store = MemoryStore()
    unclaimed = Learner.__new__(Learner)  # as before `train` has begun
    heartbeat_unless_it_fails(store, unclaimed)
    assert store.list("") == []


def test_diloco_learner_trains_no_island_with_a_loop_of_its_owners() -> None:
    with pytest.raises(UsageError, match=r"trained by a loop of its own \(infra: loop/addressed\)") as caught:
        refuse_own_loop(RUN, OWN, HOME)
    assert caught.value.hint == f'in its own script: join("{HOME}", name="{OWN.name}", ...)'
    refuse_own_loop(RUN, RUN.islands[0], HOME)


@pytest.mark.parametrize(
    ("infra", "hint"),
    [("ssh", f"diloco learner --run {EU} --name "), ("loop/external", f'in its own script: join("{EU}", name="')],
)
def test_an_island_at_another_regions_bucket_is_told_its_own(infra: str, hint: str) -> None:
    run = replace(RUN, regions=(RegionStore("eu", EU),), home_url=HOME)
    with pytest.raises(UsageError, match="learners use another bucket") as caught:
        refuse_another_regions_bucket(run, replace(OWN, infra=infra), HOME)
    assert (caught.value.hint or "").startswith(hint)


def test_an_emulated_link_is_disturbed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, str(tmp_path / "l0.json"))
    slow = replace(RUN.islands[0], link=Link(up_bps=1e6, emulate=True))
    store = behind_its_link(disturbable(MemoryStore()), slow)
    assert isinstance(store, DisturbedStore) and isinstance(store.undisturbed, EmulatedLink)
    assert isinstance(store.undisturbed._store, MemoryStore)


class Sparse(Regression):
    """Runs, and gives gradients that no learner can clip."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, 1, sparse=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.table(torch.tensor(0)).sum()


def test_what_cannot_train_here_is_not_admitted() -> None:
    """The run may train well where it was launched; this machine lacks its data, or has another torch."""
    store, clock = MemoryStore(), SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)

    def refused(model: str, data: str) -> UsageError:
        settings = replace(RUN.settings, model=ModelSettings(entrypoint=model), data=DataSettings(entrypoint=data))
        with pytest.raises(UsageError) as error:
            _with_island(replace(RUN, settings=settings), store, clock, "spot", None, Newcomer())
        assert store.list("") == []
        return error.value

    settings = replace(RUN.settings, model=ModelSettings(entrypoint=f"{__name__}:Sparse"))
    log = WrittenLog(replace(RUN, settings=settings))
    log.append("membership", islands=(replace(OWN, name="spot"),))
    again = _with_island(log.run, log.store, clock, "spot", None, Newcomer())
    assert again.island("spot") is not None, "who is a member already is not tried again"
    assert "gradient" in refused(f"{__name__}:Sparse", "tests.numerics.tiny:stream").message
    assert "nowhere" in refused("tests.numerics.tiny:slope", "nowhere:stream").message
