"""Which islands, which codec, H, fragments and quorum: the best fleet that keeps every limit.

Only settings that the user did not pin are searched. Every fleet is evaluated by `flow.run_fleet`, as the plan itself
is. Its limits: the syncer's slot (calls, bytes, processor), each island's two lanes to the store (link.py), each rank's
memory with all that is on its way. Where H is searched, a part of syncer and lanes stays free; what breaks
a limit is taken only where nothing else comes near it. Rounds that a run lacks to LEAST_ROUNDS cost some loss.
Where H is given, links and memory have to hold the run, and a warning tells the rest.

A coarse scan of rounds and settings, each with the islands that such a round may have and the syncer carries, gives
starts; so do the best island alone, all of them, and for money the best by tokens. A longer round leaves out those that
would need too large an H for it. From each start, moves while they help: another codec, number of fragments or quorum;
an island more, less or exchanged; after each, H anew: from the shortest that keeps the limits upwards. Many islands
come and go in portions of a ranking, in rounds as long, longer or shorter. The evaluations of single islands are
bounded, so that ten thousand islands take no longer than ten."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from diloco_cli.config.codec import replace
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import Inventory, RunSettings, SyncSettings
from diloco_cli.plan.candidates import Candidate, candidates
from diloco_cli.plan.flow import MAX_EVERY, Fleet, costs, run_fleet
from diloco_cli.plan.link import CODEC_BITS, load_of_round, work_of
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.quality import loss_percent
from diloco_cli.protocol.log.commit_log import SNAPSHOT_HOLDS
from diloco_cli.protocol.rules.capacity import most_learners

SEARCHED = ("codec", "weights_codec", "every", "fragments", "quorum")  # keys of `sync`
FRAGMENTS = (6, 8, 12, 16, 24, 32, 48, 96, 192, 384)
MAX_WORK = 60_000  # evaluations of one island
SCAN_SHARE = 0.3  # of the work, for the coarse scan
LEAST_EVALUATIONS = 8  # of a whole fleet, however large
STARTS = 8  # settings of the scan from which the search goes on
MANY_ISLANDS = 32  # beyond it, islands come and go in portions, and of so many one is always there as a quorum
SWAPPED = 20  # islands up to which one may take another's place
NEARLY, FAR = 0.97, 1.4  # a rival is worth so much of the best; so much longer a round is another one
WORTH_A_CHANGE = 1.002  # a fleet of fewer islands must be better by this factor
HEADROOM = 0.95  # of what the syncer can, where H is searched: in virtual time it keeps its pace up to 1
LANES = 0.9  # of what an island's lanes can: a start is caught up with in six rounds, beyond in ever more
FREE_HEADROOM, FREE_LANES = 0.8, 0.7  # up to which they cost nothing, and FULL at the limit
FULL = 0.03  # of what a fleet is worth: links and the syncer may turn out slower than planned
BEYOND = 0.1  # what a fleet that breaks a limit is worth beside one that does not
LEAST_STEPS = 4  # of each island in a round, where H is searched: with fewer its offers come late, and others wait
PER_DOUBLING = 0.004  # of the tokens, guessed: the more fragments beyond 24, the more slots until a run has its pace
LEAST_SLOT_S = 0.1  # that is searched: the log grows by a commit a slot, and each takes a syncer's processor some 10 ms
LEAST_ROUNDS = 100  # of a run whose H is searched
PERCENT_A_HALVING = 4.0  # of loss, guessed, for half as many: 2 % from 200 to 100 (quality), 9 % at 20 (ablations)
HALVING_PERCENT = 10.0  # of loss: so much of it makes a fleet worth half
PER_LOG_SPEED = 1e-3  # less than a tenth of a percent of loss, whatever the speed: it decides between equals
CLIMB = (4.0, 2.0, 2**0.5, 2**0.25, 2**0.125, 2**0.0625)  # factors of H
ROUNDS_APART = 0.7  # a round of the coarse scan over the next longer one, at most
HALVED = 10  # times, the longest round of the fastest island
ROUNDS = (1.0, 1.25, 1.5, 2.0, 4.0, 0.8, 0.5)  # factors of a round of which other islands are tried
PORTIONS = (0.25, 0.5, 0.75, 0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0, 4.0)  # of the number of islands that take part


class Point(NamedTuple):
    """Settings of a fleet. `quorum`: 1, or a share of the islands."""

    pair: tuple[str, str]
    fragments: int
    every: int
    quorum: float


Kept = tuple[int, ...]  # islands by their place among all, fastest step first


@dataclass(frozen=True)
class Space:
    """The values to choose from, the run's own first. `everys` None: any."""

    codecs: tuple[tuple[str, str], ...]
    every: int | None
    fragments: tuple[int, ...]
    quorums: tuple[float, ...]


