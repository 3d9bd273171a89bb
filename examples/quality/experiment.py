"""What is compared: methods, tasks, equal tokens. Every number that was tuned stands here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
    RetentionSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.methods import fitting_outer

Method = Literal[
    "data-parallel", "diloco", "streaming", "decoupled", "failures",
    "decoupled, outer auto", "data-parallel, muon", "decoupled, muon, outer auto",
]  # fmt: skip
METHODS: tuple[Method, ...] = get_args(Method)
CUSTOMARY = METHODS[:5]
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
    methods: tuple[Method, ...] = CUSTOMARY
    long: bool = False


ROUND = 24 * 4 * 256  # tokens of a round of four learners: every budget is whole rounds for everybody
TASKS: dict[str, Task] = {
    "dense": Task("dense", "dense", "text", 64, 20 * ROUND, 128, InnerSettings(lr=3e-3, warmup_steps=40)),
    "moe": Task("moe", "moe", "text", 64, 10 * ROUND, 128, InnerSettings(lr=3e-3, warmup_steps=40)),
    "dense-20": Task(
        "dense-20",
        "dense",
        "text",
        64,
        100 * ROUND,
        256,
        InnerSettings(lr=4e-3, warmup_steps=150),
        ("data-parallel", "decoupled", *METHODS[5:]),
        long=True,
    ),
    "vision": Task("vision", "vision", "digits", 16, 20 * ROUND, 256, InnerSettings(lr=1e-3, warmup_steps=40)),
}
PARALLEL_LR: dict[tuple[str, int], float] = {}  # where data-parallel training prefers another inner learning rate
SYNC = SyncSettings(every=24, fragments=12, overlap=2, quorum=1)
OUTER = OuterSettings(lr=0.7, momentum=0.5)  # of short runs; long ones have the product's default


def trial(task: Task, method: Method, learners: int, seed: int, tokens: int | None = None) -> Trial:
    """One method on one task. All of them read the same shards in the same order from the same first parameters."""
    lr = PARALLEL_LR.get((task.name, learners)) if method == "data-parallel" else None
    inner = replace(task.inner, lr=lr or task.inner.lr, name="muon" if "muon" in method else "adamw")
    train = TrainSettings(tokens or task.tokens, task.batch_tokens, seed, inner=inner)
    settings = RunSettings(
        name=f"{task.name}-{method}",
        model=ModelSettings(entrypoint=f"models:{task.model}"),
        data=DataSettings(entrypoint=f"models:{task.data}", args={"seed": seed}),
        train=train,
        sync=sync_of(method, learners),
        outer=outer_of(task, method, train, learners),
        retention=RetentionSettings(rounds="all" if task.long else 64),
    )
    kind: Literal["data_parallel", "fleet"] = "data_parallel" if method.startswith("data-parallel") else "fleet"
    return Trial(kind, settings, pacings_of(method, learners, seed, train), task.sequence, SEQUENCES)


def outer_of(task: Task, method: Method, train: TrainSettings, learners: int) -> OuterSettings:
    if "outer auto" in method:
        rounds = train.tokens / (train.batch_tokens * learners * SYNC.every)
        lr, momentum = fitting_outer(train.inner.name, rounds)
        return OuterSettings(lr=lr, momentum=momentum)
    return OuterSettings() if task.long or method.startswith("data-parallel") else OUTER


def sync_of(method: Method, learners: int) -> SyncSettings:
    match method:
        case "data-parallel" | "data-parallel, muon":
            return SYNC  # it has no rounds
        case "diloco":
            return synchronous(SYNC, learners)
        case "streaming":
            return streaming(SYNC, learners)
    return decoupled(replace(SYNC, mixing="rebase"))


def pacings_of(method: Method, learners: int, seed: int, train: TrainSettings) -> tuple[Pacing, ...]:
    match method:
        case "decoupled" | "decoupled, outer auto" | "decoupled, muon, outer auto":
            return nearly_equal(learners)
        case "failures":
            return failing(learners, CHIPS, seed, train.tokens // train.batch_tokens // learners)
    return lockstep(learners)


def named(task: Task, method: Method, learners: int, seed: int, tokens: int | None = None) -> Named:
    labels = {"task": task.name, "learners": learners, "method": method, "seed": seed, "tokens": tokens or task.tokens}
    return Named(labels, trial(task, method, learners, seed, tokens))


def quick(task: Task) -> Task:
    return replace(task, tokens=QUICK_TOKENS)
