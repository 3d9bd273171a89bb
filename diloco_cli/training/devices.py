"""Devices: from an accelerator's name to torch's device, copies between device and host beside the training, and an
island with one CUDA device.

Copies know an accelerator by a few verbs (`Accelerator`), so that their order is tested on a machine that has none.
With CUDA, fragments cross beside the training, on streams of their own:

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

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from diloco_cli.config.hardware import BACKENDS, find_device
from diloco_cli.errors import UsageError
from diloco_cli.protocol.actors.learner import Moments, Values
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, RunFormat
from diloco_cli.runtime.processes import usable_cores
from diloco_cli.tensors.flat import flatten_into, unflatten
from diloco_cli.tensors.payload import to_bytes
from diloco_cli.training.inner import moment_names, moments_of, step_of
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire, mixed

ALLOWED = "cpu, mps, cuda, cuda:N, or the name of an NVIDIA, AMD or Apple device of the catalogue"
MOST_THREADS = 16  # codecs are bound by memory: more gain nothing


def choose_device(accelerator: str) -> torch.device:
    """By name: cpu, mps, cuda, or a device of the catalogue. Raises UsageError for another, and for one that torch
    does not see on this machine."""
    wanted = kind_of(accelerator)
    if wanted == "cpu":
        return torch.device("cpu")
    available = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if not available[wanted]:
        raise UsageError(
            f"{accelerator} needs {wanted}, which torch {torch.__version__} does not see on this machine",
            hint="run the island where the accelerator is, or give --device cpu",
        )
    if wanted == "mps":
        return torch.device("mps")
    index = accelerator.lower().partition("cuda:")[2]  # a device without an index cannot be made the current one
    return torch.device("cuda", int(index or 0))


def refuse_few(ranks: int) -> None:
    """Raises UsageError if this machine has fewer CUDA devices than ranks that are to run on it."""
    there = torch.cuda.device_count()
    if ranks > there:
        raise UsageError(
            f"{ranks} ranks on this machine need as many devices; torch sees {there}",
            hint="start fewer ranks here, or run the island where its accelerators are",
        )


def kind_of(accelerator: str) -> str:
    """cpu, mps or cuda, which AMD's devices are too. Raises UsageError for any other."""
    kind, _, index = accelerator.lower().partition(":")
    if kind in ("cpu", "mps", "cuda") and (not index or index.isdigit()):
        return kind
    try:
        backend = find_device(accelerator, {}).backend
    except UsageError:
        raise UsageError(
            f"no device {accelerator!r} is known here; allowed: {ALLOWED}",
            hint="a device that your inventory describes itself: start its learner with --device cuda (or cpu, mps)",
        ) from None
    if backend not in BACKENDS:
        raise UsageError(
            f"{accelerator} is one of torch's {backend} devices, on which learners do not train; allowed: {ALLOWED}",
            hint="such devices can be planned, not launched; for a trial give --device cpu",
        )
    return backend


