"""Evaluation of the outer parameters: a low-priority process of its own, started by the syncer, fed through a pipe.

It never delays a merge: the syncer sends a request and goes on; the answer becomes an `eval` commit when it comes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

import torch

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.environment import DEVICE_VARIABLE, environment_with
from diloco_cli.errors import DilocoError
from diloco_cli.events.bucket import EVALUATOR, WRITE_EVERY_S, tell_event
from diloco_cli.protocol.actors.syncer import FINAL_EVALUATION_S
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.quantities import format_duration
from diloco_cli.runtime.daemon import say
from diloco_cli.runtime.units import diloco_command
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import load_versions
from diloco_cli.tasks.build import Data, build_data, build_model, losses_of, tried
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.flat import bare_tensors

FINAL_FACTOR = 4  # the last evaluation uses so many times more sequences
NICENESS = 10
MAX_S = 600.0  # beyond reading the states: an evaluation that takes longer has failed
FASTER = f"a faster device is named by `diloco syncer --evaluator-device` or {DEVICE_VARIABLE}"
CPU = torch.device("cpu")
Answer = tuple[int, float | None]


class EvaluatorProcess:
    """Implements protocol.actors.syncer.Evaluator with `diloco evaluator` as a child, which computes on the device that
    the environment names. One evaluation at a time. `reading_s`: how long it may need to read the states."""

    def __init__(self, url: str, reading_s: float = 0.0, max_s: float = MAX_S) -> None:
        self._url, self._max_s, self._final_s = url, max_s + reading_s, FINAL_EVALUATION_S + reading_s
        self._child: subprocess.Popen[str] | None = None
        self._asked: int | None = None
        self._asked_s = 0.0
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        return self._ask(evaluation_request(n, outputs, final))

    def _ask(self, request: dict[str, Any]) -> bool:
        if self._asked is not None:
            return False
        if self._child is None or self._child.poll() is not None:
            self._child = self._start()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self.close()
            return False  # it died just now; the next call starts another
        self._asked, self._asked_s = request["n"], monotonic_s()
        return True

    def result(self) -> Answer | None:
        if self._asked is None:
            return None
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            status = None if self._child is None else self._child.poll()
            if self._child is not None and status is None and monotonic_s() - self._asked_s < self._max_s:
                return None
            answer = (self._asked, None)  # the child died over it, or hangs
            self._tell(f"took too long ({FASTER})" if status is None else f"failed (exit status {status})")
            self._asked = None
            self.close()
        self._asked = None
        return answer

    def _tell(self, what: str, as_event: bool = True) -> None:
        """Why an evaluation has no result: in the syncer's log, and as an event of the evaluator."""
        spent = format_duration(monotonic_s() - self._asked_s)
        text = f"after {spent} without a loss, the evaluation of commit {self._asked} {what}"
        say(f"{utc_now_text()} {text}")
        if as_event:  # beside the merges: a bucket may take its time
            told = (self._url, "error", EVALUATOR, text, None, WRITE_EVERY_S)
            threading.Thread(target=tell_event, args=told).start()

    def close(self) -> None:
        """Ends the child; an evaluation that it was at is said to have no result."""
        child, self._child = self._child, None
        if child is None:
            return
        if self._asked is not None:
            waited = monotonic_s() - self._asked_s >= self._final_s  # else the syncer was told to leave
            self._tell(f"was ended with the syncer{f' ({FASTER})' if waited else ''}", as_event=waited)
            self._asked = None
        child.kill()
        child.wait()
        with suppress(OSError):  # what the pipe still held
            if child.stdin is not None:
                child.stdin.close()

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            diloco_command("evaluator", "--run", self._url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_with(OMP_NUM_THREADS="1"),
        )
        self._answers = queue.SimpleQueue()  # a queue per child: late answers of an earlier child are dropped
        threading.Thread(target=_listen, args=(child.stdout, self._answers), daemon=True).start()
        return child


def evaluation_request(n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> dict[str, Any]:
    return {"n": n, "outputs": to_plain(outputs), "final": final}


def _listen(lines: Iterable[str], answers: queue.SimpleQueue[Answer]) -> None:
    for line in lines:
        answer = read_answer(line)
        if answer is not None:
            answers.put(answer)


def read_answer(line: str) -> Answer | None:
    """(n, loss), which is not finite if the model's is not; None where the evaluation failed, and for a line that is no
    answer."""
    try:
        plain = json.loads(line)
        n, loss = plain["n"], plain["loss"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(n) is not int:
        return None
    return n, loss if isinstance(loss, float) else None


def take_stdout() -> IO[str]:
    """The pipe of the answers, for this module alone: all other output to stdout (of a user's model) goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def requests_until_the_syncer_ends(lines: Iterable[str]) -> Iterator[str]:
    """Lines as they come. At the end of the pipe the process ends at once, also in the middle of an evaluation or of
    retries to a store."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return iter(waiting.get, None)


def serve_evaluations(
    run: RunFormat, store: Store, requests: Iterable[str], answers: IO[str], device: torch.device = CPU
) -> None:
    """The child's loop: one JSON line in, one out; ends with the requests."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    examiner = Examiner(run, store)
    examiner.model.to(device)
    for line in requests:
        request = json.loads(line)
        print(json.dumps({"n": request["n"], "loss": examiner.loss_of(request)}), file=answers, flush=True)


class Examiner:
    """Answers requests, with one model into which it loads the parameters that a request is about."""

    def __init__(self, run: RunFormat, store: Store) -> None:
        self.run, self.store = run, store
        self.model, self.data = build_model(run.settings).eval(), build_data(run.settings, ("held_out",))
        check_frozen(run.settings, self.model)

    def loss_of(self, request: dict[str, Any]) -> float | None:
        """None, with the reason in the log, if the parameters cannot be had: collected by now, or damaged."""
        try:
            outputs = [from_plain(FragmentVersion, plain) for plain in request["outputs"]]
            load_versions(self.run, outputs, self.store, bare_tensors(self.model))
        except DilocoError as error:
            say(f"{utc_now_text()} no evaluation of commit {request['n']}: {error}")
            return None
        sequences = self.run.settings.evaluation.sequences * (FINAL_FACTOR if request.get("final") else 1)
        return held_out_loss(self.model, self.data, sequences)


def held_out_loss(model: torch.nn.Module, data: Data, num_sequences: int) -> float:
    """Nats per token (as the model's forward gives them) over that many held-out sequences, on the model's device."""
    total, count = 0.0, 0
    device = next(model.parameters()).device
    with torch.inference_mode():
        for tokens, targets in data.held_out(num_sequences):
            loss, _ = losses_of(tried(model, (tokens.to(device), targets.to(device)), "held-out data"))
            total += float(loss) * targets.numel()
            count += targets.numel()
    return total / count
