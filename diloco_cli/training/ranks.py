"""Several ranks as one island: commands from rank 0 to the others, the replica of a rank, and the training port.

`RankedTraining` on rank 0 sends each of its calls to the others as a few numbers, and they `follow` it: they have no
clock, no store and no decision of their own, so all ranks do the same at the same step. All call `step` with the same
arguments, and all find the same loss and norm. Gradients are weighted by targets: their sum over the ranks is the
gradient of the mean loss over the whole batch, as on one device. Fragments meet on rank 0, one at a time, as the same
vectors that one device would give, so payloads and saved moments do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum, auto
from itertools import chain
from math import isfinite
from typing import Protocol

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import UsageError
from diloco_cli.protocol.actors.learner import Moments, Values
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.tasks.build import Batch, Data, build_model_on_meta
from diloco_cli.tensors.flat import flatten, unflatten
from diloco_cli.tensors.payload import Blank
from diloco_cli.training.devices import Accelerator, Copies, Cuda, LeavingMoments, Placed, largest
from diloco_cli.training.inner import (
    as_saved,
    begin_moments,
    keeps_moments,
    moment_names,
    moments_of,
    sound_moments,
    step_of,
)
from diloco_cli.training.replica import (
    DeviceTraining,
    Replica,
    check_layout,
    enough_memory,
    examples_at_once,
    with_others,
)
from diloco_cli.training.sharding import Shards, Tensors, copied_model, local, refuse_buffers, sharded_model

SILENT = timedelta(minutes=10)  # rank 0 tells something every few seconds, also while it waits for the run
SIZE = 4
BEAT_S = 5.0


class Command(IntEnum):
    """With its numbers."""

    STEP = auto()  # position, batch_tokens, lr
    READ = auto()  # fragment
    WRITE = auto()  # fragment
    SAVE = auto()
    RESTORE = auto()
    RESET = auto()
    BEAT = auto()
    END = auto()  # the exit status of rank 0: 0 if the run is over


class Commands:
    """On a group of its own, so that a command is on the host whatever the device is. Made by all ranks at once."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=SILENT)

    def send(self, command: Command, *numbers: float) -> None:
        """Of rank 0."""
        told = torch.zeros(SIZE, dtype=torch.float64)  # exact for positions below 2^53
        told[: 1 + len(numbers)] = torch.tensor([command, *numbers], dtype=torch.float64)
        distributed.broadcast(told, 0, group=self._group)

    def receive(self) -> tuple[Command, list[float]]:
        told = torch.empty(SIZE, dtype=torch.float64)
        distributed.broadcast(told, 0, group=self._group)
        command, *numbers = told.tolist()
        return Command(int(command)), numbers


