"""The training port of an island of several ranks, and what the others do: `RankedTraining` on rank 0 tells each of its
calls to the others, which `follow` it (commands.py).

Fragments meet on rank 0, one at a time, as the same vectors that one device would give. So payloads and saved moments
do not depend on the number of ranks, and another number of ranks can go on with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import distributed

from diloco_cli.clock import monotonic_s
from diloco_cli.protocol.actors.ports import Moments, Values
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.tasks.build import Data, build_model_on_meta
from diloco_cli.tensors.flat import flatten, unflatten
from diloco_cli.tensors.payload import Blank
from diloco_cli.training.commands import Command, Commands
from diloco_cli.training.cuda import LeavingMoments, Placed, largest
from diloco_cli.training.faults import enough_memory, with_others
from diloco_cli.training.inner import as_saved, begin_moments, keeps_moments, moment_names, moments_of, sound_moments
from diloco_cli.training.ranked_model import copied_model, sharded_model
from diloco_cli.training.ranked_replica import RankedReplica
from diloco_cli.training.replica import DeviceTraining, Replica, check_layout
from diloco_cli.training.shards import Shards, Tensors
from diloco_cli.training.streams import Accelerator, Copies, Cuda

BEAT_S = 5.0


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
    sharded = island.sharding == "fsdp"
    with with_others("the start"), enough_memory(f"rank {rank} of {ranks}"):
        model = sharded_model(model, run.settings, device) if sharded else copied_model(run.settings, device)
    shard, micro = run.shard_of(island.name), island.micro_batch_tokens
    replica = RankedReplica(
        run.settings, model, data, shard, run.num_shards, device, micro_batch_tokens=micro, rank=rank, ranks=ranks
    )  # fmt: skip
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
        """As the wire of this device takes them (cuda.py)."""
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
            for fragment, moment in _all_moments(self._shards, self.replica.optimizer):
                flat = self._shards.gather(fragment, _of(moments, moment))
                assert flat is not None
                with self._on_host(flat) as host:
                    unflatten(self.run.layout.fragments[fragment], host, _of(blank.tensors, moment))
                self._alive.beat()
        return as_saved(int(moments["step"][0]), blank.seal())

    def _on_host(self, flat: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(flat) if self._outward is None else self._outward.on_host(flat, self._outward.now())

    def restore(self, moments: bytes) -> bool:
        tensors = sound_moments(self.replica.model, self.replica.optimizer, moments)
        if tensors is None:
            return False
        with self._told(Command.RESTORE, int(tensors["step"][0])):
            _restore(self.replica, self._shards, self._alive, int(tensors["step"][0]), tensors)
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
            for fragment, moment in _all_moments(shards, replica.optimizer):
                shards.gather(fragment, _of(moments, moment))
                rank.alive.beat()
        case Command.RESTORE:
            _restore(replica, shards, rank.alive, int(numbers[0]), None)
        case Command.RESET:
            replica.optimizer.state.clear()


def _restore(replica: Replica, shards: Shards, alive: Alive, step: int, tensors: Tensors | None) -> None:
    """`tensors`: the saved moments, which rank 0 has."""
    begin_moments(replica.model, replica.optimizer, step)
    state = replica.optimizer.state
    for fragment, moment in _all_moments(shards, replica.optimizer):
        slots, flat = shards.layout.fragments[fragment], None
        if tensors is not None:
            flat = flatten(slots, _of(tensors, moment)).to(replica.device)
        trained = {name: p for name, p in replica.tensors.items() if p.requires_grad}
        shards.scatter(fragment, flat, {name: state[p][moment] for name, p in trained.items()})
        alive.beat()


def _all_moments(shards: Shards, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
    return product(range(len(shards.layout.fragments)), moment_names(optimizer))


def _of(tensors: Mapping[str, torch.Tensor], moment: str) -> dict[str, torch.Tensor]:
    """One of the moments, by the names of the parameters."""
    return {name.removeprefix(f"{moment}."): t for name, t in tensors.items() if name.startswith(f"{moment}.")}
