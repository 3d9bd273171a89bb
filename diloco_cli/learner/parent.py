"""The parent of an island's ranks on one node: starts them, ends all when one is lost, and ends those that hang.

Each rank is one more process of the same command. The parent imports no torch and touches no device, so it
cannot hang with them. An incarnation ends as a whole: whatever started this process begins the next one.

    a rank ends by itself     the others have END_S to end, then SIGKILL; the parent ends as that rank did
    a rank hangs              all are killed (`Watchdog`), and the parent says STUCK
    SIGTERM, SIGINT           rank 0 is told, drains, and ends the others, those of other nodes too; where it does not
                              drain, as its node was not told, a node's ranks are killed once a drain would be over
    the parent dies           the kernel kills its ranks

A rank's environment has torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, and MASTER_ADDR and
MASTER_PORT where torchrun, Slurm or Kubernetes started it, or DILOCO_RENDEZVOUS where this parent did (`RankPlace`).
Ranks show that they live in a small file that they share with their parent (`RankBeats`), as devices and collectives
may hang.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.environment import environment_value, environment_with
from diloco_cli.errors import DilocoError, FencedError, TryAgainError, UsageError
from diloco_cli.events.cause import Cause
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.records import Island
from diloco_cli.runtime.consent import signing_secret
from diloco_cli.runtime.daemon import StopSignal, opened, perform, say
from diloco_cli.runtime.registry import CAUSE_VARIABLE, read_cause, tell
from diloco_cli.signing import learner_signer

ENDPOINT = re.compile(r"[A-Za-z0-9.:_\[\]-]+:[0-9]{1,5}")
POLL_S = 0.1
END_S = 5.0
ASKED_TO_END = {-signal.SIGTERM: 143, -signal.SIGINT: 130}
LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RENDEZVOUS_VARIABLE = "DILOCO_RENDEZVOUS"
BEATS_VARIABLE = "DILOCO_BEATS"
PARENT_VARIABLE = "DILOCO_PARENT"  # its pid
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
PR_SET_PDEATHSIG = 1
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLOT = struct.Struct("<qq")
STEP_TIMES = 10
LEAST_S = 30.0
FIRST_S = 900.0  # building, the newest versions, and the first step, which may compile
SEEN = 16
PAUSED_S = 5.0  # a look that comes so late: this process was paused itself


class RankLostError(DilocoError):
    """A rank of the island was lost, and the incarnation with it."""

    code = "rank_lost"


@dataclass(frozen=True)
class IslandNode:
    """Node `index` of an island's `count`, with `ranks` each. `rendezvous`: HOST:PORT of node 0, where the nodes meet;
    None: this node is all of the island."""

    ranks: int
    count: int = 1
    index: int = 0
    rendezvous: str | None = None

    @property
    def is_parent(self) -> bool:
        """Whether there are several ranks; one is the learner's own process."""
        return self.ranks * self.count > 1

    def places(self, directory: Path) -> list[RankPlace]:
        url = f"file://{directory}/rendezvous" if self.rendezvous is None else f"tcp://{self.rendezvous}"
        first, world = self.index * self.ranks, self.count * self.ranks
        return [RankPlace(first + local, world, local, self.ranks, url) for local in range(self.ranks)]


