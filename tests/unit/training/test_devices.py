"""Which device a name means, and which names are refused.

An island with one CUDA device does what one without does, bit for bit, and its training thread waits for no copy.

Where there is no such device the same path runs on the CPU, with an accelerator whose copies take as long as a test
says (slow_device.py).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import catalogue, find_device
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.new_run import with_buffers_of
from diloco_cli.plan.memory import Precision, computes_in_half
from diloco_cli.protocol.actors.learner import Fragments, Progression
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, RunFormat
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.merge import WeightsFormat
from diloco_cli.training.devices import Copies, CudaTraining, CudaWire, Placed, choose_device, host_threads, kind_of
from diloco_cli.training.inner import moments_of, runs_in_bf16
from diloco_cli.training.replica import DeviceTraining, Pinned, Replica
from diloco_cli.training.wire import TensorWire
from tests.numerics.harness import make_run
from tests.numerics.tiny import ROWS
from tests.unit.training.slow_device import SlowDevice


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cpu", "cpu"), ("CPU:0", "cpu"), ("mps", "mps"), ("Apple-M4-Max", "mps")]
    + [(name, "cuda") for name in ("cuda", "cuda:3", "H100", "h100-80gb", "MI300X")],
)
def test_devices_are_known_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", ["TPU-v5p", "Trainium2", "Gaudi3"])
def test_what_torch_alone_does_not_drive_is_refused_with_the_reason(name: str) -> None:
    reason = rf"{name} is one of torch's (xla|neuron|hpu) devices, .* allowed: cpu, mps, cuda"
    with pytest.raises(UsageError, match=reason) as refused:
        choose_device(name)
    assert "--device cpu" in (refused.value.hint or "")


@pytest.mark.parametrize("name", ["xla", "tpu", "H1000", "cuda:x", "cpux", "vulkan"])
def test_what_is_unknown_is_refused_and_never_taken_for_cuda(name: str) -> None:
    with pytest.raises(UsageError, match=r"no device .* allowed: cpu, mps, cuda"):
        choose_device(name)


def test_every_device_of_the_catalogue_is_of_a_kind_or_refused() -> None:
    for name in catalogue().devices:
        if name.startswith(("TPU", "Trainium", "Gaudi")):
            with pytest.raises(UsageError, match="on which learners do not train"):
                kind_of(name)
        else:
            assert kind_of(name) == ("mps" if name.startswith("Apple") else "cuda")


def test_a_device_that_torch_does_not_see_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"H100 needs cuda, which torch .* does not see"):
        choose_device("H100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("H100") == torch.device("cuda:0") and choose_device("cuda:1") == torch.device("cuda:1")


def test_codecs_beside_accelerators_share_the_hosts_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, devices, threads in [(2, 0, 2), (64, 8, 8), (96, 1, 16), (4, 8, 1)]:
        monkeypatch.setattr("diloco_cli.training.devices.usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        assert host_threads() == threads


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize(("name", "capability"), [("cpu", None), ("T4", (7, 5)), ("H100", (9, 0))])
def test_plan_and_learner_compute_in_the_same_type(
    name: str, capability: tuple[int, int] | None, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cpu" if capability is None else "cuda:0")
    assert runs_in_bf16(precision, device) == computes_in_half(find_device(name, {}), precision)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize("accelerator", ["slow", pytest.param("cuda", marks=needs_cuda)])
AT = Progression(0.5, 3, False)


def run_of(model: str = "regression", **sync: Any) -> RunFormat:
    settings = replace(SyncSettings(every=4, fragments=2), codec="fp32", weights_codec="fp32", **sync)
    run = make_run(1, 4, settings, OuterSettings(), InnerSettings(clip_norm=0.0), model)
    train = replace(run.settings.train, precision="fp32")
    return with_buffers_of(replace(run, settings=replace(run.settings, train=train)), None)


class CudaDevice:
    """A learner's fragments on a device; their own values are read back by the wire that sends them."""

    def __init__(self, run: RunFormat, kind: str) -> None:
        at = torch.device("cuda" if kind == "cuda" else "cpu")
        replica = Replica(run.settings, build_model(run.settings).to(at), build_data(run.settings), 0, 1, at)
        self.run, self.on_cuda, self.slow = run, kind != "cpu", SlowDevice()
        accelerator = self.slow if kind == "slow" else None
        self.training = CudaTraining(run, replica, 1.0, accelerator) if self.on_cuda else DeviceTraining(run, replica)
        self.wire = CudaWire(run, at, accelerator) if self.on_cuda else TensorWire(run)
        self.fragments = Fragments(self.training, self.wire)

    def version(self, fragment: int, value: float) -> Any:
        slots = self.run.layout.fragments[fragment]
        version = {"parameters": torch.linspace(-value, value, slots.num_parameters)}
        if slots.buffers:
            version["buffers"] = torch.full((slots.buffer_bytes,), int(8 * value), dtype=torch.uint8)
        data = WeightsFormat(codec(self.run.settings.sync.weights_codec), slots).to_bytes(version)
        return self.wire.decode(FragmentVersion(fragment, 1, 0, 1, "", ""), data)

    def parameters(self, fragment: int) -> torch.Tensor:
        values = self.training.read(fragment)
        if not isinstance(values, Placed):
            return values
        with values.on_host() as host:
            return host.clone()

    def move(self, by: float) -> None:
        with torch.no_grad():
            for tensor in self.training.replica.tensors.values():
                tensor.add_(by if tensor.is_floating_point() else 1)


