"""`diloco learner`: joins a run by its URL and a name, trains until the log says that the run is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.config.hardware import data_class_of
from diloco_cli.errors import DilocoError, NoSpaceError, StoreError, UsageError
from diloco_cli.events.cause import note_position
from diloco_cli.learner.attended import AttendedStore
from diloco_cli.learner.beats import RankBeats, own_beats
from diloco_cli.learner.facts import Facts
from diloco_cli.learner.group import MEET_S, join_group
from diloco_cli.learner.hosting import HostedSyncer, standby_command
from diloco_cli.learner.place import RankPlace
from diloco_cli.learner.presence import (
    CLEAN_STOP_S,
    behind_its_link,
    depart,
    earlier_heartbeat,
    heartbeat_unless_it_fails,
    traffic,
)
from diloco_cli.learner.resize import as_resized, at_ranks, part_of
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.randomness import nonce
from diloco_cli.runtime.consent import NamedHere, check_operator, consented, signing_secret, stores_of
from diloco_cli.runtime.daemon import Lanes, StopSignal, SystemClock, own_claim, perform, say
from diloco_cli.signing import LOG, learner_signer
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, RetryNews, background_store
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import MeteredStore
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.devices import choose_device, host_threads
from diloco_cli.training.micro_batch import micro_batch_here, parameters_of
from diloco_cli.training.prefetch import Prefetched
from diloco_cli.training.ranks import RankedTraining, build_rank
from diloco_cli.training.replica import DeviceTraining, Replica, check_layout
from diloco_cli.training.wire import TensorWire

HOSTED_LEAVE_S = 3.0


@dataclass(frozen=True)
class Newcomer:
    """An island that the run may not know yet, as its options describe it; None: the value of the run's islands."""

    region: str | None = None
    batch_tokens: int | None = None
    ranks: int = 1


def run_learner(
    url: str, name: str, device: str | None, drain_s: float = 0.0, newcomer: Newcomer | None = None,
    host_syncer: bool = False, here: NamedHere = NamedHere(), place: RankPlace | None = None,
) -> int:  # fmt: skip
    """Exit status: 0 when the run is over. Raises TerminatedError (143) after SIGTERM, FencedError (9) and others.

    On a signal it leaves at once, or drains for at most `drain_s`. A `newcomer` first asks to be admitted to the run.
    `host_syncer`: start a standby beside it, also if the run's settings do not ask for one on every learner. `here`:
    what this machine consents to. `place`: that of rank 0, where the island has several.
    """
    stop = StopSignal(drain_s)
    stop.hear_signals()
    beats = own_beats(place)
    bare, clock = open_store(url), _hasty(stop, beats)

    def waits(seconds: float) -> None:
        beats.beat()
        stop.wait(seconds)

    store, _ = background_store(bare, waits, stop.is_set, _log_of(name))
    secret = signing_secret()
    run = perform(read_format(bare.url, secret, (learner_signer(name),)), store, clock)
    check_operator(run, bare.url, secret, say)
    hosts = host_syncer or run.settings.syncer.on_learners
    if hosts and not run.keyring.holds(LOG):
        hosts = False
        say(f"{utc_now_text()} {name}: hosts no standby syncer: its key is not certified for one")
    run = consented(run, url, here, stores_of(run) if hosts else ())
    run = _with_island(run, store, clock, name, device, newcomer)
    island = run.island(name)
    if island is None:
        names = ", ".join(i.name for i in run.all_islands)
        raise UsageError(
            f"run {run.name} has no island {name!r}; it has: {names}",
            hint=f"to take part as one more: diloco learner --run {url} --name {name} --join",
        )
    refuse_own_loop(run, island, url)
    refuse_another_regions_bucket(run, island, url)
    torch.set_num_threads(threads_of(run, island, place))
    meter = MeteredStore(behind_its_link(bare, island))
    store, news = background_store(meter, stop.wait, stop.is_due, _log_of(name))
    with _hosted_syncer(run.home_of(str(parse_url(url))), name) if hosts else nullcontext():
        try:
            _learn(run, island, store, meter, device, stop, news, place, beats)
        except (StoreError, NoSpaceError):
            _end_if_asked(stop)  # a stop ends the retries of a failing store: that is no failure of this learner
            raise
    return 0


