"""The evaluator's process with users' models that print, hang or die."""

from __future__ import annotations

import subprocess
import sys
from math import inf, isnan
from pathlib import Path

import pytest
import torch

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.events.bucket import EVALUATOR, EventReader
from diloco_cli.runtime.consent import Allowance, NamedHere, consented, format_digest
from diloco_cli.store.open import open_store
from diloco_cli.syncer.evaluation import EvaluatorProcess, read_answer
from diloco_cli.tasks.build import build_data, build_model
from tests.numerics.bucket import ROOT, begun_run
from tests.waiting import wait_until

Answer = tuple[int, float | None]


def evaluate(bucket: Path, model: str, max_s: float = 60.0, times: int = 1) -> list[Answer | None]:
    """Ask `times` evaluations, one after the other."""
    run, _, outputs = begun_run(bucket, f"tests.numerics.loud:{model}")
    consented(run, bucket.as_uri(), NamedHere(Allowance((format_digest(run),))))
    evaluator = EvaluatorProcess(bucket.as_uri(), max_s=max_s)
    answers = []
    try:
        for n in range(times):
            assert evaluator.submit(n, outputs, final=False) and not evaluator.submit(n, outputs, final=False)
            answers.append(wait_for_answer(evaluator))
    finally:
        evaluator.close()
    return answers


def wait_for_answer(evaluator: EvaluatorProcess, within_s: float = 90.0) -> Answer | None:
    deadline_s = monotonic_s() + within_s
    while monotonic_s() < deadline_s:
        answer = evaluator.result()
        if answer is not None:
            return answer
        sleep_s(0.02)
    return None


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_model_that_prints_does_not_break_the_pipe(tmp_path: Path) -> None:
    answers = evaluate(tmp_path / "bucket", "printing", times=2)
    run, _, _ = begun_run(tmp_path / "another", "tests.numerics.tiny:regression")
    with torch.inference_mode():
        expected = float(build_model(run.settings)(*next(iter(build_data(run.settings).held_out(1)))))
    assert [n for answer in answers if answer is not None for n in answer[:1]] == [0, 1]
    assert all(answer is not None and answer[1] == pytest.approx(expected) for answer in answers)


@pytest.mark.parametrize(("model", "max_s"), [("dying", 60.0), ("hanging", 0.5)])
def test_an_evaluation_that_dies_or_hangs_counts_as_failed_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, max_s: float
) -> None:
    assert evaluate(tmp_path / "bucket", model, max_s) == [(0, None)]
    why = "failed (exit status 3)" if model == "dying" else "took too long (a faster device"
    assert f"the evaluation of commit 0 {why}" in capfd.readouterr().out
    store = open_store((tmp_path / "bucket").as_uri())
    wait_until(lambda: [e for e in EventReader().read(store) if e.unit == EVALUATOR and e.kind == "error"])
    if model == "hanging":
        assert any(why in event.text for event in EventReader().read(store))


def test_an_evaluation_that_the_end_of_the_syncer_cuts_off_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _, outputs = begun_run(tmp_path / "bucket", "tests.numerics.loud:hanging")
    consented(run, (tmp_path / "bucket").as_uri(), NamedHere(Allowance((format_digest(run),))))
    evaluator = EvaluatorProcess((tmp_path / "bucket").as_uri())
    assert evaluator.submit(7, outputs, final=True)
    evaluator.close()
    assert "the evaluation of commit 7 was ended with the syncer" in capfd.readouterr().out
    evaluator.close()
    assert capfd.readouterr().out == "" and evaluator.result() is None


def test_it_computes_on_the_device_that_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_EVALUATOR_DEVICE", "cuda:77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert evaluate(tmp_path / "bucket", "printing") == [(0, None)]
    assert "cuda:77 needs cuda" in capfd.readouterr().err


def test_a_model_whose_loss_is_not_finite_is_told_apart_from_an_evaluator_that_failed(tmp_path: Path) -> None:
    ((n, loss),) = [answer for answer in evaluate(tmp_path / "bucket", "not_a_number") if answer is not None]
    assert n == 0 and loss is not None and isnan(loss)


def test_the_child_ends_with_its_parent_whatever_it_is_doing() -> None:
    """As it does while it retries a store that cannot be reached."""
    code = (
        "import sys, time\n"
        "from diloco_cli.syncer.evaluation import requests_until_the_syncer_ends\n"
        "print(next(requests_until_the_syncer_ends(sys.stdin)), flush=True)\n"
        "time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        print("a request", file=child.stdin, flush=True)
        assert child.stdout.readline() == "a request\n"
        child.stdin.close()
        assert child.wait(30) == 0
    finally:
        child.kill()


@pytest.mark.parametrize("line", ["", "hello", "[]", "{}", '{"n": 1}', '{"n": "1", "loss": 2.0}', "null", "3"])
def test_a_line_that_is_no_answer_is_passed_over(line: str) -> None:
    assert read_answer(line) is None


def test_an_answer_without_a_number_is_a_failed_evaluation() -> None:
    assert read_answer('{"n": 3, "loss": 1.5}') == (3, 1.5)
    assert read_answer('{"n": 3, "loss": null}') == read_answer('{"n": 3, "loss": "x"}') == (3, None)
    assert read_answer('{"n": 3, "loss": Infinity}') == (3, inf)
