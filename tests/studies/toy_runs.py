"""Runs small enough that a process of theirs starts in a third of a second: three equal islands, four fragments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OuterSettings,
    RetentionSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.randomness import nonce

ROOT = Path(__file__).resolve().parents[2]
LEARNERS = ("l0", "l1", "l2")
FRAGMENTS = 4
LOCAL_STEPS = 8
BATCH_TOKENS = 16
ROUND_TOKENS = len(LEARNERS) * LOCAL_STEPS * BATCH_TOKENS
NEVER = 1 << 20
SYNC = SyncSettings(every=LOCAL_STEPS, fragments=FRAGMENTS, quorum=2, skip_after_s=2.0)


def spawned(log: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """`python -m WORDS`, whose words go to this log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=out, stderr=out, env=environment)


def integer_run(rounds: int, step_s: float, retention: RetentionSettings) -> RunFormat:
    """Everything without torch: a fragment is one integer (histories/integers.py)."""
    settings = RunSettings(
        name="toy",
        train=TrainSettings(tokens=rounds * ROUND_TOKENS, batch_tokens=BATCH_TOKENS),
        sync=SYNC,
        retention=retention,
        evaluation=EvaluationSettings(every=NEVER),
    )
    return _run(settings, elements=1, step_s=step_s)


def float_run(rounds: int, step_s: float, elements: int, learners: Sequence[str] = LEARNERS) -> RunFormat:
    """Toy learners under the product's own syncer: a fragment is `elements` equal float32 numbers."""
    settings = RunSettings(
        name="toy",
        model=ModelSettings(entrypoint="tests.studies.toy_task:model", args={"elements": elements}),
        data=DataSettings(entrypoint="tests.studies.toy_task:data"),
        train=TrainSettings(tokens=rounds * len(learners) * LOCAL_STEPS * BATCH_TOKENS, batch_tokens=BATCH_TOKENS),
        sync=replace(SYNC, codec="fp32", weights_codec="fp32", skip_after_s=20.0),
        outer=OuterSettings(),
        retention=RetentionSettings(rounds="all"),
        evaluation=EvaluationSettings(every=NEVER, sequences=1),
    )
    return _run(settings, elements, step_s, learners)


def _run(settings: RunSettings, elements: int, step_s: float, learners: Sequence[str] = LEARNERS) -> RunFormat:
    facts = [ParameterFact(f"w{index}", (elements,), False) for index in range(FRAGMENTS)]
    layout = balanced_layout(facts, FRAGMENTS)
    tokens_per_s = BATCH_TOKENS / step_s
    islands = tuple(Island(name, "here", BATCH_TOKENS, LOCAL_STEPS, tokens_per_s, step_s) for name in learners)
    return RunFormat(nonce(), settings.name, "2026-01-01T00:00:00.000Z", settings, islands, layout, "test")
