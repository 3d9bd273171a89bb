"""How often learners take part, in virtual time: python -m tests.benchmarks.participation

Fleets of the product's learners and syncer, without training (`examples/quality/methods/fleets.py`). Prints the tables
of participation.md beside this file, with every figure beyond its bound in bold; ends with status 1 if there is one.

    participation   inputs of the merges / (merges x learners)
    late            offers that missed their slot / all offers
    merges          merges / (the time in which anybody steps / the fastest learner's slot)
    kept up         merges / (the median learner's steps / its steps a slot)
    merged          of what was trained before each learner's last round, the share that is merged
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median_low

from diloco_cli.config.settings import RunSettings, SyncSettings, TrainSettings
from diloco_cli.forecast.goodput import PUBLISHED
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.log.records import Island, MergedOffer, Mixing, RunFormat
from examples.quality.methods.fleets import PacedFleet, play_fleet
from examples.quality.methods.pacing import Pacing
from examples.quality.methods.schedules import LINK_STEPS, failing
from tests.benchmarks.measure import machine

EVERY = 24  # steps a round
STEPS = 480  # of the fastest learner
STEP_S = 2.0
BATCH_TOKENS = 1000
CHIPS, SEEDS = 1_228_800, 5
SLOWER = 6.0
LEARNERS, FRAGMENTS = (2, 4, 8), (4, 12, 24)
SPREADS = (0.0, 0.002, 0.01, 0.03, 0.1)
MIXINGS: tuple[Mixing, ...] = ("replace", "rebase")
LEAST, MAX_LATE, LEAST_OF_SLOW = 0.95, 0.05, 0.9
LATE = "late"  # protocol/rules/merging.py


@dataclass(frozen=True)
class Found:
    """Of one fleet. `uptime`: the share of the time in which a learner steps, their mean. `merged_by`: `merged`, of
    each learner."""

    participation: float
    late: float
    merges: float
    kept_up: float
    merged: float
    uptime: float
    merged_by: tuple[float, ...]


def play(pacings: Sequence[Pacing], fragments: int, mixing: Mixing, steps: int = STEPS) -> Found:
    """One fleet: the learners together process what so many steps of the fastest one's time give undisturbed ones."""
    fastest_s = min(pacing.step_s for pacing in pacings)
    tokens = sum(round(steps * fastest_s / pacing.step_s) for pacing in pacings) * BATCH_TOKENS
    fleet = play_fleet(make_run(pacings, fragments, mixing), tuple(pacings), tokens)
    return judge(fleet, fastest_s)


def make_run(pacings: Sequence[Pacing], fragments: int, mixing: Mixing) -> RunFormat:
    """One island per pacing, H_i as `plan` gives it; everything else as a run has it that says nothing of it."""
    fastest_s = min(pacing.step_s for pacing in pacings)
    settings = RunSettings(
        name="participation",
        train=TrainSettings(batch_tokens=BATCH_TOKENS),
        sync=SyncSettings(every=EVERY, fragments=fragments, mixing=mixing),
    )
    islands = tuple(
        Island(f"l{index}", "virtual", BATCH_TOKENS, round(EVERY * fastest_s / pacing.step_s), 0.0, pacing.step_s)
        for index, pacing in enumerate(pacings)
    )  # fmt: skip
    layout = balanced_layout([ParameterFact(f"w{index}", (100,), False) for index in range(fragments)], fragments)
    return RunFormat("participation", settings.name, "", settings, islands, layout, "bench")


def judge(fleet: PacedFleet, fastest_s: float) -> Found:
    """What a fleet came to that has been played."""
    commits = fleet.log
    merges = [commit for commit in commits if commit.kind == "merge"]
    applied = [item for commit in merges for item in commit.inputs]
    outcomes = [outcome for commit in commits for outcome in commit.outcomes]
    names = [island.name for island in fleet.run.islands]
    stretches = [stretch for name in names for stretch in fleet.stepping[name]]
    end_s = max(to_s for _, to_s in stretches)
    slot_s = EVERY * fastest_s / fleet.run.num_fragments
    counted = [tokens_before_the_last_round(fleet, name, fastest_s) for name in names]
    taken = [tokens_taken(name, before, applied) for name, before in zip(names, counted, strict=True)]
    whole = [before * fleet.run.num_fragments for before in counted]
    return Found(
        participation=len(applied) / (len(merges) * len(names)),
        late=sum(outcome.reason == LATE for outcome in outcomes) / (len(applied) + len(outcomes)),
        merges=len(merges) / (covered_s(stretches) / slot_s),
        kept_up=len(merges) * EVERY / (fleet.run.num_fragments * median_low(fleet.steps[name] for name in names)),
        merged=sum(taken) / sum(whole),
        uptime=mean(covered_s(fleet.stepping[name]) / end_s for name in names),
        merged_by=tuple(part / all_of_it for part, all_of_it in zip(taken, whole, strict=True)),
    )


