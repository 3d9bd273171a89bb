"""Situations of a run and their verdicts: python -m tests.studies.situations [--situation NAME ...]

Each is made with real processes of `diloco launch` on file://, and looked at from two places: on the machine itself
(`here`), and with nothing but the bucket's address (`afar`). `status --json --exit-code` must give the state, its cause
in words, and the exit status, each within its time: max(2 expected slots, 10 s) where the cause is written or local,
max(2 expected slots, 30 s) where only silence tells it. On a machine with more to do than cores these times are
multiplied by its load per core, and the row says so.

Ends with a row a situation, and with status 1 if one was not seen in time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from diloco_cli.errors import DilocoError
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.runtime.daemon import perform
from diloco_cli.runtime.processes import Identity, is_alive, signal_process
from tests.forked import run_diloco
from tests.studies.launched import CLOCK, INVENTORY, NAME, LaunchedRun, lived, toy_file

STEP_S, LOCAL_STEPS = 0.1, 8
ENDLESS_TOKENS, FEW_TOKENS = 10**9, 3_000
KNOWN_S, SILENT_S = 10.0, 30.0  # or two expected slots
UP_S = 180.0
GONE_STATUS = 6
DELTAS_OF_L1, OFFERS_OF_L1, SEQ_DIGITS = "delta/l1/*/*", "offer/l1/*/*.json", 10
DISK_MB = 24


class SteeredRun(LaunchedRun):
    """Learners and an evaluator that follow orders; two places to look at it from. `small`: its bucket lies in a file
    system of a few MB, which needs root."""

    def __init__(self, tokens: int = ENDLESS_TOKENS, small: bool = False, **more: object) -> None:
        directory = Path(tempfile.mkdtemp(prefix="situations-"))
        self.orders = directory / "orders"
        self.orders.mkdir()
        (directory / "bucket").mkdir(mode=0o700)
        self.small = small
        if small:
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "tmpfs", str(directory / "bucket")]
            subprocess.run(words, check=True)
        orders = str(self.orders)
        sync = {"every": LOCAL_STEPS, "fragments": 4, "quorum": 1}
        model, data = (
            ("steered_model", {"elements": 16, "orders": orders}),
            ("steered_data", {"step_s": STEP_S, "orders": orders}),
        )
        super().__init__(directory, toy_file(model, data, tokens, sync, **more), INVENTORY)
        self.homes = {"here": self.home, "afar": str(directory / "elsewhere")}

    def end(self) -> None:
        super().end()
        if self.small:
            subprocess.run(["umount", "-l", str(self.directory / "bucket")], check=True)

    def is_stopped(self) -> bool:
        log = self.log()
        return json.loads(log[max(log)])["kind"] == "stop"

    def order(self, name: str, word: str) -> None:
        (self.orders / name).write_text(word)

    def status(self, place: str) -> tuple[int, dict[str, Any]]:
        variables = {**self.environment, "DILOCO_HOME": self.homes[place]}
        words = ("status", self.bucket.as_uri(), "--json", "--exit-code")
        done = run_diloco(*words, folder=self.directory, **variables)
        return done.returncode, json.loads(done.stdout)

    def told(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_diloco(*words, folder=self.directory, DILOCO_HOME=self.home)

    def signalled(self, signum: int, *names: str) -> None:
        units = self.units()
        for name in names:
            signal_process(units[name], signum)
        for name in names if signum == signal.SIGKILL else ():
            awaited(lambda identity=units[name]: not is_alive(identity), UP_S)


@dataclass(frozen=True)
class Expected:
    """One place's verdict: any of these states, its cause and its hint by patterns, and within which time."""

    place: str
    states: str
    reason: str
    within_s: float = KNOWN_S
    hint: str = ""
    exit_status: int = 0


@dataclass
class Row:
    situation: str
    place: str
    state: str
    after_s: float
    within_s: float
    load: float
    reason: str

    def line(self) -> str:
        scaled = f" (load {self.load:.1f} a core)" if self.load > 1 else ""
        allowed = f"{self.within_s:.0f}{scaled}"
        cells = [self.situation, self.place, self.state, f"{self.after_s:.1f}", allowed, self.reason]
        return f"| {' | '.join(cells)} |"


