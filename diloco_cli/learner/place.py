"""Where a process stands among the ranks of its island, as its environment says.

A rank is one more `diloco learner` with the same words. Its environment has torchrun's variables: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, and MASTER_ADDR and MASTER_PORT where torchrun, Slurm or Kubernetes started it, or
DILOCO_RENDEZVOUS where the parent of its island did (learner/parent.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass

from diloco_cli.environment import environment_value
from diloco_cli.errors import UsageError

RENDEZVOUS_VARIABLE = "DILOCO_RENDEZVOUS"
BEATS_VARIABLE = "DILOCO_BEATS"
PARENT_VARIABLE = "DILOCO_PARENT"  # its pid
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
PR_SET_PDEATHSIG = 1
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankPlace:
    """Rank `rank` of `world_size`; `local_rank` of `local_world_size` on its node, which is device `local_rank` there.

    `guessed`: nothing says which of its node it is, so it is taken for the only one.

    `rendezvous`: file:///PATH for the ranks of one node, tcp://HOST:PORT where rank 0 listens on HOST and on no other
    address, or env:// for a store that torchrun or the like has opened. `has_parent`: a process of its island started
    it, and watches over it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str = "env://"
    guessed: bool = False

    @property
    def has_parent(self) -> bool:
        return not self.rendezvous.startswith("env:")

    @property
    def commands(self) -> bool:
        """Whether this rank takes part in the run for all others."""
        return self.rank == 0

    def environment(self) -> dict[str, str]:
        """For the process of this place, which this process starts."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return {
            **dict(zip(_NUMBERS, map(str, numbers), strict=True)),
            RENDEZVOUS_VARIABLE: self.rendezvous,
            PARENT_VARIABLE: str(os.getpid()),
        }


def started_as_rank() -> bool:
    """Whether something has started this process as a rank: torchrun also as the only one. (Containers of one process
    have RANK and WORLD_SIZE, too, and may start ranks of their own.)"""
    named = all(environment_value(name) is not None for name in ("RANK", "WORLD_SIZE"))
    return named and (environment_value("WORLD_SIZE") != "1" or environment_value(TORCHRUN_VARIABLE) is not None)


def place_here() -> RankPlace | None:
    """This process's place; None: it is no rank of several. Raises UsageError for numbers that make no sense."""
    texts = {name: environment_value(name) for name in _NUMBERS}
    if not started_as_rank():
        return None
    guessed = texts["LOCAL_RANK"] is None
    if guessed:  # as of a Kubernetes pod: one process a machine
        texts |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    texts["LOCAL_WORLD_SIZE"] = texts["LOCAL_WORLD_SIZE"] or texts["WORLD_SIZE"]
    try:
        rank, world, local_rank, local_world = (int(texts[name] or "") for name in _NUMBERS)
    except ValueError:
        rank = world = local_rank = local_world = -1
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        told = ", ".join(f"{name}={value}" for name, value in texts.items())
        raise UsageError(f"the environment names no rank of several: {told}", hint="unset RANK and WORLD_SIZE")
    rendezvous = environment_value(RENDEZVOUS_VARIABLE) or "env://"
    return RankPlace(rank, world, local_rank, local_world, rendezvous, guessed) if world > 1 else None


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies, also if it is paused then. Linux alone: elsewhere a rank
    that has lost its parent ends with the group, and its successor fences it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if environment_value(PARENT_VARIABLE) != str(os.getppid()):  # it died before
            os.kill(os.getpid(), signal.SIGKILL)
