"""The summary of a run: the data of `launch --json`, and its text."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_cli.escaping import escaped
from diloco_cli.observe.facts import RunFacts
from diloco_cli.observe.lines import wrapped
from diloco_cli.observe.local import Local
from diloco_cli.observe.render import FINISHED, mirror_line, next_commands
from diloco_cli.observe.status import MirrorStatus, status_of, wall_seconds
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.units import format_duration, format_size

GRADIENT_BYTES = 2  # data-parallel training exchanges bf16 gradients


@dataclass(frozen=True)
class LearnerSummary:
    name: str
    region: str
    tokens: int
    share: float
    merges: int
    incarnations: int


@dataclass(frozen=True)
class SyncerSummary:
    epochs: int


@dataclass(frozen=True)
class Summary:
    """Tokens are merged tokens. `up_bytes` and `down_bytes`: the traffic of the islands' links, records and saved inner
    states included; the syncer's own traffic with its home bucket is counted separately."""

    run: str
    url: str
    state: str
    commits: int
    merges: int
    step: int
    tokens: int
    loss: float | None
    wall_s: float
    goodput: float | None
    participation: float | None
    participants_mean: float | None
    up_bytes: int
    down_bytes: int
    syncer_up_bytes: int
    syncer_down_bytes: int
    data_parallel_bytes: int
    learners: list[LearnerSummary]
    syncer: SyncerSummary
    mirrors: list[MirrorStatus] = field(default_factory=list)
    divergence: str = ""
    hint: str = ""


def summary_of(facts: RunFacts, local: Local = Local()) -> Summary:
    run, state, status = facts.run, facts.state, status_of(facts, local)
    assert status.store is not None
    up_bytes = sum(learner.up_bytes for learner in status.learners)
    down_bytes = sum(learner.down_bytes for learner in status.learners)
    learners = [
        LearnerSummary(
            name=learner.name,
            region=learner.region,
            tokens=learner.tokens,
            share=learner.tokens / status.tokens if status.tokens else 0.0,
            merges=state.learner(learner.name).merges,
            incarnations=learner.incarnation,
        )
        for learner in status.learners
    ]
    return Summary(
        run=run.name,
        url=facts.url,
        state=status.state,
        commits=state.n + 1,
        merges=state.merges,
        step=status.step,
        tokens=status.tokens,
        loss=status.loss,
        wall_s=wall_seconds(facts),
        goodput=status.goodput,
        participation=state.participation,
        participants_mean=state.metrics.offers_applied / state.merges if state.merges else None,
        up_bytes=up_bytes,
        down_bytes=down_bytes,
        syncer_up_bytes=status.store.up_bytes - up_bytes,
        syncer_down_bytes=status.store.down_bytes - down_bytes,
        data_parallel_bytes=data_parallel_bytes(run, status.tokens),
        learners=learners,
        syncer=SyncerSummary(state.epoch),
        mirrors=status.mirrors,
        divergence=status.divergence,
        hint=status.hint,
    )


def data_parallel_bytes(run: RunFormat, tokens: int) -> int:
    """The traffic of data-parallel training over the same islands for as many tokens, up and down: in each step every
    island sends, and receives, 2 (M - 1) / M of the bf16 gradients (ring all-reduce)."""
    islands = len(run.islands)
    steps = tokens / max(1, sum(island.batch_tokens for island in run.islands))
    sent = steps * 2 * (islands - 1) * run.layout.num_parameters * GRADIENT_BYTES
    return int(2 * sent)


def summary_text(summary: Summary, width: int | None = None) -> str:
    """The last screen of `launch` and `status --watch`, at most so wide."""
    moved = summary.up_bytes + summary.down_bytes
    loss = f"{summary.loss:.4f} nats per token, held out" if summary.loss is not None else "not evaluated"
    goodput = "unknown" if summary.goodput is None else f"{100 * summary.goodput:.1f}%"
    lines = [
        f"run {summary.run} {summary.state} in {format_duration(summary.wall_s)}",
        f"  loss           {loss}",
        *([f"                 {escaped(summary.divergence)}"] if summary.divergence else []),
        f"  tokens         {summary.tokens:,} merged",
    ]
    lines += [
        f"    {learner.name:<12} {learner.tokens:>12,}  {100 * learner.share:4.1f}%  in {learner.merges} merges, "
        f"{learner.incarnations} incarnation{'s' if learner.incarnations != 1 else ''}  ({learner.region})"
        for learner in summary.learners
    ]
    lines += [
        f"  merges         {summary.merges} ({summary.participants_mean or 0:.2f} participants on average, "
        f"participation {100 * (summary.participation or 0):.0f}%)",
        f"  goodput        {goodput} of the planned tokens/s",
        f"  bytes moved    {format_size(summary.up_bytes)} up, {format_size(summary.down_bytes)} down over the links;"
        f" data-parallel: {format_size(summary.data_parallel_bytes)}"
        f" ({summary.data_parallel_bytes / max(1, moved):.0f}x)",
        f"  syncer         {summary.syncer.epochs} epoch{'s' if summary.syncer.epochs != 1 else ''}",
        f"  bucket         {summary.url}",
        *(f"  {mirror_line(mirror)}" for mirror in summary.mirrors),
    ]  # fmt: skip
    if summary.state == FINISHED:
        lines += [
            f"  {'next' if not number else '':<14} {words}" for number, words in enumerate(next_commands(summary.run))
        ]
    elif summary.hint:
        lines.append(f"  next           {escaped(summary.hint)}")
    return "\n".join(text for line in lines for text in wrapped(line, width, " " * 17))
