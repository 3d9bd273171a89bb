"""A scenario: faults, their times and their targets. A YAML file, read as strictly as run.yaml.

version: 1
name: spot-storm
seed: 7
duration: 10 min
warm_up: 30 s
faults:
  - {kind: kill, target: learners, poisson: 60 s, revive_after: 5 s}   # one of them, drawn each time
  - {kind: kill, target: syncer, at: 2 min}
  - {kind: partition, target: "region:europe-west4", every: 3 min, for: 20 s}
constraints: {min_alive: 1, max_concurrent: 2, protect: [ohio], cooldown: 2 s}
hypotheses: ["goodput >= 0.9", "recovery_p95 <= 30 s", "verify"]

`diloco simulate run` plays it in virtual time; `diloco chaos run` carries it out and checks the hypotheses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, log, nan
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from diloco_cli.config.fields import (
    Node,
    Positive,
    Settings,
    SettingsReader,
    Text,
    Whole,
    read_yaml_file,
    refuse_newer,
    unit,
)
from diloco_cli.config.settings import RESERVED_NAMES
from diloco_cli.digests import ALGORITHM, digest
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.quantities import parse_duration

SCENARIO_VERSION = 1
MAX_FAULTS = 1000
MAX_S = 366 * 86_400.0
SCENARIOS = "chaos"  # the folder of built-in ones, under templates
SYNCER, SUPERVISOR = RESERVED_NAMES
GROUPS = ("learners", "regions", "all")  # one of the learners, or of the regions, drawn; every learner and the syncer

FaultKind = Literal["kill", "pause", "slow", "partition", "errors", "full", "corrupt", "poison", "second-syncer"]
Hits = Literal["units", "learners", "syncer"]


@dataclass(frozen=True)
class FaultRecord:
    """All facts of a kind of fault. `lasts`, `needs_factor`, `needs_share`, `revives`: the keys `for`, `factor`,
    `share`, `revive_after` that a scenario must, must, must, may give. `hits`: which units of a simulated run, which
    has an effect of that name for it (forecast/fleet.py). `not_real`: why it is not done to a living run; "": it is, by
    a class in chaos/faults.py."""

    doc: str
    hits: Hits
    lasts: bool = False
    needs_factor: bool = False
    needs_share: bool = False
    revives: bool = False
    not_real: str = ""


FAULTS: dict[FaultKind, FaultRecord] = {
    "kill": FaultRecord(
        "the process is gone at once; it is started again after `revive_after` (else when its supervisor does)",
        "units",
        revives=True,
    ),
    "pause": FaultRecord(
        "the process stands still for `for`: a straggler, or a zombie that wakes after others took its place",
        "units",
        lasts=True,
    ),
    "slow": FaultRecord("its link is `factor` times slower for `for`", "learners", lasts=True, needs_factor=True),
    "partition": FaultRecord("it cannot reach the store for `for`", "units", lasts=True),
    "errors": FaultRecord("a `share` of its calls to the store fails for `for`", "units", lasts=True, needs_share=True),
    "full": FaultRecord("the store has no space for what it writes for `for`", "units", lasts=True),
    "corrupt": FaultRecord(
        "a copy of an object that it wrote has a flipped bit", "learners", not_real="it would damage the run's bucket"
    ),
    "poison": FaultRecord(
        "its next delta is far too large", "learners", not_real="the model would be trained by it, if it were believed"
    ),
    "second-syncer": FaultRecord(
        "another syncer starts beside the one that serves",
        "syncer",
        not_real="`diloco syncer` starts one, and it stays",
    ),
}


Moment = Annotated[float, unit(parse_duration, "_s", ge=0, le=MAX_S)]
Longer = Annotated[float, unit(parse_duration, "_s", gt=0, le=MAX_S)]


class FaultRule(Settings, frozen=True):
    """One line of a scenario. Exactly one of `at_s` (once), `every_s` and `poisson_s` (mean distance) says when.
    `target`: a unit's name, `syncer`, `supervisor`, `learners` (one of them), `region:NAME` (all in it), `regions` (all
    in one of them), `all` (every learner and the syncer)."""

    kind: FaultKind
    target: Text
    at_s: Moment | None = None
    every_s: Longer | None = None
    poisson_s: Longer | None = None
    for_s: Longer | None = None
    revive_after_s: Moment | None = None
    factor: Positive | None = None
    share: Annotated[float, Meta(gt=0, le=1)] | None = None


class Constraints(Settings, frozen=True):
    """What a timetable never does: fewer learners alive than `min_alive`, more units disturbed at once than
    `max_concurrent` (None: no limit), anything to `protect`, two faults of one unit closer than `cooldown_s`."""

    min_alive: Annotated[int, Meta(ge=0)] = 0
    max_concurrent: Whole | None = None
    protect: tuple[Text, ...] = ()
    cooldown_s: Moment = 0.0


class Scenario(Settings, frozen=True):
    """Times count from the scenario's start; nothing happens during the warm-up."""

    name: Text
    duration_s: Longer
    faults: tuple[FaultRule, ...]
    version: int = SCENARIO_VERSION
    seed: Annotated[int, Meta(ge=0)] = 0
    warm_up_s: Moment = 0.0
    constraints: Constraints = Constraints()
    hypotheses: tuple[Text, ...] = ()


VERIFY = "verify"
FIGURES: dict[str, Callable[[str], float]] = {
    "goodput": float,
    "participation": float,
    "recovery_p50": parse_duration,
    "recovery_p95": parse_duration,
    "longest_gap": parse_duration,
    "tokens_lost": float,
    "loss": float,
}
"""What a hypothesis may bound (report/storm.py computes it), and how its bound is written."""


