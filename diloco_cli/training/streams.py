"""Copies between a device and its host that go on beside the training, through pinned buffers that are used again.

An accelerator is known here by four verbs. So the order of copies can be tested on a machine that has none, by an
accelerator that is slow and notes who waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


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
