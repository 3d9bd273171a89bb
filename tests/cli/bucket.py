"""A run in a bucket of its own, as a launch would have made it, without any process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from diloco_cli.clock import wall_s
from diloco_cli.config.settings import RunSettings
from diloco_cli.launch.new_run import create_run
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import Island, RunFormat, encode
from diloco_cli.store.local import LocalStore

LAYOUT = balanced_layout([ParameterFact("w", (4, 4), False)], 1)
IOWA = Island("iowa", "us", 1024, 40, 100.0, 1.0)
RHINE = replace(IOWA, name="rhine", region="eu")
NANO = RunFormat("id", "nano", "2026-01-01T00:00:00Z", RunSettings("nano"), (IOWA, RHINE), LAYOUT, "0")


def make_bucket(folder: Path, run: RunFormat = NANO) -> str:
    """Creates the run in `folder`; returns its URL."""
    folder.mkdir(parents=True)
    create_run(LocalStore(folder), run, str(folder))
    return f"file://{folder}"


def say(folder: Path, learner: str, age_s: float) -> None:
    """A heartbeat of this learner, `age_s` old by the store's time (negative: in this machine's future)."""
    heartbeat = LearnerHeartbeat("TRAINING", 1, 0, 1, 0, 10.0, 0)
    LocalStore(folder).put(heartbeat_key(learner), encode(heartbeat))
    changed_s = wall_s() - age_s
    os.utime(folder / heartbeat_key(learner), (changed_s, changed_s))
