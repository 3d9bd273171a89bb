"""What is compared: methods, tasks, equal tokens. Every number that was tuned stands here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ledger import Named
from methods import two_bits
from methods.pacing import Pacing
from methods.schedules import failing, lockstep, nearly_equal, synchronous
from methods.trial import Trial
from models import SEQUENCE

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

Optimizer = Literal["adamw", "muon"]
Method = Literal[
    "data-parallel", "decoupled", "failures", "diloco", "default outer", "slow outer", "plain mean", "int4", "int2"
]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
METHODS: tuple[Method, ...] = get_args(Method)
STANDARD = METHODS[:3]  # the others are asked for by name
CODED = ("int4", two_bits.register())  # deltas alone, with error feedback
CHIPS = 1_200_000
SEQUENCES = 512  # of the held-out data, for a trial's last loss
PARAMETERS = 122_880  # of the dense model, rounded: every budget is whole rounds of two, four and eight learners
SYNC = SyncSettings(every=24, fragments=12, overlap=2, quorum=1, mixing="rebase")
PARALLEL_RATE = 6e-3  # of the inner optimizer, either one; this and what follows is the best of those that were tried
RATES: dict[Optimizer, float] = {"adamw": 3e-3, "muon": 1.5e-3}  # of islands
FACTORS: dict[tuple[Optimizer, int], float] = {("muon", 8): 2.0}  # of both, by the number of learners
SLOW_OUTER, ITS_FACTOR = OuterSettings(lr=0.4, momentum=0.8), 2.0  # of the inner rates, to go as far in a round
TRIED_RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)
TUNING_SEED, TUNING_LEARNERS = 100, 4  # the seed is in no other table


@dataclass(frozen=True)
class Task:
    """`tokens`: processed by all learners together. `batch_tokens`: of one inner step of one learner. `learners`: how
    many there are by default. `outer`: auto. `model`: a function of models.py."""

    name: str
    tokens: int
    batch_tokens: int
    learners: tuple[int, ...] = (2, 4, 8)
    warmup_steps: int = 150
    outer: OuterSettings | None = None
    model: str = "dense"


TASKS: dict[str, Task] = {
    "dense-20": Task("dense-20", 20 * PARAMETERS, 128),
    "dense-80": Task("dense-80", 80 * PARAMETERS, 256, learners=(8,)),
    "moe-20": Task("moe-20", 20 * PARAMETERS, 128, learners=(4,), model="moe"),
    "quick": Task("quick", PARAMETERS, 128, learners=(2,), warmup_steps=40),
}


def named(task: str, optimizer: Optimizer, method: Method, learners: int, seed: int, lr: float | None = None) -> Named:
    """`lr`: the inner learning rate, where it is not the tuned one."""
    labels = {"task": task, "learners": learners, "optimizer": optimizer, "method": method, "seed": seed}
    rate = {} if lr is None else {"lr": lr}
    return Named({**labels, **rate}, trial(TASKS[task], optimizer, method, learners, seed, lr))


def tuning(task: str) -> list[Named]:
    """Each inner learning rate that was tried, with both methods."""
    methods: tuple[Method, ...] = ("data-parallel", "decoupled")
    return [
        named(task, optimizer, method, TUNING_LEARNERS, TUNING_SEED, lr)
        for optimizer in OPTIMIZERS
        for method in methods
        for lr in TRIED_RATES
    ]


def trial(task: Task, optimizer: Optimizer, method: Method, learners: int, seed: int, lr: float | None = None) -> Trial:
    """One method on one task. All of them read the same shards in the same order from the same first parameters."""
    tuned = PARALLEL_RATE if method == "data-parallel" else RATES[optimizer]
    factor = ITS_FACTOR if method == "slow outer" else 1.0
    rate = lr or tuned * FACTORS.get((optimizer, learners), 1.0) * factor
    inner = InnerSettings(optimizer, lr=rate, warmup_steps=task.warmup_steps)
    train = TrainSettings(task.tokens, task.batch_tokens, seed=seed, inner=inner)
    settings = RunSettings(
        name=task.name,
        model=ModelSettings(entrypoint=f"models:{task.model}"),
        data=DataSettings(entrypoint="models:text", args={"seed": seed}),
        train=train,
        sync=sync_of(method, learners),
        outer=outer_of(task, method, train, learners),
        retention=RetentionSettings(rounds="all"),  # a learner that is down for long is still told what it missed
    )
    kind: Literal["data_parallel", "fleet"] = "data_parallel" if method == "data-parallel" else "fleet"
    return Trial(kind, settings, pacings_of(method, learners, seed, train), SEQUENCE, SEQUENCES)


def outer_of(task: Task, method: Method, train: TrainSettings, learners: int) -> OuterSettings:
    """As `outer: auto` resolves it, but where the task or the method has its own. Data-parallel training has none."""
    if method in ("data-parallel", "default outer"):
        return OuterSettings()
    if method == "slow outer":
        return SLOW_OUTER
    lr, momentum = fitting_outer(train.inner.name, train.tokens / (train.batch_tokens * learners * SYNC.every))
    return task.outer or OuterSettings(lr=lr, momentum=momentum)


def sync_of(method: Method, learners: int) -> SyncSettings:
    if method == "plain mean":
        return replace(SYNC, merge="avg")
    if method in CODED:
        return replace(SYNC, codec=method, error_feedback=True)
    return synchronous(SYNC, learners) if method == "diloco" else SYNC


def pacings_of(method: Method, learners: int, seed: int, train: TrainSettings) -> tuple[Pacing, ...]:
    if method in ("data-parallel", "diloco"):
        return lockstep(learners)
    if method == "failures":
        return failing(learners, CHIPS, seed, train.tokens // train.batch_tokens // learners)
    return nearly_equal(learners)