def node_here(
    url: str, name: str, ranks: int | None, nodes: int | None, index: int, rendezvous: str | None
) -> IslandNode:
    """This machine as a node of its island: as the options say, else as the run does; one process if it does not know
    the island. Raises UsageError if they do not fit together."""
    if ranks is None or nodes is None:
        island = _island(url, name)
        of_island = (1, 1) if island is None else (island.ranks, island.nodes)
        nodes = nodes or of_island[1]
        ranks = ranks or max(1, of_island[0] // of_island[1])
    if nodes > 1 and rendezvous is None:
        raise UsageError(
            f"{name} has {nodes} nodes, and none of them says where they meet",
            where="--rendezvous",
            hint="on every node: --rendezvous HOST:PORT, a private address of the one with --node-rank 0",
        )
    if index >= nodes:
        raise UsageError(f"--node-rank {index}: {name} has {nodes} nodes, counted from 0", hint="--nodes says how many")
    if rendezvous is not None and not ENDPOINT.fullmatch(rendezvous):
        raise UsageError(f"--rendezvous {rendezvous}: must be HOST:PORT", hint="--rendezvous 10.0.0.7:29400")
    return IslandNode(ranks, nodes, index, rendezvous if nodes > 1 else None)


def _island(url: str, name: str) -> Island | None:
    """As the run has it; None: it has yet to join, or there is no such run: the learner itself says so."""
    stop = StopSignal()
    _, store, _, clock = opened(url, stop, f"{name}: ")
    run = perform(read_format(store.url, signing_secret(), (learner_signer(name),)), store, clock)
    return run.island(name) or perform(read_log(run), store, clock).with_members(run).island(name)


def run_ranks(command: Sequence[str], url: str, name: str, node: IslandNode, drain_s: float = 0.0) -> int:
    """Start `command` once for each rank of this node; returns 0 when the run is over, else a lost rank's own exit
    status, or dies by the signal that it died by. Raises RankLostError if a rank hangs. `drain_s`: as its ranks have
    it."""
    stop = StopSignal()
    stop.hear_signals()
    with tempfile.TemporaryDirectory(prefix="diloco-ranks-") as directory:
        status = _Family(command, name, node, Path(directory), drain_s).watched(stop, url)
    return leave_as(status)


class _Family:
    """`killed`: the ranks that this process has ended; `stuck`: why, if they did not step."""

    def __init__(self, command: Sequence[str], name: str, node: IslandNode, directory: Path, drain_s: float) -> None:
        self.name, self.node, self.directory, self.drain_s = name, node, directory, drain_s
        self.beats = directory / "beats"
        self.killed: set[int] = set()
        self.stuck = ""
        self.interface = interface_to((node.rendezvous or f"{LOOPBACK}:1").rpartition(":")[0])
        self.beats.write_bytes(bytes(node.ranks * _SLOT.size))
        self.ranks = {place.rank: self._start(command, place) for place in node.places(directory)}
        self.watchdog = Watchdog(node.ranks, monotonic_s())

    def _start(self, command: Sequence[str], place: RankPlace) -> subprocess.Popen[bytes]:
        environment = {
            **place.environment(),
            **{name: self._interface_by(name) for name in INTERFACE_VARIABLES},
            BEATS_VARIABLE: str(self.beats),
            CAUSE_VARIABLE: f"{os.getpid()}:{self._cause_path(place.rank)}",
        }
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment_with(**environment))

    def _interface_by(self, variable: str) -> str:
        """What the user has set counts where nodes meet over a network; on one node it is always loopback."""
        given = None if self.node.rendezvous is None else environment_value(variable)
        return given or self.interface

    def _cause_path(self, rank: int) -> Path:
        path = self.directory / f"rank-{rank}"
        path.mkdir(exist_ok=True)
        return path / f"{self.name}.json"

    def watched(self, stop: StopSignal, url: str) -> int:
        try:
            exits = self._until_all_have_ended(stop)
        finally:
            self._kill_those_left()
        if stop.is_set():  # a signal to the whole group is no rank's own end
            exits = {rank: ASKED_TO_END.get(status, status) for rank, status in exits.items()}
        lost = culprit(exits, self.killed)
        if self.stuck:
            raise RankLostError(f"STUCK: {self.stuck}", hint=f"diloco logs {self.name} shows what each rank said last")
        if lost is None:
            return 143 if stop.is_set() and self.node.index else 0
        self._tell(url, lost, exits[lost])
        return exits[lost]

    def _until_all_have_ended(self, stop: StopSignal) -> dict[int, int]:
        """The exit statuses of all ranks of this node."""
        kill_at_s: float | None = None
        told = False
        while True:
            exits = {rank: status for rank, process in self.ranks.items() if (status := process.poll()) is not None}
            if len(exits) == len(self.ranks):
                return exits
            now_s = monotonic_s()
            if stop.is_set() and not told:
                told = True
                self._pass_on(stop)
                if self.node.index and kill_at_s is None:
                    kill_at_s = now_s + self.drain_s + END_S
            if kill_at_s is None and (any(exits.values()) or 0 in exits):
                kill_at_s = now_s + END_S
            if (kill_at_s is not None and now_s >= kill_at_s) or self._hangs(exits, now_s):
                self._kill_those_left()
            sleep_s(POLL_S)

    def _pass_on(self, stop: StopSignal) -> None:
        if 0 in self.ranks:
            self.ranks[0].send_signal(signal.SIGINT if stop.by_hand else signal.SIGTERM)

    def _hangs(self, exits: Mapping[int, int], now_s: float) -> bool:
        """Whether ranks hang; why is noted then."""
        if self.killed or exits:
            return False
        counts = [RankCount(beats, steps) for beats, steps in _SLOT.iter_unpack(self.beats.read_bytes())]
        silent = self.watchdog.silent(counts, now_s)
        if not silent:
            return False
        self.stuck = f"no step for {min(silent.values()):.0f} s"
        say(f"{utc_now_text()} {self.name}: STUCK: {self.stuck}; all ranks are ended")
        return True

    def _kill_those_left(self) -> None:
        left = {rank: process for rank, process in self.ranks.items() if process.poll() is None}
        for rank, process in left.items():
            self.killed.add(rank)
            process.kill()
        for process in left.values():
            process.wait()

    def _tell(self, url: str, rank: int, status: int) -> None:
        """Hand on the lost rank's own account of its end, for the supervisor or the bucket."""
        world = self.node.ranks * self.node.count
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        ended = f"rank {rank} of {world} {how}"
        say(f"{utc_now_text()} {self.name}: {ended}: the others were ended")
        cause = read_cause(self._cause_path(rank), self.ranks[rank].pid)
        if status not in (FencedError.exit_status, 143, 130):
            text = ended if cause is None else f"rank {rank} of {world}: {cause.text}"
            tell(url, self.name, replace(cause or Cause(ended), text=text))


