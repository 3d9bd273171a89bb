"""The user's command and webhook: called beside the work, with a time limit, never chosen by a run file."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from diloco_cli.cli import hooks as calling
from diloco_cli.cli.hooks import HookCaller, Hooks, hooks_of
from diloco_cli.config.run_file import load_run
from diloco_cli.errors import RunFailedError, UsageError
from tests.forked import ROOT

WRITES = "import os, sys; open(sys.argv[1], 'a').write(sys.stdin.read() + os.environ['DILOCO_EVENT_KIND'] + '\\n')"
QUICKSTART = ROOT / "examples/quickstart/run.yaml"


def command(*words: str) -> str:
    return shlex.join([sys.executable, "-S", "-c", *words])


def test_a_command_gets_the_event_as_json_and_in_its_environment_without_a_shell(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out; touch never"
    with HookCaller(Hooks(on_event=command(WRITES, str(out))), "nano", "file:///b", said.append) as caller:
        caller.look("STALLED", "no syncer")
        caller.look("STALLED", "no syncer")  # the same stall
    event, _, rest = out.read_text().rpartition("stalled\n")
    told = json.loads(event)
    assert (told["kind"], told["run"], told["text"], rest, said) == ("stalled", "nano", "no syncer", "", [])
    assert not (tmp_path / "never").exists()


def test_a_run_that_fails_is_told_and_a_stall_that_comes_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    monkeypatch.setattr(HookCaller, "_command", lambda self, event: kinds.append(event["kind"]))
    with pytest.raises(RunFailedError), HookCaller(Hooks("x"), "nano", "u", print) as caller:
        for state in ("STALLED", "MERGING", "STALLED"):
            caller.look(state, "")
            for thread in caller._calls:
                thread.join()
        raise RunFailedError("cannot go on")
    assert kinds == ["stalled", "stalled", "failed"]


def test_a_failing_or_endless_command_is_said_once_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    endless, failing = "import time; time.sleep(60)", "raise SystemExit('sorry')"
    for code, within_s, words in ((endless, 0.2, "no end within"), (failing, 60.0, "sorry")):
        monkeypatch.setattr(calling, "TIMEOUT_S", within_s)
        said: list[str] = []
        with HookCaller(Hooks(on_event=command(code)), "nano", "u", said.append) as caller:
            caller.call("stalled", "")
            caller.call("finished", "")
        assert len(said) == 1 and words in said[0]


@pytest.fixture
def posts() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(address, what was posted there)."""
    got: list[dict[str, str]] = []

    class WebhookHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(404 if "missing" in self.path else 204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), WebhookHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()


def test_a_webhook_gets_the_event_and_its_address_is_never_said(posts: tuple[str, list[dict[str, str]]]) -> None:
    address, got = posts
    said: list[str] = []
    for path in ("/token-canary", "/missing/token-canary"):
        with HookCaller(Hooks(webhook=address + path), "nano", "u", said.append) as caller:
            caller.call("finished", "run nano is FINISHED")
    assert [event["kind"] for event in got] == ["finished", "finished"]
    assert len(said) == 1 and "404" in said[0] and "canary" not in said[0]


def test_they_come_from_a_flag_or_the_environment_or_the_users_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert hooks_of(None, None) == Hooks()
    (tmp_path / "diloco").mkdir()
    own = "on_event: notify-send run\nwebhook: https://h/x\ntrain: {seed: 7}\n"
    (tmp_path / "diloco" / "config.yaml").write_text(own)
    assert hooks_of(None, None) == Hooks("notify-send run", "https://h/x")
    assert load_run(QUICKSTART).train.seed == 7
    monkeypatch.setenv("DILOCO_WEBHOOK", "https://env/x")
    assert hooks_of("mail me", None) == Hooks("mail me", "https://env/x")
    assert hooks_of("", None).environment() == {"DILOCO_WEBHOOK": "https://env/x"}


@pytest.mark.parametrize(
    ("given", "words"), [(("'open", None), "No closing quotation"), ((None, "file:///etc/passwd"), "not an http")]
)
def test_what_can_never_work_is_refused_at_once(given: tuple[str | None, str | None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hooks_of(*given)


@pytest.mark.parametrize("key", ["on_event", "webhook"])
def test_a_run_file_cannot_choose_what_this_machine_runs(key: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{key}: rm -rf /\n{QUICKSTART.read_text()}")
    with pytest.raises(UsageError, match="does not belong into a run file") as caught:
        load_run(path)
    assert caught.value.where == f"{path}:1" and f"--{key.replace('_', '-')}" in str(caught.value.hint)
