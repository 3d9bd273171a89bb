"""How a supervision ends: what asked for it, and how long units may take to leave. Pure.

A signal ends what runs here, and nothing else: the run goes on elsewhere, or waits in its bucket. Only Ctrl-C in a
`launch` that has the whole run on its machine also stops the run, as `diloco stop` does.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from diloco_cli.events.cause import Cause
from diloco_cli.runtime.restart import FENCED_STATUS
from diloco_cli.units import format_duration

SIGNAL_STATUS_BASE = 128
EventKind = Literal[
    "started", "adopted", "ended", "held", "released", "done", "failed", "stopping", "leaving", "terminated", "killed",
    "fenced",
]  # fmt: skip
Reason = Literal["finished", "stopped", "interrupted", "left", "fenced", "failed", "gone"]
ENDINGS: dict[str, Reason] = {"FINISHED": "finished", "STOPPED": "stopped"}
AGAIN = "ask again to end at once"


@dataclass(frozen=True)
class SupervisionEvent:
    """One line for people. `unit` is None if it concerns all. `data`: facts for programs; of an end `pid`, `status` and
    `lived_s`, of a start `pid` and which one it is. `cause`: what the unit itself said before its end."""

    kind: EventKind
    unit: str | None
    text: str
    data: dict[str, str | int | float] = field(default_factory=dict)
    cause: Cause | None = None


@dataclass(frozen=True)
class SupervisionResult:
    """How a supervision ended. `signum` is the signal that interrupted it; `left`: the units that ran until then."""

    reason: Reason
    signum: int | None
    left: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        if self.reason in ("interrupted", "left"):
            return SIGNAL_STATUS_BASE + (self.signum or 2)
        return FENCED_STATUS if self.reason == "fenced" else 0


@dataclass(frozen=True)
class Participants:
    """What the bucket says of the run's processes: the islands of the launch, those that joined since, and syncers
    that serve or stand by and are none of this machine's units."""

    islands: tuple[str, ...]
    joined: tuple[str, ...] = ()
    syncers_elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a signal is taken for: to stop the run, or to leave it. The reason is shown."""

    stops: bool
    reason: str


def answer_alone(signum: int, launched: bool) -> Answer | None:
    """The answer to a first signal that needs no look into the bucket; None: it depends on who takes part.

    `launched`: this is a `launch` of all regions, in the foreground."""
    if signum != signal.SIGINT:
        return Answer(False, f"{signal.Signals(signum).name} ends what runs here")
    if not launched:
        return Answer(False, "Ctrl-C stops a run only in the `launch` that has all of it")
    return None


def answer_to_ctrl_c(living: Mapping[str, bool], participants: Participants | None) -> Answer:
    """Whether Ctrl-C in a `launch` stops the run: if all of it lives here, and nobody else takes part. `living`: this
    machine's units, and which of them live; `participants`: None if the bucket did not answer in time."""
    if participants is None:
        return Answer(False, "the bucket does not say who else takes part")
    away = [name for name in (*participants.islands, *living) if not living.get(name, False)]
    if away:
        return Answer(False, f"{listed(dict.fromkeys(away))} {_is_are(away)} not alive here")
    others = (*participants.joined, *participants.syncers_elsewhere)
    if others:
        return Answer(False, f"{listed(others)} {'takes' if len(others) == 1 else 'take'} part elsewhere")
    return Answer(True, f"all of the run is here ({listed(living)}), and nobody has joined")


def listed(names: Collection[str]) -> str:
    """`a, b and c`."""
    *most, last = names or ("nothing",)
    return f"{', '.join(most)} and {last}" if most else last


def _is_are(names: Collection[str]) -> str:
    return "is" if len(set(names)) == 1 else "are"


@dataclass(frozen=True)
class StopPolicy:
    """Bounds of a clean end, from its beginning; together below 10 s, but `finish_s` more where the run is over, for a
    syncer `syncer_finish_s`: units then leave by themselves, a learner after its present step, a syncer after its
    regions have all, and nobody waits for the cores.

    Units that can read in the bucket that the run has ended, or will stop, have `leave_s` before they get
    SIGTERM; if no stop request was written, they get it at once. Where this machine leaves, learners get it at once,
    and drain; syncers get it once the learners have gone, or after `drain_s`, as they may merge their last offers. A
    unit that lives after `kill_s` gets SIGKILL. Where the bucket is gone, nothing can be drained: `gone_kill_s`.
    """

    finish_s: float = 30.0
    syncer_finish_s: float = 30.0
    leave_s: float = 4.0
    drain_s: float = 6.0
    kill_s: float = 8.0
    gone_kill_s: float = 2.0
    give_up_s: float = 9.5


