"""An island of several ranks: their process group, an island with another number of ranks than planned, and the process
of a rank that does what rank 0 does.

Ranks meet, compare their versions, and form the group. Nothing that a rank sends is unpickled: what they state of
themselves is JSON, the rest are tensors. A file joins the ranks of one node; over several, rank 0 listens on the
address that the user named and on no other. A store may outlive ranks (torchrun's does), and then holds what dead ones
stated: so rank 0 names each meeting anew, ranks state themselves for that meeting, and rank 0 calls those processes
once all are there.

With another number of ranks the batch stays, and the moments; each rank computes more or fewer micro-batches, by the
plan's own rule. A rank reads only the run's format from the bucket: parameters and moments come from rank 0.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import (
    InfeasibleError,
    TryAgainError,
    UsageError,
)
from diloco_cli.learner.parent import RankPlace, own_beats
from diloco_cli.plan.memory import USABLE
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.randomness import nonce
from diloco_cli.runtime.consent import NamedHere, consented, signing_secret
from diloco_cli.runtime.daemon import StopSignal, opened, perform
from diloco_cli.signing import learner_signer
from diloco_cli.tasks.build import build_data
from diloco_cli.training.devices import choose_device, host_threads, refuse_few
from diloco_cli.training.replica import (
    Prefetched,
    micro_batch_here,
    parameters_of,
    with_others,
)

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MEET_S = 120.0
ADMITTED_S = 3600.0  # for rank 0 of an island that the run has yet to admit
COLLECTIVE_S = 600.0  # the second line of defence: the parent's watchdog is earlier
MEETING, ITSELF = "meeting", "itself"
SLICE_S = 2.0
SAME_VERSIONS = "install the same versions on every node of the island"
SAME_DEVICES = "give the island devices of one kind and memory"
ALIKE = {"torch": SAME_VERSIONS, "diloco": SAME_VERSIONS, "device": SAME_DEVICES, "part": SAME_DEVICES}
BACKLOG = 4096
POLL_S = 0.05


def join_group(
    place: RankPlace,
    device: torch.device,
    meet_s: float = MEET_S,
    attend: Callable[[], object] = lambda: None,
    part: str = "",
) -> None:
    """Form the island's process group, its default one. Raises TryAgainError that names the ranks that did not come
    within `meet_s`, UsageError if the ranks' versions or devices differ, or for a device that has no group.

    `attend` is called while ranks wait for each other, and may end that by raising. `part`: how this rank will do its
    part, which must be the same on all."""
    backend = BACKENDS.get(device.type)
    if backend is None:
        raise UsageError(
            f"ranks cannot work together on {device.type}: {', '.join(BACKENDS)} can", hint="ranks: 1 in inventory.yaml"
        )
    until_s = monotonic_s() + meet_s
    store = _store(place, until_s, attend)
    own = {"torch": torch.__version__, "diloco": __version__, "device": device.type, "part": part}
    if device.type == "cuda":
        own["uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))  # since torch 2.4
    with with_others("the meeting"):
        meeting, stated = _met(store, place, own, until_s, attend)
        _compare(stated)
        distributed.init_process_group(
            backend,
            store=PrefixStore(meeting, store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
    atexit.register(distributed.destroy_process_group)  # gloo aborts a process that exits with its threads alive


def _store(place: RankPlace, until_s: float, attend: Callable[[], object]) -> Store:
    """Raises TryAgainError if rank 0 does not listen."""
    scheme, _, rest = place.rendezvous.partition("://")
    if scheme == "file":
        return FileStore(rest, place.world_size)
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    listening = _listening(host, int(port)) if scheme == "tcp" and place.commands else None
    if scheme == "tcp" and listening is None:
        _until_it_listens(host, int(port), until_s, attend)
    left_s = max(1.0, until_s - monotonic_s())
    timeout = timedelta(seconds=left_s)
    try:
        if scheme == "env":
            met: tuple[Store, int, int] = next(iter(rendezvous("env://", timeout=timeout)))
            return met[0]
        return TCPStore(
            host,
            int(port),
            place.world_size,
            place.commands,
            timeout,
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except ValueError as error:  # torch's own words: which variable is missing
        hint = "start ranks with torchrun, or let `diloco learner --ranks N` do it"
        raise UsageError(str(error), where="environment", hint=hint) from error
    except (distributed.DistError, RuntimeError) as error:
        at = rest or "MASTER_ADDR"
        raise TryAgainError(
            f"rank {place.rank} of {place.world_size} cannot reach rank 0 at {at}",
            hint="give every node the same --rendezvous (or MASTER_ADDR), and --node-rank 0 to the one that has it",
        ) from error


def _until_it_listens(host: str, port: int, until_s: float, attend: Callable[[], object]) -> None:
    """Until rank 0 may be reached, or the time is over: torch's own wait could neither be attended nor ended."""
    while monotonic_s() < until_s:
        attend()
        try:
            with socket.create_connection((host, port), SLICE_S):
                return
        except OSError:
            sleep_s(POLL_S)


