"""Status as OpenMetrics text. METRICS is the table of all names; the Grafana dashboard in templates/ uses them.

Only counters and gauges, so that Prometheus's older text format, which node_exporter's textfile collector reads, has
the same meaning. A rollback lowers the counters of merged tokens, which a reader takes for a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from diloco_cli.observe.status import LastMerge, LearnerStatus, Status, SyncerStatus
from diloco_cli.observe.verdict import State

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Kind = Literal["counter", "gauge"]
Labels = dict[str, str]
Sample = tuple[Labels, float | None]
"""None: not known now; the sample is left out."""


@dataclass(frozen=True)
class Metric:
    """`samples`: from a status; each gets the run's name as a label."""

    name: str
    kind: Kind
    help: str
    samples: Callable[[Status], Iterable[Sample]]

    @property
    def sample_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


def metrics_text(status: Status) -> str:
    lines = []
    for metric in METRICS:
        lines += [f"# TYPE {metric.name} {metric.kind}", f"# HELP {metric.name} {metric.help}"]
        lines += [
            f"{metric.sample_name}{_labels({'run': status.run, **labels})} {float(value)!r}"
            for labels, value in metric.samples(status)
            if value is not None
        ]
    return "\n".join([*lines, "# EOF", ""])


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items()) + "}"


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _of_run(name: str, text: str, value: Callable[[Status], float | None], kind: Kind = "gauge") -> Metric:
    return Metric(name, kind, text, lambda status: [({}, value(status))])


def _of_merge(name: str, text: str, value: Callable[[LastMerge], float]) -> Metric:
    return Metric(name, "gauge", text, lambda s: [] if s.last_merge is None else [({}, value(s.last_merge))])


def _of_syncer(name: str, text: str, value: Callable[[SyncerStatus], float | None]) -> Metric:
    return Metric(name, "gauge", text, lambda s: [] if s.syncer is None else [({}, value(s.syncer))])


def _of_learners(name: str, text: str, value: Callable[[LearnerStatus], float | None], kind: Kind = "gauge") -> Metric:
    def samples(status: Status) -> Iterator[Sample]:
        for learner in status.learners:
            yield {"learner": learner.name, "region": learner.region}, value(learner)

    return Metric(name, kind, text, samples)


def _states(status: Status) -> Iterator[Sample]:
    for state in State:
        yield {"state": state}, float(status.state == state)


def _learner_bytes(status: Status) -> Iterator[Sample]:
    for learner in status.learners:
        for direction, count in (("up", learner.up_bytes), ("down", learner.down_bytes)):
            yield {"learner": learner.name, "region": learner.region, "direction": direction}, count


def _store_bytes(status: Status) -> Iterator[Sample]:
    if status.store is not None:
        yield {"direction": "up"}, status.store.up_bytes
        yield {"direction": "down"}, status.store.down_bytes


def _store_requests(status: Status) -> Iterator[Sample]:
    if status.store is not None:
        yield {"kind": "write"}, status.store.writes
        yield {"kind": "read"}, status.store.requests - status.store.writes


def _behind(status: Status) -> Iterator[Sample]:
    for mirror in status.mirrors:
        yield {"region": mirror.region}, mirror.commits_behind


METRICS: tuple[Metric, ...] = (
    Metric("diloco_state", "gauge", "1 for the verdict on the run, 0 for every other state.", _states),
    _of_run("diloco_tokens_merged", "Merged tokens.", lambda s: s.tokens, "counter"),
    _of_run("diloco_tokens_target", "Merged tokens at which the run ends.", lambda s: s.tokens_target),
    _of_run("diloco_tokens_per_second", "Merged tokens per second over the last merges.", lambda s: s.tokens_per_s),
    _of_run("diloco_commit", "Number of the newest commit.", lambda s: s.commit),
    _of_run("diloco_step", "The syncer's global step.", lambda s: s.step),
    _of_run("diloco_loss", "Held-out loss of the outer parameters, nats per token.", lambda s: s.loss),
    _of_run("diloco_goodput_ratio", "Merged tokens by those of the undisturbed plan.", lambda s: s.goodput),
    _of_run("diloco_participation_ratio", "Mean share of the islands in a merge.", lambda s: s.participation),
    _of_run("diloco_eta_seconds", "Until the target, while merges go on.", lambda s: s.eta_s),
    _of_merge("diloco_merge_age_seconds", "Since the last merge.", lambda merge: merge.age_s),
    _of_merge("diloco_merge_participants", "Participants of the last merge.", lambda merge: merge.participants),
    _of_merge("diloco_merge_alive", "Islands alive at the last merge.", lambda merge: merge.alive),
    _of_merge("diloco_merge_grace_used_seconds", "Waited beyond the quorum.", lambda merge: merge.grace_used_s),
    _of_syncer("diloco_syncer_epoch", "How many syncers have served.", lambda syncer: syncer.epoch),
    _of_syncer("diloco_syncer_heard_seconds", "Since the syncer's heartbeat.", lambda syncer: syncer.heard_s),
    Metric("diloco_store_bytes", "counter", "Moved by all units since the launch.", _store_bytes),
    Metric("diloco_store_requests", "counter", "Requests of all units since the launch.", _store_requests),
    _of_learners("diloco_learner_tokens_merged", "Merged tokens of a learner.", lambda one: one.tokens, "counter"),
    _of_learners("diloco_learner_tokens_per_second", "A learner's own pace.", lambda one: one.tokens_per_s),
    _of_learners("diloco_learner_heard_seconds", "Since a learner's heartbeat.", lambda one: one.heard_s),
    _of_learners("diloco_learner_in_last_merges", "Of the last ten merges, with it.", lambda one: one.in_last_10),
    _of_learners("diloco_learner_behind", "Versions that a learner has not adopted yet.", lambda one: one.behind),
    _of_learners("diloco_learner_loss", "Training loss of a learner, nats per token.", lambda one: one.loss),
    _of_learners(
        "diloco_learner_data_percent", "Of a learner's steps, spent waiting for data.", lambda one: one.data_percent
    ),
    Metric("diloco_learner_bytes", "counter", "Over a learner's link since the launch.", _learner_bytes),
    Metric("diloco_region_behind_commits", "gauge", "How far a region's bucket is behind.", _behind),
)
