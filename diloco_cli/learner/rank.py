"""`diloco learner` as one of an island's ranks that do what rank 0 does: it takes no part in the run by itself.

It reads the run's format from the bucket, as any learner does, and nothing else from there: parameters and moments come
from rank 0.
"""

from __future__ import annotations

import signal

import torch

from diloco_cli.errors import UsageError
from diloco_cli.learner.beats import own_beats
from diloco_cli.learner.daemon import device_here, threads_of
from diloco_cli.learner.group import ADMITTED_S, MEET_S, join_group
from diloco_cli.learner.place import RankPlace
from diloco_cli.learner.resize import at_ranks, part_of
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.runtime.consent import NamedHere, consented, signing_secret
from diloco_cli.runtime.daemon import StopSignal, opened, perform
from diloco_cli.signing import learner_signer
from diloco_cli.tasks.build import build_data
from diloco_cli.training.prefetch import Prefetched
from diloco_cli.training.ranks import build_rank, follow


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
    return follow(build_rank(run, island, data, on, beats))
