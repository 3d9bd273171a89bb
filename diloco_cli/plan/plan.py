"""The records of a plan. Field names are those of `diloco plan --json`; units are last in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.protocol.rules.capacity import Limit

Verdict = Literal["feasible", "feasible with warnings"]  # "infeasible" is an error, not a plan
Mark = Literal["guessed", "catalogue", "measured"]
Sharding = Literal["none", "ddp", "fsdp"]
Objective = Literal["tokens", "cost"]


def shards(sharding: Sharding, ranks: int) -> str:
    """`fsdp over 8`; `none` for a single rank."""
    return sharding if sharding == "none" else f"{sharding} over {ranks}"


@dataclass(frozen=True)
class Goal:
    """The search's goal: the most tokens per second, or the least money per token; within limits on all money per
    hour, on the money to the target, and on the days to it. None: no limit."""

    objective: Objective = "tokens"
    budget_per_h: float | None = None
    budget_total: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """One setting that planning may choose. `origin` names the place that pins it, or says that it was searched."""

    name: str
    value: str
    origin: str
    pinned: bool


@dataclass(frozen=True)
class MemoryPart:
    """A part of one accelerator's memory, in GB (10^9 bytes)."""

    name: str
    gb: float


@dataclass(frozen=True)
class PlannedIsland:
    """One island of the plan. None is unknown. Prices in the inventory's currency, egress per day.

    `devices`, `ranks`: of all `nodes`. `memory_gb_*` are of one rank's accelerator, `memory_parts` its uses,
    `micro_batch_tokens` one pass of one rank (None, in plans of older versions: the whole batch).
    `host_memory_gb_needed` is of the learner's process, for the exchange. `sent_mbps` and `received_mbps` are the true
    traffic: with records, and with the moments that are saved now and then.
    """

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
    sent_mbps: float
    transfer_s: float
    transfer_window_s: float
    memory_gb_needed: float
    memory_gb_available: float | None
    fits: bool
    sharding: Sharding
    memory_parts: tuple[MemoryPart, ...]
    host_memory_gb_needed: float
    availability: float
    price_per_h: float
    egress_per_day: float
    predicted_tokens_per_s: float
    warnings: tuple[str, ...] = ()
    received_mbps: float = 0.0
    micro_batch_tokens: int | None = None
    nodes: int = 1
    ranks: int = 1

    @property
    def shards(self) -> str:
        return shards(self.sharding, self.ranks)


@dataclass(frozen=True)
class Excluded:
    """An island or a machine that does not take part, why, and what would let it."""

    name: str
    reason: str
    suggestions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Formed:
    """An island that planning formed of machines, and the reason."""

    name: str
    machines: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Schedule:
    """When fragments travel. `overlap` is tau in slots of `slot_s`; `slack_s` = overlap x slot - exchange.
    `fragment_parameters` are those of the largest fragment; `offsets` the step of a round at which each is due."""

    fragments: int
    sync_every: int
    overlap: int
    quorum: int
    grace_s: float
    codec: str
    weights_codec: str
    round_s: float
    slot_s: float
    exchange_s: float
    slack_s: float
    quorum_s: float
    merge_s: float
    fragment_parameters: float
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class SyncerNeeds:
    """What the syncer's machine must have: memory, its own link, and the share of its time that merging takes.

    `fastest_slot_s`: the shortest slot that it can hold, the sum of what calls, bytes and its processor take; `limit`:
    the one that takes most; `busy_percent` of the slot; `max_islands`: how many it carries at this slot. `reads_back`:
    what it has written, because the store does not check uploads."""

    memory_gb: float
    down_mbps: float
    up_mbps: float
    merge_percent: float
    fastest_slot_s: float = 0.0
    calls_s: float = 0.0
    bytes_s: float = 0.0
    processor_s: float = 0.0
    limit: Limit = "calls"
    busy_percent: float = 0.0
    max_islands: int = 0
    reads_back: bool = False


@dataclass(frozen=True)
class Money:
    """In the inventory's currency. `class_a` requests write, `class_b` ones read. `storage_gb_per_day` is written,
    `storage_gb_at_end` kept at most, in `objects_kept`; `objects_at_end`: with the log's commits, which are never
    deleted. `storage_total`: its price up to the target. `mirrors`: traffic between the home bucket
    and those of regions. `total` is the sum up to the target."""

    accelerators_per_h: float
    egress_per_day: float
    egress_gb_per_day: float
    class_a_per_day: float
    class_b_per_day: float
    requests_per_day: float
    storage_gb_per_day: float
    storage_gb_at_end: float
    storage_total: float
    per_h: float
    total: float
    per_billion_tokens: float
    mirrors_gb_per_day: float = 0.0
    mirrors_per_day: float = 0.0
    objects_kept: float = 0.0
    objects_at_end: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One step of the waterfall from ideal to predicted."""

    name: str
    tokens_per_s: float
    days: float


@dataclass(frozen=True)
class Prediction:
    """The predicted run. `goodput` is tokens_per_s over tokens_per_s_ideal; `present_probabilities[k - 1]` the
    probability that at least k islands are present (empty for very many islands)."""

    tokens_per_s_ideal: float
    tokens_per_s: float
    goodput: float
    days_to_target: float
    synchronous_tokens_per_s: float
    synchronous_goodput: float
    synchronous_days_to_target: float
    price_per_h: float
    egress_per_day: float
    quorum_probability: float
    all_present_probability: float
    present_probabilities: tuple[float, ...]
    waterfall: tuple[Stage, ...]


@dataclass(frozen=True)
class Alternative:
    """Another plan that was computed, and why it was not chosen. `total` is all money up to the target."""

    name: str
    tokens_per_s: float
    reason: str
    total: float = 0.0


@dataclass(frozen=True)
class Sensitivity:
    """The prediction of a plan made again with one thing changed."""

    change: str
    tokens_per_s: float
    gain_percent: float


@dataclass(frozen=True)
class Assumption:
    """A number the prediction rests on, and where it comes from."""

    text: str
    mark: Mark


@dataclass(frozen=True)
class Plan:
    """Everything that `launch` needs: the predictions, and the settings and inventory they were made from. `run` holds
    the settings that were chosen; `settings` says which of them were pinned and which were searched."""

    verdict: Verdict
    why: str
    goal: Goal
    islands: tuple[PlannedIsland, ...]
    excluded: tuple[Excluded, ...]
    schedule: Schedule
    prediction: Prediction
    money: Money
    syncer: SyncerNeeds
    model: ModelFacts
    run: RunSettings
    inventory: Inventory
    settings: tuple[Setting, ...] = ()
    formed: tuple[Formed, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()