def space_of(sync: SyncSettings, free: frozenset[str], model: ModelFacts) -> Space:
    """The search space; `free`: names of `SEARCHED` that the user did not pin."""
    smaller = [codec for codec in CODEC_BITS if codec != "fp32"]
    ups = dict.fromkeys((sync.codec, *smaller)) if "codec" in free else (sync.codec,)
    downs = dict.fromkeys((sync.weights_codec, *smaller)) if "weights_codec" in free else (sync.weights_codec,)
    both = {"codec", "weights_codec"} <= free
    pairs = [(up, up) for up in ups] if both else list(product(ups, downs))
    counts = [count for count in FRAGMENTS if model.fragments(count).count == count] if "fragments" in free else []
    return Space(
        codecs=tuple(dict.fromkeys(((sync.codec, sync.weights_codec), *pairs))),
        every=None if "every" in free else sync.every,
        fragments=tuple(dict.fromkeys((sync.fragments, *counts))),
        quorums=(1, 0.5, 1.0) if "quorum" in free else (sync.quorum,),
    )


def score(fleet: Fleet, run: RunSettings, model: ModelFacts, goal: Goal, token: float = 1.0) -> float | None:
    """A fleet's score by the goal, larger is better; None if it breaks one of the goal's limits. `token`: what one is
    worth."""
    if not {candidate.island.name for candidate in fleet.kept}.issuperset(goal.with_islands):
        return None
    tokens_per_s = token * fleet.effective_tokens_per_s
    if goal.deadline_s is not None and run.train.tokens / fleet.tokens_per_s > goal.deadline_s:
        return None
    if goal.objective == "cost" or goal.has_budget:
        money = costs(fleet, run, model)
        if goal.budget_per_h is not None and money.per_h > goal.budget_per_h:
            return None
        if goal.budget_total is not None and money.total > goal.budget_total:
            return None
        if goal.objective == "cost":
            return tokens_per_s / (money.total * fleet.tokens_per_s) if money.total else None
    if goal.objective == "loss":
        percent = loss_of(fleet, run, model) or 0.0
        return (1 + PER_LOG_SPEED * math.log(tokens_per_s)) / (1 + percent / HALVING_PERCENT)
    return tokens_per_s


def loss_of(fleet: Fleet, run: RunSettings, model: ModelFacts) -> float | None:
    """In percent over data-parallel training, as far as it was measured."""
    rounds = run.train.tokens / fleet.tokens_a_round
    return loss_percent(len(fleet.kept), rounds, run.train.inner.name, model.parameters, run.train.tokens)


def search(
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
    free: frozenset[str],
    goal: Goal,
    max_work: int = MAX_WORK,
    start: frozenset[str] = frozenset(),
) -> Fleet | None:
    """The best fleet among those that fit their memory; None if there is none. `start`: names of islands that are tried
    first."""
    attempt = Search(run, inventory, model, space_of(run.sync, free, model), goal, max_work)
    attempt.search(start)
    return attempt.best


