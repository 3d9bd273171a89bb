"""Prefetch: builds the next batch while the current step runs, if building takes long enough to be worth a thread.

Positions follow one another, so the batch after (position, n) is most likely (position + n, n). At most one batch is
built ahead, by a thread that ends with it; a request for another batch waits for that thread and builds its own. Timing
decides which batches are built ahead, never what is in them. A batch for a CUDA device is put into pinned memory, and
the device fetches it from there while the training thread goes on.

Each rank of an island builds the whole batch, pinned too, and computes its rows of it: a source knows no ranks. So n
ranks on a machine build each batch n times.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch

from diloco_cli.clock import monotonic_s
from diloco_cli.tasks.build import Batch, Data

LEAST_S = 0.001  # a thread costs 0.2 to 0.5 ms of CPU on two busy cores
WORTH_ON_CPU, WORTH_BESIDE_ACCELERATOR = 0.2, 0.02  # of a step
WATCHED = 3  # batches during which it is checked whether the source draws from the process's random generators
Request = tuple[int, int, int, int]  # shard, num_shards, position, batch_tokens
Rule = Callable[[float, float, torch.device], bool]


def pays(build_s: float, step_s: float, device: torch.device) -> bool:
    """Whether a batch that takes `build_s` should be built ahead, during a step of `step_s` on `device`.

    Beside an accelerator, CPU cores are idle. If training uses the cores, building a computed batch ahead gains
    nothing, and a batch of 10 % of a step made steps 2 to 7 % slower; with batches that wait (for a disk) for half a
    step, training was 1.1 to 1.4 times as fast. Presets' batches take up to 1 % of it (tests/benchmarks/prefetch.py).
    """
    worth = WORTH_ON_CPU if device.type == "cpu" else WORTH_BESIDE_ACCELERATOR
    return build_s > max(LEAST_S, worth * step_s)


class Prefetched:
    """`data`, with the probable next batch built ahead. Errors are raised when the batch is asked for, as without it.

    A source that draws from one of the process's own random generators is never asked ahead: the model may draw from
    it too (dropout), and the order of draws must not depend on timing. For one calling thread only."""

    def __init__(
        self, data: Data, device: torch.device, clock_s: Callable[[], float] = monotonic_s, pays: Rule = pays
    ) -> None:
        self._device = device
        self.data: Data = Pinned(data) if device.type == "cuda" and torch.cuda.is_available() else data
        self._clock_s, self._pays = clock_s, pays
        self._ahead: _Build | None = None
        self._may_build_ahead, self._watched = True, WATCHED
        self._build_s = 0.0
        self._left_s: float | None = None

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        step_s = None if self._left_s is None else self._clock_s() - self._left_s
        batch = self._batch((shard, num_shards, position, batch_tokens))
        if self._may_build_ahead and step_s is not None and self._pays(self._build_s, step_s, self._device):
            self._ahead = _Build(self.data, (shard, num_shards, position + batch_tokens, batch_tokens), self._clock_s)
        self._left_s = self._clock_s()
        return batch

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        return self.data.held_out(num_sequences)

    def _batch(self, request: Request) -> Batch:
        """The requested batch, built ahead if possible. Two are never built at once: data need not be thread-safe."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.join()
            self._build_s = ahead.took_s
            if ahead.request == request:
                return ahead.outcome.result()
        before, started_s = _random_states() if self._watched else {}, self._clock_s()
        batch = self.data.batch(*request)
        self._build_s = self._clock_s() - started_s
        if self._watched:
            self._watched -= 1
            after = _random_states()
            self._may_build_ahead &= all(after[name] == state for name, state in before.items())
        return batch


class Pinned:
    """`data`, whose batches lie in pinned memory; torch uses that again."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        inputs, targets = self.data.batch(shard, num_shards, position, batch_tokens)
        return _pinned(inputs), _pinned(targets)

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        return self.data.held_out(num_sequences)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


class _Build(threading.Thread):
    """The thread that builds one batch."""

    def __init__(self, data: Data, request: Request, clock_s: Callable[[], float]) -> None:
        super().__init__(name="prefetch", daemon=True)
        self.request, self.took_s = request, 0.0
        self._data, self._clock_s = data, clock_s
        self.outcome: Future[Batch] = Future()
        self.start()

    def run(self) -> None:
        started_s = self._clock_s()
        try:
            self.outcome.set_result(self._data.batch(*self.request))
        except BaseException as error:  # raised where the batch is asked for
            self.outcome.set_exception(error)
        self.took_s = self._clock_s() - started_s


def _random_states() -> dict[str, object]:
    """The states of the process-wide random generators whose modules are loaded."""
    states: dict[str, object] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    return states