def host_threads() -> int:
    """Threads for codecs and mixing beside an accelerator: its share of the host's cores, which it leaves idle."""
    return max(1, min(MOST_THREADS, usable_cores() // max(1, torch.cuda.device_count())))


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class DeviceStream(Protocol):
    """Work of the device in its order. What it waits for is waited for on the device, not by the calling thread."""

    def wait_event(self, event: Any) -> None: ...


class Accelerator(Protocol):
    """`pinned`: [n] float32 on the host, which the device copies to and from by itself."""

    def stream(self) -> DeviceStream: ...

    def current(self) -> DeviceStream: ...

    def event(self) -> DeviceEvent: ...

    def within(self, stream: Any) -> AbstractContextManager[object]: ...

    def pinned(self, size: int) -> torch.Tensor: ...


class Cuda:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def within(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, pin_memory=True)


class Copies:
    """Copies one way or the other, on a stream of their own. `size`: elements of the largest; a buffer holds that, and
    there are as many buffers as copies at once. May be used by any thread; what waits says so."""

    def __init__(self, accelerator: Accelerator, device: torch.device, size: int) -> None:
        self.accelerator, self.device, self._size = accelerator, device, size
        self._stream = accelerator.stream()
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, DeviceEvent | None]] = []

    def now(self) -> DeviceEvent:
        """The present end of the calling thread's own work on the device."""
        event = self.accelerator.event()
        event.record(self.accelerator.current())
        return event

    @contextmanager
    def on_host(self, values: torch.Tensor, ready: DeviceEvent) -> Iterator[torch.Tensor]:
        """The device's values, once it has reached `ready`; waits for their copy, and for no later work."""
        buffer = self._take()
        with self.accelerator.within(self._stream):
            self._stream.wait_event(ready)
            buffer[: values.numel()].copy_(values, non_blocking=True)
            copied = self.accelerator.event()
            copied.record(self._stream)
        copied.synchronize()
        try:
            yield buffer[: values.numel()]
        finally:
            self._give_back(buffer, None)

    def to_device(self, values: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """[n] float32 on the host -> the same on the device, from the event on. Waits for nothing."""
        buffer = self._take()
        buffer[: values.numel()].copy_(values)
        with self.accelerator.within(self._stream):
            there = torch.empty(values.numel(), device=self.device)
            there.copy_(buffer[: values.numel()], non_blocking=True)
            copied = self.accelerator.event()
            copied.record(self._stream)
        self._give_back(buffer, copied)
        return there, copied

    def use(self, values: torch.Tensor, ready: DeviceEvent) -> torch.Tensor:
        """The device's values for the calling thread's own work there, which waits for them, not the thread."""
        current = self.accelerator.current()
        current.wait_event(ready)
        if values.is_cuda:
            values.record_stream(current)  # type: ignore[arg-type]
        return values

    def after(self, ready: DeviceEvent, tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> DeviceEvent:
        """Copy each tensor after `ready`; they must stay as they are until the event that is returned."""
        with self.accelerator.within(self._stream):
            self._stream.wait_event(ready)
            for name, tensor in tensors.items():
                into[name].copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)  # type: ignore[arg-type]
            copied = self.accelerator.event()
            copied.record(self._stream)
        return copied

    def _take(self) -> torch.Tensor:
        """A buffer that no copy uses."""
        with self._lock:
            for place, (buffer, copied) in enumerate(self._free):
                if copied is None or copied.query():
                    del self._free[place]
                    return buffer
        return self.accelerator.pinned(self._size)

    def _give_back(self, buffer: torch.Tensor, copied: DeviceEvent | None) -> None:
        with self._lock:
            self._free.append((buffer, copied))


class Placed:
    """One fragment's vector on the host, on the device, or on both. `copies`: what moves them."""

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
        flat = torch.empty(slots.size, device=self.replica.device)
        flatten_into(flat, slots, self._tensors)
        return Placed(self._outward, None, flat)

    def write(self, fragment: int, values: Values) -> None:
        unflatten(self.run.layout.fragments[fragment], values.device, self._tensors)
        values.leave_device()

    def save(self) -> Moments | None:
        return self._leaving.save()


class LeavingMoments:
    """Moments on their way from a device to the host, beside the training: the lane that encodes them waits for the
    copies, and on the device the next change of them does."""

    def __init__(self, copies: Copies, replica: Replica) -> None:
        self._copies, self._replica = copies, replica
        self._left: DeviceEvent | None = None
        replica.before_update = self._wait
        kept = moment_names(replica.model, replica.optimizer)
        every = {f"{moment}.{name}": replica.tensors[name] for name, moments in kept.items() for moment in moments}
        self._pinned_like(every)  # torch keeps freed pinned memory: half a second less at the first save

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

        return Moments(step_of(tensors), encode)

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
        self._rebases = run.settings.sync.mixing == "rebase"
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

    def mix(
        self,
        fragment: int,
        mixing: Mixing,
        merged: Values,
        own: Values,
        reference: Values | None,
        last: bool = False,
    ) -> Values:
        against, mine = None if reference is None else reference.device, own.device
        into = mine if last else None
        count = self._layout.fragments[fragment].num_parameters
        found = Placed(self._inward, None, mixed(mixing, merged.device, mine, against, into, count))
        for placed in (merged, reference) if last else ():  # each mix would bring them there again
            if placed is not None:
                placed.leave_device()
        return found


def largest(run: RunFormat) -> int:
    """Elements of the largest fragment."""
    return max(fragment.size for fragment in run.layout.fragments)
