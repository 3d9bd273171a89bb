"""The classes that a history is made of, and its result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diloco_cli.protocol.actors.standby import Standby
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.regions.mirrors import Mirror
from diloco_cli.protocol.regions.relays import Relay
from tests.histories.client import Client
from tests.histories.integers import IntegerArithmetic
from tests.histories.learner import SimulatedLearner
from tests.histories.replayer import ViolationError
from tests.histories.script import Script

Moment = tuple[float, str, str]  # when (seconds), what, and the key of what was created, if it was


@dataclass(frozen=True)
class Actors:
    """The classes that a history is made of. Tests hand in faulty ones to see that errors are found."""

    syncer: type[Syncer] = Syncer
    standby: type[Standby] = Standby
    mirror: type[Mirror] = Mirror
    relay: type[Relay] = Relay
    learner: type[SimulatedLearner] = SimulatedLearner
    client: type[Client] = Client
    arithmetic: type[IntegerArithmetic] = IntegerArithmetic


@dataclass
class HistoryResult:
    """The result of a history. `lost_tokens`: those lost with processes that ended, of all `processed_tokens`, in the
    fragment that lost most. `tail`: the events to report, in their order; `objects`: the final objects of the bucket,
    and under `apart/` those of the region's, if there is one."""

    commits: int = 0
    crashes: int = 0
    operations: int = 0
    faulty: Script = field(default_factory=Script)
    violation: ViolationError | None = None
    tail: list[Moment] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[bytes] = field(default_factory=list)
    processed_tokens: int = 0
    lost_tokens: int = 0
    per_actor: Counter[str] = field(default_factory=Counter)
