"""One device's training port: what a step says and takes, and how a fragment is read and written."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.protocol.actors.ports import Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.replica import DeviceTraining, Replica
from tests.numerics.harness import make_run
from tests.numerics.tiny import ROWS

AT = Progression(0.5, 3, False)


def port(model: str = "tiny:regression", slowdown: float = 1.0, inner: InnerSettings | None = None) -> DeviceTraining:
    run = make_run(1, 4, SyncSettings(every=4, fragments=2), OuterSettings(), inner or InnerSettings())
    settings = replace(run.settings, model=replace(run.settings.model, entrypoint=f"tests.numerics.{model}"))
    replica = Replica(settings, build_model(settings), build_data(settings), 0, 1)
    return DeviceTraining(run, replica, slowdown)


def performed(training: DeviceTraining, step_s: float, woken_after_s: float | None = None) -> tuple[Stepped, float]:
    """What a step gives and how long it takes, if the device needs `step_s`; news may end each sleep sooner."""
    now_s, asked, answer = 0.0, 0, None
    steps = training.step(0, ROWS, AT)
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            return stop.value, now_s
        if isinstance(operation, Now):
            now_s += step_s if asked == 1 else 0.0
            asked, answer = asked + 1, now_s
        else:
            assert isinstance(operation, Sleep)
            now_s, answer = now_s + min(operation.seconds, woken_after_s or operation.seconds), None


def test_a_step_tells_its_tokens_and_the_loss_before_it() -> None:
    training = port()
    x, y = training.replica.data.batch(0, 1, 0, ROWS)
    expected = float(training.replica.model(x, y).detach())
    done, _ = performed(training, 0.0)
    assert (done.tokens, done.loss) == (ROWS, pytest.approx(expected))


@pytest.mark.parametrize("woken_after_s", [None, 0.3])
def test_an_emulated_slower_island_takes_so_many_times_as_long_whatever_wakes_it(woken_after_s: float | None) -> None:
    _, seconds = performed(port(slowdown=3.0), 2.0, woken_after_s)
    assert seconds == pytest.approx(6.0)


def test_an_island_as_it_is_does_not_sleep() -> None:
    assert list(port().step(0, ROWS, AT)) == [Now()]


def test_a_loss_that_is_not_finite_ends_the_run_and_changes_nothing() -> None:
    training = port("loud:not_a_number")
    before = training.read(0)
    with pytest.raises(RunFailedError, match="the loss is nan at token 8 of shard 0"):
        training.train(8, ROWS, AT)
    assert torch.equal(training.read(0), before)


def test_what_is_read_is_a_copy_and_what_is_written_is_read() -> None:
    training = port()
    values, other = training.read(0), training.read(1)
    training.write(0, torch.full_like(values, 2.0))
    assert not torch.equal(values, training.read(0)) and set(training.read(0).tolist()) == {2.0}
    assert torch.equal(training.read(1), other)
    assert values.dtype == torch.float32 and values.shape == (training.run.layout.fragments[0].num_parameters,)


def test_moments_are_saved_as_they_were_and_restored_into_another() -> None:
    first, second = port(), port()
    assert first.save() is None, "no step yet"
    first.train(0, ROWS, AT)
    saved = first.save()
    assert saved is not None and saved.step == 1
    data = saved.encode()
    first.train(ROWS, ROWS, AT)
    assert saved.encode() == data, "they are encoded behind the training"
    assert second.restore(data) and not second.restore(b"something else")
    again = second.save()
    assert again is not None and again.encode() == data
    assert second.reset() and second.save() is None


def test_plain_sgd_has_no_moments_to_lose() -> None:
    training = port(inner=InnerSettings(name="sgd"))
    training.train(0, ROWS, AT)
    assert training.save() is None and not training.reset()
