"""Islands, one of them hostile, in virtual time: the product's learners, syncer and arithmetic on a tiny model.

`contest` plays one run to a number of honest tokens, and gives the held-out loss after each merge.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from statistics import mean

import torch

from diloco_cli.clock import utc_now_text
from diloco_cli.config.settings import (
    DataSettings,
    EvaluationSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RetentionSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.launch.new_run import layout_of
from diloco_cli.protocol.log.commits import Commit, Merge, Quarantine, Rollback
from diloco_cli.protocol.log.records import FragmentVersion, Island, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.syncer.evaluation import evaluation_request
from tests.numerics.test_divergence import AtOnce
from tests.numerics.virtual import VirtualFleet
from tests.security.hostile import HOSTILE, Hostile, Strategy, honest_of

THREE = (2, 1)  # honest and hostile islands
TASK = "tests.security.tiny_text"
BATCH_TOKENS, LOCAL_STEPS, FRAGMENTS, STEP_S = 256, 8, 4, 0.5
SLOT_S = LOCAL_STEPS * STEP_S / FRAGMENTS
STEP_OF = {"l0": 0.98 * STEP_S}  # somebody is the first
ROUNDS = 16
SEQUENCES = 128  # held out
LAST = FRAGMENTS  # merges whose losses the final one is the mean of
NEVER = 1 << 30


def contest_run(seed: int = 0, islands: tuple[int, int] = THREE) -> RunFormat:
    """Settings that users get, with two exceptions. The learning rate is constant: a schedule would go on with hostile
    tokens too. The outer optimizer is calm: with the default one a merge of so short a run raises the loss by 9 % all
    by itself; with this one by 0.1 %."""
    settings = RunSettings(
        name="contest",
        model=ModelSettings(entrypoint=f"{TASK}:model"),
        data=DataSettings(
            entrypoint=f"{TASK}:text", args={"seed": seed}, shards=sum(islands)
        ),
        train=TrainSettings(
            tokens=NEVER, batch_tokens=BATCH_TOKENS, seed=seed,
            inner=InnerSettings(lr=3e-3, warmup_steps=8, schedule="constant", save_every=NEVER),
        ),
        outer=OuterSettings(lr=0.5, momentum=0.5),
        sync=SyncSettings(every=LOCAL_STEPS, fragments=FRAGMENTS),
        retention=RetentionSettings(rounds="all"),
        evaluation=EvaluationSettings(every=1, sequences=SEQUENCES),
    )  # fmt: skip
    names = [f"l{number}" for number in range(islands[0])] + [f"x{number}" for number in range(islands[1])]
    speed = BATCH_TOKENS / STEP_S
    equal = tuple(Island(name, "here", BATCH_TOKENS, LOCAL_STEPS, speed, STEP_S) for name in names)
    return RunFormat("contest", "contest", utc_now_text(), settings, equal, layout_of(settings), "test")


class HeldOutJudge(AtOnce):
    """An evaluation takes no time."""

    def loss(self, outputs: tuple[FragmentVersion, ...]) -> float:
        loss = self.examiner.loss_of(evaluation_request(0, outputs, False))
        assert loss is not None
        return loss


@dataclass
class Score:
    """Of one run. `losses`: held-out, after each merge; `rises`: of each merge against the parameters before it, as a
    share. `tokens`: those that count at the end; `steps`: of an honest offer that was merged, the mean. `applied`: bad
    offers and others of the hostile learner that were merged; `blamed`: who was quarantined."""

    losses: list[float] = field(default_factory=list)
    rises: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: float = 0.0
    applied: int = 0
    blamed: tuple[str, ...] = ()
    rollbacks: int = 0
    reached: bool = True
    phase: str = ""

    @property
    def worst_rise(self) -> float:
        return max(self.rises, default=0.0)

    @property
    def final(self) -> float:
        return mean(self.losses[-LAST:])


class Contest(VirtualFleet):
    """`strategy` None: hostile islands, if there are any, stay away."""

    def __init__(self, run: RunFormat, strategy: Strategy | None) -> None:
        self.commits: list[tuple[Commit, RunState]] = []
        self.judge: HeldOutJudge | None = None
        self.begins = 0 if strategy is None else strategy.begins
        hostile = [island.name for island in run.islands if island.name not in honest_of(run)]
        super().__init__(run, lambda name, number: STEP_OF.get(name, STEP_S), evaluator=self._judge, absent=hostile)
        for number, name in enumerate(hostile if strategy is not None else ()):
            self.world.start(name, Hostile(run, name, strategy, SLOT_S, number).steps())

    def _judge(self, run: RunFormat, store: Store) -> HeldOutJudge:
        self.judge = self.judge or HeldOutJudge(run, store)
        return self.judge

    def committed(self, state: RunState, commit: Commit) -> None:
        super().committed(state, commit)
        self.commits.append((commit, state))

    def play(self, rounds: int = ROUNDS) -> Score:
        reached = self.world.run(
            lambda: honest_tokens(self.run, self.state) >= target_tokens(self.run, rounds),
            4.0 * rounds * FRAGMENTS * SLOT_S,
        )
        assert self.judge is not None
        score = judged(self.judge, self.commits, self.begins)
        score.reached, score.tokens = reached, self.state.tokens(self.run.layout)
        inputs = [item for commit, _ in self.commits for item in commit.inputs]
        score.steps = mean(item.steps for item in inputs if item.learner in honest_of(self.run))
        return score


def target_tokens(run: RunFormat, rounds: int) -> int:
    return rounds * LOCAL_STEPS * BATCH_TOKENS * len(honest_of(run))


def honest_tokens(run: RunFormat, state: RunState) -> float:
    """Tokens of honest learners in the parameters."""
    parameters = sum(fragment.num_parameters for fragment in run.layout.fragments)
    return sum(state.learner(name).token_parameters for name in honest_of(run)) / parameters


def judged(judge: HeldOutJudge, log: list[tuple[Commit, RunState]], begins: int = 0) -> Score:
    """Rises count from the slot on in which the attack `begins`: before it they are the young model's own."""
    score, before = Score(), None
    for commit, state in log:
        if isinstance(commit, Merge):
            loss = judge.loss(state.outputs)
            score.losses.append(loss)
            score.rises.append(0.0 if before is None or commit.slot < begins else loss / before - 1.0)
            score.applied += sum(item.learner.startswith(HOSTILE) for item in commit.inputs)
            before = loss
        elif isinstance(commit, Rollback):
            score.rollbacks += 1
            before = judge.loss(state.outputs)
        elif isinstance(commit, Quarantine):
            score.blamed = (*score.blamed, str(commit.learner))
    score.phase = str(log[-1][1].phase) if log else ""
    return score


@cache
def contest(seed: int, strategy: Strategy | None, rounds: int = ROUNDS, islands: tuple[int, int] = THREE) -> Score:
    torch.set_num_threads(1)
    run = contest_run(seed, islands)
    if strategy is None:
        run = replace(run, islands=run.islands[: islands[0]])  # the same shards, and nobody to wait for
    return Contest(run, strategy).play(rounds)


def drift(seed: int, strategy: Strategy, rounds: int = ROUNDS, islands: tuple[int, int] = THREE) -> float:
    """By how much the final loss is above that of the run without the hostile learners, as a share."""
    return contest(seed, strategy, rounds, islands).final / contest(seed, None, rounds, islands).final - 1.0