def rank_batches(
    batch: Batch, batch_tokens: int, micro_batch_tokens: int | None, rank: int, ranks: int
) -> Iterator[tuple[Batch, float]]:
    """This rank's micro-batches, each with its share of the whole batch's targets: as many on every rank, because each
    is a meeting of all. A rank that has fewer rows repeats its first one, with a share of 0.

    Raises UsageError for a batch that cannot be divided by examples, or has fewer than there are ranks.
    """
    examples, at_once = examples_at_once(batch, batch_tokens, micro_batch_tokens)
    if examples < ranks:
        raise UsageError(
            f"a batch of {examples} examples cannot be divided over {ranks} ranks",
            where="data",
            hint="give the island a larger batch_tokens, or fewer ranks",
        )
    inputs, targets = batch
    first, end = rank * examples // ranks, (rank + 1) * examples // ranks
    for start in range(0, -(-examples // ranks), at_once):
        rows = slice(first + start, min(first + start + at_once, end))
        if rows.start < rows.stop:
            yield (inputs[rows], targets[rows]), targets[rows].numel() / targets.numel()
        else:
            yield (inputs[first : first + 1], targets[first : first + 1]), 0.0


@dataclass
class RankedReplica(Replica):
    """`model`: wrapped by `sharding.py`, as are its gradients: of a DTensor, sharded; of DDP's, whole on each."""

    rank: int = 0
    ranks: int = 1

    @property
    def called(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    def step(self, position: int, batch_tokens: int, lr: float) -> float:
        """As Replica.step; the loss and the norm are those of the whole island, on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        mean = self._accumulate(position, batch_tokens)
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        loss_and_squares = torch.stack([mean.double().reshape(()), _squares(gradients)])
        is_copy = isinstance(self.model, DistributedDataParallel)
        distributed.all_reduce(loss_and_squares[:1] if is_copy else loss_and_squares)
        norm = loss_and_squares[1].sqrt()
        _shorten(gradients, norm, self.settings.train.inner.clip_norm)
        found: list[float] = loss_and_squares.tolist()  # the step's only wait for the device
        loss, squares = found
        if isfinite(loss):
            self._optimize(squares**0.5, lr)
        return loss

    def _parts(self, batch: Batch, batch_tokens: int) -> Iterator[tuple[Batch, float]]:
        return rank_batches(batch, batch_tokens, self.micro_batch_tokens, self.rank, self.ranks)

    def _adding_up(self, last: bool) -> AbstractContextManager[object]:
        """Copies add up their gradients once a step; shards in each backward pass, because no rank has room for the
        gradients of the whole model."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[object] = self.model.no_sync()
        return context


def _squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements, a float64 scalar."""
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _shorten(gradients: list[torch.Tensor], norm: torch.Tensor, clip_norm: float) -> None:
    """As torch's clip_grad_norm_, with a norm that is known; 0: leave them."""
    if clip_norm:
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


class Alive(Protocol):
    """Where the thread that trains shows that it lives."""

    def beat(self) -> None: ...

    def stepped(self) -> None: ...


@dataclass(frozen=True)
class Rank:
    """What one rank has of its island: made by all of them at once, after they have formed their group."""

    replica: RankedReplica
    shards: Shards
    commands: Commands
    alive: Alive


def build_rank(run: RunFormat, island: Island, data: Data, device: torch.device, alive: Alive) -> Rank:
    """Each rank draws its own random numbers from here on (dropout), so that masks are not the same on all.

    Raises UsageError if its model has other tensors than the run's layout, or cannot be divided."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = build_model_on_meta(run.settings)
    check_layout(run, model)
    refuse_buffers(run.layout)
    sharded = island.sharding == "fsdp"
    with with_others("the start"), enough_memory(f"rank {rank} of {ranks}"):
        model = sharded_model(model, run.settings, device) if sharded else copied_model(run.settings, device)
    shard, micro = run.shard_of(island.name), island.micro_batch_tokens
    replica = RankedReplica(
        run.settings, model, data, shard, run.num_shards, device, micro_batch_tokens=micro, rank=rank, ranks=ranks
    )
    torch.manual_seed(run.settings.train.seed * ranks + rank)
    with with_others("the start"):
        distributed.barrier()  # nccl wants all ranks in the first meeting, and a fragment may need only some
    return Rank(replica, Shards(run.layout, rank, ranks, device, sharded), Commands(), alive)


class RankedTraining(DeviceTraining):
    """On rank 0. One thread calls it. `accelerator`: None: CUDA, if the ranks' device is no CPU."""

    def __init__(
        self, run: RunFormat, rank: Rank, slowdown: float = 1.0, accelerator: Accelerator | None = None
    ) -> None:
        super().__init__(run, rank.replica, slowdown)
        self._shards, self._commands, self._alive = rank.shards, rank.commands, rank.alive
        self._told_s, self._together = monotonic_s(), True
        device = rank.replica.device
        if accelerator is None and device.type != "cpu":
            accelerator = Cuda(device)
        self._outward = None if accelerator is None else Copies(accelerator, device, largest(run))
        self._leaving = None  # shards must meet first
        if self._outward is not None and not rank.shards.sharded:
            self._leaving = LeavingMoments(self._outward, rank.replica)

    def _on_device(self, values: torch.Tensor | None) -> Values:
        """As the wire of this device takes them (devices.py)."""
        return values if self._outward is None else Placed(self._outward, None, values)

    def read(self, fragment: int) -> Values:
        if not self._shards.sharded:
            return self._on_device(self._shards.gather(fragment, self._tensors))
        with self._told(Command.READ, fragment):
            return self._on_device(self._shards.gather(fragment, self._tensors))

    def write(self, fragment: int, values: Values) -> None:
        flat = values if self._outward is None else values.device
        with self._told(Command.WRITE, fragment):
            self._shards.scatter(fragment, flat, self._tensors)
        if self._outward is not None:
            values.leave_device()

    def save(self) -> Moments | None:
        """Training waits while shards are gathered, and copied to the host: 0.4 s for 25 M parameters over 4 ranks, a
        twentieth of their step (on a CPU, tests/benchmarks/rank_blocking.py)."""
        if self._leaving is not None:
            return self._leaving.save()
        moments = moments_of(self.replica.model, self.replica.optimizer) if self._shards.sharded else None
        if moments is None:
            return super().save()
        blank = Blank({name: (t.dtype, tuple(t.shape)) for name, t in moments.items()})
        blank.tensors["step"].copy_(moments["step"])
        with self._told(Command.SAVE):
            for fragment, moment, shards in _all_moments(self._shards, self.replica):
                flat = shards.gather(fragment, _of(moments, moment))
                assert flat is not None
                with self._on_host(flat) as host:
                    unflatten(shards.layout.fragments[fragment], host, _of(blank.tensors, moment))
                self._alive.beat()
        return as_saved(step_of(moments), blank.seal())

    def _on_host(self, flat: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(flat) if self._outward is None else self._outward.on_host(flat, self._outward.now())

    def restore(self, moments: bytes) -> bool:
        tensors = sound_moments(self.replica.model, self.replica.optimizer, moments)
        if tensors is None:
            return False
        with self._told(Command.RESTORE):
            _restore(self.replica, self._shards, self._alive, tensors)
        return True

    def reset(self) -> bool:
        if keeps_moments(self.replica.optimizer):
            with self._told(Command.RESET):
                pass
        return super().reset()

    def keep_alive(self) -> None:
        """While there is nothing to do: the others show that they live, too."""
        self._alive.beat()
        if self._together and monotonic_s() - self._told_s > BEAT_S:
            with self._told(Command.BEAT):
                pass

    def close(self, status: int) -> None:
        """Tell the others to end as this one does; not if this rank failed in the middle of something that all do: they
        fail, too, or are ended. One that is lost by now is not waited for."""
        if self._together:
            with suppress(RuntimeError):
                self._commands.send(Command.END, status)

    def _step(self, position: int, batch_tokens: int, lr: float) -> float:
        with self._told(Command.STEP, position, batch_tokens, lr):
            loss = super()._step(position, batch_tokens, lr)
        self._alive.stepped()
        return loss

    @contextmanager
    def _told(self, command: Command, *numbers: float) -> Iterator[None]:
        """All do the same within."""
        self._together = False
        with with_others(command.name):
            self._commands.send(command, *numbers)
            yield
        self._together = True
        self._told_s = monotonic_s()
        self._alive.beat()


def follow(rank: Rank) -> int:
    """On the other ranks: do what rank 0 does, until it says END; its exit status."""
    while True:
        with with_others("a command"):
            command, numbers = rank.commands.receive()
        if command is Command.END:
            return int(numbers[0])
        with with_others(command.name):
            _do(command, numbers, rank)
        if command is Command.STEP:
            rank.alive.stepped()
        rank.alive.beat()


def _do(command: Command, numbers: list[float], rank: Rank) -> None:
    replica, shards = rank.replica, rank.shards
    match command:
        case Command.STEP:
            position, batch_tokens, lr = numbers
            with enough_memory(replica.called, replica.micro_batch_tokens):
                replica.step(int(position), int(batch_tokens), lr)
        case Command.READ:
            shards.gather(int(numbers[0]), replica.tensors)
        case Command.WRITE:
            shards.scatter(int(numbers[0]), None, replica.tensors)
        case Command.SAVE:
            moments = moments_of(replica.model, replica.optimizer) or {}
            for fragment, moment, theirs in _all_moments(shards, replica):
                theirs.gather(fragment, _of(moments, moment))
                rank.alive.beat()
        case Command.RESTORE:
            _restore(replica, shards, rank.alive, None)
        case Command.RESET:
            replica.optimizer.state.clear()


def _restore(replica: Replica, shards: Shards, alive: Alive, tensors: Tensors | None) -> None:
    """`tensors`: the saved moments, which rank 0 has."""
    trained = {name: p for name, p in replica.tensors.items() if p.requires_grad}
    steps = torch.zeros(len(trained), dtype=torch.int64) if tensors is None else tensors["step"]
    distributed.broadcast(steps := steps.to(replica.device), 0)
    begin_moments(replica.model, replica.optimizer, steps)
    state = replica.optimizer.state
    for fragment, moment, theirs in _all_moments(shards, replica):
        slots, flat = theirs.layout.fragments[fragment], None
        if tensors is not None:
            flat = flatten(slots, _of(tensors, moment)).to(replica.device)
        theirs.scatter(fragment, flat, {name: state[p][moment] for name, p in trained.items() if moment in state[p]})
        alive.beat()


def _all_moments(shards: Shards, replica: Replica) -> Iterator[tuple[int, str, Shards]]:
    """Each moment of each fragment, with the shards of the tensors that have it."""
    kept = moment_names(replica.model, replica.optimizer)
    for moment in dict.fromkeys(chain.from_iterable(kept.values())):
        theirs = shards.of({name for name, moments in kept.items() if moment in moments})
        for fragment, slots in enumerate(theirs.layout.fragments):
            if slots.tensors:
                yield fragment, moment, theirs


def _of(tensors: Mapping[str, torch.Tensor], moment: str) -> dict[str, torch.Tensor]:
    """One of the moments, by the names of the parameters."""
    return {name.removeprefix(f"{moment}."): t for name, t in tensors.items() if name.startswith(f"{moment}.")}