def refuse_own_loop(run: RunFormat, island: Island, url: str) -> None:
    """Raises UsageError for an island that its owner's own loop trains: on other data, perhaps, than the run names."""
    if data_class_of(island.infra) is not None:
        raise UsageError(
            f"island {island.name} of run {run.name} is trained by a loop of its own (infra: {island.infra})",
            hint=_start_of(island, url),
        )


def _start_of(island: Island, url: str) -> str:
    if data_class_of(island.infra) is not None:
        return f'in its own script: join("{url}", name="{island.name}", ...)'
    return f"diloco learner --run {url} --name {island.name}"


def refuse_another_regions_bucket(run: RunFormat, island: Island, url: str) -> None:
    """A learner's offers count only in its own region's bucket. Raises UsageError for another bucket of the run."""
    here = str(parse_url(url))
    own = run.url_for(island.region, run.home_url or here)
    if here != own and here in {run.home_url, *run.region_urls}:
        raise UsageError(
            f"{island.name} is of region {island.region}, whose learners use another bucket of this run",
            where=here,
            hint=_start_of(island, own),
        )


@contextmanager
def _hosted_syncer(url: str, name: str) -> Iterator[None]:
    """Run a standby beside the learner, from its start, because it may be the syncer that begins the run."""
    hosted = HostedSyncer(
        lambda dead_pid: standby_command(url, f"standby-{name}", dead_pid),
        lambda line: say(f"{utc_now_text()} {name}: {line}"),
    )
    leave_s = 0.0
    try:
        yield
        leave_s = HOSTED_LEAVE_S  # the run is over: a syncer that serves it writes its last heartbeat
    finally:
        hosted.close(leave_s)


def _train(learner: Learner, lanes: Lanes, store: Store, clock: SystemClock, stop: StopSignal) -> None:
    """Train to the end; the last heartbeat states what ended the training."""
    try:
        perform(learner.train(), store, clock)
        _end_if_asked(stop)
    except BaseException as error:
        learner.ended_by(error)
        if hasattr(learner, "progress"):
            note_position(error, learner.progress.position)
        raise
    finally:
        depart(learner, lanes, store)


def _learn(
    run: RunFormat, island: Island, store: RetryingStore, meter: MeteredStore, device_name: str | None,
    stop: StopSignal, news: RetryNews, place: RankPlace | None, beats: RankBeats,
) -> None:  # fmt: skip
    device = device_here(device_name or island.accelerator, place)
    planned, island = island, at_ranks(run, island, 1 if place is None else place.world_size, device)
    if island is not planned:
        _log_of(island.name)(as_resized(island, planned))
    training, wire = _ports(run, island, device, place, beats, _hasty(stop, beats).check)
    attended = store if place is None else AttendedStore(store, training.keep_alive)
    facts, earlier = Facts(island.name), earlier_heartbeat(run, attended, island.name)
    # what is being uploaded when the stop comes may still be published
    lanes = Lanes(store, SystemClock(monotonic_s, stop.wait, lambda: stop.check(CLEAN_STOP_S)))
    learner = Learner(
        run, island.name, own_claim(island.ranks), training, wire, nonce, lanes.start, facts, stop.is_set,
        lambda: not stop.is_due(),
        lambda: facts.heartbeat(training.replica.passed, training.replica.data_s) | traffic(meter, store, earlier),
        lanes.news.set,
    )  # fmt: skip

    def check() -> None:
        lanes.check()
        if not hasattr(learner, "progress"):  # before training a signal ends it at once
            _end_if_asked(stop)
        training.keep_alive()

    news.heartbeat = lambda: heartbeat_unless_it_fails(meter, learner)
    status = DilocoError.exit_status
    try:
        _train(learner, lanes, attended, SystemClock(monotonic_s, lanes.sleep_s, check), stop)
        status = 0
    except DilocoError as error:
        status = error.exit_status
        raise
    finally:
        training.close(status)


def _ports(
    run: RunFormat, island: Island, device: torch.device, place: RankPlace | None, beats: RankBeats,
    attend: Callable[[], None],
) -> tuple[DeviceTraining, TensorWire]:  # fmt: skip
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread, for what it pins
    if place is not None:
        join_group(place, device, MEET_S, attend, part_of(island))  # first of all: the others are there, and wait
    data = Prefetched(build_data(run.settings), device)
    wire = TensorWire(run)
    if device.type == "cuda":
        from diloco_cli.training.cuda import CudaTraining, CudaWire

        wire = CudaWire(run, device)
    if place is not None:
        return RankedTraining(run, build_rank(run, island, data, device, beats), island.slowdown), wire
    model = build_model(run.settings)
    check_layout(run, model)
    model.to(device)
    shard, micro = run.shard_of(island.name), island.micro_batch_tokens
    replica = Replica(run.settings, model, data, shard, run.num_shards, device, micro)
    kind = DeviceTraining if device.type != "cuda" else CudaTraining
    return kind(run, replica, island.slowdown), wire


