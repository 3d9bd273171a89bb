"""`diloco rollback`, `gc` and `readmit` on a bucket that no syncer serves: said before, asked, done, verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.cli import operators
from diloco_cli.cli.arguments import open_run
from diloco_cli.cli.status import read_status
from diloco_cli.engines.port import Job, JobState
from diloco_cli.errors import UsageError
from diloco_cli.protocol.actors import collection, syncer
from diloco_cli.protocol.log.commit_log import append, read_log
from diloco_cli.protocol.log.commits import Finish, Quarantine, Refuse, Stop
from diloco_cli.protocol.log.keys import request_key
from diloco_cli.protocol.log.records import Outcome, Request, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import Created, Exists
from diloco_cli.syncer.operator import Operator
from tests.cli.conftest import Diloco, edit
from tests.simulation.operated import run_that_keeps, started

CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)
QUICKLY = ("--timeout", "0")
TIME = "2026-01-01T00:00:00Z"
RUN = run_that_keeps(grace_s=0.0, merges=60)


@pytest.fixture(scope="module")
def history() -> dict[str, bytes]:
    """The bucket of a run of 30 commits with snapshots, its syncer gone."""
    patch = pytest.MonkeyPatch()
    patch.setattr(syncer, "SNAPSHOT_EVERY", 5)
    patch.setattr(collection, "FLOORS_APART", 3)
    fleet = started(RUN, 30)
    patch.undo()
    store = fleet.world.store
    return {key: store.get(key) or b"" for key in store.list("", limit=10_000)}


@pytest.fixture
def bucket(history: dict[str, bytes], tmp_path: Path) -> tuple[LocalStore, str]:
    folder = tmp_path / "toy"
    for key, data in history.items():  # as the store lays them out, without its fsyncs
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return LocalStore(folder), f"file://{folder}"


def test_a_run_without_a_commit_gives_nothing_to_verify(bucket: tuple[LocalStore, str], diloco: Diloco) -> None:
    store, url = bucket
    for key in store.list("", limit=10_000):
        if key != "FORMAT.json":
            store.delete(key)
    done = diloco("verify", url, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 75 and answer["ok"] is False and answer["error"]["code"] == "try_again"
    assert "nothing to verify: run toy has no commit yet" in answer["error"]["message"]
    assert "diloco status toy" in answer["error"]["hint"]


def test_what_a_run_file_has_changed_since_is_said_to_be_not_used(
    diloco: Diloco, quickstart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = str(quickstart.parent / "home")
    launched = diloco("launch", "q/run.yaml", "--create-only", "--set", "train.tokens=3M", DILOCO_HOME=home)
    assert launched.returncode == 0, launched.stderr
    monkeypatch.setenv("DILOCO_HOME", home)
    monkeypatch.chdir(quickstart)

    def said() -> str:
        operators._say_unused(open_run("run.yaml"), Path("run.yaml"))
        return capsys.readouterr().err

    assert said() == "", "what launch was told by --set is no change, nor is what was searched"
    edit(quickstart / "run.yaml", "every: 40", "every: 80")
    assert said().startswith(
        "run.yaml was changed since this run began: sync.every 40 -> 80 is not used; the run goes on with its own "
        "settings. To begin anew: diloco launch run.yaml --set name=quickstart-2"
    )
    edit(quickstart / "run.yaml", "evaluation: {every: 5}", "evaluation: {every: 7}")
    assert " are not used; " in said()
    edit(quickstart / "run.yaml", "name: quickstart", "name: another")
    operators._say_unused(open_run(f"file://{quickstart}/bucket/quickstart"), Path("run.yaml"))
    assert capsys.readouterr().err == "", "another run's file"


def head(store: LocalStore) -> RunState:
    return perform(read_log(RUN), store, CLOCK)


def said(done: Any) -> dict[str, Any]:
    data = json.loads(done.stdout)
    assert isinstance(data, dict)
    return data


Bucket = tuple[LocalStore, str]


def test_rollback_says_first_what_it_would_do_and_changes_nothing(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    before = store.list("", limit=10_000)
    done = diloco("rollback", url, "--to", "12", "--dry-run")
    assert done.returncode == 0 and store.list("", limit=10_000) == before
    for words in ("run toy: from commit 30 back to commit 12", "merges of commits 13 to 30", "2 of 2 change"):
        assert words in done.stdout
    data = said(diloco("rollback", url, "--to", "12", "-n", "--json"))["data"]
    assert data["dry_run"] and data["tokens_before"] - data["tokens"] == data["tokens_left"] > 0


def test_rollback_asks_and_takes_silence_for_a_no(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    done = diloco("rollback", url, "--to", "12")
    assert done.returncode == 8 and "--yes" in done.stderr and not store.list("request/")


def test_rollback_with_no_syncer_alive_is_done_by_the_command(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    done = diloco("rollback", url, "--to", "12", "-y", *QUICKLY)
    state = head(store)
    assert done.returncode == 0, done.stderr
    assert "no syncer answers" in done.stderr
    assert f"back to commit 12, as version {state.base_floor} of every fragment" in done.stdout
    assert (state.rolled_back_to, state.n) == (12, state.base_floor) and state.phase == "RUNNING"
    undo = diloco("rollback", url, "--to", str(state.base_floor - 1), "-y", "--json", *QUICKLY)
    assert said(undo)["data"]["version"] == head(store).base_floor > state.base_floor


def test_the_answer_is_told_from_those_to_others_who_asked_at_the_same_time(diloco: Diloco, bucket: Bucket) -> None:
    """The next number is taken already, by a request that is answered in the same breath, and refused."""
    store, url = bucket
    other = Request(1, "readmit", "nonce", "then", learner="nobody")
    store.create(request_key(1), encode(other))
    done = diloco("rollback", url, "--to", "12", "-y", *QUICKLY)
    assert done.returncode == 0 and "back to commit 12" in done.stdout, done.stderr
    assert head(store).next_request == 2 and "is not quarantined" in head(store).metrics.notes[-1].text


def test_rollback_to_what_is_not_there_is_refused(diloco: Diloco, bucket: Bucket) -> None:
    done = diloco("rollback", bucket[1], "--to", "30", "-y", *QUICKLY)
    assert done.returncode == 2 and "only commits 0 to 29" in done.stderr and "hint:" in done.stderr


def test_rollback_to_states_that_are_gone_is_refused_before_anything_is_asked(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    (gone,) = [key for key in store.list("state/0000/") if "/000000000000-" in key]
    store.delete(gone)
    done = diloco("rollback", url, "--to", "0", "-y", *QUICKLY)
    assert done.returncode == 2 and gone in done.stderr and not store.list("request/")


def test_gc_says_first_what_goes_and_then_it_is_gone(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    shown = said(diloco("gc", url, "-n", "--json"))["data"]
    assert shown["floor"] > 10 and shown["objects"]["state"] > 5 and shown["bytes_about"] > 100
    assert "objects" not in (plain := diloco("gc", url, "-n").stdout) and f"to {shown['floor']}, of 30" in plain
    before = set(store.list("", limit=10_000))
    assert diloco("gc", url).returncode == 8
    done = diloco("gc", url, "--yes", *QUICKLY)
    assert done.returncode == 0, done.stderr
    gone = before - set(store.list("", limit=10_000))
    assert len(gone) == sum(shown["objects"].values())
    assert head(store).gc_floor == shown["floor"]
    again = diloco("gc", url, "-y", *QUICKLY)
    assert again.returncode == 2 and "nothing to collect" in again.stderr
    back = diloco("rollback", url, "--to", str(shown["floor"] - 1), "-y", *QUICKLY)
    assert back.returncode == 2 and f"only commits {shown['floor']} to" in back.stderr


def quarantine(store: LocalStore, name: str) -> None:
    state = head(store)
    seq = state.learner(name).next_seq + 5
    outcomes = tuple(Outcome(name, state.learner(name).floor, seq + k, 0, "bad_payload") for k in range(9))
    for draft in (
        Refuse(epoch=state.epoch, outcomes=outcomes),
        Quarantine(epoch=state.epoch, learner=name, reason="bad"),
    ):
        state, mine = perform(append(RUN, state, structs.replace(draft, time=TIME)), store, CLOCK)
        assert mine


def test_a_run_that_is_resumed_is_no_longer_called_stopped_while_its_jobs_wait(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = bucket
    end(store, Stop)
    opened, found = open_run(url), [Job(name, "slurm", "7", JobState.QUEUED, "Priority") for name in ("l0", "syncer-0")]

    def told() -> tuple[str, str, str]:
        current, _ = read_status(opened, ask=lambda: found)
        return current.state, current.reason, current.hint

    assert told()[::2] == ("STOPPED", f"diloco resume {url}")
    operator = Operator(RUN, store, CLOCK, lambda text: None)
    assert operator.withdraw_stop(head(store))
    assert told() == ("STARTING", "jobs wait: l0 (Priority), syncer-0 (Priority)", "")
    found[1] = replace(found[1], state=JobState.RUNNING)
    found[0] = replace(found[0], state=JobState.RUNNING)
    assert told() == ("STARTING", "resumed, and no syncer serves it yet", "")
    del found[1]
    assert told()[::2] == ("STARTING", f"diloco resume {url}"), "nothing that it waits for would serve it"
    found.clear()
    assert told()[::2] == ("STARTING", f"diloco resume {url}"), "who resumed it may be gone"
    assert operator.keep_stopped(head(store)) and told()[0] == "STOPPED"


def test_readmit_lets_a_learner_in_again_and_status_shows_both(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    quarantine(store, "l1")
    status = diloco("status", url)
    assert "QUARANTINED" in status.stdout and "diloco readmit" in status.stdout
    done = diloco("readmit", "l1", url, *QUICKLY)
    assert done.returncode == 0 and "l1 is readmitted" in done.stdout
    assert head(store).learner("l1").quarantined is None
    assert "QUARANTINED" not in diloco("status", url).stdout


def test_readmit_of_one_who_is_not_kept_out_is_refused(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    quarantine(store, "l1")
    done = diloco("readmit", "l0", url, *QUICKLY)
    assert done.returncode == 2 and "quarantined: l1" in done.stderr and not store.list("request/")


def test_quarantine_keeps_a_learner_out_also_of_a_stopped_run(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    end(store, Stop)
    done = diloco("quarantine", "l1", url, "--json", *QUICKLY)
    assert done.returncode == 0, done.stderr
    assert head(store).learner("l1").quarantined is not None and head(store).phase == "STOPPED"
    again = diloco("quarantine", "l1", url, *QUICKLY)
    assert again.returncode == 2 and "'l1' is quarantined already" in again.stderr
    last = diloco("quarantine", "l0", url, *QUICKLY)
    assert last.returncode == 2 and "the quorum is 1" in last.stderr


def end(store: LocalStore, kind: type[Stop | Finish] = Finish) -> None:
    state = head(store)
    perform(append(RUN, state, kind(epoch=state.epoch, time=TIME, reason="enough")), store, CLOCK)


def test_a_stopped_run_stays_stopped(diloco: Diloco, bucket: Bucket) -> None:
    store, url = bucket
    end(store, Stop)
    done = diloco("rollback", url, "--to", "12", "-y")
    assert done.returncode == 0, done.stderr
    assert (head(store).phase, head(store).rolled_back_to) == ("STOPPED", 12)


def test_a_run_that_ends_while_somebody_asks_says_that_it_has_ended(bucket: Bucket) -> None:
    store, _ = bucket

    class CommandEnding(LocalStore):
        def create(self, key: str, data: bytes) -> Created | Exists:
            if key.startswith("request/"):
                end(store)
            return super().create(key, data)

    with pytest.raises(UsageError, match="FINISHED"):
        Operator(RUN, CommandEnding(store.root), CLOCK, str, timeout_s=0.0).request("gc")


@pytest.mark.parametrize("words", [("rollback", "--to", "3", "-y"), ("readmit", "l1")])
def test_a_finished_run_is_left_alone(diloco: Diloco, bucket: Bucket, words: tuple[str, ...]) -> None:
    store, url = bucket
    end(store)
    n = head(store).n
    done = diloco(*words, url)
    assert done.returncode == 2 and "FINISHED" in done.stderr and head(store).n == n
