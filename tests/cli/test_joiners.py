"""`diloco learner --join --name-from`: spare capacity, whose tasks find names of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from diloco_cli.cli import daemons
from diloco_cli.errors import DilocoError, FencedError, TakenError, UsageError
from diloco_cli.learner import daemon
from diloco_cli.protocol.log.keys import FORMAT_KEY
from tests.cli.bucket import NANO, make_bucket
from tests.cli.conftest import called


def becomes(monkeypatch: pytest.MonkeyPatch, taken: str) -> list[str]:
    """The words with which this process starts again, once it does. `taken`: the names of living learners."""
    became = list[str]()

    def living(run: Any, learner: str) -> Iterator[Any]:
        if learner in taken.split():
            raise TakenError("it lives")
        yield from ()

    def become(program: str, words: tuple[str, ...]) -> NoReturn:
        became.extend(words)
        raise SystemExit(0)

    monkeypatch.setattr(daemons, "refuse_beside_living", living)
    monkeypatch.setattr(os, "execv", become)
    return became


def begin_another(bucket: Path) -> None:
    shutil.rmtree(bucket)
    make_bucket(bucket, replace(NANO, run_id="another"))


@pytest.mark.parametrize("names", [("--name-from", "spot-[0-3]"), ("--name-from=spot-[0-3]",)])
@pytest.mark.parametrize(
    ("taken", "task", "name"),
    [
        ("", {}, "spot-0"),
        ("spot-0 spot-1", {}, "spot-2"),
        ("", {"SLURM_ARRAY_TASK_ID": "2"}, "spot-2"),
        ("spot-2", {"SLURM_ARRAY_TASK_ID": "6"}, "spot-3"),
        ("spot-3", {"JOB_COMPLETION_INDEX": "3"}, "spot-0"),
        ("spot-0 spot-1 spot-2 spot-3", {}, ""),
    ],
)
def test_a_joiner_takes_the_first_name_that_nobody_living_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    taken: str,
    task: dict[str, str],
    name: str,
    names: tuple[str, ...],
) -> None:
    url, became = make_bucket(tmp_path / "bucket/nano"), becomes(monkeypatch, taken)
    for variable, value in task.items():
        monkeypatch.setenv(variable, value)
    words = ("learner", "--run", url, "--join", *names, "--region", "spot-[0-3]")
    status = called(monkeypatch, *words)
    if name:
        kept = [*words, f"--chosen={name}"]
        assert status == 0 and became[-len(kept) :] == kept
    else:
        assert status == TakenError.exit_status and "all of spot-[0-3] take part already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "pid", "name"),
    [
        (FencedError("a newer process has its place"), 6, "spot-3"),
        (TakenError("it lives"), 6, "spot-3"),
        (TakenError("it lives"), 8, "spot-0"),
        (FencedError("another run was begun in the place of this one", where=FORMAT_KEY), 6, ""),
        (UsageError("no such region"), 6, ""),
    ],
)
def test_of_two_that_chose_one_name_the_loser_takes_the_next_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DilocoError, pid: int, name: str
) -> None:
    url, became = make_bucket(tmp_path / "bucket/nano"), becomes(monkeypatch, "spot-2")

    def lose(*words: object) -> NoReturn:
        if error.where == FORMAT_KEY:
            begin_another(tmp_path / "bucket/nano")
        raise error

    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(daemon, "run_learner", lose)
    words = ["learner", "--run", url, "--join", "--name-from=spot-[0-3]"]
    status = called(monkeypatch, *words, "--chosen=spot-1")
    assert became[-6:] == ([*words, f"--chosen={name}"] if name else [])
    assert status == (0 if name else error.exit_status)


@pytest.mark.parametrize(("status", "became"), [(9, "--chosen=spot-1"), (1, ""), (0, "")])
def test_an_island_of_several_ranks_takes_the_next_name_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, became: str
) -> None:
    url, words = make_bucket(tmp_path / "bucket/nano"), becomes(monkeypatch, "")
    monkeypatch.setattr(daemons, "run_ranks", lambda *given: status)
    given = ("learner", "--run", url, "--join", "--name-from=spot-[0-1]", "--chosen=spot-0", "--ranks=2")
    assert called(monkeypatch, *given) == (0 if became else status)
    assert words[-1:] == ([became] if became else [])


def test_an_island_of_several_ranks_ends_where_another_run_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket/nano"
    url, words = make_bucket(bucket), becomes(monkeypatch, "")

    def fenced(*given: object) -> int:
        begin_another(bucket)
        return FencedError.exit_status

    monkeypatch.setattr(daemons, "run_ranks", fenced)
    given = ("learner", "--run", url, "--join", "--name-from=spot-[0-1]", "--chosen=spot-0", "--ranks=2")
    assert called(monkeypatch, *given) == FencedError.exit_status and not words


@pytest.mark.parametrize("words", [(), ("--name=a", "--join", "--name-from=b"), ("--name-from=b",)])
def test_a_learner_has_one_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert called(monkeypatch, "learner", "--run", "file:///nowhere/nano", *words) == 2
    assert "which island is this?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--nodes", "2"), ("--node-rank", "1"), ("--rendezvous", "10.0.0.1:1234")])
def test_machines_of_one_island_do_not_choose_its_name_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    own = ("learner", "--run", "file:///nowhere/nano", "--join", "--name-from", "spot-[0-3]")
    assert called(monkeypatch, *own, *words) == 2
    assert "--name-from chooses for one machine" in capsys.readouterr().err
