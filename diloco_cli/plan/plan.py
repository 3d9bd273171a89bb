"""The records of a plan, and a plan as a file.

Field names are those of `diloco plan --json`; units are last in them. A file is versioned JSON that `launch` reads back
exactly, with a digest over the plan's canonical JSON (keys sorted, no spaces): the same hardware, run and version of
diloco give the same bytes, so the digest is also the plan's name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diloco_cli.config.codec import from_plain, parse_object, to_plain
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.digests import SHORT_DIGITS, digest, short_digest
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.protocol.rules.capacity import Limit

Verdict = Literal["feasible", "feasible with warnings"]  # "infeasible" is an error, not a plan
Mark = Literal["guessed", "catalogue", "measured"]
Sharding = Literal["none", "ddp", "fsdp"]
Objective = Literal["tokens", "cost", "loss"]


def shards(sharding: Sharding, ranks: int) -> str:
    """`fsdp over 8`; `none` for a single rank."""
    return sharding if sharding == "none" else f"{sharding} over {ranks}"


@dataclass(frozen=True)
class Goal:
    """The search's goal: the most tokens per second, the least money per token, or the least loss at the target; within
    limits on all money per hour, on the money to the target, and on the days to it (None: no limit); with some islands
    in any case, and as if others were not in the inventory."""

    objective: Objective = "tokens"
    budget_per_h: float | None = None
    budget_total: float | None = None
    deadline_s: float | None = None
    with_islands: tuple[str, ...] = ()
    without_islands: tuple[str, ...] = ()

    @property
    def has_budget(self) -> bool:
        return (self.budget_per_h, self.budget_total) != (None, None)

    @property
    def fastest(self) -> Goal:
        """The fastest with the same islands, whatever it takes."""
        return Goal(with_islands=self.with_islands, without_islands=self.without_islands)


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
    downloads_per_day: float = 0.0
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

    @property
    def busy_cores(self) -> float:
        """Without what it waits for calls."""
        computing_s = self.bytes_s + self.processor_s
        return self.busy_percent / 100 * computing_s / self.fastest_slot_s if computing_s else 0.0


@dataclass(frozen=True)
class Money:
    """In the inventory's currency. `class_a` requests write, `class_b` ones read. `storage_gb_per_day` is written,
    `storage_gb_at_end` kept at most, in `objects_kept`; `objects_at_end`: with the log's commits, which are never
    deleted. `storage_total`: its price up to the target. `egress`: of what islands send; `downloads`: of what those in
    other regions read, where the home bucket's region has a price; `mirrors`: traffic between the home bucket
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
    downloads_gb_per_day: float = 0.0
    downloads_per_day: float = 0.0
    objects_kept: float = 0.0
    objects_at_end: float = 0.0

    @property
    def is_priced(self) -> bool:
        """By the inventory, and not by what is guessed of requests and storage alone."""
        return bool(self.accelerators_per_h or self.egress_per_day or self.downloads_per_day or self.mirrors_per_day)


@dataclass(frozen=True)
class Stage:
    """One step of the waterfall from ideal to predicted."""

    name: str
    tokens_per_s: float
    days: float


@dataclass(frozen=True)
class Prediction:
    """The predicted run. `goodput` is tokens_per_s over tokens_per_s_ideal; `present_probabilities[k - 1]` the
    probability that at least k islands are present (empty for very many islands). `loss_percent`: of the loss over
    data-parallel training at equal tokens (quality.py); None: nobody measured it."""

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
    loss_percent: float | None = None


@dataclass(frozen=True)
class Alternative:
    """Another plan that was computed, and why it was not chosen. `total` is all money up to the target."""

    name: str
    tokens_per_s: float
    reason: str
    total: float = 0.0


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
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """When a plan was made that is kept beside its run, and of what: the digests of its inputs by their names."""

    at: str
    inputs: dict[str, str]


PLAN_FORMAT = "diloco-plan"
PLAN_VERSION = 4
MAX_PLAN_BYTES = 64_000_000
SETTINGS = ("run", "inventory", "model")  # a plan's inputs, which `--json` leaves out
AGAIN = "make the plan again: diloco plan INVENTORY -o PLAN"
CAUSES = ("goal", "run", "inventory", "model", "settings", "formed")  # of differences; the rest follows from them
SAYINGS = ("why", "warnings", "assumptions", "alternatives")  # follow from what else is different


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The `data` of `diloco plan --json`."""
    plain = to_plain(plan)
    return {key: value for key, value in plain.items() if key not in SETTINGS} | {"digest": plan_digest(plan)}


def plan_digest(plan: Plan) -> str:
    """`algorithm-hex` of the plan and its inputs."""
    return digest_of(plan)


def digest_of(value: Any) -> str:
    """Of settings, records or plain data."""
    canonical = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(canonical.encode())


def plan_file_name(plan: Plan) -> str:
    """`NAME-0123456789ab.plan.json`: the run's name and the digest."""
    return f"{plan.run.name}-{short_digest(plan_digest(plan))}.plan.json"


def plan_to_text(plan: Plan, made: Made | None = None) -> str:
    plain = to_plain(plan)
    body = {"format": PLAN_FORMAT, "version": PLAN_VERSION, "digest": digest_of(plain)}
    body |= {"made": to_plain(made)} if made else {}
    return json.dumps(body | {"plan": plain}, indent=1, allow_nan=False) + "\n"


