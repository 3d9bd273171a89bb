"""What a run measured, from its bucket alone, as `plan --calibrate` takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_cli.cli.run_argument import OpenRun
    from diloco_cli.observe.facts import RunFacts
    from diloco_cli.plan.calibrate import MeasuredRun
    from diloco_cli.protocol.state import MergeNote

MOST_BEFORE_A_MERGE = 100  # commits that are looked through for the first merge


def measured_run(text: str) -> MeasuredRun:
    """RUN as everywhere: a name, a run file, a URL. Raises NotFoundError if there is no such run."""
    from diloco_cli.cli.run_argument import open_run
    from diloco_cli.observe.facts import read_facts

    opened = open_run(text)
    return measured_in(read_facts(opened.url, opened.format, opened.store, opened.clock), _first_merge(opened))


def measured_in(facts: RunFacts, first: MergeNote | None) -> MeasuredRun:
    """`first`: the run's first merge, from which on the steady rate counts."""
    from diloco_cli.observe.status import rate_between, status_of, wall_seconds
    from diloco_cli.plan.calibrate import MeasuredIsland, MeasuredRun

    status, merges = status_of(facts), facts.state.recent_merges
    means = {name: heard.beat.mean_tokens_per_s for name, heard in facts.learners.items()}
    islands = tuple(
        MeasuredIsland(i.name, means.get(i.name, 0.0), i.up_bytes, i.down_bytes, i.incarnation) for i in status.learners
    )
    return MeasuredRun(
        name=status.run,
        wall_s=wall_seconds(facts),
        tokens=status.tokens,
        steady_tokens_per_s=rate_between(first, merges[-1]) if first and merges else None,
        requests=status.store.requests if status.store else 0,
        islands=islands,
    )


def _first_merge(opened: OpenRun) -> MergeNote | None:
    from diloco_cli.protocol.driver import perform
    from diloco_cli.protocol.log import next_commit
    from diloco_cli.protocol.state import RunState

    state = RunState()
    for _ in range(MOST_BEFORE_A_MERGE):
        later = perform(next_commit(opened.format, state), opened.store, opened.clock)
        if later is None or later.recent_merges:
            return later.recent_merges[0] if later else None
        state = later
    return None
