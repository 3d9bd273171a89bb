"""The whole examination: checks in their order, each with its own time limit, and a clean-up afterwards in any
case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from diloco_cli import clock
from diloco_cli.doctor import checks
from diloco_cli.doctor.checks import CLEAN_UP_S, Finding, Level, Place, PromiseBrokenError, passed
from diloco_cli.doctor.races import exclusive_create, race_of_threads
from diloco_cli.errors import NoSpaceError, StoreError
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreBrokenError, StoreForbiddenError
from diloco_cli.store.url import StoreKind, parse_url
from diloco_cli.store.wrappers import Deadline

CHECK_S = 12.0
CHECK_SHARE = 0.25
"""One check has its own limit, or this share of the time for all checks if that is more (slow links)."""
HOPELESS_S = 2.0
"""For the clean-up if no write succeeded: a failed write may have taken effect all the same."""
PROOF_S = 10.0
PROOF_RACERS, PROOF_ROUNDS = 4, 4
MORE_TIME = "give it more time: --timeout 300"
SLOW_OR_DEAD = f"is the store reachable from this machine? if it is only slow, {MORE_TIME}"
CANNOT_GO_ON = "not tried: nothing can be written"

MAX_BYTES = 64_000_000
QUICK_MAX_BYTES = 4_000_000

Examiner = Callable[[Place], Finding]


@dataclass(frozen=True)
class Check:
    """A finding under its name. `ok`: it is no reason against using the store."""

    name: str
    ok: bool
    level: Level
    detail: str
    hint: str
    took_s: float


@dataclass
class Examination:
    """The data of `doctor --json`. Megabits per second of whole objects, one after the other; milliseconds of the
    smallest read; None if they could not be measured. `num_repeated`: calls with transient errors that were repeated,
    the last of them with `last_trouble`. `left_behind`: keys that could not be deleted again."""

    url: str
    checks: list[Check] = field(default_factory=list)
    ok: bool = False
    up_mbps: float | None = None
    down_mbps: float | None = None
    latency_ms: float | None = None
    num_repeated: int = 0
    last_trouble: str = ""
    left_behind: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of the failed checks."""
        return [check.name for check in self.checks if check.level == "fail"]


@dataclass(frozen=True)
class Effort:
    """The number of tries. `quick`: enough to find a store that is always wrong, not one that rarely is."""

    racers: int = 6
    rounds: int = 12
    processes: int = 3
    reads: int = 30
    max_bytes: int = MAX_BYTES


QUICK = Effort(racers=4, rounds=4, processes=2, reads=8, max_bytes=QUICK_MAX_BYTES)


def examine(
    url: str,
    say: Callable[[Check], None],
    timeout_s: float,
    effort: Effort,
    written_gb_per_day: float | None = None,
    open_again: Callable[[], Store] | None = None,
) -> Examination:
    """Examine the store at `url`; `say` hears each verdict at once. `written_gb_per_day`: what a run would write there.

    Everything is written below a fresh random prefix and deleted in the end, also when interrupted. Raises StoreError
    if the store cannot even be opened."""
    whole = Deadline(timeout_s)
    place = Place(open_again or partial(open_store, url), url, Deadline(timeout_s))
    found = Examination(url)
    examiner = _Examiner(place, whole, found, say)
    try:
        examiner.run(effort, parse_url(url).kind, written_gb_per_day)
    finally:
        found.left_behind = place.clean_up(CLEAN_UP_S if examiner.usable else HOPELESS_S)
    found.ok = all(check.ok for check in found.checks)
    found.num_repeated, found.last_trouble = place.num_repeated, place.last_trouble
    return found


def prove_exclusive_create(url: str) -> None:
    """A few quick races, before a new run trusts the store. Raises StoreBrokenError if two racers win, and whatever
    the store raises."""
    place = Place(partial(open_store, url), url, Deadline(PROOF_S))
    try:
        detail, wrong = race_of_threads(place, PROOF_RACERS, PROOF_ROUNDS)
    finally:
        place.clean_up()
    if wrong:
        raise StoreBrokenError(
            f"this store lost exclusive creates ({detail}): two syncers could both believe they had committed",
            where=url,
            hint=f"diloco doctor {url}",
        )


class _Examiner:
    """Runs the checks, each with its own time limit, and notes what they find."""

    def __init__(self, place: Place, whole: Deadline, found: Examination, say: Callable[[Check], None]) -> None:
        self._place, self._whole, self._found, self._say = place, whole, found, say
        self._refused = False

    @property
    def usable(self) -> bool:
        """Whether anything could be written."""
        return bool(self._found.checks) and self._found.checks[0].ok

    def run(self, effort: Effort, kind: StoreKind, written_gb_per_day: float | None) -> None:
        racing = effort.processes if kind.is_shared else 0
        self._check("write", checks.write)
        examiners: dict[str, Examiner] = {
            "read_back": lambda place: checks.read_back(place, effort.reads),
            "upload_check": checks.upload_check,
            "exclusive_create": lambda place: exclusive_create(place, effort.racers, effort.rounds, racing),
            "own_write": checks.own_write,
            "list_after_write": checks.list_after_write,
            "range_read": checks.range_read,
            "delete": checks.delete,
            "clock": checks.clock_skew,
            "throughput": lambda place: self._throughput(place, effort.max_bytes),
            "permissions": checks.permissions,
        }
        if kind.retention:
            examiners[kind.retention] = lambda place: checks.retention(place, written_gb_per_day)
        for name, examiner in examiners.items():
            if self.usable or (self._refused and name == "permissions"):
                self._check(name, examiner)
            else:
                self._note(Check(name, False, "skip", CANNOT_GO_ON, "", 0.0))

    def _check(self, name: str, examiner: Examiner) -> None:
        box = self._place.box
        box.restart(min(max(CHECK_S, CHECK_SHARE * self._whole.seconds), self._whole.left_s()))
        started_s = clock.monotonic_s()
        if self._whole.is_over():
            finding = Finding("fail", "not tried: the time is used up", MORE_TIME)
        else:
            finding = self._asked(examiner)
        took_s = round(clock.monotonic_s() - started_s, 3)
        self._note(Check(name, finding.level != "fail", finding.level, finding.detail, finding.hint, took_s))

    def _note(self, check: Check) -> None:
        self._found.checks.append(check)
        self._say(check)

    def _asked(self, examiner: Examiner) -> Finding:
        """A store that raises has failed the check."""
        try:
            return examiner(self._place)
        except PromiseBrokenError as broken:
            return broken.finding
        except (StoreError, NoSpaceError) as error:
            self._refused = self._refused or isinstance(error, StoreForbiddenError)
            return Finding("fail", str(error), SLOW_OR_DEAD if self._place.box.is_over() else error.hint or "")

    def _throughput(self, place: Place, max_bytes: int) -> Finding:
        speed = checks.measure_speed(place, max_bytes)
        self._found.up_mbps, self._found.down_mbps = round(speed.up_bps / 1e6, 3), round(speed.down_bps / 1e6, 3)
        self._found.latency_ms = round(1000 * speed.latency_s, 3)
        return passed(speed.text())
