"""A rank that steps with the others and ends as its arguments say: RANK DEED STEP.

Deeds: done, exit9, kill, stop (SIGSTOP), fail (an exception). With LONG it steps for ever.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import distributed

from diloco_cli.learner.group import join_group
from diloco_cli.learner.parent import die_with_parent, own_beats, place_here

MEET_S = 20.0
STEPS = 40


def main(doer: int, deed: str, at: int) -> None:
    die_with_parent()
    place = place_here()
    assert place is not None
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number) if place.commands else None)
    beats = own_beats(place)
    join_group(place, torch.device("cpu"), MEET_S)
    step = 0
    while step < STEPS or deed == "long":
        goes_on = torch.tensor([0 if stopped else 1])
        distributed.broadcast(goes_on, 0)
        if not goes_on:
            sys.exit(143 if place.commands else 0)
        step += 1
        beats.stepped()
        if place.rank == doer and step == at:
            do(deed)


def do(deed: str) -> None:
    match deed:
        case "exit9":
            sys.exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fail":
            raise ValueError("this rank fails")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
