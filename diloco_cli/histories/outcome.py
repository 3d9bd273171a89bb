"""What a history is made of, and how it ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diloco_cli.histories.client import Client
from diloco_cli.histories.integers import IntegerArithmetic
from diloco_cli.histories.learner import SimulatedLearner
from diloco_cli.histories.replayer import ViolationError
from diloco_cli.histories.script import Script
from diloco_cli.protocol.actors.standby import Standby
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.regions.mirrors import Mirror
from diloco_cli.protocol.regions.relays import Relay

Moment = tuple[float, str, str]  # when (seconds), what, and the key of what was created, if it was


@dataclass(frozen=True)
class Actors:
    """What a history is made of. Tests hand in others to see mistakes caught."""

    syncer: type[Syncer] = Syncer
    standby: type[Standby] = Standby
    mirror: type[Mirror] = Mirror
    relay: type[Relay] = Relay
    learner: type[SimulatedLearner] = SimulatedLearner
    client: type[Client] = Client
    arithmetic: type[IntegerArithmetic] = IntegerArithmetic


@dataclass
class HistoryResult:
    """How a history ended. `lost_tokens`: that processes took with them when they ended, of all `processed_tokens`, in
    the fragment of which most were lost. `tail`: everything worth telling, in its order; `objects`: what then lies in
    the bucket, and under `apart/` in the region's, if there is one."""

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