class Hypothesis(NamedTuple):
    """`figure` VERIFY has no bound: the log must replay."""

    figure: str
    at_least: bool = False
    bound: float = 0.0


def hypothesis_of(text: str) -> Hypothesis:
    """Of `verify`, `goodput >= 0.9`, `recovery_p95 <= 30 s`."""
    figure, sign, bound = (*text.split(None, 2), "", "")[:3]
    if text == VERIFY:
        return Hypothesis(VERIFY)
    if figure not in FIGURES or sign not in (">=", "<="):
        raise UsageError(f"{text!r} is no hypothesis: {VERIFY}, or one of {', '.join(FIGURES)}, then >= or <=, a bound")
    try:
        value = FIGURES[figure](bound)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise UsageError(f"{text!r}: {bound!r} is no number")
    return Hypothesis(figure, sign == ">=", value)


def find_scenario(text: str, kinds: Collection[FaultKind] = tuple(FAULTS)) -> Scenario:
    """A file's, or a built-in one. Raises NotFoundError, or UsageError also for a fault of no kind in `kinds`."""
    if Path(text).is_file():
        return load_scenario(text, kinds)
    folder = templates_directory() / SCENARIOS
    built_in = sorted(path.stem for path in folder.glob("*.yaml"))
    if text not in built_in:
        raise NotFoundError(f"no scenario {text!r}; built in: {', '.join(built_in)}", hint="or name a file: storm.yaml")
    return load_scenario(folder / f"{text}.yaml", kinds)


def load_scenario(path: Path | str, kinds: Collection[FaultKind] = tuple(FAULTS)) -> Scenario:
    """Raises UsageError with file and line for anything that is no scenario of this version."""
    tree = read_yaml_file(Path(path))
    refuse_newer(tree, SCENARIO_VERSION)
    scenario = SettingsReader(Path(path).parent).read(Scenario, tree)
    if len(scenario.faults) > MAX_FAULTS:
        raise UsageError(f"more than {MAX_FAULTS} faults", where=tree.where)
    if scenario.warm_up_s >= scenario.duration_s:
        raise UsageError("warm_up must be shorter than duration", where=tree.where)
    for index, rule in enumerate(scenario.faults):
        problem = _problem(rule) or _never(rule, scenario)
        if problem:
            raise UsageError(f"faults[{index}]: {problem}", where=_place(tree, "faults", index))
        if rule.kind not in kinds:
            why = FAULTS[rule.kind].not_real
            can = f"faults[{index}]: {rule.kind} is not done to a living run ({why}); what is: {', '.join(kinds)}"
            hint = f"play it in virtual time: diloco simulate run RUN --scenario {quote(str(path))}"
            raise UsageError(can, where=_place(tree, "faults", index), hint=hint)
    for index, text in enumerate(scenario.hypotheses):
        try:
            hypothesis_of(text)
        except UsageError as error:
            raise UsageError(f"hypotheses: {error}", where=_place(tree, "hypotheses", index)) from None
    return scenario


def _problem(rule: FaultRule) -> str | None:
    given = [key for key in ("at", "every", "poisson") if getattr(rule, f"{key}_s") is not None]
    if len(given) != 1:
        return f"give one of at, every, poisson; given: {', '.join(given) or 'none'}"
    fault = FAULTS[rule.kind]
    if fault.lasts and rule.for_s is None:
        return f"{rule.kind} needs 'for': how long it lasts"
    if not fault.lasts and rule.for_s is not None:
        return f"{rule.kind} does not last: leave out 'for'"
    if rule.revive_after_s is not None and not fault.revives:
        return f"{rule.kind} needs no 'revive_after': that is for kill"
    for key, needed in (("factor", fault.needs_factor), ("share", fault.needs_share)):
        if needed and getattr(rule, key) is None:
            return f"{rule.kind} needs '{key}': {fault.doc}"
    return None


def _never(rule: FaultRule, scenario: Scenario) -> str | None:
    """Why a rule's fault can never happen within its scenario, so that it is not taken for a survived fault."""
    if rule.at_s is not None and rule.at_s >= scenario.duration_s:
        return f"at {rule.at_s:g} s it never happens: the scenario ends at {scenario.duration_s:g} s"
    if rule.every_s is not None and scenario.warm_up_s + rule.every_s > scenario.duration_s:
        first_s = scenario.warm_up_s + rule.every_s
        return f"its first time, {first_s:g} s, never comes: the scenario ends at {scenario.duration_s:g} s"
    return None


def _place(tree: Node, key: str, index: int) -> str:
    listed: Any = tree.value[key] if isinstance(tree.value, dict) else None
    children: list[Node] = listed.value if listed is not None and isinstance(listed.value, list) else []
    return children[index].where if index < len(children) else tree.where


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
    share: float | None = None
    skipped: str = ""

    @property
    def away_s(self) -> float:
        """How long it disturbs its targets, as known beforehand."""
        if FAULTS[self.kind].revives:
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
                ("share", self.share, ""),
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
    for serial, (at_s, _, rule, targets) in enumerate(planned):
        fault = Injection(serial, at_s, rule.kind, targets, rule.for_s, rule.revive_after_s, rule.factor, rule.share)
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
    if rule.target in (*names, SUPERVISOR):
        return (rule.target,)
    allowed = [*names, SUPERVISOR, *GROUPS, *(f"region:{region}" for region in regions)]
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
