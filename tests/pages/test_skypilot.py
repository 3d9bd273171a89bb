"""The SkyPilot job of examples/several-machines: diloco takes its command, SkyPilot's own parser the whole of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import ROOT
from tests.pages.test_commands import parse

SKY = shutil.which("sky")  # an environment of its own has it: 460 MB
PAGE = ROOT / "examples" / "several-machines" / "README.md"
READ = """\
import json, sys, sky
task = sky.Task.from_yaml_config(json.load(sys.stdin))
found = list(task.resources)[0]
json.dump([task.name, task.num_nodes, found.accelerators, found.use_spot, found.job_recovery], sys.stdout)
"""


def the_job() -> dict[str, Any]:
    texts = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (found,) = (job for text in texts if "resources" in (job := yaml.safe_load(text)))
    return dict(found)


def test_its_command_is_one_of_diloco() -> None:
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    script = 'diloco() { printf "%s\\n" "$@"; }\n' + re.sub("^exec ", "", the_job()["run"])
    words = subprocess.check_output(("bash", "-c", script), env={**os.environ, **given}, text=True).splitlines()
    assert words[-4:] == ["--node-rank", "1", "--rendezvous", "10.0.0.7:29500"]
    parse(words)


@pytest.mark.skipif(SKY is None, reason="no SkyPilot here: pip install skypilot in a venv of its own, its bin in PATH")
def test_skypilots_own_parser_takes_it_and_means_the_same(tmp_path: Path) -> None:
    def read(job: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        words = (Path(str(SKY)).with_name("python"), "-c", READ)
        home = {**os.environ, "HOME": str(tmp_path)}
        return subprocess.run(words, input=json.dumps(job), env=home, capture_output=True, text=True, check=False)

    job = the_job()
    done = read(job)
    assert done.returncode == 0, done.stderr
    name, nodes, accelerators, spot, recovery = json.loads(done.stdout)
    assert (name, nodes, accelerators, spot) == ("nano-iowa", 2, {"H100": 8}, True)
    assert recovery["max_restarts_on_errors"] == job["resources"]["job_recovery"]["max_restarts_on_errors"] == 10
    assert "num_nodes" in read({**job, "num_node": 2}).stderr, "what it does not know it refuses"