def _hasty(stop: StopSignal, beats: RankBeats) -> SystemClock:
    """A clock for the time before training: a signal ends it at once, also if `stop` allows a drain; a wait is a sign
    of life."""

    def check() -> None:
        beats.beat()
        _end_if_asked(stop)

    return SystemClock(monotonic_s, stop.wait, check)


def _end_if_asked(stop: StopSignal) -> None:
    if stop.is_set():
        raise stop.error()


def _with_island(
    run: RunFormat, store: Store, clock: SystemClock, name: str, device: str | None, newcomer: Newcomer | None
) -> RunFormat:
    """The run, with the members of its log if the launch did not know this island."""
    if run.island(name) is not None:
        return run
    if newcomer is None:
        return perform(read_log(run), store, clock).with_members(run)
    check_batch(run, newcomer.batch_tokens or run.settings.train.batch_tokens)
    say(f"{utc_now_text()} {name}: asks to join run {run.name}")
    island = _island_of(run, str(parse_url(store.url)), name, device, newcomer)
    refuse_another_regions_bucket(run, island, store.url)
    return perform(enter(run, island, nonce(), utc_now_text()), store, clock)


def _island_of(run: RunFormat, url: str, name: str, device: str | None, newcomer: Newcomer) -> Island:
    """The newcomer's island; its region is that of the bucket it was started with, unless an option names another."""
    batch_tokens = newcomer.batch_tokens or run.settings.train.batch_tokens
    tensors, here_it_runs = parameters_of(run.layout), choose_device(device or "cpu")
    micro, fit = micro_batch_here(run.settings, tensors, run.num_fragments, batch_tokens, here_it_runs, newcomer.ranks)
    return Island(
        name=name,
        region=newcomer.region or region_here(run, url),
        batch_tokens=batch_tokens,
        local_steps=run.settings.sync.every,
        tokens_per_s=0.0,
        step_s=0.0,
        accelerator=device or "cpu",
        num_accelerators=1 if here_it_runs.type == "cpu" else newcomer.ranks,
        infra="joined",
        micro_batch_tokens=micro,
        ranks=newcomer.ranks,
        sharding=fit.sharding,
    )


def region_here(run: RunFormat, url: str) -> str:
    """The region whose bucket is at `url`; else the run's home."""
    here = next((store.name for store in run.regions if store.url == url), None)
    return here or run.home_region or min(island.region for island in run.islands)


def check_batch(run: RunFormat, batch_tokens: int) -> None:
    """Preset data comes in whole sequences: with another batch size an island would claim tokens that it never trains
    on. For a user's own data only its code can check this. Raises UsageError."""
    sequence = getattr(build_data(run.settings), "sequence", None)
    if isinstance(sequence, int) and batch_tokens % sequence:
        nearest = max(1, round(batch_tokens / sequence)) * sequence
        raise UsageError(
            f"--batch-tokens {batch_tokens}: not a multiple of the run's sequence length, {sequence}",
            where=run.name,
            hint=f"--batch-tokens {nearest}",
        )


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
    if place.local_world_size > there:
        raise UsageError(
            f"{place.local_world_size} ranks on this machine need as many devices; torch sees {there}",
            hint="start fewer ranks here, or run the island where its accelerators are",
        )
    return torch.device("cuda", place.local_rank)


def threads_of(run: RunFormat, island: Island, place: RankPlace | None) -> int:
    """Of one rank: an island on CPUs has as many cores as accelerators, and its ranks divide them."""
    if island.accelerator != "cpu":
        return max(run.settings.train.threads, host_threads())
    ranks = 1 if place is None else place.world_size
    return max(1, max(run.settings.train.threads, island.num_accelerators) // ranks)


def _log_of(name: str) -> Callable[[str], None]:
    return lambda line: say(f"{utc_now_text()} {name}: {line}")