def plan_from_text(text: str, where: str) -> Plan:
    """Raises UsageError for anything but an unchanged plan of this version."""
    return plan_of_body(_body_of(text, where), where)


def _body_of(text: str, where: str) -> dict[str, Any]:
    try:
        body = parse_object(text, MAX_PLAN_BYTES)
    except ValueError as error:
        problem = f"not a plan file (no JSON: {error})"
        raise UsageError(problem, where=where, hint="diloco plan INVENTORY -o PLAN") from None
    if body.get("format") != PLAN_FORMAT:
        raise UsageError("not a plan file", where=where, hint="diloco plan INVENTORY -o PLAN")
    return body


def made_of(body: dict[str, Any]) -> Made | None:
    """None in a plan that is kept nowhere beside its run."""
    try:
        return from_plain(Made, body.get("made"))
    except (UsageError, ValueError, OverflowError):
        return None


def plan_of_body(body: dict[str, Any], where: str) -> Plan:
    """Of what a plan's file holds. Raises UsageError for anything but an unchanged plan of this version."""
    _check_version(body.get("version"), where)
    _check_digest(body, where)
    try:
        return from_plain(Plan, body.get("plan"))
    except (UsageError, ValueError, OverflowError) as error:
        raise UsageError(getattr(error, "message", str(error)), where=where, hint=AGAIN) from None


def _check_version(version: Any, where: str) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"the plan's version is {version!r}, not {PLAN_VERSION}", where=where)
    if version > PLAN_VERSION:
        raise UsageError(
            f"the plan is of version {version}, newer than this diloco reads ({PLAN_VERSION})",
            where=where,
            hint=f"take a newer diloco from where this one came, or {AGAIN}",
        )
    if version < PLAN_VERSION:
        raise UsageError(
            f"the plan is of version {version}, and this diloco reads {PLAN_VERSION}: its numbers mean something else",
            where=where,
            hint=AGAIN,
        )


def _check_digest(body: dict[str, Any], where: str) -> None:
    """Checks the digest in the file, and that in the file's name, if it has one."""
    found = digest_of(body.get("plan"))
    if body.get("digest") != found:
        raise UsageError(
            "the plan was changed after it was made: its content is not what its digest says",
            where=where,
            hint=f"change the run file or the inventory, and {AGAIN}",
        )
    named = re.search(rf"-([0-9a-f]{{{SHORT_DIGITS}}})\.plan\.json$", where)
    if named is not None and not found.partition("-")[2].startswith(named[1]):
        raise UsageError(
            f"the file's name says {named[1]}, its content is {short_digest(found)}",
            where=where,
            hint="another plan took this file's place; rename it if it is the one you mean",
        )


def save_plan(plan: Plan, path: Path | str, made: Made | None = None) -> Path:
    """Write the file atomically, by renaming a temporary file. `path` may be a folder: then under the plan's own name.
    `made`: of a plan that is kept beside its run. Returns the file's path."""
    path = Path(path)
    if path.is_dir():
        path = path / plan_file_name(plan)
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(plan_to_text(plan, made), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write the plan: {reason}", where=str(path)) from None
    return path


def load_plan(path: Path | str) -> Plan:
    """Raises NotFoundError if there is no such file, UsageError if it holds no unchanged plan of this version."""
    return plan_of_body(read_body(path), str(path))


def read_body(path: Path | str) -> dict[str, Any]:
    """What is in a plan's file. Raises NotFoundError if there is none, UsageError if it is no plan's."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError("no such plan", where=str(path), hint=f"diloco plan INVENTORY -o {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read the plan: {(error.strerror or '').lower()}", where=str(path)) from None
    if len(raw) > MAX_PLAN_BYTES:
        raise UsageError(f"larger than {MAX_PLAN_BYTES // 10**6} MB", where=str(path))
    return _body_of(raw.decode("utf-8", errors="replace"), str(path))


def plan_differences(old: Plan, new: Plan) -> list[str]:
    """Lines such as `~ islands.home.local_steps: 33 -> 38`, `+ islands.tokyo`, `- islands.home` for what changed, was
    added and removed; causes first."""
    before, after = to_plain(old), to_plain(new)
    names = [*CAUSES, *(name for name in before if name not in (*CAUSES, *SAYINGS))]
    return [line for name in names for line in _differences(before[name], after[name], name)]


def summary_of(changes: list[str]) -> str:
    """`2 to add, 40 to change, 1 to remove`."""
    count = {sign: sum(line.startswith(sign) for line in changes) for sign in "+~-"}
    return f"{count['+']} to add, {count['~']} to change, {count['-']} to remove"


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    before, after = _children(old), _children(new)
    if before is None or after is None:
        yield f"~ {path}: {_shown(old)} -> {_shown(new)}"
        return
    for key in [*before, *(key for key in after if key not in before)]:
        place = f"{path}.{key}"
        if key not in after:
            yield f"- {place}{_said(before[key])}"
        elif key not in before:
            yield f"+ {place}{_said(after[key])}"
        else:
            yield from _differences(before[key], after[key], place)


def _children(value: Any) -> dict[str, Any] | None:
    """A mapping's entries, or a list's by their names; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    return None


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _said(item: Any) -> str:
    """The text of an added or removed entry: its reason, or its value."""
    if isinstance(item, dict):
        return f": {item['reason']}" if isinstance(item.get("reason"), str) else ""
    return f": {_shown(item)}"
