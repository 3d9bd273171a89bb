"""Which islands, which codec, H, fragments and quorum: exact while there are few combinations, greedy beyond.

Only settings that the user did not pin are searched. Every combination is evaluated by `flow.run_fleet`, as the plan
itself is; the evaluations of single islands are bounded, so that ten thousand islands take no longer than ten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RunSettings, SyncSettings
from diloco_cli.plan.candidates import Candidate
from diloco_cli.plan.flow import MAX_EVERY, Fleet, run_fleet
from diloco_cli.plan.link import CODEC_BITS, Need, load_of_round
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.money import costs
from diloco_cli.plan.plan import Goal

SEARCHED = ("codec", "weights_codec", "every", "fragments", "quorum")  # keys of `sync`
MAX_WORK = 30_000  # evaluations of one island
MAX_FOR_SETTINGS = 0.5  # of the work of the greedy search; the rest goes into choosing islands
LEAST_EVALUATIONS = 8  # of a whole fleet, however large
MAX_EXACT = 16  # islands of which every set may be tried
MANY_ISLANDS = 32  # beyond it, the quorum is not searched: of so many islands one is always present
WORTH_A_CHANGE = 1.002
"""A setting other than the first one, and a fleet of fewer islands, must be better by this factor."""
LONGER = (1, 2, 4, 8, 16, 32)
FEWER_FRAGMENTS = (1.0, 0.5, 0.25, 2.0)
NUMBERS_AT_ONCE = 16
PACE_SETTERS = (1, 2, 4, 8)  # how many islands with the shortest steps the greedy search tries to leave out


@dataclass(frozen=True)
class Space:
    """The values to choose from, the run's own first. `everys` None: those that the links need."""

    codecs: tuple[tuple[str, str], ...]
    everys: tuple[int, ...] | None
    fragments: tuple[int, ...]
    quorum_free: bool

    def quorums(self, num_islands: int, pinned: int) -> tuple[int, ...]:
        if not self.quorum_free:
            return (pinned,)
        if num_islands > MANY_ISLANDS:
            return (1,)
        return tuple(dict.fromkeys((1, (num_islands + 1) // 2, num_islands)))


def space_of(sync: SyncSettings, free: frozenset[str], model: ModelFacts) -> Space:
    """The search space; `free`: names of `SEARCHED` that the user did not pin."""
    smaller = [codec for codec in CODEC_BITS if codec != "fp32"]
    ups = dict.fromkeys((sync.codec, *smaller)) if "codec" in free else (sync.codec,)
    downs = dict.fromkeys((sync.weights_codec, *smaller)) if "weights_codec" in free else (sync.weights_codec,)
    both = {"codec", "weights_codec"} <= free
    pairs = [(up, up) for up in ups] if both else list(product(ups, downs))
    counts = [max(1, round(sync.fragments * factor)) for factor in FEWER_FRAGMENTS] if "fragments" in free else []
    fragments = dict.fromkeys((sync.fragments, *(count for count in counts if model.fragments(count).count == count)))
    return Space(
        codecs=tuple(dict.fromkeys(((sync.codec, sync.weights_codec), *pairs))),
        everys=None if "every" in free else (sync.every,),
        fragments=tuple(fragments),
        quorum_free="quorum" in free,
    )


def score(fleet: Fleet, run: RunSettings, model: ModelFacts, goal: Goal) -> float | None:
    """A fleet's score by the goal, larger is better; None if it breaks a limit."""
    days_s = run.train.tokens / fleet.tokens_per_s
    if goal.deadline_s is not None and days_s > goal.deadline_s:
        return None
    if goal.objective == "tokens" and goal.budget_per_h is None and goal.budget_total is None:
        return fleet.effective_tokens_per_s
    money = costs(fleet, run, model)
    if goal.budget_per_h is not None and money.per_h > goal.budget_per_h:
        return None
    if goal.budget_total is not None and money.total > goal.budget_total:
        return None
    if goal.objective == "tokens":
        return fleet.effective_tokens_per_s
    return fleet.effective_tokens_per_s / (money.total * fleet.tokens_per_s) if money.total else None


def search(
    everyone: Sequence[Candidate],
    run: RunSettings,
    model: ModelFacts,
    free: frozenset[str],
    goal: Goal,
    max_work: int = MAX_WORK,
    start: frozenset[str] = frozenset(),
) -> Fleet | None:
    """The best fleet among those that fit their memory; None if there is none. `everyone`: fastest step first;
    `start`: names of islands that the greedy search tries first."""
    fitting = [candidate for candidate in everyone if candidate.can_train]
    attempt = _Search(run, model, space_of(run.sync, free, model), goal, max_work)
    if attempt.is_small(len(fitting)):
        attempt.exact(fitting)
    elif fitting:
        attempt.greedy(fitting, [candidate for candidate in fitting if candidate.island.name in start])
    return attempt.best


@dataclass
class _Search:
    """One search: the space, the best fleet so far, the work done (evaluations of one island)."""

    run: RunSettings
    model: ModelFacts
    space: Space
    goal: Goal
    max_work: int
    best: Fleet | None = None
    best_score: float = 0.0
    work: int = 0
    evaluations: int = 0

    def is_small(self, num_islands: int) -> bool:
        settings = len(self.space.codecs) * len(self.space.fragments)
        settings *= 2 if self.space.everys is None else 1
        settings *= 3 if self.space.quorum_free else 1
        return num_islands <= MAX_EXACT and 2**num_islands * settings * num_islands / 2 <= self.max_work

    def exact(self, fitting: Sequence[Candidate]) -> None:
        """Every set of islands, the largest first, under every setting that their links carry."""
        for fragments, pair in product(self.space.fragments, self.space.codecs):
            need = self._load(pair)
            for size in range(len(fitting), 0, -1):
                for kept in combinations(fitting, size):
                    least = max(candidate.least_every(need, kept[0].step_s) for candidate in kept)
                    base = max(self.run.sync.every, least)
                    for every in self.space.everys or (base, 2 * base):
                        if every >= least:
                            self._consider_quorums(kept, pair, every, fragments)

    def greedy(self, fitting: Sequence[Candidate], start: Sequence[Candidate]) -> None:
        """Settings first, each with all islands that it can carry; then, under the best, fewer islands."""
        everys = self.space.everys or tuple(self.run.sync.every * n for n in LONGER)
        for pool in (start, fitting):
            for fragments, pair, every in product(self.space.fragments, self.space.codecs, everys):
                if pool and not self._spent(MAX_FOR_SETTINGS):
                    self._consider_quorums(carried(pool, every, self._load(pair)), pair, every, fragments)
        sync = self.best.sync if self.best else self.run.sync
        pair = (sync.codec, sync.weights_codec)
        for pool in _pools(fitting, self.goal):
            for every in dict.fromkeys((sync.every, *everys)):
                if not self._spent(1.0):
                    kept = carried(pool, every, self._load(pair))
                    self._consider_quorums(kept, pair, every, sync.fragments)
        self._other_numbers_of_the_largest(fitting)

    def _other_numbers_of_the_largest(self, fitting: Sequence[Candidate]) -> None:
        """If the best fleet is the n largest islands: tries numbers from n / 4 to 2 n, and then ever closer to the
        best. The score has more than one peak: an exchange that takes a slot more costs more than an island adds."""
        ranked = sorted(fitting, key=_by_size)
        if self.best is None or _names(self.best.kept) != _names(ranked[: len(self.best.kept)]):
            return
        sync, count = self.best.sync, len(self.best.kept)
        low, high = count // 4, 2 * count
        step = high - low
        while step > 1:
            step = max(1, (high - low) // NUMBERS_AT_ONCE)
            for pool in _first_of(ranked, range(low + step, min(high, len(ranked)) + 1, step)):
                if not self._spent(1.0):
                    kept = carried(pool, sync.every, self._load((sync.codec, sync.weights_codec)))
                    self._consider_quorums(kept, (sync.codec, sync.weights_codec), sync.every, sync.fragments)
            low, high = len(self.best.kept) - step, len(self.best.kept) + step

    def _load(self, pair: tuple[str, str]) -> Need:
        return load_of_round(self.model, *pair, self.run.train.inner)

    def _spent(self, share: float) -> bool:
        return self.work > share * self.max_work and self.evaluations >= share * LEAST_EVALUATIONS

    def _consider_quorums(self, kept: Sequence[Candidate], pair: tuple[str, str], every: int, fragments: int) -> None:
        if self.space.everys is None and every > MAX_EVERY:
            return
        for quorum in self.space.quorums(len(kept), self.run.sync.quorum):
            if 1 <= quorum <= len(kept):
                changed = {"codec": pair[0], "weights_codec": pair[1], "every": every}
                self._consider(kept, _with(self.run.sync, fragments=fragments, quorum=quorum, **changed))

    def _consider(self, kept: Sequence[Candidate], sync: SyncSettings) -> None:
        self.work += len(kept)
        self.evaluations += 1
        fleet = run_fleet(kept, sync, self.model)
        value = score(fleet, self.run, self.model, self.goal)
        if value is None:
            return
        best = self.best
        as_many = best is not None and best.sync == sync and len(kept) >= len(best.kept)
        if best is None or value > self.best_score * (1.0 if as_many else WORTH_A_CHANGE):
            self.best, self.best_score = fleet, value


def _with(sync: SyncSettings, **changed: Any) -> SyncSettings:
    """`sync` with other values; the same object if nothing changes, so that settings compare fast."""
    return sync if all(getattr(sync, key) == value for key, value in changed.items()) else replace(sync, **changed)


def _by_size(candidate: Candidate) -> tuple[float, str]:
    """The largest first."""
    return (-candidate.tokens_per_s, candidate.island.name)


def _pools(fitting: Sequence[Candidate], goal: Goal) -> Iterator[Sequence[Candidate]]:
    """The best value for money, if the goal asks for it; the largest islands; all but those that set the pace."""
    if goal.objective == "cost" or goal.budget_per_h is not None or goal.budget_total is not None:
        by_value = sorted(fitting, key=lambda c: (c.island.price_per_h / c.tokens_per_s, c.island.name))
        yield from _first_of(by_value, [*_within_budget(by_value, goal), *_halvings(len(fitting))])
    yield from _first_of(sorted(fitting, key=_by_size), _halvings(len(fitting)))
    for count in PACE_SETTERS:
        if count < len(fitting):
            yield fitting[count:]


def _names(islands: Sequence[Candidate]) -> set[str]:
    return {candidate.island.name for candidate in islands}


def _first_of(ranked: Sequence[Candidate], counts: Sequence[int]) -> Iterator[Sequence[Candidate]]:
    """The best of a ranking, fastest step first again."""
    for count in dict.fromkeys(counts):
        if count >= 1:
            yield sorted(ranked[:count], key=lambda c: (c.step_s, c.island.name))


def _within_budget(by_value: Sequence[Candidate], goal: Goal) -> list[int]:
    """How many of the cheapest islands the hourly budget pays for, and slightly smaller numbers."""
    spent = 0.0
    for count, candidate in enumerate(by_value):
        spent += candidate.island.price_per_h
        if goal.budget_per_h is not None and spent > goal.budget_per_h:
            return [count, count * 95 // 100]
    return [len(by_value)]


def _halvings(count: int) -> list[int]:
    counts = []
    while count > 1:
        count //= 2
        counts.append(count)
    return counts


def carried(pool: Sequence[Candidate], every: int, need: Need) -> list[Candidate]:
    """The islands of `pool` (fastest step first) whose links carry the round that the fastest of them sets; islands
    whose link cannot carry even the round that they would set themselves are removed first."""
    first = 0
    while first < len(pool) and not pool[first].carries(need, every * pool[first].step_s):
        first += 1
    if first == len(pool):
        return []
    round_s = every * pool[first].step_s
    return [candidate for candidate in pool[first:] if candidate.carries(need, round_s)]
