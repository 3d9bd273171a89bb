"""An island with one CUDA device: fragments cross between device and host beside the training, on streams of their own.

    send     a copy on the device, without waiting; the upload lane brings it to the host and encodes it there
    begin    versions stay on the host; each is on the device while it is written
    arrive   the follower decodes a version on the host and brings it to the device, with the base that it replaces
    adopt    arithmetic and copies on the device alone
    save     moments leave the device during the next step, which waits for them, on the device, before it changes them

The training thread waits for the device once a step, where it reads the loss and the norm of the gradients (and for the
optimizer's count of steps, where moments are saved), and never for the bus. Beside the model the device holds the
values that were sent, and the versions that have arrived and their bases, until the next adoption; the host holds the
bases, and pinned buffers of the largest fragment's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diloco_cli.protocol.actors.ports import Moments, Values
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, RunFormat
from diloco_cli.tensors.flat import flatten_into, unflatten
from diloco_cli.tensors.payload import to_bytes
from diloco_cli.training.inner import keeps_moments, moments_of
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.streams import Accelerator, Copies, Cuda, DeviceEvent
from diloco_cli.training.wire import TensorWire, mixed


class Placed:
    """One fragment's [n] float32 values on the host, on the device, or on both. `copies`: what moves them."""

    def __init__(self, copies: Copies, host: torch.Tensor | None, device: torch.Tensor | None) -> None:
        self._copies, self._host = copies, host
        self._there: tuple[torch.Tensor, DeviceEvent] | None = None if device is None else (device, copies.now())

    def upload(self) -> Placed:
        """Start the copy to the device, if there is none; the first use of the values there waits for it."""
        if self._there is None:
            assert self._host is not None
            self._there = self._copies.to_device(self._host)
        return self

    @contextmanager
    def on_host(self) -> Iterator[torch.Tensor]:
        """The values on the host, for any thread and for reading. Waits for their copy, not for later work of the
        device."""
        if self._host is not None:
            yield self._host
            return
        there = self._there
        assert there is not None
        with self._copies.on_host(*there) as host:
            yield host

    @property
    def device(self) -> torch.Tensor:
        """The values on the device, for the training thread, on its own stream."""
        there = self._there  # the follower may bring them there meanwhile: then twice
        if there is None:
            assert self._host is not None
            there = self._there = self._copies.to_device(self._host)
        return self._copies.use(*there)

    def leave_device(self) -> None:
        """Free the device's copy if the host has one: an adopted version is only needed as a base from now on."""
        if self._host is not None:
            self._there = None


class CudaTraining(DeviceTraining):
    """`accelerator`: None: CUDA."""

    def __init__(
        self, run: RunFormat, replica: Replica, slowdown: float = 1.0, accelerator: Accelerator | None = None
    ) -> None:
        super().__init__(run, replica, slowdown)
        self._outward = Copies(accelerator or Cuda(replica.device), replica.device, largest(run))
        self._leaving = LeavingMoments(self._outward, replica)

    def read(self, fragment: int) -> Values:
        slots = self.run.layout.fragments[fragment]
        flat = torch.empty(slots.num_parameters, device=self.replica.device)
        flatten_into(flat, slots, self._tensors)
        return Placed(self._outward, None, flat)

    def write(self, fragment: int, values: Values) -> None:
        unflatten(self.run.layout.fragments[fragment], values.device, self._tensors)
        values.leave_device()

    def save(self) -> Moments | None:
        return self._leaving.save()


class LeavingMoments:
    """AdamW's moments on their way from a device to the host, beside the training: the lane that encodes them waits for
    the copies, and on the device the next change of them does."""

    def __init__(self, copies: Copies, replica: Replica) -> None:
        self._copies, self._replica = copies, replica
        self._left: DeviceEvent | None = None
        replica.before_update = self._wait
        if keeps_moments(replica.optimizer):  # torch keeps freed pinned memory: half a second less at the first save
            trained = {n: t for n, t in replica.tensors.items() if t.requires_grad}
            self._pinned_like(trained)
            self._pinned_like({f"2.{n}": t for n, t in trained.items()})

    def save(self) -> Moments | None:
        """Orders the copies; None if there is nothing to save."""
        tensors = moments_of(self._replica.model, self._replica.optimizer)
        if tensors is None:
            return None
        into = self._pinned_like(tensors)
        copied = self._left = self._copies.after(self._copies.now(), tensors, into)

        def encode() -> bytes:
            copied.synchronize()
            return to_bytes(into)

        return Moments(int(tensors["step"][0]), encode)

    def _wait(self) -> None:
        """The device does not change moments that are being saved."""
        if self._left is not None:
            self._copies.accelerator.current().wait_event(self._left)
            self._left = None

    def _pinned_like(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """float32 on the host (a step count as it is), for copies that a device makes by itself."""
        pinned = self._copies.accelerator.pinned
        return {
            name: torch.empty_like(t) if t.dtype == torch.int64 else pinned(t.numel()).view(t.shape)
            for name, t in tensors.items()
        }


class CudaWire(TensorWire):
    """`Values` are `Placed`, as in `CudaTraining`."""

    def __init__(self, run: RunFormat, device: torch.device, accelerator: Accelerator | None = None) -> None:
        super().__init__(run)
        self._inward = Copies(accelerator or Cuda(device), device, largest(run))
        self._rebases = run.settings.sync.mixing in ("rebase", "adaptive")
        self._decoded: dict[int, Placed] = {}

    def encode(self, fragment: int, seq: int, applied: int | None, base: Values, values: Values) -> bytes:
        with base.on_host() as before, values.on_host() as after:
            return super().encode(fragment, seq, applied, before, after)

    def decode(self, output: FragmentVersion, data: bytes) -> Values:
        placed = Placed(self._inward, super().decode(output, data), None)
        base, self._decoded[output.fragment] = self._decoded.get(output.fragment), placed
        if base is not None:  # else it is what the learner begins with: all fragments arrive before one is written
            placed.upload()
            if self._rebases:
                base.upload()  # the progress that is kept may have to be measured from there
        return placed

    def mix(self, mixing: Mixing, merged: Values, own: Values, reference: Values | None, last: bool = False) -> Values:
        against, mine = None if reference is None else reference.device, own.device
        into = mine if last else None
        found = Placed(self._inward, None, mixed(mixing, merged.device, mine, against, self._blend, into))
        for placed in (merged, reference) if last else ():  # each mix would bring them there again
            if placed is not None:
                placed.leave_device()
        return found


def largest(run: RunFormat) -> int:
    """Elements of the largest fragment."""
    return max(fragment.num_parameters for fragment in run.layout.fragments)
