"""A scenario's timetable: what happens when, to which units. Pure, and the same for the same seed on every machine.

Eligibility (constraints) and schedule (draws) are decided here; the faults are executed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from diloco_cli.digests import ALGORITHM, digest
from diloco_cli.errors import UsageError
from diloco_cli.faults.scenario import GROUPS, FaultKind, FaultRule, Scenario

SYNCER = "syncer"
MAX_INJECTIONS = 100_000
UNTIL_RESTARTED_S = 30.0  # assumed time until a supervisor has restarted a killed unit


@dataclass(frozen=True)
class Unit:
    """A learner (its island's name and region) or the syncer (`region` None)."""

    name: str
    region: str | None


@dataclass(frozen=True)
class Injection:
    """Fault number `number`, `at_s` after the start. `skipped`: why it must not happen (empty: it happens)."""

    number: int
    at_s: float
    kind: FaultKind
    targets: tuple[str, ...]
    for_s: float | None = None
    revive_after_s: float | None = None
    factor: float | None = None
    skipped: str = ""

    @property
    def away_s(self) -> float:
        """How long it disturbs its targets, as known beforehand."""
        if self.kind == "kill":
            return UNTIL_RESTARTED_S if self.revive_after_s is None else self.revive_after_s
        return self.for_s or 0.0

    def describe(self) -> str:
        """A line of a timetable."""
        extra = "".join(
            f" {word} {value:g}{unit}"
            for word, value, unit in (
                ("for", self.for_s, " s"),
                ("revive after", self.revive_after_s, " s"),
                ("factor", self.factor, ""),
            )
            if value is not None
        )
        skipped = f"   skipped: {self.skipped}" if self.skipped else ""
        return f"{self.at_s:10.3f} s  #{self.number:<4} {self.kind} {', '.join(self.targets)}{extra}{skipped}"


def timetable(scenario: Scenario, units: Sequence[Unit], seed: int | None = None) -> tuple[Injection, ...]:
    """In order of time. Raises UsageError for a target that is no unit of the run."""
    seed = scenario.seed if seed is None else seed
    planned = []
    for index, rule in enumerate(scenario.faults):
        draws = Draws(seed, f"fault {index}")
        for at_s in _times(rule, scenario, draws):
            planned.append((at_s, index, rule, _targets(rule, units, draws)))
    planned.sort(key=lambda entry: entry[:2])
    made: list[Injection] = []
    disturbed: dict[str, Injection] = {}  # by unit: the fault whose effect on it ends last
    for number, (at_s, _, rule, targets) in enumerate(planned):
        fault = Injection(number, at_s, rule.kind, targets, rule.for_s, rule.revive_after_s, rule.factor)
        reason = _forbidden(fault, disturbed, scenario, units)
        made.append(replace(fault, skipped=reason))
        if not reason:
            disturbed |= {name: fault for name in targets if _ends_s(disturbed.get(name)) <= _ends_s(fault)}
    return tuple(made)


def _ends_s(fault: Injection | None) -> float:
    return 0.0 if fault is None else fault.at_s + fault.away_s


class Draws:
    """Uniform numbers in [0, 1) from a seed and a name, by a hash: no state of the process, no version of a library
    changes them."""

    def __init__(self, seed: int, name: str) -> None:
        self._name, self._count = f"{seed}/{name}", 0

    def uniform(self) -> float:
        self._count += 1
        text = digest(f"{self._name}/{self._count}".encode())
        return int(text.removeprefix(f"{ALGORITHM}-")[:13], 16) / (1 << 52)

    def exponential(self, mean: float) -> float:
        return -mean * log(1.0 - self.uniform())


def _times(rule: FaultRule, scenario: Scenario, draws: Draws) -> Iterator[float]:
    """From the end of the warm-up to the scenario's end; a time given by `at` counts as it stands."""
    if rule.at_s is not None:
        if rule.at_s <= scenario.duration_s:
            yield rule.at_s
        return
    now_s = scenario.warm_up_s
    for _ in range(MAX_INJECTIONS):
        now_s += rule.every_s if rule.every_s is not None else draws.exponential(rule.poisson_s or 1.0)
        if now_s > scenario.duration_s:
            return
        yield round(now_s, 3)
    raise UsageError(f"the scenario {scenario.name} has more than {MAX_INJECTIONS:,} faults", hint="a shorter duration")


def _targets(rule: FaultRule, units: Sequence[Unit], draws: Draws) -> tuple[str, ...]:
    learners = sorted(unit.name for unit in units if unit.region is not None)
    names = sorted(unit.name for unit in units)
    regions = sorted({unit.region for unit in units if unit.region is not None})
    if rule.target == "all":
        return tuple(names)
    if rule.target == "learners" and learners:
        return (learners[int(draws.uniform() * len(learners))],)
    if rule.target == "regions" and regions:
        drawn = regions[int(draws.uniform() * len(regions))]
        return tuple(sorted(unit.name for unit in units if unit.region == drawn))
    if rule.target.startswith("region:"):
        region = rule.target.removeprefix("region:")
        inside = sorted(unit.name for unit in units if unit.region == region)
        if inside:
            return tuple(inside)
    if rule.target in names:
        return (rule.target,)
    allowed = [*names, *GROUPS, *(f"region:{region}" for region in regions)]
    raise UsageError(f"{rule.kind}: there is no unit {rule.target!r}; allowed: {', '.join(allowed)}")


def _forbidden(fault: Injection, disturbed: dict[str, Injection], scenario: Scenario, units: Sequence[Unit]) -> str:
    """The constraint that the fault would break, as text; empty if there is none."""
    limits = scenario.constraints
    protected = sorted(set(fault.targets) & set(limits.protect))
    if protected:
        return f"{', '.join(protected)} is protected"
    for name in fault.targets:
        before = disturbed.get(name) if fault.kind != "second-syncer" else None  # that one only starts beside it
        if before is not None and fault.at_s < _ends_s(before) + limits.cooldown_s:
            return f"{name} is still disturbed by #{before.number}, or cooling down"
    away = {name for name, other in disturbed.items() if fault.at_s < _ends_s(other)} | set(fault.targets)
    if limits.max_concurrent is not None and len(away) > limits.max_concurrent:
        return f"more than {limits.max_concurrent} units would be disturbed at once"
    learners = {unit.name for unit in units if unit.region is not None}
    if len(learners - away) < limits.min_alive:
        return f"fewer than {limits.min_alive} learners would be left"
    return ""
