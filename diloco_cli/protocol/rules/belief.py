"""How much of the work that learners state is believed: what the syncer's own clock and the other learners bear out.

A learner states its tokens, and no other process sees it work. So a fragment's tokens count as far as

    believed tokens <= the time since its last merge of the fragment x the learner's proven tokens/s

and what it states beyond that counts for nothing: neither for the run's end and learning rate, nor as weight or steps
of its delta. The ranges of its data stream stay as stated: they say what was trained on, and count nothing. Time that
brought fewer tokens is saved up, as offers never come evenly, up to what an offer can hold. A syncer that takes
over gives all of that at once: it cannot know how long nobody counted.

The proven rate begins as planned. While a learner states more than is believed, it grows with each merge, by at most
`GROWS` a round; as a plan is often a guess, the first `GUESS_ROUNDS` rounds may show up to `GUESSED` times it. It grows
with deltas at work alone: those that point where the deltas of the others point, about as much as these do. So neither
a loop that does nothing nor noise of usual length proves a speed, however long it states it.

The log has what was believed of each offer, and each rate as it was then proven: every reader counts alike, and a
successor begins where the log stands. Pure: time is handed in, in seconds on the syncer's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from statistics import median_low

from diloco_cli.protocol.log.records import MergedOffer, Offer, RunFormat
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.protocol.rules.merging import max_steps

GROWS = 1.25  # a round
GUESSED, GUESS_ROUNDS = 8.0, 3
ALIKE = 0.5  # of the usual agreement with the others
SURE, SURE_ENOUGH = 4.0, 0.5  # standard deviations of a cosine that is chance; a cosine that is none, of however few
SAMPLED = 1 << 20  # values of a fragment at most, of which cosines are taken


def planned_rate(run: RunFormat, learner: str) -> float:
    """Tokens/s as planned; of an island that has joined, what is usual. 0: nothing is planned."""
    island = run.island(learner)
    if island is None or learner not in run.launched:
        return run.usual_tokens_per_s
    return island.batch_tokens / island.step_s if island.step_s > 0 else 0.0


def most_saved(run: RunFormat, learner: str) -> int:
    """The tokens of a learner that nobody has counted yet, at most: what an offer can hold."""
    island = run.island(learner)
    return max_steps(run) * (0 if island is None else min(island.batch_tokens, run.largest_batch_tokens))


def rate_of(run: RunFormat, learner: str, known: LearnerRecord) -> float:
    return known.proven or planned_rate(run, learner)


def rate_after(before: float, planned: float, merges: int, num_fragments: int, stated: int, believed: int) -> float:
    """The proven rate after a delta at work of which so many tokens were stated and believed, the learner's
    merge number `merges`."""
    shown = before * stated / max(1, believed)
    grown = before * GROWS ** (1 / num_fragments)
    if merges < GUESS_ROUNDS * num_fragments:
        grown = max(grown, GUESSED * planned)
    return float(f"{max(before, min(shown, grown)):.9g}")


def at_work(inputs: Sequence[MergedOffer], alive: int, num_parameters: int) -> set[str]:
    """The learners whose deltas agree with the rest of a merge of so many parameters, by what its commit states. Nobody
    can tell of one that is merged alone while others are alive."""
    if len(inputs) == 1:
        return {item.learner for item in inputs if item.norm > 0 and alive <= 1}
    total = sum(item.weight for item in inputs) or 1.0
    parts = [item.weight / total * item.norm * item.scale for item in inputs]
    length = sum(part * item.cosine for part, item in zip(parts, inputs, strict=True))  # of their mean
    agrees = {}
    for part, item in zip(parts, inputs, strict=True):
        rest = sqrt(max(0.0, length * length - 2 * length * part * item.cosine + part * part))
        agrees[item.learner] = (length * item.cosine - part) / rest if rest > 0 and part > 0 else 0.0
    chance = min(SURE_ENOUGH, SURE / sqrt(min(num_parameters, SAMPLED)))
    least = max(chance, ALIKE * median_low(agrees.values()))
    return {name for name, cosine in agrees.items() if cosine >= least}


def proven(
    run: RunFormat, learners: Mapping[str, LearnerRecord], fragment: int, inputs: Sequence[MergedOffer], alive: int
) -> tuple[MergedOffer, ...]:
    """The inputs of a merge of this fragment with the rates that are proven after it. `run`: with all its members;
    `learners`: before it."""
    working, found = at_work(inputs, alive, run.layout.fragments[fragment].num_parameters), []
    for item in inputs:
        known, planned = learners.get(item.learner, LearnerRecord()), planned_rate(run, item.learner)
        after = known.proven
        if item.learner in working and item.counted < item.tokens:
            before = rate_of(run, item.learner, known)
            after = rate_after(before, planned, known.merges, run.num_fragments, item.tokens, item.counted)
        found.append(replace(item, proven=after))
    return tuple(found)


@dataclass
class Belief:
    """What one syncer process believes. `_saved`: tokens by (learner, fragment), and as of when; `_met`: likewise, of a
    learner of which this process has merged nothing."""

    run: RunFormat
    _saved: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _met: dict[str, tuple[float, float]] = field(default_factory=dict)

    def begin(self, state: RunState, now_s: float) -> None:
        """From now on this process counts. `state`: of the log as it begins; at commit 0 no learner has trained yet."""
        run = state.with_members(self.run)
        for island in run.all_islands:
            self._met[island.name] = (0.0 if state.n == 0 else inf), now_s

    def met(self, names: Iterable[str], now_s: float) -> None:
        """These have joined."""
        self._met |= dict.fromkeys(names, (0.0, now_s))

    def of(self, state: RunState, offer: Offer, now_s: float) -> int:
        """The tokens of an offer that are believed now: at least one."""
        saved = self._saved_tokens(state, offer.learner, offer.fragment, now_s)
        return max(1, offer.tokens if saved >= offer.tokens else ceil(saved))

    def _saved_tokens(self, state: RunState, learner: str, fragment: int, now_s: float) -> float:
        run = state.with_members(self.run)
        rate = rate_of(run, learner, state.learner(learner))
        tokens, since_s = self._saved.get((learner, fragment)) or self._met.get(learner, (0.0, now_s))
        return min(most_saved(run, learner), tokens + rate * (now_s - since_s)) if rate else inf

    def merged(self, before: RunState, fragment: int, believed: Mapping[str, int], now_s: float) -> None:
        """A merge is in the log that was decided at `now_s`, in the state `before`; `believed`: tokens by learner."""
        for learner, tokens in believed.items():
            saved = self._saved_tokens(before, learner, fragment, now_s)
            self._saved[learner, fragment] = max(0.0, saved - tokens), now_s
