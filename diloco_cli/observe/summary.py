# ruff: noqa: RUF009
"""The summary of a run: the data of `launch --json`, and its text."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.errors import escaped
from diloco_cli.observe.facts import Local, RunFacts
from diloco_cli.observe.fields import Fields, made
from diloco_cli.observe.screen import flowing, mirror_parts, next_commands, wrapped
from diloco_cli.observe.situation import State
from diloco_cli.observe.status import LearnerStatus, MirrorStatus, Status, StoreStatus, status_of, wall_seconds
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.quantities import format_duration, format_size

GRADIENT_BYTES = 2  # data-parallel training exchanges bf16 gradients


@dataclass(frozen=True)
class OneSummary:
    """What a summary is computed from: the facts, and the status that follows from them."""

    facts: RunFacts
    status: Status

    @property
    def state(self) -> RunState:
        return self.facts.state

    @property
    def wall_s(self) -> float:
        return wall_seconds(self.facts)

    @property
    def up_bytes(self) -> int:
        return sum(learner.up_bytes for learner in self.status.learners)

    @property
    def down_bytes(self) -> int:
        return sum(learner.down_bytes for learner in self.status.learners)

    @property
    def store(self) -> StoreStatus:
        assert self.status.store is not None
        return self.status.store


of_summary, of_learner = Fields[OneSummary](), Fields[tuple[OneSummary, LearnerStatus]]()


@dataclass(frozen=True)
class LearnerSummary:
    name: str = of_learner(lambda it: it[1].name, "Of the island and its learner.")
    region: str = of_learner(lambda it: it[1].region, "Where it is.")
    tokens: int = of_learner(lambda it: it[1].tokens, "Its merged tokens.")
    share: float = of_learner(
        lambda it: it[1].tokens / it[0].status.tokens if it[0].status.tokens else 0.0, "Of the run's merged tokens."
    )
    merges: int = of_learner(lambda it: it[0].state.learner(it[1].name).merges, "In so many it took part.")
    incarnations: int = of_learner(lambda it: it[1].incarnation, "How many processes it has had.")


@dataclass(frozen=True)
class SyncerSummary:
    epochs: int


@dataclass(frozen=True)
class Summary:
    """The data of `launch --json`. Tokens are merged tokens; `up_bytes` and `down_bytes` are the traffic of the
    islands' links, records and saved inner states included."""

    run: str = of_summary(lambda it: it.facts.run.name, "The run's name.")
    url: str = of_summary(lambda it: it.facts.url, "The run's bucket.")
    state: str = of_summary(lambda it: it.status.state, "The verdict on the run.")
    commits: int = of_summary(lambda it: it.state.n + 1, "In the log.")
    merges: int = of_summary(lambda it: it.state.merges, "Commits that merged offers.")
    step: int = of_summary(lambda it: it.status.step, "The syncer's global step.")
    tokens: int = of_summary(lambda it: it.status.tokens, "Merged tokens.")
    loss: float | None = of_summary(lambda it: it.status.loss, "Held-out loss of the outer parameters.")
    wall_s: float = of_summary(lambda it: it.wall_s, "Since the launch, or until the run's end.")
    goodput: float | None = of_summary(lambda it: it.status.goodput, "Merged tokens by those of the undisturbed plan.")
    participation: float | None = of_summary(lambda it: it.state.participation, "Mean share of the islands in a merge.")
    participants_mean: float | None = of_summary(
        lambda it: it.state.metrics.offers_applied / it.state.merges if it.state.merges else None,
        "Learners in a merge.",
    )
    up_bytes: int = of_summary(lambda it: it.up_bytes, "Sent over the islands' links.")
    down_bytes: int = of_summary(lambda it: it.down_bytes, "Received over the islands' links.")
    syncer_up_bytes: int = of_summary(lambda it: it.store.up_bytes - it.up_bytes, "Sent by the syncer.")
    syncer_down_bytes: int = of_summary(lambda it: it.store.down_bytes - it.down_bytes, "Received by the syncer.")
    data_parallel_bytes: int = of_summary(
        lambda it: data_parallel_bytes(it.facts.run, it.status.tokens), "What data-parallel training would move."
    )
    learners: list[LearnerSummary] = of_summary(
        lambda it: [made(LearnerSummary, (it, learner)) for learner in it.status.learners], "All islands."
    )
    syncer: SyncerSummary = of_summary(lambda it: SyncerSummary(it.state.epoch), "How many syncers served.")
    mirrors: list[MirrorStatus] = of_summary(lambda it: it.status.mirrors, "The buckets of regions.")
    divergence: str = of_summary(lambda it: it.status.divergence, "What people should know of the loss.")
    doubts: str = of_summary(lambda it: it.status.doubts, "What does not fit the plan, and why goodput is low.")
    hint: str = of_summary(lambda it: it.status.hint, "One command that helps.")


def summary_of(facts: RunFacts, local: Local = Local()) -> Summary:
    return made(Summary, OneSummary(facts, status_of(facts, local)))


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
        *([f"                 {escaped(summary.doubts)}"] if summary.doubts else []),
        f"  bytes moved    {format_size(summary.up_bytes)} up, {format_size(summary.down_bytes)} down over the links;"
        f" data-parallel: {format_size(summary.data_parallel_bytes)}"
        f" ({summary.data_parallel_bytes / max(1, moved):.0f}x)",
        f"  syncer         {summary.syncer.epochs} epoch{'s' if summary.syncer.epochs != 1 else ''}",
        f"  bucket         {summary.url}",
        *(f"  {flowing(mirror_parts(mirror), None)[0]}" for mirror in summary.mirrors),
    ]
    if summary.state == State.FINISHED:
        lines += [f"  {'' if number else 'next':<14} {text}" for number, text in enumerate(next_commands(summary.run))]
    elif summary.hint:
        lines.append(f"  next           {escaped(summary.hint)}")
    return "\n".join(text for line in lines for text in wrapped(line, width, " " * 17))
