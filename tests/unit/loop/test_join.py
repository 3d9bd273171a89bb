"""`join`: who is admitted, and what is refused before anything is trained."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from diloco_cli import join
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.runtime.daemon import perform
from diloco_cli.tasks.build import build_model
from tests.numerics.harness import CLOCK
from tests.numerics.own_loops import Meeting, own_run
from tests.numerics.tiny import ROWS, Slope

ROOM = {"rounds": 400}


def with_shards(count: int) -> Meeting:
    run = own_run(**ROOM)
    return Meeting(replace(run, settings=replace(run.settings, data=replace(run.settings.data, shards=count))))


def test_the_package_imports_no_torch_until_join_is_asked_for() -> None:
    code = "import sys, diloco_cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError):
        from diloco_cli import no_such_name  # noqa: F401


def test_an_island_that_the_run_does_not_know_is_admitted_with_its_class_of_data() -> None:
    meeting = with_shards(3)
    island = meeting.loop("guest", batch_tokens=2 * ROWS).island
    assert (island.data, island.shard, island.num_shards) == ("external", 1, 3)
    member = perform(read_log(meeting.run), meeting.store, CLOCK).members[0]
    assert (member.name, member.infra, member.batch_tokens) == ("guest", "loop/external", 2 * ROWS)
    island.finish(0)
    again = meeting.loop("guest").island
    assert (again.data, again.shard) == ("external", 1)
    again.finish(0)
    full = meeting.loop("other", data="addressed").island
    assert full.data == "addressed"
    with pytest.raises(UsageError, match="the data has 3 shards"):
        meeting.loop("more")
    full.finish(0)


def test_a_model_of_another_layout_is_refused() -> None:
    meeting, other = Meeting(own_run(**ROOM)), Slope()
    with pytest.raises(UsageError, match=r"run.s: a is missing in the run and \[3\] here; 5 more differ"):
        join(meeting.url, name="l0", model=other, optimizer=torch.optim.AdamW(other.parameters()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    meeting = Meeting(own_run(**ROOM))
    model, other = (build_model(meeting.run.settings) for _ in range(2))
    with pytest.raises(UsageError, match="does not hold 4 of the model's parameters, among them first"):
        join(meeting.url, name="l0", model=model, optimizer=torch.optim.AdamW(other.parameters()))


def test_another_class_of_data_than_the_runs_is_refused() -> None:
    meeting = Meeting(own_run(**ROOM))
    with pytest.raises(UsageError, match="data='addressed' in run tiny, not 'external'"):
        meeting.loop(data="external")
    with pytest.raises(UsageError, match="must be one of addressed, stateful, external, not 'adressed'"):
        meeting.loop(data="adressed")


def test_an_island_of_diloco_learner_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trained by diloco learner \(infra: local\)") as caught:
        Meeting(own_run("local", **ROOM)).loop()
    assert "hint: " in caught.value.__notes__[0]


@pytest.mark.parametrize("run", ["memory://nothing-here", "file:///nothing/here"])
def test_a_run_that_is_not_there_is_said(run: str) -> None:
    model = Slope()
    with pytest.raises(NotFoundError, match=f"no run at {run}") as caught:
        join(run, name="a", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert "diloco runs" in caught.value.__notes__[0]


def test_state_that_is_not_saved_is_said_and_lost_on_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    meeting = Meeting(own_run(**ROOM, inner=InnerSettings(lr=0.01, save_every=1)))
    with caplog.at_level(logging.WARNING, "diloco"):
        first = meeting.loop(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    assert "the state of SGD is not saved" in caplog.text and not first.island.moments_lost
    for _ in range(12):
        first.step()
    first.island.finish()
    second = meeting.loop(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    assert second.island.moments_lost
    second.island.finish(0)
