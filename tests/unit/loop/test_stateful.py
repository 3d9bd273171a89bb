"""A loop whose loader keeps its own state: after a restart each of its batches is trained on once more or skipped, as
the log says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from diloco_cli.config.settings import InnerSettings
from diloco_cli.errors import UsageError
from tests.numerics.harness import merges
from tests.numerics.own_loops import Meeting, OwnLoop, own_run
from tests.numerics.tiny import ROWS, TinyStream

INNER = InnerSettings(lr=0.01, schedule="constant", warmup_steps=0, save_every=2)


class Counter:
    """Batch number n; its state is the number of the next one."""

    def __init__(self) -> None:
        self.next = 0
        self.loaded: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        self.loaded.append(self.next)


def meeting() -> Meeting:
    return Meeting(own_run("loop/stateful", rounds=4000, inner=INNER))


def saved_and_named(loop: OwnLoop) -> Callable[[int], bool]:
    """After some steps, two rounds of offers since a save among them."""
    named_after: list[int] = []

    def holds(steps: int) -> bool:
        if loop.island._exchange.learner.saves.newest is not None:
            named_after.append(steps)
        return steps >= 30 and bool(named_after) and steps >= named_after[0] + 2 * loop.run.settings.sync.every

    return holds


def trained(loop: OwnLoop, loader: Counter, enough: int | Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """The batches that were skipped, and those that were trained on, until there are so many."""
    holds = enough if callable(enough) else lambda steps: steps == enough
    skipped: list[int] = []
    done: list[int] = []
    loop.island.resume(loader)
    for number in loader:
        if loop.island.skips(tokens=ROWS):
            skipped.append(number)
            continue
        loss = loop.model(*TinyStream().batch(0, 1, number * ROWS, ROWS))
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        done.append(number)
        loop.island.step(tokens=ROWS, loss=loss)
        if holds(len(done)):
            return skipped, done
    raise AssertionError


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr=lr), lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)],
)
def test_a_restarted_loop_skips_what_was_offered_after_the_state_was_saved(optimizer: Any) -> None:
    run, makes = meeting(), lambda model: optimizer(model.parameters(), lr=0.01)
    first = run.loop(optimizer=makes)
    _, done = trained(first, Counter(), saved_and_named(first))
    assert done == list(range(len(done)))
    first.island.fail(KeyboardInterrupt())
    merged = max(item.data_end for commit in merges(run.store) for item in commit.inputs) // ROWS
    second, loader = run.loop(optimizer=makes), Counter()
    start = second.island.position // ROWS
    assert merged <= start <= len(done)
    skipped, again = trained(second, loader, 5)
    (loaded,) = loader.loaded
    assert 0 < loaded <= start and skipped == list(range(loaded, start)) and again == list(range(start, start + 5))
    second.island.finish(0)


def test_without_a_saved_state_everything_that_was_offered_is_skipped() -> None:
    run = meeting()
    first = run.loop()
    trained(first, Counter(), 6)
    first.island.finish()
    second, loader = run.loop(), Counter()
    skipped, _ = trained(second, loader, 1)
    assert not loader.loaded and skipped == list(range(6))
    second.island.finish(0)


def test_a_loop_that_does_not_resume_its_loader_or_does_not_skip_is_told() -> None:
    run = meeting()
    loop = run.loop()
    loop.train_once()
    with pytest.raises(UsageError, match="no loader was resumed"):
        loop.island.step(tokens=ROWS)
    first = run.loop()
    trained(first, Counter(), 6)
    first.island.finish()
    second = run.loop()
    second.island.resume(Counter())
    second.train_once()
    with pytest.raises(UsageError, match=f"{6 * ROWS} tokens of it are left to skip"):
        second.island.step(tokens=ROWS)


def test_only_stateful_data_has_a_loader_to_resume() -> None:
    loop = Meeting(own_run()).loop()
    with pytest.raises(UsageError, match="has addressed data in this run"):
        loop.island.resume(Counter())
