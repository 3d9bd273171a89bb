"""Starts a history's processes, and brings back those that crash or fail, as supervisors do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from diloco_cli.errors import DilocoError, FencedError, UsageError
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.operations import Now, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import SYNCER as SYNCER_STATES
from diloco_cli.protocol.log.state import IllegalStateError, RunState, SyncerState, moved
from diloco_cli.signing import learner_signer, syncer_signer
from diloco_cli.virtual.world import Actor
from tests.histories.harm import HarmEvaluator
from tests.histories.learner import LearnerProfile
from tests.histories.liveness import check_gave_way
from tests.histories.monitor import OPERATOR
from tests.histories.options import SLOWEST, with_key
from tests.histories.processes import Process
from tests.histories.replayer import ViolationError

if TYPE_CHECKING:
    from tests.histories.history import History


SYNCER_HOSTS = 2
STAYS_AWAY = (0, UsageError.exit_status, FencedError.exit_status)  # a process with one of these is not restarted


def syncers_signer(number: int) -> str:
    """As whom the syncer's `number`-th process signs: as its machine."""
    return syncer_signer(f"host-{number % SYNCER_HOSTS}")


class SimulatedSupervisor:
    """The supervisor of all roles. `standing_by`: the standbys; `fallen`: crashed syncers without a successor."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.processes: list[Process] = []
        self.standing_by: set[str] = set()
        self.fallen: list[int] = []
        self.crashes = 0
        self._counts: Counter[str] = Counter()

    def living(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role and not process.ended]

    @property
    def all_ended(self) -> bool:
        return all(process.ended for process in self.processes)

    # -- starting -----------------------------------------------------------------------------------------------

    def new_process(self, role: str) -> Process:
        history = self.history
        self._counts[role] += 1
        process = Process(
            role, self._counts[role], history.world, history.seed, history.actors.client, history.walls
        )  # fmt: skip
        process.heard_merges = history.monitor.replayer.merges
        self.processes.append(process)
        return process

    def start_syncer(self, delay_s: float = 0.0, dead: int | None = None) -> None:
        """Under an engine: as a job, one of two that are alike; `dead`: the process that it replaces in its job."""
        process = self.new_process(SYNCER)
        alike = self.history.options.engine
        process.start(self._stand_by(process, True, dead) if alike else self._serve(process), delay_s=delay_s)

    def _serve(self, process: Process, because: str = "") -> Steps[RunState]:
        history = self.history
        run = self.as_syncer(process)
        arithmetic = history.actors.arithmetic(run, unfit=history.nemesis.unfit)
        process.serves = served = history.actors.syncer(
            run, process.claim(), arithmetic, HarmEvaluator(history.monitor.harm),
            process.time_text, process.nonce, on_commit=history.monitor.on_commit, because=because,
        )  # fmt: skip
        return served.serve() if history.region is None else history.region.serve(process, served)

    def start_standby(self) -> None:
        """Start a standby; once it has served, it is like any other syncer."""
        process = self.new_process(SYNCER)
        self.standing_by.add(process.name)
        process.start(self._stand_by(process))

    def _stand_by(self, process: Process, alike: bool = False, dead: int | None = None) -> Steps[Any]:
        history = self.history
        name = f"s{process.number % SYNCER_HOSTS if alike else process.number}"
        standby = history.actors.standby(
            self.as_syncer(process), process.claim(), name, history.draw.uniform(),
            instead_of=dead, alike=alike,
        )  # fmt: skip
        if (reason := (yield from standby.wait())) is None:
            return "the run is over"
        self.standing_by.discard(process.name)
        return (yield from self._serve(process, reason))

    def as_syncer(self, process: Process) -> RunFormat:
        """The run as this process has it: with its machine's own key, if the run is signed."""
        signer = syncers_signer(process.number)
        return with_key(self.history.run, signer, self.history.nemesis.keys_made[signer])

    def as_learner(self, name: str, run: RunFormat) -> RunFormat:
        signer = learner_signer(name)
        return with_key(run, signer, self.history.nemesis.keys_made[signer])

    def start_learner(self, name: str, delay_s: float = 0.0) -> None:
        process = self.new_process(name)
        process.start(self.learner_steps(process, self.as_learner(name, self.history.run)), delay_s=delay_s)

    def learner_steps(self, process: Process, run: RunFormat) -> Steps[RunState]:
        learner = self.history.actors.learner(
            run, process.role, process.claim(), process.nonce, self.history.beliefs, self._profile(process.role),
            process.start_threads,
        )  # fmt: skip
        process.learner = learner
        return learner.train()

    def _profile(self, name: str) -> LearnerProfile:
        options, nemesis = self.history.options, self.history.nemesis
        return LearnerProfile(
            options.step_s * (options.slowest if name == SLOWEST else 1.0),
            lambda: nemesis.leaves(name),
            lambda: nemesis.poison(name),
            lambda: nemesis.corrupts(name),
            lambda: nemesis.harms(name),
            lambda: nemesis.share(name),
            lambda: nemesis.lengthens(name),
        )

    def leave(self, process: Process) -> None:
        """This syncer is told to leave: whatever it does, it says goodbye, if it serves, and ends."""
        syncer = process.serves

        def goodbye() -> Steps[bool]:
            if syncer is not None and syncer.epoch and syncer.doing is not SyncerState.FENCED:
                syncer.doing = moved(SYNCER_STATES, syncer.doing, SyncerState.DONE)
                yield from syncer.send_heartbeat((yield Now()), force=True)
            return True

        process.end_with(goodbye(), "/goodbye")

    # -- ending, and coming back --------------------------------------------------------------------------------

    def ended(self, actor: Actor) -> None:
        """The world reports that an actor has ended, and how."""
        if actor.owner is None:  # a timer
            if actor.error is not None:
                raise actor.error
            return None
        process: Process = actor.owner.process
        if process.ended:
            return None
        error, main = actor.error, actor is process.threads[0]
        if error is None and actor.result is None and not main:
            process.end(None)  # a crash struck this thread: the whole process is gone
        elif error is None and not main:
            return None
        elif error is None:
            process.end(0 if actor.result is not None else None)
        else:
            process.end(_status_of(actor, error))
        if process.status is None:
            return self.crashed(process)
        self.history.note(f"{process.name} left with status {process.status}")
        if isinstance(error, FencedError):
            check_gave_way(self.history, process)
        if self.history.healthy is not None:
            self.history.healthy.left(process, error)
            self.history.nemesis.losses.owner_restores()  # it may have been the last one that held a record
        return self._replace(process)

    def crashed(self, process: Process) -> None:
        self.crashes += 1
        self.history.note(f"{process.name} crashed")
        self.fallen += [process.number] if process.role == SYNCER else []
        self._replace(process)

    def _replace(self, process: Process) -> None:
        """Restart a process that crashed or failed, but not one that was fenced or has finished."""
        history = self.history
        history.changes += 1
        if process.status in STAYS_AWAY:
            return
        delay_s = history.draw.between(0.05, 2.0)
        history.world.call_at(history.world.now_s + delay_s, lambda: self.revive(process.role))

    def revive(self, role: str) -> None:
        """Start a role's process if none lives. Standbys do not count: the syncer's unit is started beside them. Under
        an engine there are two of them."""
        serving = [process for process in self.living(role) if process.name not in self.standing_by]
        units = self.history.options.syncers if role == SYNCER and self.history.options.engine else 1
        if len(serving) >= units or role == OPERATOR or self.history.nemesis.stopped:
            return
        if role == SYNCER:
            self.start_syncer(dead=self.fallen.pop(0) if self.fallen else None)
        else:
            self.history.nemesis.start(role)

    def freeze(self, process: Process, for_s: float) -> None:
        process.pause()
        self.history.world.call_at(self.history.world.now_s + for_s, process.resume)


def _status_of(actor: Actor, error: BaseException) -> int:
    """exit: a process that ends with an error has a documented exit status."""
    if isinstance(error, ViolationError):
        raise error
    if not isinstance(error, DilocoError) or isinstance(error, IllegalStateError):
        raise ViolationError("exit", f"{actor.name} ended with {type(error).__name__}: {error}") from error
    return error.exit_status
