"""The learner's actor beside a user's loop: performed on its thread between two steps, and on lanes beside it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import TerminatedError
from diloco_cli.learner.facts import Facts
from diloco_cli.learner.presence import (
    CLEAN_STOP_S,
    behind_its_link,
    depart,
    earlier_heartbeat,
    heartbeat_unless_it_fails,
    traffic,
)
from diloco_cli.loop.handover import LentTraining, Wanted, until_wanted
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.actors.ports import Stepped
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.states import LearnerState
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import Lanes, StopSignal, SystemClock, own_claim, perform
from diloco_cli.store.port import Store
from diloco_cli.store.retry import background_store
from diloco_cli.store.wrappers import MeteredStore
from diloco_cli.training.wire import TensorWire

LOG = logging.getLogger("diloco")
TELLS_AFTER_S = 10.0  # of waiting in one call, and again after as long


@dataclass
class LoopWait:
    """Tells the user's log why a call of his loop waits."""

    learner: Learner
    lanes: Lanes
    since_s: float = 0.0

    def sleep_s(self, seconds: float) -> None:
        self.lanes.sleep_s(seconds)
        now_s = monotonic_s()
        if now_s - self.since_s >= TELLS_AFTER_S:
            LOG.warning("%s waits: %s", self.learner.name, self.learner.note or "for the log")
            self.since_s = now_s


class LoopExchange:
    """One incarnation of one island's learner. `go_on` and `leave` are called by the thread of the user's loop."""

    def __init__(self, run: RunFormat, island: Island, bare: Store, training: LentTraining) -> None:
        self.run, self.island, self.training = run, island, training
        self._stop = stop = StopSignal()
        meter = MeteredStore(behind_its_link(bare, island))
        self._store, news = background_store(meter, stop.wait, stop.is_due, self._warn)
        facts, earlier = Facts(island.name, self._tell), earlier_heartbeat(run, self._store, island.name)
        self._lanes = lanes = Lanes(self._store, SystemClock(monotonic_s, stop.wait, lambda: stop.check(CLEAN_STOP_S)))
        self.learner = learner = Learner(
            run, island.name, own_claim(island.ranks), training, TensorWire(run), nonce, lanes.start, facts,
            stop.is_set, lambda: not stop.is_due(),
            lambda: _said(facts) | traffic(meter, self._store, earlier), lanes.news.set,
        )  # fmt: skip
        news.heartbeat = lambda: heartbeat_unless_it_fails(meter, learner)
        self._waits = LoopWait(learner, lanes)
        self._clock = SystemClock(monotonic_s, self._waits.sleep_s, lanes.check)
        self._train = learner.train()

    def go_on(self, stepped: Stepped | None) -> Wanted | None:
        """From one step of the loop to the next that is wanted; None: the run is over. Waits where a learner would."""
        self._waits.since_s = monotonic_s()
        return perform(until_wanted(self._train, stepped), self._store, self._clock)

    def leave(self, drain_s: float) -> None:
        """Leave before the run's end, in order."""
        self._stop.patience_s = drain_s
        self._stop.ask()
        self._train.close()  # at the step that is wanted: there will be none
        perform(self.learner.drain(), self._store, self._clock)
        self.learner.go(LearnerState.DONE)

    def fail(self, error: BaseException) -> None:
        """The last heartbeat will state what ended the loop. One that its user stops has not failed."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self.learner.ended_by(TerminatedError("stopped by its user") if stopped else error)

    def close(self) -> None:
        """End the threads, and write the last heartbeat."""
        depart(self.learner, self._lanes, self._store)
        self._stop.ask()  # what is still being repeated to a store that fails

    def _tell(self, text: str) -> None:
        LOG.info("%s: %s", self.island.name, text)

    def _warn(self, line: str) -> None:
        LOG.warning("%s: %s", self.island.name, line)


def _said(facts: Facts) -> dict[str, Any]:
    """For the heartbeat. Only the loop knows how far it is in its first batch."""
    found = facts.heartbeat(0.0)
    return found if facts.tokens else found | {"note": "before its first step"}