@everywhere
@pytest.mark.parametrize("mixing", ["replace", "rebase"])
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("model", ["regression", "normalised"])
def test_what_is_sent_and_adopted_is_the_same_bit_for_bit(
    mixing: Mixing, knows: bool, accelerator: str, model: str
) -> None:
    found = []
    for device in (CudaDevice(run_of(model), name) for name in ("cpu", accelerator)):
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
        found.append((payloads, [device.parameters(fragment).view(torch.int32) for fragment in (0, 1)]))
    (on_cpu, before), (on_cuda, after) = found
    assert on_cpu == on_cuda and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@everywhere
def test_a_base_is_on_the_host_alone_and_what_was_sent_on_the_device_alone(accelerator: str) -> None:
    device = CudaDevice(run_of(), accelerator)
    device.fragments.begin(0, device.version(0, 1.0))
    sent = device.fragments.send(0, 0, keep=True)
    device.fragments.adopt(0, device.version(0, 2.0), "rebase", 0)
    base = device.fragments.bases[0]
    assert base._there is None and base._host is not None and sent._host is None


def test_at_the_start_one_fragment_at_a_time_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[weakref.ref[torch.Tensor]] = []
    most = 0
    to_device = Copies.to_device

    def noted(copies: Copies, values: torch.Tensor) -> Any:
        nonlocal most
        there, ready = to_device(copies, values)
        uploaded.append(weakref.ref(there))
        most = max(most, sum(tensor() is not None for tensor in uploaded))
        return there, ready

    monkeypatch.setattr(Copies, "to_device", noted)
    device = CudaDevice(run_of(), "slow")
    versions = [device.version(fragment, 1.0) for fragment in (0, 1)]
    assert not uploaded
    for fragment, version in enumerate(versions):
        device.fragments.begin(fragment, version)
    assert most == 1 and len(uploaded) == 2
    assert all(tensor() is None for tensor in uploaded), "bases are on the host"


