"""Events that hit whole processes: deaths, freezes, outages, slow links, operators, islands that join or leave, bad
payloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.actors.requests import StandIn, ask, withdraw_stop
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.operations import Create, Operation, Steps, There
from diloco_cli.protocol.log.records import Island, Offer, RequestKind
from diloco_cli.protocol.log.state import RunState
from tests.faulty_world import Fault, Injected
from tests.histories.integers import MOST, NOT_FINITE
from tests.histories.key_events import KeyEvents
from tests.histories.liveness import check_restart
from tests.histories.losses import Losses
from tests.histories.monitor import OPERATOR
from tests.histories.options import BATCH_TOKENS, REGION, SPARE_SHARDS
from tests.histories.poisoner import Poisoner
from tests.histories.processes import Process
from tests.histories.region import JOINS_HERE
from tests.histories.replayer import is_poisoner
from tests.histories.script import LARGE, NemesisEvent
from tests.histories.stream import Stream

if TYPE_CHECKING:
    from tests.histories.history import History


BAD_PAYLOADS = (2, 12)  # in one event: a few, or enough for a quarantine
RESUMED_AFTER_S = 0.5
AWAY_S = 5.0  # at most, of a job that an engine has taken
PART = 0.5


class Nemesis:
    """Causes these events, and heals. `stopped`: an operator has stopped the run; no process is brought back."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.stopped = False
        self.joiners: dict[str, Island] = {}
        self.keys, self.losses = KeyEvents(history), Losses(history)
        self.keys_made: Counter[str] = Counter()  # by signer: keys that replaced an earlier one
        self._away: dict[str, tuple[float, Fault]] = {}
        self._slow: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._bad: Counter[tuple[str, str]] = Counter()
        self._partial_until_s: dict[str, float] = {}
        self._poisoner = Poisoner(
            history.options.poisoner or "always",
            Stream(history.seed, "poison"),
            lambda: bool(history.supervisor.living(SYNCER)),
        )

    def strike(self, event: NemesisEvent) -> None:
        history = self.history
        if history.monitor.healthy:
            return
        history.note(event.describe())
        getattr(self, f"_{event.kind}")(event)

    def heal(self) -> None:
        """End outages, slow links and bad payloads, and readmit all quarantined learners."""
        self._away.clear()
        self._slow.clear()
        self._leaving.clear()
        self._bad.clear()
        self._partial_until_s.clear()
        self.keys.remove()
        self.losses.owner_restores()
        self.readmit()

    def readmit(self) -> None:
        """Operators readmit all quarantined learners; the monitor checks that no honest one is among them."""
        for name in sorted(self.history.monitor.replayer.kept_out):
            self._ask("readmit", learner=name)

    def readmit_nobody(self) -> None:
        """A request that changes nothing."""
        self._ask("readmit", learner="nobody")

    # -- processes ----------------------------------------------------------------------------------------------

    def start(self, role: str) -> None:
        """Start a learner's next process; one of an island that joined asks again, and finds the island admitted."""
        history = self.history
        if role not in self.joiners:
            return history.supervisor.start_learner(role)
        process, island = history.supervisor.new_process(role), self.joiners[role]

        def steps() -> Steps[RunState]:
            known = yield from enter(
                history.supervisor.as_learner(role, history.run), island, process.nonce(), process.time_text()
            )
            return (yield from history.supervisor.learner_steps(process, known))

        process.start(steps())
        return None

    def _struck(self, event: NemesisEvent) -> list[Process]:
        """The processes that an event hits: all of the role, or one of them."""
        living = self.history.supervisor.living(event.target)
        return [living[(event.which - 1) % len(living)]] if event.which and living else living

    def _kill(self, event: NemesisEvent) -> None:
        self._end(self._struck(event))

    def crash(self, role: str) -> None:
        self._end(self.history.supervisor.living(role))

    def _end(self, processes: list[Process]) -> None:
        for process in processes:
            process.end(None)
            self.history.supervisor.crashed(process)

    def _kill_all(self, event: NemesisEvent) -> None:
        history = self.history
        self.keys.remove()
        for role in sorted({process.role for process in history.supervisor.processes}):
            self.crash(role)
        self.losses.owner_restores()
        if history.monitor.replayer.n >= 0:
            check_restart(history, history.monitor.replayer)

    def _pause(self, event: NemesisEvent) -> None:
        for process in self._struck(event):
            self.history.supervisor.freeze(process, event.for_s)

    def _zombie(self, event: NemesisEvent) -> None:
        """A process is taken for dead and replaced; later it wakes up beside its successor."""
        self._pause(event)
        if event.target == SYNCER:
            self.history.supervisor.start_syncer()
        else:
            self.start(event.target)

    def _second_syncer(self, event: NemesisEvent) -> None:
        self.history.supervisor.start_syncer()

    # -- the store ----------------------------------------------------------------------------------------------

    def away(self, who: str, operation: Operation) -> Injected | None:
        """The fault that an outage of a role, of one process or of the region gives a call."""
        if who not in self._away:
            return None
        until_s, fault = self._away[who]
        if self.history.world.now_s >= until_s or (fault is Fault.FULL and not isinstance(operation, Create)):
            return None
        return Injected(fault)

    def _shut_out(self, event: NemesisEvent, fault: Fault) -> None:
        """Cut a role, with processes that start during the outage, or one process off from the store."""
        those = [process.name for process in self._struck(event)] if event.which else [event.target]
        self._away |= dict.fromkeys(those, (self.history.world.now_s + event.for_s, fault))

    def _outage(self, event: NemesisEvent) -> None:
        self._shut_out(event, Fault.LOST_REQUEST)

    def _region_outage(self, event: NemesisEvent) -> None:
        """No process reaches the region's bucket, if there is one."""
        self._away[REGION] = (self.history.world.now_s + event.for_s, Fault.LOST_REQUEST)

    def _forbidden(self, event: NemesisEvent) -> None:
        self._shut_out(event, Fault.FORBIDDEN)

    def _full(self, event: NemesisEvent) -> None:
        self._shut_out(event, Fault.FULL)

    def _slow_link(self, event: NemesisEvent) -> None:
        """From now on each large object takes `for_s`, a record does not. What a learner expects of its uploads then
        stays with it when faults have ceased."""
        self._slow[event.target] = event.for_s

    def transfer_s(self, process: Process, operation: Operation) -> float:
        """How much longer a call takes that begins now, in seconds."""
        slow_s = self._slow.get(process.role, 0.0)
        operation = operation.operation if isinstance(operation, There) else operation
        return slow_s if slow_s and getattr(operation, "key", "").startswith(LARGE) else 0.0

    def _wall_jump(self, event: NemesisEvent) -> None:
        for process in self._struck(event):
            process.wall_s += 1000 * event.for_s

    # -- operators, newcomers, leavers --------------------------------------------------------------------------

    def _operate(self, asks: Callable[[Process, RunState], Steps[Any]]) -> None:
        """An operator's command: reads the log, asks for something, leaves."""
        history = self.history
        process = history.supervisor.new_process(OPERATOR)

        def steps() -> Steps[bool]:
            state = yield from read_log(history.run)
            yield from asks(process, state)
            return True

        process.start(steps())

    def _ask(self, kind: RequestKind, **fields: Any) -> None:
        self._operate(lambda process, state: self._asked(process, state, kind, **fields))

    def _asked(self, process: Process, state: RunState, kind: RequestKind, **fields: Any) -> Steps[int]:
        keyring = self.history.run.keyring
        return ask(state, kind, process.nonce(), process.time_text(), "asked", keyring=keyring, **fields)

    def _rotate(self, event: NemesisEvent) -> None:
        """A machine gets another key; the operator revokes the old one, which its processes may still use."""
        learner = None if event.target == SYNCER else event.target
        self._ask("revoke", revoke=self.keys.replace(event.target, event.which), learner=learner)

    def _lose(self, event: NemesisEvent) -> None:
        self.losses.strike(event)

    def _steal(self, event: NemesisEvent) -> None:
        self.keys.steal(event.target, event.which)

    def _stop(self, event: NemesisEvent) -> None:
        """The serving syncer is asked to stop; after a while the run is resumed."""
        self._ask("stop")
        self._resume_later(event.for_s)

    def _stand_in(self, event: NemesisEvent) -> None:
        """An operator takes the syncer for dead; the operator's command stops the run itself."""

        def alone(process: Process, state: RunState) -> Steps[Any]:
            yield from self._asked(process, state, "stop")
            stand_in = StandIn(self.history.run, process.claim(), process.time_text(), process.nonce)
            yield from stand_in.serve()

        self._operate(alone)
        self._resume_later(event.for_s)

    def _readmit(self, event: NemesisEvent) -> None:
        self._ask("readmit", learner=event.target)

    def _rollback(self, event: NemesisEvent) -> None:
        """Request a rollback to a commit before the head as this history knows it; it may be refused."""
        self._ask("rollback", to=max(0, self.history.monitor.replayer.n - int(4 * event.for_s)))

    def _collect(self, event: NemesisEvent) -> None:
        self._ask("gc")

    def _resume_later(self, after_s: float) -> None:
        self.history.world.call_at(self.history.world.now_s + after_s + RESUMED_AFTER_S, self._resume)

    def _resume(self) -> None:
        run = self.history.run
        self._operate(lambda process, state: withdraw_stop(run, state, process.nonce(), process.time_text()))
        self.history.world.call_at(self.history.world.now_s + RESUMED_AFTER_S, self._start_all)

    def resume_if_stopped(self) -> None:
        """Operators look after a run that stays stopped: the command that was to resume it may have died, or what the
        stop has ended was to put a record back."""
        if self.history.monitor.replayer.kinds[-1:] == ["stop"]:
            self.losses.owner_restores()
            self._resume()

    def _start_all(self) -> None:
        self.stopped = False
        for role in (SYNCER, *self.history.roles):
            self.history.supervisor.revive(role)

    def _join(self, event: NemesisEvent) -> None:
        history = self.history
        if len(self.joiners) >= SPARE_SHARDS:
            return
        name = f"n{len(self.joiners)}"
        where = REGION if history.region is not None and name == JOINS_HERE else "elsewhere"
        self.joiners[name] = Island(name, where, BATCH_TOKENS * 2, 1, 1e9, 1e-9)
        history.roles.append(name)
        self.start(name)

    def _leave(self, event: NemesisEvent) -> None:
        if event.target == SYNCER:
            return
        self._leaving.add(event.target)

    def _notice(self, event: NemesisEvent) -> None:
        """An engine takes a role's jobs away: they are told, and leave, or are killed once their grace is over; then it
        brings them back."""
        history, role, told = self.history, event.target, self._struck(event)
        back_s = event.for_s + history.draw.between(0.0, AWAY_S)
        if role == SYNCER:
            for process in told:
                history.supervisor.leave(process)
        else:
            self._leaving.add(role)

        def taken() -> None:
            if not history.monitor.healthy:
                self._leaving.discard(role)
                self._end([process for process in told if not process.ended])

        history.world.call_at(history.world.now_s + event.for_s, taken)
        history.world.call_at(history.world.now_s + back_s, lambda: history.supervisor.revive(role))

    def leaves(self, name: str) -> bool:
        return name in self._leaving

    def _partial(self, event: NemesisEvent) -> None:
        """Some of an island's devices are missing for a while: its steps take a part of its batch."""
        self._partial_until_s[event.target] = self.history.world.now_s + event.for_s

    def share(self, name: str) -> float:
        """The share of its batch that a step of this learner takes now."""
        return PART if self.history.world.now_s < self._partial_until_s.get(name, 0.0) else 1.0

    # -- bad payloads -------------------------------------------------------------------------------------------

    def _poison(self, event: NemesisEvent) -> None:
        self._bad["poison", event.target] += BAD_PAYLOADS[event.for_s > 1.0]

    def _huge(self, event: NemesisEvent) -> None:
        self._bad["huge", event.target] += BAD_PAYLOADS[event.for_s > 1.0]

    def _corrupt(self, event: NemesisEvent) -> None:
        self._bad["corrupt", event.target] += BAD_PAYLOADS[event.for_s > 1.0]

    def _unfit(self, event: NemesisEvent) -> None:
        self._bad["unfit", event.target] += BAD_PAYLOADS[event.for_s > 1.0]

    def _next_is(self, kind: str, name: str) -> bool:
        if not self._bad[kind, name]:
            return False
        self._bad[kind, name] -= 1
        self.history.monitor.suspects.add(name)
        return True

    def poison(self, name: str) -> int | str | None:
        if self._next_is("poison", name):
            return NOT_FINITE
        return 4 * MOST if self._next_is("huge", name) else None

    def _harm(self, event: NemesisEvent) -> None:
        self._bad["harm", event.target] += BAD_PAYLOADS[event.for_s > 1.0]

    def _diverge(self, event: NemesisEvent) -> None:
        """All learners' next deltas do harm."""
        for name in self.history.roles:
            self._bad["harm", name] += BAD_PAYLOADS[1]

    def harms(self, name: str) -> bool:
        """Whether this learner's next delta does harm. Such a delta is no reason to refuse anything: no suspect."""
        if not self._bad["harm", name]:
            return False
        self._bad["harm", name] -= 1
        return True

    def lengthens(self, name: str) -> float:
        """How many times as long as it should be this learner's next delta is."""
        if not is_poisoner(name) or self.history.monitor.healthy:
            return 1.0
        return self._poisoner.factor()

    def paused(self) -> None:
        """The syncer has stopped the run itself: operators look at it, and resume it."""
        self._resume_later(RESUMED_AFTER_S)

    def corrupts(self, name: str) -> bool:
        return self._next_is("corrupt", name)

    def unfit(self, offer: Offer) -> str | None:
        return "bad_norms" if self._next_is("unfit", offer.learner) else None