@dataclass(frozen=True)
class Ending:
    """The reason for the end, and its times on the monotonic clock. Syncers get SIGTERM when the learners here have
    gone, not before `terminate_at_s`, and at `syncers_at_s` at the latest. SIGKILL comes at `kill_at_s`. Learners
    get both `learners_earlier_s` before."""

    reason: Reason
    text: str
    terminate_at_s: float
    syncers_at_s: float
    kill_at_s: float
    give_up_at_s: float
    learners_earlier_s: float = 0.0

    def terminates(self, kind: str, learners_live: bool, now_s: float) -> bool:
        """Whether a unit of this kind gets SIGTERM now."""
        if kind == "learner":
            return now_s >= self.terminate_at_s - self.learners_earlier_s
        return now_s >= (self.syncers_at_s if learners_live else self.terminate_at_s)

    def kills(self, kind: str, now_s: float) -> bool:
        """Whether a unit of this kind gets SIGKILL now."""
        return now_s >= self.kill_at_s - (self.learners_earlier_s if kind == "learner" else 0.0)


def next_ending(
    ending: Ending | None,
    num_signals: int,
    answer: Answer | None,
    run_state: str | None,
    now_s: float,
    policy: StopPolicy,
) -> Ending | None:
    """The ending that follows from the signals, what they are taken for (None: that is not known yet), and the run's
    state in the bucket. A signal takes precedence over the run's own end, and a second one kills at once."""
    if num_signals >= 2:
        hasty = ending or begin_ending("left", "asked twice", now_s, 0.0, policy)
        kill_at_s = min(now_s, hasty.kill_at_s)
        return replace(hasty, terminate_at_s=now_s, syncers_at_s=now_s, kill_at_s=kill_at_s, learners_earlier_s=0.0)
    if num_signals and ending is not None and ending.reason in ("finished", "stopped", "failed"):
        fresh = begin_ending("interrupted", f"asked to leave; {AGAIN}", now_s, 0.0, policy)
        return replace(fresh, kill_at_s=min(fresh.kill_at_s, ending.kill_at_s))
    if ending is not None:
        return ending
    if num_signals and answer is not None:
        if answer.stops:
            text = f"stopping the run: {answer.reason}; {AGAIN}"
            return begin_ending("interrupted", text, now_s, policy.leave_s, policy)
        return replace(
            begin_ending("left", answer.reason, now_s, 0.0, policy), syncers_at_s=now_s + policy.drain_s
        )  # fmt: skip
    if run_state == "FINISHED":
        return _finished(now_s, policy)
    if run_state in ENDINGS:
        return begin_ending(ENDINGS[run_state], f"the run is {run_state}", now_s, policy.leave_s, policy)
    return None


def _finished(now_s: float, policy: StopPolicy) -> Ending:
    text, longest_s = "the run is FINISHED", max(policy.finish_s, policy.syncer_finish_s)
    if longest_s > policy.finish_s:
        text += f"; a syncer has {format_duration(longest_s)} to fill its regions"
    ending = begin_ending("finished", text, now_s + longest_s, policy.leave_s, policy)
    return replace(ending, learners_earlier_s=longest_s - policy.finish_s)


def begin_ending(reason: Reason, text: str, now_s: float, delay_s: float, policy: StopPolicy) -> Ending:
    """An ending whose SIGTERM comes after `delay_s`."""
    at_s = now_s + delay_s
    return Ending(reason, text, at_s, at_s, now_s + policy.kill_s, now_s + policy.give_up_s)


def without_bucket(reason: Reason, text: str, now_s: float, policy: StopPolicy) -> Ending:
    """An ending while the bucket is gone: all units get SIGTERM now, and SIGKILL soon."""
    return replace(begin_ending(reason, text, now_s, 0.0, policy), kill_at_s=now_s + policy.gone_kill_s)


def drain_text(why: str, learners: Collection[str], syncers: Collection[str]) -> str:
    """The line that says what goes on while this machine leaves: `learners` and `syncers` that live here."""
    steps = []
    if learners:
        steps.append(f"{listed(learners)} {'offers its' if len(learners) == 1 else 'offer their'} last deltas")
    if syncers:
        steps.append(f"{'then ' if learners else ''}{listed(syncers)} {'ends' if len(syncers) == 1 else 'end'}")
    return f"{why}: {', '.join(steps) or 'nothing lives here'}; the run itself goes on. {AGAIN.capitalize()}"


def last_words(
    come_back: str, serve: str, left: Collection[str], served: bool, participants: Participants | None
) -> list[str]:
    """What a person should know after this machine has left, one line each. `come_back` and `serve`: the commands that
    bring back what ran here, and a syncer; `left`: the units that ran here; `served`: one of them was a syncer."""
    lines = [f"left the run without stopping it; ended here: {listed(left)}. Come back: {come_back}"]
    if participants is None:
        return lines
    others = [name for name in (*participants.islands, *participants.joined) if name not in left]
    if participants.syncers_elsewhere:
        lines.append(f"not here: {listed(participants.syncers_elsewhere)}; the merges go on with them")
    elif served and others:
        lines.append(
            f"no syncer is left: {listed(others)}, if alive, {'trains' if len(others) == 1 else 'train'} on up to the "
            f"drift bound. Start one on any machine: {serve}"
        )
    elif served:
        lines.append("nothing of the run is left elsewhere: it waits in its bucket")
    return lines
