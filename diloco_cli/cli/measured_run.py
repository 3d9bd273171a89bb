"""What a run measured, from its bucket alone, as `plan --calibrate` takes it."""

from __future__ import annotations

from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.observe.status import rate_between, status_of, wall_seconds
from diloco_cli.plan.calibrate import MeasuredIsland, MeasuredRun
from diloco_cli.protocol.log.commit_log import next_commit
from diloco_cli.protocol.log.metrics import MergeNote
from diloco_cli.protocol.log.state import RunState

MAX_BEFORE_A_MERGE = 100  # commits that are looked through for the first merge


def measured_run(text: str) -> MeasuredRun:
    """RUN as everywhere: a name, a run file, a URL. The steady rate counts from the run's first merge on. Raises
    NotFoundError if there is no such run."""
    opened = open_run(text)
    facts = opened.facts()
    status, merges, first = status_of(facts), facts.state.metrics.recent_merges, _first_merge(opened)
    means = {name: heard.heartbeat.mean_tokens_per_s for name, heard in facts.learners.items()}
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
    state = RunState()
    for _ in range(MAX_BEFORE_A_MERGE):
        later = opened.perform(next_commit(opened.format, state))
        if later is None or later.metrics.recent_merges:
            return later.metrics.recent_merges[0] if later else None
        state = later
    return None
