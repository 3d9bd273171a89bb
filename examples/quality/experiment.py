"""What is compared: five methods, three tasks, equal tokens. Every number that was tuned stands here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ledger import Named
from methods.pacing import Pacing
from methods.schedules import decoupled, failing, lockstep, nearly_equal, streaming, synchronous
from methods.trial import Trial

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)

Method = Literal["data-parallel", "diloco", "streaming", "decoupled", "failures"]
METHODS: tuple[Method, ...] = ("data-parallel", "diloco", "streaming", "decoupled", "failures")
CHIPS = 1_200_000
SEQUENCES = 512  # of the held-out data, for a trial's last loss
QUICK_TOKENS = 491_520


@dataclass(frozen=True)
class Task:
    """`tokens`: processed by all learners together. `batch_tokens`: of one inner step of one learner."""

    name: str
    model: str
    data: str
    sequence: int
    tokens: int
    batch_tokens: int
    inner: InnerSettings


ROUND = 24 * 4 * 256  # tokens of a round of four learners: every budget is whole rounds for everybody
TASKS: dict[str, Task] = {
    "dense": Task("dense", "dense", "text", 64, 20 * ROUND, 128, InnerSettings(lr=3e-3, warmup_steps=40)),
    "moe": Task("moe", "moe", "text", 64, 10 * ROUND, 128, InnerSettings(lr=3e-3, warmup_steps=40)),
    "vision": Task("vision", "vision", "digits", 16, 20 * ROUND, 256, InnerSettings(lr=1e-3, warmup_steps=40)),
}
PARALLEL_LR: dict[tuple[str, int], float] = {}  # where data-parallel training prefers another inner learning rate
SYNC = SyncSettings(every=24, fragments=12, overlap=2, quorum=1)
OUTER: dict[Method, OuterSettings] = {
    "diloco": OuterSettings(lr=0.7, momentum=0.5),
    "streaming": OuterSettings(lr=0.7, momentum=0.5),
    "decoupled": OuterSettings(lr=0.7, momentum=0.5),
    "failures": OuterSettings(lr=0.7, momentum=0.5),
}


def trial(task: Task, method: Method, learners: int, seed: int, tokens: int | None = None) -> Trial:
    """One method on one task. All of them read the same shards in the same order from the same first parameters."""
    lr = PARALLEL_LR.get((task.name, learners)) if method == "data-parallel" else None
    inner = task.inner if lr is None else replace(task.inner, lr=lr)
    train = TrainSettings(tokens or task.tokens, task.batch_tokens, seed, inner=inner)
    settings = RunSettings(
        name=f"{task.name}-{method}",
        model=ModelSettings(entrypoint=f"models:{task.model}"),
        data=DataSettings(entrypoint=f"models:{task.data}", args={"seed": seed}),
        train=train,
        sync=sync_of(method, learners),
        outer=OUTER.get(method, OuterSettings()),
    )
    kind: Literal["data_parallel", "fleet"] = "data_parallel" if method == "data-parallel" else "fleet"
    return Trial(kind, settings, pacings_of(method, learners, seed, train), task.sequence, SEQUENCES)


def sync_of(method: Method, learners: int) -> SyncSettings:
    match method:
        case "data-parallel":
            return SYNC  # it has no rounds
        case "diloco":
            return synchronous(SYNC, learners)
        case "streaming":
            return streaming(SYNC, learners)
    return decoupled(replace(SYNC, mixing="rebase"))


def pacings_of(method: Method, learners: int, seed: int, train: TrainSettings) -> tuple[Pacing, ...]:
    match method:
        case "decoupled":
            return nearly_equal(learners)
        case "failures":
            return failing(learners, CHIPS, seed, train.tokens // train.batch_tokens // learners)
    return lockstep(learners)


def named(task: Task, method: Method, learners: int, seed: int, tokens: int | None = None) -> Named:
    labels = {"task": task.name, "learners": learners, "method": method, "seed": seed, "tokens": tokens or task.tokens}
    return Named(labels, trial(task, method, learners, seed, tokens))


def quick(task: Task) -> Task:
    return replace(task, tokens=QUICK_TOKENS)