def covered_s(stretches: Iterable[tuple[float, float]]) -> float:
    """The length of their union."""
    total_s, end_s = 0.0, float("-inf")
    for from_s, to_s in sorted(stretches):
        total_s += max(0.0, to_s - max(from_s, end_s))
        end_s = max(end_s, to_s)
    return total_s


def tokens_before_the_last_round(fleet: PacedFleet, name: str, fastest_s: float) -> int:
    """Of one learner: a round lasts as long as the fastest learner's."""
    return fleet.tokens[name] - round(EVERY * fastest_s / fleet.pacings[name].step_s) * BATCH_TOKENS


def tokens_taken(name: str, before: int, applied: Iterable[MergedOffer]) -> int:
    """Merged of its first `before` tokens, summed over fragments."""
    own = (item for item in applied if item.learner == name)
    return sum(max(0, min(item.data_end, before) - item.data_start) for item in own)


# -- tables -----------------------------------------------------------------------------------------------------------


class Marked:
    """Figures as text, those beyond their bound in bold; `misses` counts these."""

    def __init__(self) -> None:
        self.misses = 0

    def text(self, text: str, holds: bool) -> str:
        self.misses += not holds
        return text if holds else f"**{text}**"

    def least(self, value: float, bound: float | None = LEAST) -> str:
        return self.text(f"{value:.3f}", bound is None or value >= bound)

    def late(self, share: float) -> str:
        return self.text(f"{100 * share:.1f} %", share <= MAX_LATE)


def least_merged(mixing: Mixing) -> float | None:
    """`replace` gives up what it does not offer: no bound."""
    return LEAST if mixing == "rebase" else None


def spread_pacings(learners: int, spread: float) -> tuple[Pacing, ...]:
    """Learner i steps 1 + spread * i / (M - 1) times slower than the first."""
    return tuple(linked(STEP_S * (1 + spread * index / max(1, learners - 1))) for index in range(learners))


def linked(step_s: float) -> Pacing:
    """Links as those of the other fleets, the same for all."""
    return Pacing(step_s, LINK_STEPS * STEP_S, LINK_STEPS * STEP_S)


def spread_rows(
    marked: Marked, mixings: Sequence[Mixing], fragments: Sequence[int], learners: Sequence[int], steps: int
) -> Iterator[str]:
    """One row a kind of run, one cell a spread: participation, late, merges, merged."""
    yield f"| mixing | P | M | {' | '.join(f's = {100 * spread:g} %' for spread in SPREADS)} |"
    yield "|---" * (3 + len(SPREADS)) + "|"
    for mixing, num_fragments, num_learners in product(mixings, fragments, learners):
        cells = []
        for spread in SPREADS:
            found = play(spread_pacings(num_learners, spread), num_fragments, mixing, steps)
            figures = (
                marked.least(found.participation), marked.late(found.late), marked.least(found.merges),
                marked.least(found.merged, least_merged(mixing)),
            )  # fmt: skip
            cells.append(", ".join(figures))
        yield f"| {mixing} | {num_fragments} | {num_learners} | {' | '.join(cells)} |"


