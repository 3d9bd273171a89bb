"""CONTRIBUTING's recipes for a field of status and for a kind of event, carried out on a copy of the product: a record
in one file, and every output knows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from diloco_cli.environment import environment_with
from tests.forked import ROOT

FIELD = """
    mean_tokens_per_s: float = of_learner(
        lambda it: it.heartbeat.mean_tokens_per_s,
        "Its pace since it began.",
        UnitColumn("MEAN", lambda row: f"{row.mean_tokens_per_s:.0f}"),
        gauge="diloco_learner_mean_tokens_per_second",
    )
"""
FIELD_USED = """
from dataclasses import asdict

from diloco_cli.cli.config import schema
from diloco_cli.metrics.prometheus import metrics_text
from diloco_cli.observe.screen import status_text
from diloco_cli.observe.status import status_of
from tests.unit.observe.test_status import facts

status = status_of(facts(mean_tokens_per_s=77.0))
assert asdict(status)["learners"][0]["mean_tokens_per_s"] == 77.0
described = schema("status")["$defs"]["LearnerStatus"]
assert described["properties"]["mean_tokens_per_s"]["description"] == "Its pace since it began."
assert "mean_tokens_per_s" in described["required"]
lines = status_text(status).splitlines()
table = [line.split() for line in lines[[line.startswith("LEARNER") for line in lines].index(True) :]]
assert (table[0][-1], table[1][-1]) == ("MEAN", "77"), table
sample = 'diloco_learner_mean_tokens_per_second{learner="iowa",region="us",run="nano"} 77.0'
assert sample in metrics_text(status).decode(), metrics_text(status)
"""
EVENT = '    EventKind("renamed", "a unit has another name now", "unit", fault=True),\n'
EVENT_USED = """
from dataclasses import replace

from diloco_cli.events.event import FreshEvent, decode_batch, encode_batch
from diloco_cli.observe.status import status_of
from diloco_cli.report.page import FAULTS
from tests.pages.test_words import WORDS
from tests.unit.observe.test_status import facts

(event,) = decode_batch(encode_batch([FreshEvent(0.0, "renamed", "iowa is idaho now")], 0.0), "iowa", 2e9)
assert status_of(replace(facts(), written=[event])).recent[0] == event
assert "renamed" in FAULTS and WORDS["event"]["renamed"] == "a unit has another name now"
"""


RECIPES = (
    ("diloco_cli/observe/status.py", "\n\n@dataclass(frozen=True)\nclass SyncerStatus:", FIELD),
    ("diloco_cli/events/event.py", ")\nKINDS = ", EVENT),
)


def test_a_field_of_status_or_a_kind_of_event_is_a_record_and_every_output_and_document_has_it(tmp_path: Path) -> None:
    for folder in ("diloco_cli", "tests", "templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file, before, added in RECIPES:
        path = tmp_path / file
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, added + before), encoding="utf-8")
    words = [sys.executable, "-c", FIELD_USED + EVENT_USED]
    environment = environment_with(PYTHONPATH=str(tmp_path))
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
