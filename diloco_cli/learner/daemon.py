"""`diloco learner`: joins a run by its URL and a name, trains until the log says that the run is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import isfinite

import torch

from diloco_cli import __version__
from diloco_cli.algorithm.flat import parameter_facts
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.errors import NoSpaceError, StoreError, TerminatedError, UsageError
from diloco_cli.layout import make_layout
from diloco_cli.learner.exchange import Exchange
from diloco_cli.learner.hosting import HostedSyncer, standby_command
from diloco_cli.learner.inner import keeps_moments
from diloco_cli.learner.loop import Facts, Trainer
from diloco_cli.learner.micro_batch import micro_batch_here, parameters_of
from diloco_cli.learner.moments import fetch_moments, restore_moments
from diloco_cli.learner.prefetch import Prefetched
from diloco_cli.learner.replica import Replica
from diloco_cli.processes.daemon import Stopping, say
from diloco_cli.processes.signing_key import signing_secret
from diloco_cli.protocol.beats import LARGEST_BEAT_BYTES, LearnerBeat
from diloco_cli.protocol.driver import SystemClock, perform
from diloco_cli.protocol.joining import Joined, join
from diloco_cli.protocol.keys import beat_key
from diloco_cli.protocol.log import read_format, read_log
from diloco_cli.protocol.membership import enter
from diloco_cli.protocol.progress import Progress
from diloco_cli.protocol.records import Island, ProcessClaim, RunFormat
from diloco_cli.protocol.sizes import most_moments_bytes
from diloco_cli.protocol.wire import RecordError, decode, encode
from diloco_cli.randomness import nonce
from diloco_cli.signing import LOG, learner_signer
from diloco_cli.store.metered import MeteredStore
from diloco_cli.store.open import open_store, parse_url
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, retrying_text
from diloco_cli.store.retry_news import BEAT_EVERY_S, RetryNews
from diloco_cli.store.wan import EmulatedLink
from diloco_cli.tasks.build import build_data, build_model

HOSTED_LEAVE_S = 3.0
CLEAN_STOP_S = 1.5  # for each background thread; the supervisor kills 4 s after SIGTERM


@dataclass(frozen=True)
class Newcomer:
    """An island that the run may not know yet, as it describes itself; None: as the run's own islands are."""

    region: str | None = None
    batch_tokens: int | None = None


def run_learner(
    url: str, name: str, device: str | None, drain_s: float = 0.0, newcomer: Newcomer | None = None,
    host_syncer: bool = False,
) -> int:  # fmt: skip
    """Exit status: 0 when the run is over. Raises TerminatedError (143) after SIGTERM, FencedError (9) and others.

    On a signal it leaves at once, or drains for at most `drain_s`. A `newcomer` asks the run to be admitted first.
    `host_syncer`: beside it a syncer stands by, also where the run's settings do not want one on every learner.
    """
    stop = Stopping(drain_s)
    stop.hear_signals()
    bare, clock = open_store(url), _hasty(stop)
    run = _run_with_island(bare, clock, stop, name, device, newcomer)
    island = run.island(name)
    if island is None:
        names = ", ".join(i.name for i in run.everybody)
        raise UsageError(
            f"run {run.name} has no island {name!r}; it has: {names}",
            hint=f"to take part as one more: diloco learner --run {url} --name {name} --join",
        )
    refuse_another_regions_bucket(run, island, url)
    cores = island.num_accelerators if island.accelerator == "cpu" else 1
    torch.set_num_threads(max(run.settings.train.threads, cores))
    meter = MeteredStore(_behind_its_link(bare, island))
    news = _news(name)
    store = RetryingStore(
        meter, sleep=stop.wait, stop=stop.is_due,
        on_retry=news.failing, on_answer=news.answered, tell_every_s=BEAT_EVERY_S,
    )  # fmt: skip
    hosts = host_syncer or run.settings.syncer.on_learners
    with _hosted_syncer(run.home_of(str(parse_url(url))), name) if hosts else nullcontext():
        try:
            _train(_prepare(run, island, store, meter, clock, device, stop, news), stop)
        except (StoreError, NoSpaceError):
            _hasty(stop).check()  # a stop ends the retrying of a store that fails: that is no failure of this learner
            raise
    return 0


def refuse_another_regions_bucket(run: RunFormat, island: Island, url: str) -> None:
    """What a learner writes counts in its own region's bucket alone. Raises UsageError for another one of the run's."""
    here = str(parse_url(url))
    own = run.url_for(island.region, run.home_url or here)
    if here != own and here in {run.home_url, *(store.url for store in run.regions)}:
        raise UsageError(
            f"{island.name} is of region {island.region}, whose learners use another bucket of this run",
            where=here,
            hint=f"diloco learner --run {own} --name {island.name}",
        )


