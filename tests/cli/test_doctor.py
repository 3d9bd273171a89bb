"""`diloco doctor` as people and scripts meet it, and what launch and status do on a store that fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.cli.launch import launch
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import StoreError
from tests.cli.conftest import Diloco, edit
from tests.contract.fake_gcs import FakeGCS

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
PROMISED = {
    "write", "read_back", "exclusive_create", "own_write", "list_after_write", "delete", "range_read",
    "clock",
    "throughput",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[FakeGCS]:
    with FakeGCS("bucket") as running:
        yield running


def test_a_directory_is_proved_and_left_as_it_was(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "theirs").write_bytes(b"x")
    done = diloco("doctor", "store", "--json")
    body = json.loads(done.stdout)
    data = body["data"]
    assert (done.returncode, body["ok"], data["ok"], body["error"]) == (0, True, True, None), done.stdout
    assert {check["name"] for check in data["checks"]} >= PROMISED
    assert all(set(check) >= {"name", "ok", "detail", "hint"} for check in data["checks"])
    assert data["up_mbps"] > 0 and data["down_mbps"] > 0 and data["latency_ms"] > 0
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["theirs"]


def test_verdicts_come_one_by_one_and_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "diloco_cli", "doctor", str(tmp_path)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().startswith(f"doctor: {tmp_path.as_uri()}")
    assert child.stdout.readline().split()[:2] == ["PASS", "write"]
    assert len(list(tmp_path.iterdir())) == 1
    child.send_signal(signal.SIGINT)
    _, talk = child.communicate(timeout=20)
    assert (child.returncode, talk) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_ignores_conditions_fails_with_hints_and_exit_6(diloco: Diloco, server: FakeGCS) -> None:
    server.ignores_conditions = True
    server.settings["bucket"] = {"softDeletePolicy": {"retentionDurationSeconds": "604800"}}
    words = ["doctor", "gs://bucket/runs", "--quick", "-f", str(QUICKSTART / "run.yaml")]
    done = diloco(*words, STORAGE_EMULATOR_HOST=server.url)
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line[:4].strip() in ("PASS", "WARN", "FAIL")}
    assert done.returncode == 6, done.stdout + done.stderr
    assert [name for name, line in lines.items() if line.startswith("FAIL")] == ["exclusive_create", "own_write"]
    assert "4 of 4 racers were told" in lines["exclusive_create"]
    assert lines["soft_delete"].startswith("WARN") and "7 d" in lines["soft_delete"]
    assert "a month for this run's" in lines["soft_delete"]
    assert "--clear-soft-delete" in done.stdout
    assert "error: gs://bucket/runs: this store failed exclusive_create, own_write" in done.stderr
    assert "hint: " in done.stderr
    assert server.objects["bucket"] == {}


def test_a_new_run_is_not_launched_where_creates_are_not_exclusive(
    server: FakeGCS, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(quickstart / "inventory.yaml", "url: bucket", "url: gs://bucket/here")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(RunSettings, "is_worth_a_try", lambda *facts: False)
    server.ignores_conditions = True
    with pytest.raises(StoreError, match="lost exclusive creates") as refused:
        launch(
            quickstart / "run.yaml", region=None, syncer=None, detach=False, dry_run=False, overrides=[],
            as_json=False, on_event=None, webhook=None, create_only=False, emit=None, files=None,
        )  # fmt: skip
    assert refused.value.exit_status == 6
    assert refused.value.hint == "diloco doctor gs://bucket/here/quickstart"
    assert server.objects["bucket"] == {}


def test_a_bad_time_or_url_is_a_usage_error_and_a_missing_directory_a_store_error(diloco: Diloco) -> None:
    assert diloco("doctor", ".", "--timeout", "0").returncode == 2
    assert diloco("doctor", "ftp://x").returncode == 2
    missing = diloco("doctor", "nowhere", "--json")
    assert missing.returncode == 6 and json.loads(missing.stdout)["error"]["hint"].startswith("mount the disk")


@pytest.mark.parametrize("answers", ["refused", "silent"])
def test_a_look_at_a_dead_store_ends_when_its_time_is_over(answers: str) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody else gets the port, and who calls it is refused
    port = listener.getsockname()[1]
    if answers == "silent":
        listener.listen()  # accepts connections and never says a word
    code = (
        "import diloco_cli.cli.arguments as r, sys\n"
        "r.LOOK_S = 1.0\n"
        "from diloco_cli.cli.main import main\n"
        "sys.argv = ['diloco', 'status', 'gs://bucket/run']\nmain()"
    )
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
    listener.close()
    assert done.returncode == 6 and "Traceback" not in done.stderr
    assert "no answer within 1 s" in done.stderr or (answers == "refused" and "does not answer" in done.stderr)
