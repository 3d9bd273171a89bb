"""What a plan says. Field names are those of `diloco plan --json`; units are last in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.plan.model_facts import ModelFacts

Verdict = Literal["feasible", "feasible with warnings"]  # "infeasible" is an error, not a plan
Mark = Literal["guessed", "catalogue", "measured"]


@dataclass(frozen=True)
class PlannedIsland:
    """One island of the plan. None is unknown. Prices in the inventory's currency, egress per day."""

    name: str
    region: str
    accelerators: str
    devices: int
    tokens_per_s: float
    step_s: float
    batch_tokens: int
    local_steps: int
    round_s: float
    idle_percent: float
    up_mbps_needed: float
    up_mbps_available: float | None
    down_mbps_needed: float
    down_mbps_available: float | None
    transfer_s: float
    memory_gb_needed: float
    memory_gb_available: float | None
    fits: bool
    sharding: str
    availability: float
    price_per_h: float
    egress_per_day: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """An island that cannot take part, and what would let it."""

    name: str
    reason: str
    ways_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """When fragments travel. `overlap` is tau in slots of `slot_s`; `slack_s` = overlap x slot - exchange."""

    fragments: int
    sync_every: int
    overlap: int
    quorum: int
    grace_s: float
    codec: str
    round_s: float
    slot_s: float
    exchange_s: float
    slack_s: float


@dataclass(frozen=True)
class Stage:
    """One step of the waterfall from ideal to predicted."""

    name: str
    tokens_per_s: float


@dataclass(frozen=True)
class Prediction:
    """What the run will do. `goodput` is tokens_per_s over tokens_per_s_ideal."""

    tokens_per_s_ideal: float
    tokens_per_s: float
    goodput: float
    days_to_target: float
    synchronous_tokens_per_s: float
    synchronous_goodput: float
    price_per_h: float
    egress_per_day: float
    quorum_probability: float
    all_present_probability: float
    waterfall: tuple[Stage, ...]


@dataclass(frozen=True)
class Alternative:
    """What else was computed, and why it was not taken."""

    name: str
    tokens_per_s: float
    reason: str


@dataclass(frozen=True)
class Assumption:
    """A number the prediction rests on, and where it comes from."""

    text: str
    mark: Mark


@dataclass(frozen=True)
class Plan:
    """Everything that `launch` needs: the predictions, and the settings and inventory they were made from."""

    verdict: Verdict
    why: str
    islands: tuple[PlannedIsland, ...]
    left_out: tuple[LeftOut, ...]
    schedule: Schedule
    prediction: Prediction
    model: ModelFacts
    run: RunSettings
    inventory: Inventory
    alternatives: tuple[Alternative, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = field(default=())
