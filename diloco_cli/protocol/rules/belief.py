"""How much of the work that learners state is believed: what the syncer's own clock and the other learners bear out.

A learner states its tokens, and no other process sees it work. So a fragment's tokens count as far as

    believed tokens <= the time since its last merge of the fragment x the learner's proven tokens/s

and what it states beyond that is doubted, and counts for nothing: neither for the run's end and learning rate, nor as
weight or steps of its delta. The ranges of its data stream stay as stated: they say what was trained on, and count
nothing. Time that brought fewer tokens is saved up, as offers never come evenly, up to what an offer can hold. A syncer
that takes over gives all of that at once: it cannot know how long nobody counted.

The proven rate begins as planned. While a learner states more than is believed, it grows with each merge, by at most
`GROWS` a round; as a plan is often a guess, the first `GUESS_ROUNDS` rounds may show up to `GUESSED` times it, and what
they show holds from their beginning: what was doubted before is believed then. It grows with deltas at work alone:
those that point where the sum of the others points, more than chance does. So neither a loop that does nothing nor
noise of usual length proves a speed, however long it states it. Of a delta that is merged alone nobody can tell, and it
counts as work unless it is empty.

The log has what was believed of each offer, and each rate as it was then proven: every reader counts alike, and a
successor begins where the log stands. Pure: time is handed in, in seconds on the syncer's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt

from diloco_cli.protocol.log.records import MergedOffer, Offer, RunFormat
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.protocol.rules.merging import max_steps

GROWS = 1.25  # a round
GUESSED, GUESS_ROUNDS = 8.0, 3
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


def is_guess(merges: int, num_fragments: int) -> bool:
    """Whether a learner's merge number `merges` may show that its plan was wrong by far."""
    return merges < GUESS_ROUNDS * num_fragments


def rate_after(before: float, planned: float, merges: int, num_fragments: int, stated: int, believed: int) -> float:
    """The proven rate after a delta at work of which so many tokens were stated and believed, the learner's
    merge number `merges`."""
    shown = before * stated / max(1, believed)
    grown = before * GROWS ** (1 / num_fragments)
    if is_guess(merges, num_fragments):
        grown = max(grown, GUESSED * planned)
    return float(f"{max(before, min(shown, grown)):.9g}")


def at_work(inputs: Sequence[MergedOffer], num_parameters: int) -> set[str]:
    """The learners whose deltas agree with the rest of a merge of so many parameters, by what its commit states."""
    chance = min(SURE_ENOUGH, SURE / sqrt(min(num_parameters, SAMPLED)))
    return {item.learner for item in inputs if (item.norm > 0 if len(inputs) == 1 else item.cosine >= chance)}


def proven(
    run: RunFormat, learners: Mapping[str, LearnerRecord], fragment: int, inputs: Sequence[MergedOffer]
) -> tuple[MergedOffer, ...]:
    """The inputs of a merge of this fragment with the rates that are proven after it. `run`: with all its members;
    `learners`: before it."""
    working, found = at_work(inputs, run.layout.fragments[fragment].num_parameters), []
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
    """What one syncer process believes. `_counted`: by (learner, fragment), the tokens that it believed since a moment,
    and that moment; `_met`: likewise, of a learner of which this process has merged nothing."""

    run: RunFormat
    _counted: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _met: dict[str, tuple[float, float]] = field(default_factory=dict)

    def begin(self, state: RunState, now_s: float) -> None:
        """From now on this process counts. `state`: of the log as it begins; at commit 0 no learner has trained yet."""
        run = state.with_members(self.run)
        for island in run.all_islands:
            self._met[island.name] = (0.0 if state.n == 0 else -inf), now_s

    def met(self, names: Iterable[str], now_s: float) -> None:
        """These have joined."""
        self._met |= dict.fromkeys(names, (0.0, now_s))

    def of(self, state: RunState, offer: Offer, now_s: float) -> int:
        """The tokens that are believed now with this offer: at least one; those of it, and beside them tokens that were
        doubted before."""
        saved = self._saved_tokens(state, offer.learner, offer.fragment, now_s)
        parameters = self.run.layout.fragments[offer.fragment].num_parameters
        most = offer.tokens + state.learner(offer.learner).doubted // parameters
        return max(1, most if saved >= most else ceil(saved))

    def _saved_tokens(self, state: RunState, learner: str, fragment: int, now_s: float) -> float:
        run = state.with_members(self.run)
        rate = rate_of(run, learner, state.learner(learner))
        counted, since_s = self._of(learner, fragment, now_s)
        return min(most_saved(run, learner), rate * (now_s - since_s) - counted) if rate else inf

    def merged(self, before: RunState, fragment: int, believed: Mapping[str, int], now_s: float) -> None:
        """A merge is in the log that was decided at `now_s`, in the state `before`; `believed`: tokens by learner. A
        guess that turns out to be wrong was so from its beginning."""
        run = before.with_members(self.run)
        for learner, tokens in believed.items():
            known, (_, since_s) = before.learner(learner), self._of(learner, fragment, now_s)
            left = max(0.0, self._saved_tokens(before, learner, fragment, now_s) - tokens)
            since_s = since_s if is_guess(known.merges, run.num_fragments) else now_s
            self._counted[learner, fragment] = rate_of(run, learner, known) * (now_s - since_s) - left, since_s

    def _of(self, learner: str, fragment: int, now_s: float) -> tuple[float, float]:
        return self._counted.get((learner, fragment)) or self._met.setdefault(learner, (0.0, now_s))
