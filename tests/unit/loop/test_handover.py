"""The actor's loop stops where it wants a step, and its other operations are performed on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diloco_cli.loop.island import Wanted, keeps_nothing, saves_moments, until_wanted
from diloco_cli.protocol.actors.ports import Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep

FIRST, SECOND = (Wanted(position, Progression(0.0, 0, False)) for position in (0, 4))


def loop(heard: list[Any]) -> Any:
    heard.append((yield Now()))
    heard.append((yield FIRST))
    heard.append((yield Sleep(1.0)))
    heard.append((yield SECOND))


def performed(steps: Any, answers: list[Any]) -> tuple[list[Any], Any]:
    """The operations that were yielded, and what the steps returned."""
    operations, answer = [], None
    while True:
        try:
            operations.append(steps.send(answer))
        except StopIteration as stop:
            return operations, stop.value
        answer = answers.pop(0)


def test_it_goes_from_one_wanted_step_to_the_next_and_to_the_end() -> None:
    heard: list[Any] = []
    train, done = loop(heard), Stepped(4)
    assert performed(until_wanted(train, None), [7.0]) == ([Now()], FIRST)
    assert performed(until_wanted(train, done), [None]) == ([Sleep(1.0)], SECOND)
    assert performed(until_wanted(train, done), []) == ([], None)
    assert heard == [7.0, done, None, done]


@pytest.mark.parametrize(
    ("make", "saved", "nothing"),
    [
        (torch.optim.AdamW, True, False),
        (torch.optim.Adam, True, False),
        (lambda p: torch.optim.Adam(p, amsgrad=True), False, False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False, False),
        (lambda p: torch.optim.SGD(p, lr=0.1), False, True),
        (torch.optim.RMSprop, False, False),
    ],
)
def test_which_optimizers_state_is_saved(make: Any, saved: bool, nothing: bool) -> None:
    optimizer = make([torch.nn.Parameter(torch.zeros(2))])
    assert (saves_moments(optimizer), keeps_nothing(optimizer)) == (saved, nothing)