HEADER = "| situation | seen from | verdict | after, s | allowed, s | reason |\n|---|---|---|---|---|---|"


def load_per_core() -> float:
    """At least 1."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def awaited(holds: Callable[[], Any], within_s: float) -> Any:
    ends_s = time.monotonic() + within_s
    while not (found := holds()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"did not happen in {within_s:.0f} s")
        time.sleep(0.05)
    return found


def seen(run: SteeredRun, situation: str, *expected: Expected) -> list[Row]:
    """Each of these in its time, from now on."""
    began_s, load = time.monotonic(), load_per_core()
    rows: list[Row] = []
    left = list(expected)
    while left:
        for one in list(left):
            status, body = run.status(one.place)
            load = max(load, load_per_core())
            after_s, within_s = time.monotonic() - began_s, one.within_s * load
            if problem_of(one, status, body) == "":
                data = body["data"]
                rows.append(Row(situation, one.place, data["state"], after_s, within_s, load, data["reason"]))
                left.remove(one)
            elif after_s > within_s:
                data = body.get("data") or body["error"]
                said = {key: data.get(key) for key in ("state", "reason", "hint", "message", "limit", "eta_s")}
                raise AssertionError(
                    f"{situation}, {one.place}: {problem_of(one, status, body)} after {after_s:.1f} s: {said}"
                )
        time.sleep(0.1)
    return rows


def problem_of(expected: Expected, status: int, body: dict[str, Any]) -> str:
    data = body.get("data") or {"state": "none", "reason": "", "hint": "", "eta_s": None}
    wanted = expected.states.split("|")
    if data["state"] not in wanted:
        return f"{data['state']} instead of {expected.states}"
    for key, pattern in (("reason", expected.reason), ("hint", expected.hint)):
        if not re.search(pattern, data[key]):
            return f"the {key} is not like {pattern!r}"
    if status != expected.exit_status or (body["ok"] is not (status == 0)):
        return f"exit status {status} instead of {expected.exit_status}"
    merges = data["state"] in ("MERGING", "SLOW", "DEGRADED")
    return "" if merges or data["eta_s"] is None else "there is an ETA, and nothing merges"


def here(states: str, reason: str, hint: str = "", exit_status: int = 5) -> Expected:
    return Expected("here", states, reason, KNOWN_S, hint, exit_status)


def afar(states: str, reason: str, hint: str = "", within_s: float = SILENT_S, exit_status: int = 5) -> Expected:
    return Expected("afar", states, reason, within_s, hint, exit_status)


def both(states: str, reason: str, hint: str = "", exit_status: int = 5) -> list[Expected]:
    return [Expected(place, states, reason, KNOWN_S, hint, exit_status) for place in ("here", "afar")]


def merging(run: SteeredRun, within_s: float = UP_S) -> list[Row]:
    well = [Expected(place, "MERGING|SLOW", "", within_s) for place in ("here", "afar")]
    return seen(run, "healthy", *well)


# -- the situations: what is done, and what is seen ---------------------------------------------------------------


def healthy(run: SteeredRun) -> list[Row]:
    """It stays well, too."""
    rows = merging(run)
    for _ in range(10):
        status, body = run.status("here")
        assert (status, body["data"]["state"] in ("MERGING", "SLOW")) == (0, True), body["data"]
        assert body["data"]["eta_s"] is not None
    return rows


def paused_process(run: SteeredRun) -> list[Row]:
    run.signalled(signal.SIGSTOP, "l1")
    try:
        return seen(
            run, "learner paused by a signal",
            here("DEGRADED", r"l1 \(its process \d+ is paused by a signal\)", f"diloco chaos revive l1 --run {NAME}"),
            afar("DEGRADED", "l1 .not heard for .*why is not known", "diloco resume"),
        )  # fmt: skip
    finally:
        run.signalled(signal.SIGCONT, "l1")


def hanging(run: SteeredRun) -> list[Row]:
    run.order("l1", "hang")
    try:
        return seen(run, "learner hangs", *both("DEGRADED", "l1 .its step has not ended for", "diloco logs l1"))
    finally:
        run.order("l1", "")


def slow(run: SteeredRun) -> list[Row]:
    """Once the run has sustained a pace."""
    awaited(lambda: run.status("here")[1]["data"]["state"] == "MERGING", UP_S)
    awaited(lambda: sustained(run) > 0, UP_S)
    run.order("l1", "slow")
    try:
        return seen(run, "learner slow", *both("SLOW", "of the best pace", "", 0))
    finally:
        run.order("l1", "")


def sustained(run: SteeredRun) -> float:
    return perform(read_log(run.run), run.store, CLOCK).metrics.sustained.best(len(run.run.islands))


def syncer_restarts(run: SteeredRun) -> list[Row]:
    with killed_again_and_again(run, "syncer"):
        return seen(
            run, "syncer killed and being restarted",
            here("STALLED", "no syncer serves: it is being restarted, after .* killed by SIGKILL"),
            afar("STALLED", "no syncer serves: syncer on .* was heard", "diloco syncer --standby"),
        )  # fmt: skip


@contextmanager
def killed_again_and_again(run: SteeredRun, unit: str) -> Iterator[None]:
    ended = Event()

    def kill() -> None:
        killed: Identity | None = None
        while not ended.wait(0.02):
            with suppress(DilocoError, OSError, ValueError, KeyError):
                found = run.units()[unit]
                if found != killed and is_alive(found):
                    signal_process(found, signal.SIGKILL)
                    killed = found

    thread = Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def bucket_gone(run: SteeredRun) -> list[Row]:
    """No verdict without a bucket: an error that says so, at once. It comes back as it was."""
    away = run.bucket.with_name("away")
    run.bucket.rename(away)
    began_s = time.monotonic()
    try:
        for place in run.homes:
            status, body = run.status(place)
            assert (status, body["ok"]) == (GONE_STATUS, False), body
            assert body["error"]["hint"], body
        after_s, load = time.monotonic() - began_s, load_per_core()
        return [Row("bucket gone", "both", "none", after_s, KNOWN_S, load, body["error"]["message"])]
    finally:
        away.rename(run.bucket)


def disk_full(run: SteeredRun) -> list[Row]:
    ballast = run.directory / "bucket" / "ballast"
    with ballast.open("wb", buffering=0) as out, suppress(OSError):
        while True:
            out.write(b"\0" * 4096)
    try:
        return seen(
            run, "disk full",
            here("STALLED", "no space is left in .* free, a merge needs"),
            afar("SILENT", "no unit has been heard for .*why is not known"),
        )  # fmt: skip
    finally:
        ballast.unlink()


def quarantined(run: SteeredRun) -> list[Row]:
    """Its deltas vanish from the bucket once they are offered: no honest learner offers what is not there."""
    ended = Event()

    def delete() -> None:
        while not ended.is_set():
            offered = {path.stem for path in run.bucket.glob(OFFERS_OF_L1)}
            for path in run.bucket.glob(DELTAS_OF_L1):  # one that is not offered yet would only be written again
                if path.name[:SEQ_DIGITS] in offered:
                    path.unlink(missing_ok=True)

    thread = Thread(target=delete)
    thread.start()
    try:
        awaited(lambda: run.status("afar")[1]["data"]["learners"][1]["state"] == "QUARANTINED", UP_S)
        return seen(run, "learner quarantined", *both("DEGRADED", "l1 .its offers are refused", "diloco readmit l1"))
    finally:
        ended.set()
        thread.join()


def stopped(run: SteeredRun) -> list[Row]:
    assert run.told("stop", NAME).returncode == 0
    return seen(run, "stopped", *both("STOPPED", "stop", "diloco resume", 0))


def left(run: SteeredRun) -> list[Row]:
    """SIGTERM to `launch`: its machine drains and leaves."""
    assert run.supervisor is not None
    run.supervisor.send_signal(signal.SIGTERM)
    run.supervisor.wait(UP_S)
    return seen(run, "left", *both("SILENT", "all units have left in good order", "diloco resume"))


def learner_killed(run: SteeredRun) -> list[Row]:
    """Without a supervisor that would start it again."""
    run.kill()
    run.signalled(signal.SIGKILL, "l1")
    return seen(
        run, "learner killed",
        here("DEGRADED", r"l1 .its process \d+ has ended, and no supervisor", "diloco resume"),
        afar("DEGRADED", "l1 .not heard for .*why is not known", "diloco resume"),
    )  # fmt: skip


def all_dead(run: SteeredRun) -> list[Row]:
    run.kill()
    run.signalled(signal.SIGKILL, *[name for name, identity in run.units().items() if is_alive(identity)])
    return seen(
        run, "all dead",
        here("SILENT", r"syncer: its process \d+ has ended, and no supervisor", "diloco resume"),
        afar("SILENT", "no unit has been heard for .*why is not known", "diloco resume"),
    )  # fmt: skip


def failed(run: SteeredRun) -> list[Row]:
    """Without this machine's consent to the run's code no learner starts again."""
    for consent in Path(run.home, "consent").glob("*.json"):
        consent.unlink()
    run.signalled(signal.SIGKILL, "l0", "l1")
    assert run.supervisor is not None
    run.supervisor.wait(UP_S)
    return seen(
        run, "failed",
        here("FAILED", r"all learners have failed: l0 \(.*ended with status 8.*times in a row", "diloco logs"),
        afar("FAILED|SILENT", ""),
    )  # fmt: skip


def diverged(run: SteeredRun) -> list[Row]:
    awaited(lambda: run.status("here")[1]["data"]["loss"] is not None, UP_S)
    run.order("evaluator", "high")
    awaited(run.is_stopped, UP_S)
    return seen(run, "paused by a divergence", *both("PAUSED", "its loss has jumped", "diloco resume", 0))


def finished(run: SteeredRun) -> list[Row]:
    """And DRAINING before, as the last evaluation takes its time."""
    rows = seen(run, "draining", Expected("here", "DRAINING", "the last evaluation", UP_S))
    return rows + seen(run, "finished", *both("FINISHED", "tokens", "diloco export", 0))


@dataclass(frozen=True)
class Arranged:
    """Situations of one run, in this order; its settings."""

    situations: tuple[Callable[[SteeredRun], list[Row]], ...]
    tokens: int = ENDLESS_TOKENS
    settings: dict[str, Any] = field(default_factory=dict)
    small_disk: bool = False


JUDGED = {"evaluation": {"every": 1, "on_divergence": "pause"}}
STAGES = (
    Arranged((healthy, slow, hanging, paused_process, syncer_restarts, bucket_gone)),
    Arranged((quarantined, stopped)),
    Arranged((learner_killed, all_dead)),
    Arranged((left,)),
    Arranged((failed,)),
    Arranged((disk_full,), small_disk=True),
    Arranged((diverged,), settings=JUDGED),
    Arranged((finished,), FEW_TOKENS),
)
SAMPLE = Arranged((hanging, stopped))  # healthy before, as all are


def said(line: str) -> None:
    print(line, flush=True)


def staged(stage: Arranged, chosen: frozenset[str] = frozenset(), tell: Callable[[str], None] = said) -> list[str]:
    """The problems. Of the chosen situations; all if none is."""
    wanted = [situation for situation in stage.situations if not chosen or situation.__name__ in chosen]
    if not wanted:
        return []
    problems = []
    with lived(SteeredRun(stage.tokens, stage.small_disk, **stage.settings)) as run:
        if stage.tokens == ENDLESS_TOKENS:
            merging(run)
        for situation in wanted:
            try:
                for row in situation(run):
                    tell(row.line())
            except AssertionError as error:
                problems.append(str(error))
                tell(f"NOT SEEN: {error}")
    return problems


def main() -> None:
    names = [situation.__name__ for stage in STAGES for situation in stage.situations]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--situation", nargs="*", choices=names, default=[])
    chosen = frozenset(parser.parse_args().situation)
    print(HEADER, flush=True)
    problems = [problem for stage in STAGES for problem in staged(stage, chosen)]
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
