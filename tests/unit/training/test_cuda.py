"""An island with one CUDA device does what one without does, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.protocol.actors.fragments import Fragments
from diloco_cli.protocol.actors.ports import Progression
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, RunFormat
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.cuda import CudaTraining, CudaWire, Placed
from diloco_cli.training.inner import inner_state
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire
from tests.numerics.harness import make_run
from tests.numerics.tiny import ROWS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
AT = Progression(0.5, 3, False)


def run_of(**sync: Any) -> RunFormat:
    settings = replace(SyncSettings(every=4, fragments=2), codec="fp32", weights_codec="fp32", blend=0.25, **sync)
    run = make_run(1, 4, settings, OuterSettings(), InnerSettings(clip_norm=0.0))
    model = replace(run.settings.model, entrypoint="tests.numerics.tiny:regression")
    train = replace(run.settings.train, precision="fp32")
    return replace(run, settings=replace(run.settings, model=model, train=train))


class CudaDevice:
    """A learner's fragments on a device; their own values are read back by the wire that sends them."""

    def __init__(self, run: RunFormat, device: str) -> None:
        at = torch.device(device)
        replica = Replica(run.settings, build_model(run.settings).to(at), build_data(run.settings), 0, 1, at)
        self.run, self.on_cuda = run, device == "cuda"
        self.training = CudaTraining(run, replica) if self.on_cuda else DeviceTraining(run, replica)
        self.wire = CudaWire(run, at) if self.on_cuda else TensorWire(run)
        self.fragments = Fragments(self.training, self.wire)

    def version(self, fragment: int, value: float) -> Any:
        size = self.run.layout.fragments[fragment].num_parameters
        data = TensorWire(self.run)._weights_codec.to_bytes(torch.linspace(-value, value, size))
        return self.wire.decode(FragmentVersion(fragment, 1, 0, 1, "", ""), data)

    def parameters(self, fragment: int) -> torch.Tensor:
        values = self.training.read(fragment)
        return values.host if isinstance(values, Placed) else values

    def move(self, by: float) -> None:
        with torch.no_grad():
            for tensor in self.training.replica.tensors.values():
                tensor.add_(by)


@pytest.mark.parametrize("mixing", ["replace", "blend", "rebase"])
@pytest.mark.parametrize("knows", [True, False])
def test_what_is_sent_and_adopted_is_the_same_bit_for_bit(mixing: Mixing, knows: bool) -> None:
    found = []
    for device in (CudaDevice(run_of(), name) for name in ("cpu", "cuda")):
        payloads = []
        for fragment in (0, 1):
            device.fragments.begin(fragment, device.version(fragment, 1.0))
        for seq, fragment in enumerate((0, 1, 0)):
            device.move(0.1)
            values = device.fragments.send(fragment, seq, keep=True)
            device.move(0.01)  # after the send: none of it is in the payload
            payloads.append(device.wire.encode(fragment, seq, None, device.fragments.bases[fragment], values))
            device.fragments.adopt(fragment, device.version(fragment, 1.0 / (2 + seq)), mixing, seq if knows else None)
        device.fragments.go_back(1)
        found.append((payloads, [device.parameters(fragment) for fragment in (0, 1)]))
    (on_cpu, before), (on_cuda, after) = found
    assert on_cpu == on_cuda and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_base_is_on_the_host_alone_and_what_was_sent_on_the_device_alone() -> None:
    device = CudaDevice(run_of(), "cuda")
    device.fragments.begin(0, device.version(0, 1.0))
    sent = device.fragments.send(0, 0, keep=True)
    device.fragments.adopt(0, device.version(0, 2.0), "rebase", 0)
    base = device.fragments.bases[0]
    assert base._device is None and base._host is not None and sent._host is None


def test_saved_moments_are_those_of_the_step_after_which_they_were_saved() -> None:
    saved = []
    for device in (CudaDevice(run_of(), name) for name in ("cpu", "cuda")):
        assert device.training.save() is None
        device.training.train(0, ROWS, AT)
        moments = device.training.save()
        assert moments is not None and moments.step == 1
        before = moments.encode() if not device.on_cuda else b""
        device.training.train(ROWS, ROWS, AT)
        data = moments.encode()
        assert not before or data == before
        assert device.training.restore(data)
        saved.append({name: t.cpu() for name, t in _moments(device).items()})
    for name, tensor in saved[0].items():
        torch.testing.assert_close(tensor, saved[1][name])


def _moments(device: CudaDevice) -> dict[str, torch.Tensor]:
    found = inner_state(device.training.replica.model, device.training.replica.optimizer)
    assert found is not None
    return found