@contextmanager
def _hosted_syncer(url: str, name: str) -> Iterator[None]:
    """A standby beside the learner: it may be the one that begins the run."""
    hosted = HostedSyncer(
        lambda dead_pid: standby_command(url, f"standby-{name}", dead_pid),
        lambda line: say(f"{utc_now_text()} {name}: {line}"),
    )
    leave_s = 0.0
    try:
        yield
        leave_s = HOSTED_LEAVE_S  # the run is over: what serves it writes its last words
    finally:
        hosted.close(leave_s)


def _train(trainer: Trainer, stop: Stopping) -> None:
    """The whole training; whatever ends it is in the last beat."""
    try:
        trainer.train()
        if stop.is_set():
            raise TerminatedError("stopped by a signal")
        trainer.facts.state = "DONE"
    except TerminatedError:
        trainer.facts.state = "DONE"
        raise
    except BaseException:
        trainer.facts.state = "FAILED"
        raise
    finally:
        trainer.exchange.close(CLEAN_STOP_S)


def _prepare(
    run: RunFormat, island: Island, store: RetryingStore, meter: MeteredStore, clock: SystemClock,
    device_name: str | None, stop: Stopping, news: RetryNews,
) -> Trainer:  # fmt: skip
    device = choose_device(device_name or island.accelerator)
    data, model = Prefetched(build_data(run.settings), device), build_model(run.settings)
    check_layout(run, model)
    model.to(device)
    micro = island.micro_batch_tokens
    replica = Replica(run.settings, model, data, run.shard_of(island.name), run.num_shards, device, micro)
    joined = perform(join(run, island.name, _claim()), store, clock)
    progress = Progress(run, island.name, joined.incarnation, joined.state, joined.data_start)
    facts = Facts(state="STARTING" if joined.incarnation == 1 else "RECOVERING")
    earlier = _earlier_beat(store, island.name)

    def beat() -> LearnerBeat:
        return _beat(trainer, meter, store, earlier)

    # what is being uploaded when the stop comes may still be published
    background = SystemClock(monotonic_s, stop.wait, lambda: stop.check(CLEAN_STOP_S))
    exchange = Exchange(run, progress, joined.state, store, background, beat)
    trainer = Trainer(run, progress, exchange, replica, stop.is_set, facts, lambda: not stop.is_due())
    news.beat = lambda: _beat_unless_it_fails(meter, island.name, beat())
    for arrival in exchange.load_all():  # the run's weights, never this process's own
        trainer.adopt(arrival, exchange.state)
    late = joined.data_start > 0 or joined.state.merges > 0  # the schedule's own warm-up is not for this one
    if late and keeps_moments(replica.optimizer):
        trainer.moments_lost = not _restore_saved(trainer, joined, store)
    exchange.start()
    _say_hello(joined, run, trainer)
    return trainer


def _hasty(stop: Stopping) -> SystemClock:
    """For all that comes before training: a signal ends it at once, however patient the stop is."""

    def check() -> None:
        if stop.is_set():
            raise TerminatedError("stopped by a signal")

    return SystemClock(monotonic_s, stop.wait, check)


def _run_with_island(
    bare: Store, clock: SystemClock, stop: Stopping, name: str, device: str | None, newcomer: Newcomer | None
) -> RunFormat:
    """The run as this learner has to know it: with the members of its log, if the launch did not know the island."""
    news = _news(name)
    store = RetryingStore(
        bare, sleep=stop.wait, stop=stop.is_set,
        on_retry=news.failing, on_answer=news.answered, tell_every_s=BEAT_EVERY_S,
    )  # fmt: skip
    run = perform(read_format(bare.url, signing_secret(), (LOG, learner_signer(name))), store, clock)
    if run.island(name) is not None:
        return run
    if newcomer is None:
        return perform(read_log(run), store, clock).with_members(run)
    check_batch(run, newcomer.batch_tokens or run.settings.train.batch_tokens)
    say(f"{utc_now_text()} {name}: asks to join run {run.name}")
    island = _island_of(run, str(parse_url(bare.url)), name, device, newcomer)
    refuse_another_regions_bucket(run, island, bare.url)
    return perform(enter(run, island, nonce(), utc_now_text()), store, clock)


def _island_of(run: RunFormat, url: str, name: str, device: str | None, newcomer: Newcomer) -> Island:
    """Of the region whose bucket it was started with, unless it says otherwise."""
    here = next((store.name for store in run.regions if store.url == url), None)
    batch_tokens = newcomer.batch_tokens or run.settings.train.batch_tokens
    tensors, here_it_runs = parameters_of(run.layout), choose_device(device or "cpu")
    return Island(
        name=name,
        region=newcomer.region or here or run.home_region or min(island.region for island in run.islands),
        batch_tokens=batch_tokens,
        local_steps=run.settings.sync.every,
        tokens_per_s=0.0,
        step_s=0.0,
        accelerator=device or "cpu",
        infra="joined",
        micro_batch_tokens=micro_batch_here(run.settings, tensors, run.num_fragments, batch_tokens, here_it_runs),
    )