@dataclass
class Search:
    """One search: the best fleet so far, the work done (evaluations of one island), what every fleet was worth."""

    run: RunSettings
    inventory: Inventory
    model: ModelFacts
    space: Space
    goal: Goal
    max_work: int
    best: Fleet | None = None
    best_worth: float = 0.0
    work: int = 0
    seen: dict[tuple[Kept, Point], tuple[float, float]] = field(default_factory=dict)
    steps: dict[tuple[Kept, Point], int] = field(default_factory=dict)  # the best H from each start
    pools: dict[int, list[Candidate]] = field(default_factory=dict)
    shortest: dict[tuple[tuple[str, str], int, bool], list[float]] = field(default_factory=dict)

    @property
    def limits(self) -> bool:
        """Whether lanes, syncer and rounds are limits: only where H is searched."""
        return self.space.every is None

    @property
    def wants_money(self) -> bool:
        return self.goal.objective == "cost" or self.goal.has_budget

    def search(self, start: frozenset[str]) -> None:
        pool = self.pool(self.space.fragments[0])
        own = Point(self.space.codecs[0], self.space.fragments[0], self.run.sync.every, self.space.quorums[0])
        if start:
            self.improve(tuple(i for i, c in enumerate(pool) if c.island.name in start), own)
        for kept, point in self._starts(own, start):
            self.improve(kept, point)
        for kept, point in self.optimum(own):
            found = self.best_worth
            for move in self._double_moves(kept, point):
                if not self._spent(1.0):
                    self.tuned(*move)
            if self.best_worth > found:
                for better in self.optimum(own):
                    self.improve(*better)

    def _double_moves(self, kept: Kept, point: Point) -> Iterator[tuple[Kept, Point]]:
        """Two changes of which neither helps alone: another number of fragments, and a codec or an island less."""
        for fragments in self.space.fragments:
            other = point._replace(fragments=fragments)
            yield from ((kept, other._replace(pair=pair)) for pair in self.space.codecs)
            if len(kept) <= SWAPPED:
                yield from ((tuple(i for i in kept if i != gone), other) for gone in kept)

    # -- starts ---------------------------------------------------------------------------------------------------

    def _starts(self, own: Point, start: frozenset[str]) -> Iterator[tuple[Kept, Point]]:
        everyone = tuple(range(len(self.pool(own.fragments))))
        of_settings: dict[tuple[tuple[str, str], int], tuple[float, Kept, Point]] = {}
        of_pace: dict[int, tuple[float, Kept, Point]] = {}
        for pacer, point in self._coarse(own):
            if self._spent(SCAN_SHARE):
                break
            kept = self.with_wanted(self.served(self.carried(everyone[pacer:], point), point))
            worth = self.worth(kept, point)
            if kept and worth > of_settings.get((point.pair, point.fragments), (0.0,))[0]:
                of_settings[point.pair, point.fragments] = worth, kept, point
            if kept and worth > of_pace.get(kept[0], (0.0,))[0]:
                of_pace[kept[0]] = worth, kept, point
        points = [own]
        if (self.wants_money or self.goal.objective == "loss") and not start:
            fastest = Search(self.run, self.inventory, self.model, self.space, self.goal.fastest, self.max_work // 2)
            fastest.search(frozenset())
            for kept, point in fastest.optimum(own):
                yield kept, point
                points.append(point)  # all of them may be too many, and fewer need its settings
        if len(everyone) <= MANY_ISLANDS:
            settings = product(self.space.codecs, self.space.fragments)
            points_alone = [own._replace(pair=pair, fragments=fragments) for pair, fragments in settings]
            each = [[self.tuned((i,), point) for point in points_alone] for i in everyone]
            alone = [max(of_one, key=lambda fleet: self.worth(*fleet)) for of_one in each]
            yield from sorted(alone, key=lambda fleet: -self.worth(*fleet))[:STARTS]
        for best in (of_settings.values(), of_pace.values()):
            yield from ((kept, point) for _, kept, point in sorted(best, key=lambda item: -item[0])[:STARTS])
        for point in points:
            for ranking in self._rankings(everyone, point.fragments):
                yield self._within_budget(ranking), point

    def optimum(self, own: Point) -> Iterator[tuple[Kept, Point]]:
        """What was found, as a start for another goal."""
        if self.best is None:
            return
        sync, names = self.best.sync, {c.island.name for c in self.best.kept}
        kept = tuple(i for i, c in enumerate(self.pool(sync.fragments)) if c.island.name in names)
        yield kept, Point((sync.codec, sync.weights_codec), sync.fragments, sync.every, own.quorum)

    def _coarse(self, own: Point) -> Iterator[tuple[int, Point]]:
        """(the fastest island, settings): every pace with one codec and number of fragments before the next, so that of
        many islands, for which not all can be tried, no pace is left out; the longest rounds first."""
        most, paces, last_s = self.space.every or MAX_EVERY, {(0, own.every): None}, math.inf
        rounds_s = [most * candidate.step_s for candidate in reversed(self.pool(own.fragments))]
        if self.limits:
            rounds_s += [round_s / 2**n for round_s in rounds_s[-1:] for n in range(1, HALVED)]
        for round_s in rounds_s:
            if round_s <= ROUNDS_APART * last_s:
                last_s = round_s
                paces[self._pace(round_s, own.fragments)] = None
        for pair, fragments, (pacer, every) in product(self.space.codecs, self.space.fragments, paces):
            yield pacer, Point(pair, fragments, every, own.quorum)

    def _pace(self, round_s: float, fragments: int) -> tuple[int, int]:
        """The fastest island that a round so long may have, and the H that makes it."""
        pool, most = self.pool(fragments), self.space.every or MAX_EVERY
        first = bisect_left(pool, round_s / most * (1 - 1e-9), key=lambda candidate: candidate.step_s)
        first = min(first, len(pool) - 1)
        return first, self.space.every or min(most, max(1, round(round_s / pool[first].step_s)))

    def _rankings(self, islands: Sequence[int], fragments: int) -> list[list[int]]:
        """The largest first; the cheapest tokens first, if the goal asks for money."""
        pool = self.pool(fragments)
        able = [i for i in islands if pool[i].can_train]
        found = [sorted(able, key=lambda i: (-pool[i].tokens_per_s, pool[i].island.name))]
        if self.wants_money:
            found.append(
                sorted(able, key=lambda i: (pool[i].island.price_per_h / pool[i].tokens_per_s, pool[i].island.name))
            )
        return found

    def _within_budget(self, ranking: Sequence[int]) -> Kept:
        spent, pool, kept = 0.0, self.pool(self.space.fragments[0]), []
        for i in ranking:
            spent += pool[i].island.price_per_h
            if self.goal.budget_per_h is not None and spent > self.goal.budget_per_h:
                break
            kept.append(i)
        return tuple(sorted(kept))

    # -- moves ----------------------------------------------------------------------------------------------------

    def improve(self, kept: Kept, point: Point) -> None:
        """Moves while they help."""
        kept, point = self.tuned(self.carried(kept, point) or kept, point)
        best = self.worth(kept, point)
        helped = bool(kept)
        while helped and not self._spent(1.0):
            helped = False
            for move in self._moves(kept, point):
                if self._spent(1.0):
                    return
                other, setting = self.tuned(*move)
                worth = self.worth(other, setting)
                if worth > best * (WORTH_A_CHANGE if len(other) < len(kept) else 1 + 1e-9):
                    kept, point, best, helped = other, setting, worth, True
                    break

    def _moves(self, kept: Kept, point: Point) -> Iterator[tuple[Kept, Point]]:
        everyone = range(len(self.pool(point.fragments)))
        others = [i for i in everyone if i not in set(kept) and self.pool(point.fragments)[i].can_train]
        if len(everyone) > MANY_ISLANDS:
            yield from self._portions(kept, point)
        else:
            yield from ((tuple(sorted((*kept, i))), point) for i in others)
            yield from ((tuple(i for i in kept if i != gone), point) for gone in kept)
        for pair in self.space.codecs:
            yield kept, point._replace(pair=pair)
        for fragments in self.space.fragments:
            same_slot = max(1, round(point.every * fragments / point.fragments))
            yield kept, point._replace(fragments=fragments, every=point.every if self.space.every else same_slot)
        for quorum in self.space.quorums if len(kept) <= MANY_ISLANDS else ():
            yield kept, point._replace(quorum=quorum)
        if len(everyone) <= SWAPPED:
            swaps = product(others, kept)
            yield from ((tuple(sorted((*(i for i in kept if i != gone), come))), point) for come, gone in swaps)

    def _portions(self, kept: Kept, point: Point) -> Iterator[tuple[Kept, Point]]:
        """More islands or fewer, of rounds as long, longer or shorter: the best of all that such a round may have."""
        pool = self.pool(point.fragments)
        for factor in ROUNDS:
            pacer, every = self._pace(factor * point.every * pool[kept[0]].step_s, point.fragments)
            able = self.carried(tuple(range(pacer, len(pool))), point._replace(every=every))
            sizes = dict.fromkeys(min(len(able), round(portion * len(kept)) or 1) for portion in PORTIONS)
            for ranking, size in product(self._rankings(able, point.fragments) if able else (), sizes):
                best = tuple(sorted(ranking[:size]))
                steps = every * pool[able[0]].step_s / pool[best[0]].step_s
                yield best, point._replace(every=self.space.every or max(1, round(steps)))

    def tuned(self, kept: Kept, point: Point) -> tuple[Kept, Point]:
        """With the islands that the goal wants, and the best H: not below the shortest that keeps the limits."""
        kept = self.with_wanted(kept)
        if self.space.every or not kept:
            return kept, point
        if (kept, point) not in self.steps:  # the same moves come again after each that helped
            self.steps[kept, point] = self._best_every(kept, point)
        return kept, point._replace(every=self.steps[kept, point])

    def _best_every(self, kept: Kept, point: Point) -> int:
        least = min(MAX_EVERY, point.every)
        for _ in range(3):
            self.worth(kept, point := point._replace(every=least))
            again = min(MAX_EVERY, max(1, math.ceil(least * self.seen[kept, point][1] - 1e-9)))
            if again == least:
                break
            least = again
        best, every = self.worth(kept, point := point._replace(every=least)), least
        for factor in CLIMB:
            for way in (factor, 1 / factor):
                other = min(MAX_EVERY, max(least, round(every * way)))
                while (worth := self.worth(kept, point._replace(every=other))) > best:
                    best, every, other = worth, other, min(MAX_EVERY, max(least, round(other * way)))
        return every

    # -- what a fleet is worth ------------------------------------------------------------------------------------

    def pool(self, fragments: int) -> list[Candidate]:
        """All islands, with their memory at so many fragments."""
        if fragments not in self.pools:
            self.pools[fragments] = candidates(with_sync(self.run, fragments=fragments), self.inventory, self.model)
        return self.pools[fragments]

    def _shortest(self, point: Point, lanes: bool) -> list[float]:
        """The shortest round of each island: by its link alone, or by its lanes, calls included."""
        key = point.pair, point.fragments, lanes
        if key not in self.shortest:
            codecs = {"codec": point.pair[0], "weights_codec": point.pair[1]}
            need = load_of_round(
                self.model, with_sync(self.run, fragments=point.fragments, **codecs).sync, self.run.train.inner
            )
            of = need.busy_s if lanes else need.shortest_round_s
            self.shortest[key] = [of(c.link) for c in self.pool(point.fragments)]
        return self.shortest[key]

    def with_wanted(self, kept: Kept) -> Kept:
        """Also the islands that the goal wants in any case."""
        if not self.goal.with_islands:
            return kept
        pool, wanted = self.pool(self.space.fragments[0]), set(self.goal.with_islands)
        return tuple(sorted({*kept, *(i for i, c in enumerate(pool) if c.island.name in wanted)}))

    def carried(self, kept: Kept, point: Point) -> Kept:
        """Those that fit their memory and whose links carry the round that the fastest of them sets; islands whose link
        cannot carry even the round that they would set themselves are removed first."""
        pool, shortest = self.pool(point.fragments), self._shortest(point, self.limits)
        limit = LANES if self.limits else 1.0
        able = [i for i in kept if pool[i].can_train]
        own = [i for i in able if shortest[i] <= limit * max(point.every * pool[i].step_s, pool[i].step_s)]
        if not own:
            return ()
        round_s = point.every * pool[own[0]].step_s
        slowest_s = round_s / LEAST_STEPS if self.limits and point.every >= LEAST_STEPS else math.inf
        return tuple(
            i
            for i in able
            if i >= own[0] and pool[i].step_s <= slowest_s and shortest[i] <= limit * max(round_s, pool[i].step_s)
        )

    def served(self, kept: Kept, point: Point) -> Kept:
        """The best of a ranking, as many as leave the syncer its headroom."""
        if not self.limits or not kept:
            return kept
        pool, changed = self.pool(point.fragments), {"codec": point.pair[0], "weights_codec": point.pair[1]}
        work = work_of(self.model.parameters / point.fragments, 1, with_sync(self.run, **changed).sync)
        slot_s = point.every * pool[kept[0]].step_s / point.fragments
        most = most_learners(work, pool[kept[0]].syncer, HEADROOM * slot_s, len(kept))
        return tuple(sorted(self._rankings(kept, point.fragments)[-1][:most])) if most < len(kept) else kept

    def worth(self, kept: Kept, point: Point) -> float:
        """0: it cannot be."""
        if (kept, point) not in self.seen:
            self.seen[kept, point] = self._judged(kept, point)
        return self.seen[kept, point][0]

    def _judged(self, kept: Kept, point: Point) -> tuple[float, float]:
        """(what it is worth, how much of its most used limit it uses)."""
        chosen = [self.pool(point.fragments)[i] for i in kept]
        quorum = point.quorum if isinstance(point.quorum, int) else max(1, math.ceil(point.quorum * len(kept)))
        if not kept or quorum > len(kept) or not all(candidate.can_train for candidate in chosen):
            return 0.0, 1.0
        round_s = point.every * chosen[0].step_s
        link, lanes = (
            max(shortest[i] / max(round_s, c.step_s) for i, c in zip(kept, chosen, strict=True))
            for shortest in (self._shortest(point, lanes) for lanes in (False, True))
        )
        if link > 1:
            return 0.0, lanes / LANES
        self.work += len(kept)
        fleet = self._fleet(kept, point)
        worth = self._valued(fleet)
        load, slot_s = fleet.syncer_load, fleet.schedule.slot_s
        used = max(lanes / LANES, load / HEADROOM, LEAST_STEPS * chosen[-1].step_s / round_s, LEAST_SLOT_S / slot_s)
        if self.limits:
            full = max((lanes - FREE_LANES) / (LANES - FREE_LANES), (load - FREE_HEADROOM) / (HEADROOM - FREE_HEADROOM))
            worth *= 1 - FULL * min(1.0, max(0.0, full))
            if used > 1 or not fleet.has_room:
                worth *= BEYOND / max(1.0, used)
        fewer = self.best is not None and len(kept) < len(self.best.kept)
        if worth > self.best_worth * (WORTH_A_CHANGE if fewer else 1.0):
            self.best, self.best_worth = fleet, worth
        return worth, used

    def rivals(self, count: int) -> list[Fleet]:
        """The best of what was seen, and what is worth nearly as much, but differs from it, and from each other, by its
        islands, codec or fragments, or by far in H."""
        ranked = sorted((one for one in self.seen if self.seen[one][0]), key=lambda one: (-self.seen[one][0], one))
        chosen: list[tuple[Kept, Point]] = []
        for kept, point in ranked:
            if self.seen[kept, point][0] < NEARLY * self.best_worth or len(chosen) == count:
                break
            if not any(_alike(kept, point, *other) for other in chosen):
                chosen.append((kept, point))
        return [self._fleet(kept, point) for kept, point in chosen]

    def _fleet(self, kept: Kept, point: Point) -> Fleet:
        quorum = point.quorum if isinstance(point.quorum, int) else max(1, math.ceil(point.quorum * len(kept)))
        changed = {"codec": point.pair[0], "weights_codec": point.pair[1], "quorum": quorum}
        sync = with_sync(self.run, fragments=point.fragments, every=point.every, **changed).sync
        return run_fleet([self.pool(point.fragments)[i] for i in kept], sync, self.model)

    def _valued(self, fleet: Fleet) -> float:
        many = PER_DOUBLING * max(0.0, math.log2(fleet.schedule.fragments / 24)) if self.limits else 0.0
        worth = score(fleet, self.run, self.model, self.goal, 1 - many) or 0.0
        if self.limits:
            rounds = self.run.train.tokens / (fleet.tokens_per_s * fleet.served_round_s)
            worth /= 1 + PERCENT_A_HALVING * max(0.0, math.log2(LEAST_ROUNDS / rounds)) / HALVING_PERCENT
        if len(self.space.fragments) > 1 and len(fleet.kept) * fleet.schedule.fragments > SNAPSHOT_HOLDS:
            worth *= BEYOND
        return worth

    def _spent(self, share: float) -> bool:
        return self.work > share * self.max_work and len(self.seen) >= share * LEAST_EVALUATIONS


def _alike(kept: Kept, point: Point, other_kept: Kept, other: Point) -> bool:
    if (kept, point.pair, point.fragments) != (other_kept, other.pair, other.fragments):
        return False
    return max(point.every, other.every) < FAR * min(point.every, other.every)


def with_sync(run: RunSettings, **changed: Any) -> RunSettings:
    return replace(run, sync=replace(run.sync, **changed))
