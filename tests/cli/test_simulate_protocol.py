"""`diloco simulate protocol` from outside: its object, its exit status, its words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.cli import main
from diloco_cli.simulate.histories import campaign
from diloco_cli.simulate.histories.shrinking import Violation

FIELDS = {
    "seed", "histories", "commits", "crashes", "store_operations", "violations", "wall_s", "histories_per_s",
}  # fmt: skip
DILOCO = [sys.executable, "-m", "diloco_cli"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DILOCO, *words], capture_output=True, text=True, check=False, timeout=120)


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["diloco", "simulate", "protocol", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def found(*arguments: Any, **options: Any) -> campaign.Totals:
    story = ("seed 7: 2 learners", "1 faults are enough:", "  l0.1, operation 3: dies", "invariant 2: merged twice")
    violation = Violation(7, "2", story, "diloco simulate protocol --seed 7 --histories 1")
    return campaign.Totals(3, 40, 5, 900, [violation])


def test_its_object_has_the_published_fields() -> None:
    done = run("simulate", "protocol", "--seed", "3", "--histories", "2", "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["command"] == "simulate protocol" and body["ok"] is True and set(body["data"]) == FIELDS
    data = body["data"]
    assert (data["seed"], data["histories"], data["violations"]) == (3, 2, [])
    assert data["commits"] >= 20 and data["store_operations"] > 200 and data["histories_per_s"] > 0


def test_several_processes_count_the_same() -> None:
    words = ("simulate", "protocol", "--histories", "12", "--json")
    alone, shared = (json.loads(run(*words, *more).stdout)["data"] for more in ((), ("--jobs", "2")))
    for data in (alone, shared):
        del data["wall_s"], data["histories_per_s"]
    assert alone == shared


def test_a_violation_ends_with_status_11_and_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "campaign", found)
    assert called(monkeypatch, "--histories", "3") == 11
    out, err = capsys.readouterr()
    assert out.index("seed 7") < out.index("merged twice") < out.index("repeat it: diloco simulate protocol --seed 7")
    assert "3 histories from seed 0: 40 commits, 5 crashes, 900 store operations, 1 violations" in out
    assert "error: 1 violations in 3 histories" in err and "hint: diloco simulate protocol --seed 7" in err


def test_a_violation_is_in_the_object_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(campaign, "campaign", found)
    assert called(monkeypatch, "--json") == 11
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is False and body["error"]["code"] == "data_check"
    (violation,) = body["data"]["violations"]
    assert set(violation) == {"seed", "invariant", "story", "command"} and violation["invariant"] == "2"


def test_an_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    words = [*DILOCO, "simulate", "protocol", "--histories", "100000", "--jobs", "2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=os.environ)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err, err.decode()


def test_it_needs_neither_torch_nor_a_cloud_client() -> None:
    code = (
        "import sys; sys.argv = ['diloco', 'simulate', 'protocol', '--histories', '1']\n"
        "from diloco_cli.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'gcsfs', 'fsspec', 'aiohttp', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