def failure_rows(
    marked: Marked, mixings: Sequence[Mixing], fragments: Sequence[int], learners: Sequence[int], seeds: int, steps: int
) -> Iterator[str]:
    """One row a kind of run: means of all seeds, and the worst of them."""
    yield "| mixing | P | M | uptime | participation / uptime | late | merges | kept up | merged |"
    yield "|---" * 9 + "|"
    for mixing, num_fragments, num_learners in product(mixings, fragments, learners):
        found = [
            play(failing(num_learners, CHIPS, seed, steps), num_fragments, mixing, steps) for seed in range(seeds)
        ]  # fmt: skip
        there = [one.participation / one.uptime for one in found]
        late, merges, kept_up, merged = (
            [getattr(one, name) for one in found] for name in ("late", "merges", "kept_up", "merged")
        )
        cells = [
            mixing, str(num_fragments), str(num_learners), f"{mean(one.uptime for one in found):.3f}",
            f"{marked.least(mean(there))} ({min(there):.3f})", f"{marked.late(mean(late))} ({100 * max(late):.1f} %)",
            f"{mean(merges):.3f} ({min(merges):.3f})", f"{marked.least(mean(kept_up))} ({min(kept_up):.3f})",
            f"{mean(merged):.3f} ({min(merged):.3f})",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def slow_rows(marked: Marked, steps: int) -> Iterator[str]:
    """Two equal islands and a slower one, with `rebase`."""
    yield "| P | merged of the slow island's work | of all | participation | late | merges |"
    yield "|---" * 6 + "|"
    for fragments in (min(FRAGMENTS), max(FRAGMENTS)):
        found = play((linked(STEP_S), linked(STEP_S), linked(SLOWER * STEP_S)), fragments, "rebase", steps)
        cells = [
            str(fragments), marked.least(found.merged_by[-1], LEAST_OF_SLOW), f"{found.merged:.3f}",
            f"{found.participation:.3f}", f"{100 * found.late:.1f} %", f"{found.merges:.3f}",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


BEGINS = """\
# Who takes part

`python -m tests.benchmarks.participation` prints this file: the product's learners and syncer in virtual time, without
training. H = {every}, {steps} steps of the fastest learner, {link:g} steps for an upload and for a download, everything
else by default (`local_steps: measured`). Figures beyond their bound are in bold.

| figure | what it is | bound |
|---|---|---|
| participation | inputs of the merges / (merges x learners) | >= {least:g} |
| late | offers that missed their slot / all offers | <= {late:g} % |
| merges | merges / (time in which anybody steps / the fastest learner's slot) | >= {least:g}, where none fails |
| kept up | merges / (the median learner's steps / its steps a slot) | >= {least:g} |
| merged | of what was trained before each learner's last round, the share that is merged | `rebase`: >= {least:g} |

{machine}; the figures are the same on any machine.

## Speeds that differ

Learner i of M (from 0) takes 1 + s * i / (M - 1) times as long for a step as the first. Each cell: participation, late,
merges, merged.
"""
FAILURES = """
## Learners that fail

{chips:,} chips in M learners, of steps of {step_s:g} s, that fail as those of the published goodput do: slices leave
and come back, and each time the learner stops for a while. Means of seeds 0 to {last} (and the worst of them).
`uptime`: the share of the time in which a learner steps. A round lasts as long as the median learner takes for its H
steps, with the time in which it stands still: `kept up` is what that pace can give, `merges` falls with the uptime.
`merged` has no bound here: what a learner has trained of a fragment is given up, also with `rebase`, where the others'
merge of it came while the learner stood still.
"""
SLOW = """
## An island {slower:g} times slower

Beside two equal ones, with `rebase`. Bound: >= {least:g} of its work is merged.
"""


def report(marked: Marked, steps: int = STEPS, seeds: int = SEEDS) -> Iterator[str]:
    """The whole of participation.md."""
    yield BEGINS.format(
        every=EVERY, steps=steps, link=LINK_STEPS, least=LEAST, late=100 * MAX_LATE, machine=machine()
    )  # fmt: skip
    yield from spread_rows(marked, MIXINGS, FRAGMENTS, LEARNERS, steps)
    yield FAILURES.format(chips=CHIPS, step_s=PUBLISHED.step_s, last=seeds - 1)
    yield from failure_rows(marked, MIXINGS, (min(FRAGMENTS), max(FRAGMENTS)), LEARNERS, seeds, steps)
    yield SLOW.format(slower=SLOWER, least=LEAST_OF_SLOW)
    yield from slow_rows(marked, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the fastest learner, in each fleet")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each failure fleet")
    options = parser.parse_args()
    marked = Marked()
    for line in report(marked, options.steps, options.seeds):
        print(line, flush=True)
    sys.exit(1 if marked.misses else 0)


if __name__ == "__main__":
    main()
