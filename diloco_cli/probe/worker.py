"""A process that makes real inner steps of a run's model on request, and reports how fast it was.

`python -m diloco_cli.probe.worker` reads its order (one line of JSON) from stdin and answers that it is ready; then
each line is a number of seconds to train for, answered with one line of JSON. It ends at the end of stdin. Parameters
do not change (the learning rate is 0), so every step costs the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from diloco_cli.clock import monotonic_s
from diloco_cli.config.codec import from_plain
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import DilocoError
from diloco_cli.runtime.consent import search_last
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.training.replica import Replica, micro_batch_here

WARM_UP_STEPS = 3


def main() -> int:
    answers = _own_stdout()
    order = json.loads(sys.stdin.readline())
    try:
        run = from_plain(RunSettings, order["settings"])
        replica, batch_tokens = _replica(run, order), run.train.batch_tokens
        for step in range(WARM_UP_STEPS):
            replica.step(step * batch_tokens, batch_tokens, 0.0)
    except (DilocoError, RuntimeError) as error:  # torch raises a RuntimeError if memory is short
        hint = error.hint if isinstance(error, DilocoError) else None
        _say(answers, {"error": str(error).splitlines()[0], "hint": hint})
        return 1
    _say(answers, {"ready": True})
    position = WARM_UP_STEPS * batch_tokens
    for line in sys.stdin:
        answer = _train(replica, position, batch_tokens, float(line))
        position += int(answer["tokens"])
        _say(answers, answer)
    return 0


def _own_stdout() -> IO[str]:
    """The stdout for answers; the output of a user's model goes to stderr, so that it does not mix with them."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: IO[str], answer: Mapping[str, object]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def _replica(run: RunSettings, order: dict[str, str]) -> Replica:
    search_last(Path(order["folder"]))
    torch.set_num_threads(run.train.threads)
    device = torch.device(order["device"])
    model, batch_tokens = build_model(run).to(device), run.train.batch_tokens
    micro, _ = micro_batch_here(run, parameter_facts(model), run.sync.fragments, batch_tokens, device)
    return Replica(run, model, build_data(run), 0, 1, device, micro)


def _train(replica: Replica, position: int, batch_tokens: int, seconds: float) -> dict[str, float]:
    """At least one step, and no new one after `seconds`."""
    tokens, started_s = 0, monotonic_s()
    while not tokens or monotonic_s() - started_s < seconds:
        replica.step(position + tokens, batch_tokens, 0.0)  # ends with reading the loss, so the device is done
        tokens += batch_tokens
    return {"tokens": tokens, "wall_s": monotonic_s() - started_s}


if __name__ == "__main__":
    sys.exit(main())
