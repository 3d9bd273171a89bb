"""One thing changed at a time: python examples/ablations/run.py [--jobs 2] [--studies merge ...]. See README.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quality"))  # the same tasks, methods, ledger and statistics

import report  # noqa: E402
from experiment import Task, trial  # noqa: E402
from ledger import Named, complete, finished  # noqa: E402
from methods.pacing import Pacing  # noqa: E402
from methods.schedules import mixed_speeds, nearly_equal  # noqa: E402
from methods.trial import Trial  # noqa: E402

from diloco_cli.config.codec import replace  # noqa: E402
from diloco_cli.config.settings import ColdStartSettings, GraceSettings, OuterSettings  # noqa: E402

TOKENS = 491_520
TASK = Task("dense-4", TOKENS, 128, warmup_steps=40, outer=OuterSettings(lr=0.7, momentum=0.5))  # short runs
SLOW = 1.5  # times as long for a step: every second learner, where hardware is mixed
FAR_S = 1.9  # inner steps, that an upload, and a download, of a distant island takes: its link just carries a slot's

Change = Callable[[Trial], Trial]


@dataclass(frozen=True)
class Variant:
    """A row of a study's table. The first of a study is what the others are compared with."""

    name: str
    learners: int
    change: Change


def sync(**fields: Any) -> Change:
    return lambda t: replace(t, settings=replace(t.settings, sync=replace(t.settings.sync, **fields)))


def outer(lr: float, momentum: float) -> Change:
    return lambda t: replace(t, settings=replace(t.settings, outer=OuterSettings("nesterov", lr, momentum)))


def cold_start(start: ColdStartSettings) -> Change:
    return lambda t: replace(t, settings=replace(t.settings, cold_start=start))


def paced(pacings: tuple[Pacing, ...], **fields: Any) -> Change:
    return lambda t: replace(sync(**fields)(t), pacings=pacings)


def merge_study() -> Iterator[Variant]:
    """The rule by which deltas are merged; embeddings are averaged in any case."""
    for learners in (2, 4):
        yield Variant("avg", learners, sync(merge="avg"))
        yield Variant("rda by row", learners, sync(merge="rda"))


def codec_study() -> Iterator[Variant]:
    """What learners upload."""
    yield Variant("bf16", 2, sync(codec="bf16"))
    yield Variant("fp32", 2, sync(codec="fp32"))
    yield Variant("int8", 2, sync(codec="int8"))
    yield Variant("int4", 2, sync(codec="int4"))
    yield Variant("int4, error feedback", 2, sync(codec="int4", error_feedback=True))


def overlap_study() -> Iterator[Variant]:
    """What becomes of a learner's own progress on adoption, near (0.6 steps on the way) and far (3.8 of 24)."""
    far = tuple(replace(pacing, upload_s=FAR_S, download_s=FAR_S) for pacing in nearly_equal(2))
    for where, pacings, overlap in (("near", nearly_equal(2), 1), ("far", far, "auto")):
        for name, fields in (
            ("replace", {"mixing": "replace"}),
            ("rebase", {"mixing": "rebase"}),
        ):
            yield Variant(f"{where}, {name}", 2, paced(pacings, overlap=overlap, **fields))


def quorum_study() -> Iterator[Variant]:
    """Two learners of full speed and two that take 1.5 times as long; all have processed the same tokens together."""
    mixed = mixed_speeds(4, SLOW)
    for name, fields in (
        ("K = 1, window", {"quorum": 1}),
        ("K = 1, no window", {"quorum": 1, "grace": GraceSettings(0.0)}),
        ("K = M", {"quorum": 4}),
        ("K = 1, window, H by speed", {"quorum": 1, "local_steps": "measured"}),
    ):
        yield Variant(name, 4, paced(mixed, **{"overlap": 2, "local_steps": "planned", **fields}))


def outer_study() -> Iterator[Variant]:
    """Nesterov's learning rate and momentum."""
    for lr, momentum in ((0.7, 0.5), (0.4, 0.5), (1.0, 0.5), (1.0, 0.0), (0.7, 0.7), (0.7, 0.9), (0.3, 0.9)):
        yield Variant(f"lr {lr}, momentum {momentum}", 2, outer(lr, momentum))


def cold_start_study() -> Iterator[Variant]:
    """How the first rounds go, against what one model with all the shards learns."""
    for learners in (4, 8):
        yield Variant("data-parallel", learners, lambda t: replace(t, kind="data_parallel"))
        yield Variant("decoupled", learners, lambda t: t)
        for name, start in (
            ("one alone for 10 rounds", ColdStartSettings(10)),
            ("one alone for 20 rounds", ColdStartSettings(20)),
        ):
            yield Variant(name, learners, cold_start(start))


STUDIES: dict[str, Callable[[], Iterator[Variant]]] = {
    "merge": merge_study,
    "codec": codec_study,
    "overlap": overlap_study,
    "quorum": quorum_study,
    "outer": outer_study,
    "cold-start": cold_start_study,
}


def main(words: list[str]) -> None:
    options = parse(words)
    task = replace(TASK, tokens=options.tokens)
    wanted = [named for study in options.studies for named in trials_of(study, task, options.seeds)]
    if not options.report:
        complete(wanted, options.output / "results.jsonl", options.jobs)
    rows = finished(wanted, options.output / "results.jsonl")
    for study in options.studies:
        print("\n".join([f"### {study}", "", *table([row for row in rows if row["labels"]["study"] == study]), ""]))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--studies", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="run nothing: the tables of what is finished")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="processed by all learners of a trial together")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of results.jsonl")
    options = parser.parse_args(words)
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def trials_of(study: str, task: Task, seeds: int) -> Iterator[Named]:
    for seed in range(seeds):
        for variant in STUDIES[study]():
            labels = {"study": study, "learners": variant.learners, "variant": variant.name, "seed": seed}
            yield Named(labels, variant.change(trial(task, "adamw", "decoupled", variant.learners, seed)))


def table(rows: list[report.Row]) -> list[str]:
    """Differences are to the first variant of the same number of learners, paired by seed."""
    lines = [
        "| variant | M | seeds | held-out loss, mean ± sd | to the first, % | merges | participation |"
        " merged / processed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first: dict[int, list[report.Row]] = {}
    for learners, name in dict.fromkeys((row["labels"]["learners"], row["labels"]["variant"]) for row in rows):
        mine = report.of(rows, learners=learners, variant=name)
        reference = first.setdefault(learners, mine)
        gap = "" if reference is mine else str(report.percent_over(mine, reference))
        merged = mean(row["merged"] / row["processed"] for row in mine)
        taken = mean(row["participation"] for row in mine)
        lines.append(
            f"| {name} | {learners} | {len(mine)} | {report.spread(mine)} | {gap} | {mine[0]['merges']} | {taken:.2f} |"
            f" {merged:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
