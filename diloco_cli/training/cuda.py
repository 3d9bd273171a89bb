"""An island with one CUDA device: fragments cross between device and host beside the training, on streams of their own.

    send     a copy on the device, without waiting; the upload lane brings it to the host and encodes it there
    arrive   the follower decodes a version on the host and brings it to the device
    adopt    arithmetic and copies on the device alone

So the training thread waits for the bus in one case only: `rebase` onto a version that comes while an offer is out, as
the base to measure the progress from has left the device by then. Saved moments are copied between two steps. Beside
the model the device holds the values that were sent, and the versions that have arrived, until the next adoption.
"""

from __future__ import annotations

import torch

from diloco_cli.protocol.actors.ports import Moments, Values
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, RunFormat
from diloco_cli.tensors.flat import flatten_into, unflatten
from diloco_cli.tensors.payload import to_bytes
from diloco_cli.training.inner import keeps_moments, moments_of
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire, mixed


class Placed:
    """One fragment's [n] float32 values on the host, on the device, or on both. `stream`: the one that copies them."""

    def __init__(self, stream: torch.cuda.Stream, host: torch.Tensor | None, device: torch.Tensor | None) -> None:
        self._stream, self._host, self._device = stream, host, device
        self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # on the device
        if device is not None:
            self._is_there.record(torch.cuda.current_stream(device.device))

    def upload(self) -> Placed:
        """Start the copy to the device; the first use of the values there waits for it."""
        assert self._host is not None
        with torch.cuda.stream(self._stream):
            self._device = self._host.to(self._stream.device)
            self._is_there.record(self._stream)
        return self

    @property
    def host(self) -> torch.Tensor:
        """The values on the host, for any thread. Waits for their copy, not for later work of the device."""
        if self._host is not None:
            return self._host
        assert self._device is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._is_there)
            found = torch.empty(self._device.shape, pin_memory=True)
            found.copy_(self._device, non_blocking=True)
        self._stream.synchronize()
        return found

    @property
    def device(self) -> torch.Tensor:
        """The values on the device, for the training thread, on its own stream."""
        if self._device is None:
            self.upload()
        assert self._device is not None
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._is_there)
        self._device.record_stream(current)
        return self._device

    def leave_device(self) -> None:
        """Free the device's copy if the host has one: an adopted version is only needed as a base from now on."""
        if self._host is not None:
            self._device = None


class CudaTraining(DeviceTraining):
    """`outward`: the stream on which sent fragments leave the device."""

    def __init__(self, run: RunFormat, replica: Replica, slowdown: float = 1.0) -> None:
        super().__init__(run, replica, slowdown)
        self.outward = torch.cuda.Stream(replica.device)  # type: ignore[no-untyped-call]
        if keeps_moments(replica.optimizer):  # torch keeps freed pinned memory: half a second less at the first save
            _pinned_like([t for t in self._tensors.values() if t.requires_grad for _ in range(2)])

    def read(self, fragment: int) -> Values:
        slots = self.run.layout.fragments[fragment]
        flat = torch.empty(slots.num_parameters, device=self.replica.device)
        flatten_into(flat, slots, self._tensors)
        return Placed(self.outward, None, flat)

    def write(self, fragment: int, values: Values) -> None:
        unflatten(self.run.layout.fragments[fragment], values.device, self._tensors)
        values.leave_device()

    def save(self) -> Moments | None:
        """Order the copies between two steps; only the lane that encodes them waits for them."""
        tensors = moments_of(self.replica.model, self.replica.optimizer)
        if tensors is None:
            return None
        copies = dict(zip(tensors, _pinned_like(list(tensors.values())), strict=True))
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.replica.device))

        def encode() -> bytes:
            copied.synchronize()
            return to_bytes(copies)

        return Moments(int(tensors["step"][0]), encode)


class CudaWire(TensorWire):
    """`Values` are `Placed`, as in `CudaTraining`."""

    def __init__(self, run: RunFormat, device: torch.device) -> None:
        super().__init__(run)
        self._inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def encode(self, fragment: int, seq: int, applied: int | None, base: Values, values: Values) -> bytes:
        return super().encode(fragment, seq, applied, base.host, values.host)

    def decode(self, output: FragmentVersion, data: bytes) -> Values:
        return Placed(self._inward, super().decode(output, data), None).upload()

    def mix(self, mixing: Mixing, merged: Values, own: Values, reference: Values | None) -> Values:
        against = None if reference is None else reference.device
        found = Placed(self._inward, None, mixed(mixing, merged.device, own.device, against, self._blend))
        for placed in (merged, reference):
            if placed is not None:
                placed.leave_device()
        return found


def _pinned_like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """float32 on the host (a step count as it is), for copies that a device makes by itself."""
    types = [tensor.dtype if tensor.dtype == torch.int64 else torch.float32 for tensor in tensors]
    return [torch.empty(t.shape, dtype=dtype, pin_memory=True) for t, dtype in zip(tensors, types, strict=True)]