def check_batch(run: RunFormat, batch_tokens: int) -> None:
    """Preset data comes in whole sequences: an island that counts others would claim what it never trains on. Of a
    user's own data only its code can tell. Raises UsageError."""
    sequence = getattr(build_data(run.settings), "sequence", None)
    if isinstance(sequence, int) and batch_tokens % sequence:
        nearest = max(1, round(batch_tokens / sequence)) * sequence
        raise UsageError(
            f"--batch-tokens {batch_tokens}: not a multiple of the run's sequence length, {sequence}",
            where=run.name,
            hint=f"--batch-tokens {nearest}",
        )


def _restore_saved(trainer: Trainer, joined: Joined, store: Store) -> bool:
    saved = fetch_moments(store, joined.inner, most_moments_bytes(trainer.exchange.run.layout))
    if joined.inner is None or not restore_moments(trainer.replica, saved):
        return False
    trainer.exchange.moments.add(joined.inner, joined.state.n)
    return True


def _say_hello(joined: Joined, run: RunFormat, trainer: Trainer) -> None:
    moments = "new"
    if trainer.moments_lost:
        moments = "lost, warming up anew" if joined.data_start > 0 else "none yet, warming up"
    elif not keeps_moments(trainer.replica.optimizer):
        moments = "none"
    elif trainer.exchange.moments.newest is not None:
        moments = "restored"
    say(
        f"{utc_now_text()} {trainer.progress.learner}: incarnation {joined.incarnation} of run {run.name} joins "
        f"at commit {joined.state.n}, data from token {joined.data_start:,}, inner moments {moments}"
    )


def check_layout(run: RunFormat, model: torch.nn.Module) -> None:
    """Every learner builds the same parameter list, or does not take part."""
    layout = make_layout(parameter_facts(model), run.settings.sync)
    if layout.digest != run.layout.digest:
        raise UsageError(
            "the model built here has other tensors (names, shapes, types or order) than the run's layout",
            where="FORMAT.json",
            hint="use the same version of the model's code on every island",
        )


def choose_device(accelerator: str) -> torch.device:
    """cpu and mps by name; any other accelerator is CUDA. Raises UsageError if this machine has none."""
    kind = accelerator.lower()
    if kind.startswith("cpu"):
        return torch.device("cpu")
    available = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    wanted = "mps" if kind.startswith(("mps", "apple")) else "cuda"
    if not available[wanted]:
        raise UsageError(
            f"{accelerator} needs {wanted}, which torch {torch.__version__} does not see on this machine",
            hint="run the island where the accelerator is, or give --device cpu",
        )
    return torch.device(kind if kind.startswith("cuda") else wanted)


def _behind_its_link(store: Store, island: Island) -> Store:
    link = island.link
    if not link.emulate:
        return store
    return EmulatedLink(store, link.up_bps, link.down_bps, link.rtt_s or 0.0)


def _claim() -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__)


def _news(name: str) -> RetryNews:
    return RetryNews(lambda line: say(f"{utc_now_text()} {name}: {line}"))


def _beat_unless_it_fails(store: Store, name: str, beat: LearnerBeat) -> None:
    """While a call is being repeated: the follower, who usually writes the beat, may be the one that waits."""
    with suppress(StoreError, NoSpaceError):
        store.put(beat_key(name), encode(beat))


def _earlier_beat(store: Store, name: str) -> LearnerBeat | None:
    data = store.get(beat_key(name), LARGEST_BEAT_BYTES)
    try:
        return decode(LearnerBeat, data, beat_key(name)) if data is not None else None
    except RecordError:
        return None


def _beat(trainer: Trainer, meter: MeteredStore, store: RetryingStore, earlier: LearnerBeat | None) -> LearnerBeat:
    facts, counts, progress = trainer.facts, meter.counts, trainer.progress
    state = "UPLOADING" if facts.state == "TRAINING" and trainer.exchange.uploading else facts.state
    return LearnerBeat(
        state=state,
        incarnation=progress.incarnation,
        n=trainer.exchange.state.n,
        step=progress.steps,
        position=progress.position,
        tokens_per_s=round(facts.tokens_per_s, 1),
        behind=progress.behind(),
        mean_tokens_per_s=round(facts.mean_tokens_per_s, 1),
        loss=facts.loss if facts.loss is not None and isfinite(facts.loss) else None,
        up_bytes=counts.bytes_up + (earlier.up_bytes if earlier else 0),
        down_bytes=counts.bytes_down + (earlier.down_bytes if earlier else 0),
        requests=counts.num_requests + (earlier.requests if earlier else 0),
        writes=counts.num_writes + (earlier.writes if earlier else 0),
        blocked_percent=round(100 * facts.blocked_s / facts.busy_s, 3) if facts.busy_s else 0.0,
        note=facts.note,
        retrying=retrying_text(store),
    )
