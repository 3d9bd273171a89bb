"""A run in Weights & Biases: one W&B run over several sessions, in steps of commits; W&B's own client and `wandb sync`
against a server of this test."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.metrics.wandb_feed import CommitPoints, Feed, start_wandb
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import LOG
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import RUN, applied, commit, output


class Log:
    """A log in a store, written commit by commit."""

    def __init__(self) -> None:
        self.store, self.state = MemoryStore(), RunState()
        self.add("epoch_start", outputs=tuple(output(f, 0, -1) for f in range(RUN.num_fragments)))

    def add(self, kind: str, **fields: Any) -> None:
        record = commit(self.state, kind, **fields)
        data = RUN.keyring.sign(LOG, commit_key(record.n), encode(record))
        self.store.create(commit_key(record.n), data)
        self.state = fold(RUN, self.state, data)

    def merge(self, seq: int) -> None:
        made = output(self.state.slot % RUN.num_fragments, self.state.n + 1, self.state.slot)
        offer = applied(seq=seq, base=seq, data_start=8 * seq, data_end=8 * seq + 8)
        self.add("merge", slot=self.state.slot, inputs=(offer,), outputs=(made,), alive=2)


class Steps:
    """Implements wandb_feed.Tracker."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((step, data))


def feed(log: Log, first: int = 0) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """What one session sends, and whether the run is over."""
    tracker = Steps()
    over = Feed(tracker, CommitPoints(RUN, log.store), first).send()
    return tracker.logged, over


def test_each_commit_with_figures_is_a_step_and_a_session_goes_on_where_wandb_stands() -> None:
    log = Log()
    log.merge(0)
    log.add("eval", evaluated=1, loss=3.5, tokens=4)
    first, over = feed(log)
    assert [step for step, _ in first] == [1, 2] and not over
    assert first[0][1] == {"tokens": 4, "participants": 1, "alive": 2, "grace_used_s": 0.0}
    assert first[1][1] == {"tokens": 4, "loss": 3.5}
    log.merge(1)
    log.add("finish")
    second, over = feed(log, 3)
    assert [step for step, _ in second] == [3] and over
    assert feed(log, 4) == ([], True)


class WandbStub(BaseHTTPRequestHandler):
    """As much of W&B as `wandb sync` asks for; keeps the runs that are made, and the steps that come, by run."""

    upserted: set[str]
    steps: dict[str, list[int]]

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            return self._answer({"data": self._data(asked["query"], asked.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            rows = self.steps.setdefault(self.path.split("/")[-2], [])
            rows += [json.loads(line)["_step"] for line in history]
        return self._answer({})

    do_PUT = do_POST

    def _data(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            self.upserted.add(variables["name"])
            project = {"id": "p", "name": "diloco", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": variables["name"], "displayName": "toy", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {"model": {"bucket": None}} if "model(" in query else {}

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _answer(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def wandb_server() -> Iterator[str]:
    WandbStub.upserted, WandbStub.steps = set(), {}
    with ThreadingHTTPServer(("127.0.0.1", 0), WandbStub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_two_sessions_offline_are_one_run_once_they_are_synced(wandb_server: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log = Log()
    for session in range(2):
        log.merge(session)
        started = start_wandb(RUN, "diloco", None, True, tmp_path)
        Feed(started, CommitPoints(RUN, log.store), 0).send()
        started.finish()
    folders = sorted(str(path) for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, "one of each session"
    environment = os.environ | {"WANDB_BASE_URL": wandb_server, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "0"}
    words = [sys.executable, "-m", "wandb", "sync", *folders]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert WandbStub.upserted == {RUN.run_id}, done.stdout + done.stderr
    assert set(WandbStub.steps[RUN.run_id]) == {1, 2}, "each session writes all that there is"