def test_an_adoption_brings_no_version_to_the_device_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many values sent it moves: the training thread would wait for each copy into a pinned buffer."""
    device, brought = CudaDevice(run_of(mixing="rebase"), "slow"), []
    device.fragments.begin(0, device.version(0, 1.0))
    for seq in range(3):
        device.fragments.send(0, seq, keep=True)
    merged, to_device = device.version(0, 2.0), Copies.to_device
    monkeypatch.setattr(Copies, "to_device", lambda self, values: brought.append(1) or to_device(self, values))
    device.fragments.adopt(0, merged, "rebase", None)
    assert len(brought) == 0


@everywhere
def test_saved_moments_are_those_of_the_step_after_which_they_were_saved(accelerator: str) -> None:
    saved = []
    for device in (CudaDevice(run_of(), name) for name in ("cpu", accelerator)):
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


def test_training_goes_on_while_a_copy_takes_as_long_as_it_likes() -> None:
    """Sent, adopted (a version, and onto an older base) and saved, while no copy ever ends."""
    device = CudaDevice(run_of(mixing="rebase"), "slow")
    for fragment in (0, 1):
        device.fragments.begin(fragment, device.version(fragment, 1.0))
    device.training.train(0, ROWS, AT)
    expected = [TensorWire.encode(device.wire, 0, 0, None, _on_host(device.fragments.bases[0]), device.parameters(0))]
    device.slow.copies_end.clear()
    payloads: list[bytes] = []
    base, values = device.fragments.bases[0], device.fragments.send(0, 0, keep=True)
    lane = threading.Thread(target=lambda: payloads.append(device.wire.encode(0, 0, None, base, values)))
    lane.start()
    saved = device.training.save()
    for step in range(1, 4):
        device.fragments.adopt(step % 2, device.version(step % 2, 1.0 / step), "rebase", None)
        device.training.train(step * ROWS, ROWS, AT)
    assert not payloads and saved is not None, "all that was trained before the copy's end"
    device.slow.copies_end.set()
    lane.join(10)
    assert payloads == expected, "the fragment as it was sent"
    assert saved.encode() and set(device.slow.waited) <= {lane.ident, threading.get_ident()}
    assert device.slow.waited.count(threading.get_ident()) == 2, "this thread waited where it read and encoded alone"


def test_a_step_that_changes_moments_waits_on_the_device_for_those_that_are_saved() -> None:
    device = CudaDevice(run_of(), "slow")
    device.training.train(0, ROWS, AT)
    device.slow.main.waits_for.clear()
    assert device.training.save() is not None
    device.training.train(ROWS, ROWS, AT)
    device.training.train(2 * ROWS, ROWS, AT)
    assert len(device.slow.main.waits_for) == 1


def test_buffers_are_pinned_once_and_used_again() -> None:
    device = CudaDevice(run_of(), "slow")
    device.slow.num_pinned = 0
    for n in range(6):
        for fragment in (0, 1):
            if n == 0:
                device.fragments.begin(fragment, device.version(fragment, 1.0))
            values = device.fragments.send(fragment, n, keep=False)
            device.wire.encode(fragment, n, None, device.fragments.bases[fragment], values)
            device.fragments.adopt(fragment, device.version(fragment, 1.0 + n), "replace", None)
    assert device.slow.num_pinned == 2, "one each way"


def test_a_buffer_is_used_again_once_its_copy_has_ended() -> None:
    device = CudaDevice(run_of(), "slow")
    device.version(0, 0.5)  # what it begins with stays on the host
    device.slow.copies_end.clear()
    device.slow.num_pinned = 0
    versions = [device.version(0, value) for value in (1.0, 2.0)]
    assert device.slow.num_pinned == len(versions), "no copy has ended"
    device.slow.copies_end.set()
    device.version(0, 3.0)
    assert device.slow.num_pinned == len(versions)


@pytest.mark.parametrize(("mixing", "comes"), [("rebase", True), ("replace", False)])
def test_a_version_comes_with_its_base_where_progress_may_be_measured_from_there(mixing: str, comes: bool) -> None:
    device = CudaDevice(run_of(mixing=mixing), "slow")
    device.fragments.begin(0, device.version(0, 1.0))
    base = device.fragments.bases[0]
    assert base._there is None
    device.version(0, 2.0)
    assert (base._there is not None) is comes


class Reads(TorchDispatchMode):
    """Counts numbers that are read from tensors one by one: on a device each is a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batch_tokens", [None, 1])
def test_a_step_reads_loss_and_norm_at_once_and_nothing_else(micro_batch_tokens: int | None) -> None:
    device = CudaDevice(run_of(), "slow")
    device.training.replica.micro_batch_tokens = micro_batch_tokens
    device.training.train(0, ROWS, AT)
    with Reads() as reads:
        device.training.train(ROWS, ROWS, AT)
        assert reads.count == 0
        float(torch.ones(1))
    assert reads.count == 1, "it can be seen"


@needs_cuda
def test_a_step_waits_for_the_device_once() -> None:
    device = CudaDevice(run_of(), "cuda")
    device.training.replica.data = Pinned(device.training.replica.data)
    for step in range(3):
        device.training.train(step * ROWS, ROWS, AT)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            device.training.train(3 * ROWS, ROWS, AT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchroniz" in str(wait.message)]) == 1


def _on_host(values: Any) -> torch.Tensor:
    with values.on_host() as host:
        return host.clone()


def _moments(device: CudaDevice) -> dict[str, torch.Tensor]:
    found = moments_of(device.training.replica.model, device.training.replica.optimizer)
    assert found is not None
    return {name: tensor.clone().cpu() for name, tensor in found.items()}
