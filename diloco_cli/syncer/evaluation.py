"""Evaluation of the outer parameters: a low-priority process of its own, started by the syncer, fed through a pipe.

It never delays a merge: the syncer asks and goes on; the answer becomes an `eval` commit when it is there.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from math import isfinite
from typing import IO

import torch

from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.environment import environment_with
from diloco_cli.protocol.records import Output, RunFormat
from diloco_cli.store.port import Store
from diloco_cli.syncer.versions import load_versions
from diloco_cli.tasks.build import build_data, build_model

FINAL_FACTOR = 4  # the last evaluation uses so many times more sequences
NICENESS = 10


class EvaluatorProcess:
    """Implements protocol.ports.Evaluator with `diloco evaluator` as a child. One evaluation at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._child: subprocess.Popen[str] | None = None
        self._asked: int | None = None
        self._answers: queue.SimpleQueue[tuple[int, float | None]] = queue.SimpleQueue()

    def submit(self, n: int, outputs: tuple[Output, ...], final: bool) -> bool:
        if self._asked is not None:
            return False
        if self._child is None or self._child.poll() is not None:
            self._child = self._start()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"n": n, "outputs": to_plain(outputs), "final": final}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return False  # it died just now; the next call starts another
        self._asked = n
        return True

    def result(self) -> tuple[int, float | None] | None:
        if self._asked is None:
            return None
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            if self._child is not None and self._child.poll() is None:
                return None
            answer = (self._asked, None)  # the child died over it
        self._asked = None
        return answer

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "diloco_cli", "evaluator", "--run", self._url]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_with(OMP_NUM_THREADS="1")
        )
        threading.Thread(target=self._listen, args=(child.stdout,), daemon=True).start()
        return child

    def _listen(self, lines: Iterable[str]) -> None:
        for line in lines:
            answer = json.loads(line)
            finite = isinstance(answer["loss"], float) and isfinite(answer["loss"])
            self._answers.put((answer["n"], answer["loss"] if finite else None))


def serve_evaluations(run: RunFormat, store: Store, requests: IO[str], answers: IO[str]) -> None:
    """The child's loop: one JSON line in, one out; ends when the syncer's end of the pipe closes."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    model, data = build_model(run.settings), build_data(run.settings)
    model.eval()
    for line in requests:
        request = json.loads(line)
        outputs = [from_plain(Output, plain) for plain in request["outputs"]]
        load_versions(run, outputs, store, dict(model.named_parameters()))
        sequences = run.settings.evaluation.sequences * (FINAL_FACTOR if request["final"] else 1)
        total, count = 0.0, 0
        with torch.inference_mode():
            for tokens, targets in data.held_out(sequences):
                total += float(model(tokens, targets)) * targets.numel()
                count += targets.numel()
        print(json.dumps({"n": request["n"], "loss": total / count}), file=answers, flush=True)
