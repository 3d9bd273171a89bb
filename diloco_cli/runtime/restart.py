"""Whether, when and why a unit that ended is started again: a pure function of (exits, now, policy)."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from diloco_cli.events.cause import Cause

FENCED_STATUS = 9
DONE_STATUSES = {0: "it is done", FENCED_STATUS: "a newer process has taken its place (fenced)"}
# The world outside may heal, and the unit has already retried by itself: patience instead of a count.
OUTSIDE_STATUSES = {6: "the store failed", 13: "no space is left", 75: "it asked to try again"}
# What was read may have been wrong, as the page of a proxy is: tries spread over some time show that it lies there.
READ_STATUSES = {4: "its run was not found", 11: "a data check failed"}
# The same start will end the same way: a few tries, for what a bucket may have healed meanwhile.
HOPELESS_STATUSES = {
    2: "its settings are not valid",
    3: "its plan is infeasible",
    8: "it was refused",
    12: "the run failed in it",
}
REASONS = (DONE_STATUSES, OUTSIDE_STATUSES, READ_STATUSES, HOPELESS_STATUSES)
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True)
class RestartPolicy:
    """`first_delay_s` is short, because a fleet loses this time whenever a learner is killed. A life is healthy after
    `healthy_s`; after `settled_s` if a signal from outside ended it, which is no fault of the unit."""

    first_delay_s: float = 0.2
    second_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_s: float = 60.0
    settled_s: float = 5.0
    max_restarts: int = 20  # in a row without a healthy life
    max_hopeless: int = 3
    reads_spread_s: float = 300.0  # from the first to the last of the deaths by READ_STATUSES
    max_repeats: int = 2
    patience_s: float = 3600.0


@dataclass(frozen=True)
class Exit:
    """`status` is that of subprocess (-9: killed by signal 9); None: an adopted unit, not our child. `cause`: what the
    process itself said."""

    at_s: float
    status: int | None
    lived_s: float
    cause: Cause | None = None


@dataclass(frozen=True)
class RestartDecision:
    """`at_s`: when to start it again, on the clock of the exits; None unless `action` is restart."""

    action: Literal["restart", "done", "give_up"]
    reason: str
    at_s: float | None = None


def decide(exits: Sequence[Exit], now_s: float, policy: RestartPolicy, stands_by: bool = False) -> RestartDecision:
    """The decision on a unit after the last of its exits (oldest first, at least one). `stands_by`: a fenced unit is
    restarted, as a standby."""
    last = exits[-1]
    if last.status in DONE_STATUSES and not (stands_by and last.status == FENCED_STATUS):
        return RestartDecision("done", DONE_STATUSES[last.status])
    cause = describe_exit(last)
    exhausted = _exhausted(exits, now_s, policy)
    if exhausted is not None:
        return RestartDecision("give_up", f"{cause}; {exhausted}")
    delay_s = _delay_s(len(_bad_lives(exits, policy)), policy)
    return RestartDecision("restart", f"{cause}; restart in {delay_s:g} s", now_s + delay_s)


def describe_exit(last: Exit) -> str:
    lived = f"after {last.lived_s:.1f} s"
    if last.status is None:
        return f"ended {lived}, how is not known (it was adopted)"
    if last.status < 0:
        return f"killed by {_signal_name(-last.status)} {lived}"
    why = next((text[last.status] for text in REASONS if last.status in text), "")
    return f"ended with status {last.status} {lived}" + (f": {why}" if why else "")


def exit_facts(last: Exit, pid: int | None) -> dict[str, str | int | float]:
    """For programs. `signal`: the name of the one that killed it; `status`: how it ended by itself."""
    how: dict[str, str | int | float] = {}
    if last.status is not None:
        how = {"signal": _signal_name(-last.status)} if last.status < 0 else {"status": last.status}
    return {**({} if pid is None else {"pid": pid}), **how, "lived_s": round(last.lived_s, 1)}


def _bad_lives(exits: Sequence[Exit], policy: RestartPolicy) -> list[Exit]:
    """The latest lives in a row that were not healthy, the last one first."""

    def is_bad(life: Exit) -> bool:
        killed = life.status is not None and -life.status in OUTSIDE_SIGNALS
        return life.lived_s < (policy.settled_s if killed else policy.healthy_s)

    return list(takewhile(is_bad, reversed(exits)))


def _delay_s(bad_lives: int, policy: RestartPolicy) -> float:
    if bad_lives <= 1:
        return policy.first_delay_s
    return min(policy.max_delay_s, policy.second_delay_s * 2.0 ** min(bad_lives - 2, 32))


def _exhausted(exits: Sequence[Exit], now_s: float, policy: RestartPolicy) -> str | None:
    """The reason to give up, or None."""
    last, repeats = exits[-1], _repeats(exits)
    if repeats >= policy.max_repeats:
        return f"{repeats + 1} times at the same place without progress, a restart does not heal it"
    if last.status in HOPELESS_STATUSES or last.status in READ_STATUSES:
        same = takewhile(lambda life: life.status == last.status and life.lived_s < policy.patience_s, reversed(exits))
        again = list(same)
        spread_s = policy.reads_spread_s if last.status in READ_STATUSES else 0.0
        if len(again) < policy.max_hopeless or last.at_s - again[-1].at_s < spread_s:
            return None
        return f"{len(again)} times in a row, a restart does not heal it"
    bad = _bad_lives(exits, policy)
    if last.status in OUTSIDE_STATUSES:
        series = list(takewhile(lambda life: life.status in OUTSIDE_STATUSES, bad))
        since_s = now_s - series[-1].at_s if series else 0.0
        return f"so for {since_s:.0f} s now" if since_s > policy.patience_s else None
    return f"restarts exhausted: {policy.max_restarts} in a row" if len(bad) > policy.max_restarts else None


def _repeats(exits: Sequence[Exit]) -> int:
    """How often, before the last one, the lives in a row ended by the same lasting error of the user's code, and no
    further on in the data."""
    causes = [life.cause for life in exits if life.cause is not None]
    last = exits[-1].cause
    if last is None or not last.lasting:
        return 0
    return sum(1 for _ in takewhile(lambda cause: _is_repeated(cause, last), reversed(causes[:-1])))


def _is_repeated(cause: Cause, last: Cause) -> bool:
    is_further = last.position is not None and cause.position is not None and last.position > cause.position
    return cause.place == last.place and not is_further


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