def _listening(host: str, port: int) -> socket.socket:
    """A socket on this address alone: torch's own store would listen on every interface."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            where="--rendezvous",
            hint="name an address of this machine that the island's other nodes reach, and a free port",
        ) from error
    return found


def _met(
    store: Store, place: RankPlace, own: dict[str, str], until_s: float, attend: Callable[[], object]
) -> tuple[str, dict[int, dict[str, str]]]:
    """The meeting's name, and what each rank states of itself, once all have come to it and rank 0 has called them."""
    own = {**own, "host": os.uname().nodename, ITSELF: nonce()}
    if place.commands:
        store.set(MEETING, own[ITSELF])
    stated: dict[int, dict[str, str]] = {}
    meeting = ""
    while True:
        if (named := _get(store, MEETING)) != meeting:  # rank 0 has begun anew
            meeting, stated = named, {}
            store.set(f"rank/{place.rank}", json.dumps({**own, MEETING: meeting}))
        for rank in sorted(set(range(place.world_size)) - set(stated)):
            said = _stated(_get(store, f"rank/{rank}"))
            if meeting and said.get(MEETING) == meeting:
                stated[rank] = said
        missing = [rank for rank in range(place.world_size) if rank not in stated and rank != place.rank]
        if not missing and _are_called(store, place, meeting, stated, own[ITSELF]):
            return meeting, stated
        if monotonic_s() >= until_s:
            raise TryAgainError(
                f"{_ranks(missing or [0])} of {place.world_size} did not come; rank {place.rank} waited for them",
                hint="start the learner on every node of the island, with the same --rendezvous",
            )
        attend()
        sleep_s(POLL_S)


def _are_called(store: Store, place: RankPlace, meeting: str, stated: dict[int, dict[str, str]], itself: str) -> bool:
    """Whether rank 0 has called this very process: a rank that is started again may find the statements of dead ones,
    which are complete."""
    key = f"called/{meeting}"
    if place.commands:
        store.set(key, json.dumps({str(rank): said[ITSELF] for rank, said in stated.items()}))
    return _stated(_get(store, key)).get(str(place.rank)) == itself


def _get(shared: Store, key: str) -> str:
    """Empty if nobody has set it."""
    return shared.get(key).decode() if shared.check([key]) else ""


def _stated(data: str) -> dict[str, str]:
    return {str(name): str(value) for name, value in json.loads(data or "{}").items()}