def interface_to(host: str) -> str:
    """This machine's network interface on the way to the host: ranks listen for each other on it alone. Raises
    UsageError if there is none, TryAgainError if nobody knows the host: a cluster names its pods as they start."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as found:
            found.connect(address)  # sends nothing
            own = found.getsockname()[0]
    except OSError as error:
        hint = "--rendezvous HOST:PORT, a private address of the node with --node-rank 0"
        kind = TryAgainError if isinstance(error, socket.gaierror) else UsageError
        raise kind(f"no way to {host}: {error.strerror or error}", where="--rendezvous", hint=hint) from error
    import psutil

    addresses = psutil.net_if_addrs().items()
    for name, known in addresses:
        if own in {one.address.partition("%")[0] for one in known}:
            return name
    raise UsageError(f"no interface here has the address {own}, from which {host} is reached", where="--rendezvous")


def culprit(exits: Mapping[int, int], killed: Collection[int]) -> int | None:
    """The rank whose end ended the others: one that a signal killed, else one that says why, else any that failed; the
    lowest of several. A rank that has only lost another asks to try again. None: none failed by itself."""
    own = {rank: status for rank, status in exits.items() if status and rank not in killed}
    last = (DilocoError.exit_status, TryAgainError.exit_status)
    order = {rank: last.index(status) + 1 if status in last else -(status < 0) for rank, status in own.items()}
    return min(own, key=lambda rank: (order[rank], rank), default=None)


def leave_as(status: int) -> int:
    """An exit status is this process's own; a signal ends this process, too, so that its parent sees the truth."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


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
    """The kernel kills this process when its parent dies, also if it is paused then, if that parent has asked for it
    (PARENT_VARIABLE). Linux alone: elsewhere a rank that has lost its parent ends with the group, and its successor
    fences it."""
    if sys.platform == "linux" and environment_value(PARENT_VARIABLE) is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if environment_value(PARENT_VARIABLE) != str(os.getppid()):  # it died before
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class RankCount:
    """What one rank has done: commands, waits and steps together, and steps alone."""

    beats: int = 0
    steps: int = 0


class RankBeats:
    """One rank's own counters. Without a file nobody reads them, and they go nowhere."""

    def __init__(self, path: Path | None, slot: int) -> None:
        self._at, self._beats, self._steps = slot * _SLOT.size, 0, 0
        self._map: mmap.mmap | None = None
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def beat(self) -> None:
        """Of the thread that trains, and of no other: a thread beside it lives on where it hangs."""
        self._beats += 1
        if self._map is not None:
            _SLOT.pack_into(self._map, self._at, self._beats, self._steps)

    def stepped(self) -> None:
        self._steps += 1
        self.beat()


def own_beats(place: RankPlace | None) -> RankBeats:
    path = environment_value(BEATS_VARIABLE)
    if place is None or not path or not place.has_parent:
        return RankBeats(None, 0)
    return RankBeats(Path(path), place.local_rank)


@dataclass
class _WatchedRank:
    since_s: float
    count: RankCount = field(default_factory=RankCount)
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))

    @property
    def patience_s(self) -> float:
        """STEP_TIMES of the longest recent step; waits in between, which have signs of life of their own, are none."""
        if self.count.steps < 2:
            return FIRST_S
        return max(LEAST_S, STEP_TIMES * max(self.steps_s, default=0.0))


class Watchdog:
    """Of the ranks on one node. Ranks step together: where one hangs, the others wait for it, and soon all are silent.

    A rank is silent if it has given no sign of life for STEP_TIMES step times, and LEAST_S at the least; FIRST_S before
    its second step."""

    def __init__(self, ranks: int, now_s: float) -> None:
        self._ranks = [_WatchedRank(now_s) for _ in range(ranks)]
        self._looked_s = now_s

    def silent(self, counts: Sequence[RankCount], now_s: float) -> dict[int, float]:
        """The silent ranks, and since when, in seconds."""
        if now_s - self._looked_s > PAUSED_S:
            for rank in self._ranks:
                rank.since_s = now_s
        self._looked_s = now_s
        for rank, count in zip(self._ranks, counts, strict=True):
            if count != rank.count:
                if 0 < rank.count.steps < count.steps:
                    rank.steps_s.append(now_s - rank.since_s)
                rank.count, rank.since_s = count, now_s
        ages = {number: now_s - rank.since_s for number, rank in enumerate(self._ranks)}
        return {number: age for number, age in ages.items() if age > self._ranks[number].patience_s}
