"""Real processes on a bucket that refuses what they need: they go on trying, and say so within seconds, in `status` and
in their logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from diloco_cli.cli.arguments import open_run
from diloco_cli.cli.status import read_status
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.observe.screen import status_text
from diloco_cli.observe.status import Status
from tests.contract.fake_gcs import Blob, FakeGCS
from tests.forked import ForkedProcess, diloco
from tests.numerics.bucket import begun_run
from tests.waiting import wait_until

URL = "gs://runs/tiny"
SAID_WITHIN_S = 60.0  # a process that starts on a busy machine takes its time; alone it is four


class Forbidding(FakeGCS):
    """Refuses to store whatever has one of these in its name."""

    forbidden: tuple[str, ...] = ()

    def _store(self, bucket: str, name: str, *more: Any, **named: Any) -> web.Response:
        if any(part in name for part in self.forbidden):
            return web.json_response({"error": {"code": 403, "message": "not you"}}, status=403)
        return super()._store(bucket, name, *more, **named)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forbidding]:
    """With a run that has begun and that nobody works on."""
    _, store, _ = begun_run(tmp_path / "bucket", "tests.numerics.tiny:regression")
    with Forbidding("runs") as running:
        for number, key in enumerate(store.list("")):
            running.objects["runs"][f"tiny/{key}"] = Blob(store.get(key) or b"", number)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
        yield running


@pytest.fixture
def start(server: Forbidding) -> Iterator[Callable[..., ForkedProcess]]:
    children: list[ForkedProcess] = []

    def begin(*words: str) -> ForkedProcess:
        children.append(ForkedProcess(diloco, *words))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.wait()


def wait_for(holds: Callable[[Status], object], within_s: float = SAID_WITHIN_S) -> Status:
    opened, deadline_s = open_run(URL), monotonic_s() + within_s
    while True:
        current, _ = read_status(opened)
        if holds(current):
            return current
        assert monotonic_s() < deadline_s, asdict(current)
        sleep_s(0.2)


def learner_of(current: Status) -> Any:
    return current.learners[0]


def test_what_fails_for_a_learner_and_a_syncer_is_told_within_seconds(
    server: Forbidding, start: Callable[..., ForkedProcess]
) -> None:
    first = start("learner", "--run", URL, "--name", "l0", "--allow-code", "tests.numerics.tiny")
    wait_for(lambda status: learner_of(status).state in ("TRAINING", "UPLOADING", "WAITING"))
    server.faults.inject("503", "GET", times=1_000_000)  # the log cannot be read: the thread that heartbeats is waiting
    wait_until(lambda: b"get fails for" in server.objects["runs"]["tiny/heartbeat/l0.json"].data)
    server.heal()
    first.kill()

    server.forbidden = ("/offer/", "/commit/")
    second = start("learner", "--run", URL, "--name", "l0", "--allow-code", "tests.numerics.tiny")
    start("syncer", "--run", URL)
    refused = wait_for(lambda status: "create fails for" in learner_of(status).note)
    assert "not allowed" in learner_of(refused).note
    assert refused.store is not None and "l0: create fails for" in refused.store.retrying
    refused = wait_for(lambda status: status.syncer is not None and "create fails for" in status.syncer.note)
    assert refused.syncer is not None and "/commit/" in refused.syncer.note
    row = next(line for line in status_text(refused).splitlines() if line.startswith("syncer"))
    assert "create fails for" in row and "not allowed" in row
    wait_until(lambda: "l0: store: create fails for" in "".join(second.said()))
