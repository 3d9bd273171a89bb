"""An accelerator (`Accelerator` in training/devices.py) on the CPU, whose copies end when a test lets them."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device = device
        self.on: SlowStream | None = None

    def record(self, stream: SlowStream) -> None:
        self.on = stream

    def query(self) -> bool:
        return self.on is self.device.main or self.device.copies_end.is_set()

    def synchronize(self) -> None:
        """Waits as long as the copies of its stream take."""
        self.device.waited.append(threading.get_ident())
        assert self.on is not None, "an event that was not recorded is over at once"
        assert self.on is self.device.main or self.device.copies_end.wait(10), "a thread waited for a copy"


class SlowStream:
    def __init__(self) -> None:
        self.waits_for: list[SlowEvent] = []

    def wait_event(self, event: SlowEvent) -> None:
        assert event.on is not None, "an event that was not recorded is over at once"
        self.waits_for.append(event)


class SlowDevice:
    """`copies_end`: cleared, no copy ends. `waited`: the threads that waited for one."""

    def __init__(self) -> None:
        self.main = SlowStream()
        self.copies_end = threading.Event()
        self.copies_end.set()
        self.waited: list[int] = []
        self.num_pinned = 0

    def stream(self) -> SlowStream:
        return SlowStream()

    def current(self) -> SlowStream:
        return self.main

    def event(self) -> SlowEvent:
        return SlowEvent(self)

    def within(self, stream: SlowStream) -> AbstractContextManager[object]:
        return nullcontext(stream)

    def pinned(self, size: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.empty(size)