def _compare(stated: Mapping[int, Mapping[str, str]]) -> None:
    """Raises UsageError for ranks that cannot work together."""
    first, owners = stated[0], dict[tuple[str, str], int]()
    for rank, said in stated.items():
        for what, hint in ALIKE.items():
            if said.get(what) and first.get(what) and said[what] != first[what]:
                raise UsageError(
                    f"rank {rank} on {said.get('host')} has {what} {said[what]}, rank 0 on {first.get('host')} has "
                    f"{first[what]}",
                    hint=hint,
                )
        device = (said.get("host", ""), said.get("uuid", ""))
        if device[1] and owners.setdefault(device, rank) != rank:
            raise UsageError(
                f"ranks {owners[device]} and {rank} on {device[0]} have the same device",
                hint="start no more ranks on a machine than it has devices, each with its LOCAL_RANK, as torchrun does",
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def at_ranks(run: RunFormat, island: Island, ranks: int, device: torch.device) -> Island:
    """The island as `ranks` ranks, each with such a `device`, train it. Raises InfeasibleError if they cannot, before
    anything is built."""
    if ranks == island.ranks:
        return island
    tensors, batch_tokens = parameters_of(run.layout), island.batch_tokens
    tokens, fit = micro_batch_here(run.settings, tensors, run.num_fragments, batch_tokens, device, ranks)
    if not fit.fits:
        sizes = f"needs {fit.needed_gb:.3g} GB ({fit.shards}), and has {fit.available_gb:.3g} GB"
        larger = f"devices with at least {math.ceil(fit.needed_gb / USABLE)} GB"
        raise InfeasibleError(
            f"{island.name} does not fit {ranks} ranks: each {sizes}, of which {100 * USABLE:.0f} % are usable",
            hint=f"--ranks {fit.devices_needed}, or {larger}" if fit.devices_needed else larger,
        )
    return replace(island, ranks=ranks, micro_batch_tokens=tokens, sharding=fit.sharding)


def part_of(island: Island | None) -> str:
    """How each rank does its part, which all must do alike; empty: of an island that has yet to join."""
    return "" if island is None else f"micro-batches of {island.micro_batch_tokens} tokens ({island.sharding})"


def as_resized(island: Island, planned: Island) -> str:
    return (
        f"ranks {island.ranks}, planned were {planned.ranks}: batches of {island.batch_tokens:,} tokens as planned, in"
        f" micro-batches of {island.micro_batch_tokens:,}"
    )


def run_rank(place: RankPlace, url: str, name: str, device: str | None, here: NamedHere) -> int:
    """Exit status: that of rank 0, once it has told this one to end. From the meeting on it hears no signals: rank 0
    does, and may drain."""
    beats = own_beats(place)
    _, store, _, clock = opened(url, StopSignal(), f"{name}, rank {place.rank}: ", beats.beat)
    run = perform(read_format(store.url, signing_secret(), (learner_signer(name),)), store, clock)
    run = consented(run, url, here, ())
    run = run if run.island(name) else perform(read_log(run), store, clock).with_members(run)
    island = run.island(name)
    on = device_here(device or ("cpu" if island is None else island.accelerator), place)
    island = island and at_ranks(run, island, place.world_size, on)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    join_group(place, on, MEET_S if island is not None else ADMITTED_S, beats.beat, part_of(island))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if island is None:  # rank 0 comes to the group once the run has admitted the island
        run = perform(read_log(run), store, clock).with_members(run)
        island = run.island(name)
    if island is None:
        raise UsageError(f"run {run.name} has no island {name!r}", hint="rank 0 says more")
    island = at_ranks(run, island, place.world_size, on)
    torch.set_num_threads(threads_of(run, island, place))
    data = Prefetched(build_data(run.settings), on)
    from diloco_cli.training.ranks import build_rank, follow

    return follow(build_rank(run, island, data, on, beats))


def device_here(accelerator: str, place: RankPlace | None) -> torch.device:
    """The device of this rank. Raises UsageError if its machine has fewer than it has ranks."""
    device = choose_device(accelerator)
    if place is None or device.type != "cuda":
        return device
    there = torch.cuda.device_count()
    if there == 1 and not place.has_parent:  # as Slurm may show each of its tasks a device of its own
        return torch.device("cuda", 0)
    if place.guessed and there > 1:
        raise UsageError(
            f"which of this machine's {there} devices is this rank's?", hint="set LOCAL_RANK for each rank"
        )
    refuse_few(place.local_world_size)
    return torch.device("cuda", place.local_rank)


def threads_of(run: RunFormat, island: Island, place: RankPlace | None) -> int:
    """Of one rank: an island on CPUs has as many cores as accelerators, and its ranks divide them."""
    if island.accelerator != "cpu":
        return max(run.settings.train.threads, host_threads())
    ranks = 1 if place is None else place.world_size
    return max(1, max(run.settings.train.threads, island.num_accelerators) // ranks)
