"""`diloco learner`: joins a run by its URL and a name, trains until the log says that the run is over."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite

import torch

from diloco_cli import __version__
from diloco_cli.algorithm.flat import parameter_facts
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.digests import digest
from diloco_cli.errors import NoSpaceError, StoreError, TerminatedError, UsageError
from diloco_cli.layout import make_layout
from diloco_cli.learner.exchange import Exchange
from diloco_cli.learner.inner import keeps_moments, restore_inner_state
from diloco_cli.learner.loop import Facts, Trainer
from diloco_cli.learner.replica import Replica
from diloco_cli.processes.daemon import Stopping, say
from diloco_cli.protocol.beats import LearnerBeat
from diloco_cli.protocol.driver import SystemClock, perform
from diloco_cli.protocol.joining import Joined, join
from diloco_cli.protocol.keys import beat_key
from diloco_cli.protocol.log import read_format, read_log
from diloco_cli.protocol.membership import enter
from diloco_cli.protocol.progress import Progress
from diloco_cli.protocol.records import Island, ProcessClaim, RunFormat
from diloco_cli.protocol.wire import RecordError, decode
from diloco_cli.randomness import nonce
from diloco_cli.store.keys import BadKeyError
from diloco_cli.store.metered import MeteredStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, retrying_text
from diloco_cli.store.wan import EmulatedLink
from diloco_cli.tasks.build import build_data, build_model

CLEAN_STOP_S = 1.5  # for each background thread; the supervisor kills 4 s after SIGTERM


@dataclass(frozen=True)
class Newcomer:
    """An island that the run may not know yet, as it describes itself; None: as the run's own islands are."""

    region: str | None = None
    batch_tokens: int | None = None


def run_learner(url: str, name: str, device: str | None, drain_s: float = 0.0, newcomer: Newcomer | None = None) -> int:
    """Exit status: 0 when the run is over. Raises TerminatedError (143) after SIGTERM, FencedError (9) and others.

    On a signal it leaves at once, or drains for at most `drain_s`. A `newcomer` asks the run to be admitted first.
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
    cores = island.num_accelerators if island.accelerator == "cpu" else 1
    torch.set_num_threads(max(run.settings.train.threads, cores))
    meter = MeteredStore(_behind_its_link(bare, island))
    store = RetryingStore(meter, sleep=stop.wait, stop=stop.is_due)
    try:
        _train(_prepare(run, island, store, meter, clock, device, stop), stop)
    except (StoreError, NoSpaceError):
        _hasty(stop).check()  # a stop ends the retrying of a store that fails: that is no failure of this learner
        raise
    return 0


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
    device_name: str | None, stop: Stopping,
) -> Trainer:  # fmt: skip
    device = choose_device(device_name or island.accelerator)
    data, model = build_data(run.settings), build_model(run.settings)
    check_layout(run, model)
    model.to(device)
    replica = Replica(run.settings, model, data, run.shard_of(island.name), run.num_shards, device)
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
    for arrival in exchange.load_all():  # the run's weights, never this process's own
        trainer.adopt(arrival)
    late = joined.data_start > 0 or joined.state.merges > 0  # the schedule's own warm-up is not for this one
    if late and keeps_moments(replica.optimizer):
        trainer.moments_lost = not _restore_moments(trainer, joined, store)
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
    store = RetryingStore(bare, sleep=stop.wait, stop=stop.is_set)
    run = perform(read_format(bare.url), store, clock)
    if run.island(name) is not None:
        return run
    if newcomer is None:
        return perform(read_log(run), store, clock).with_members(run)
    say(f"{utc_now_text()} {name}: asks to join run {run.name}")
    return perform(enter(run, _island_of(run, name, device, newcomer), nonce(), utc_now_text()), store, clock)


def _island_of(run: RunFormat, name: str, device: str | None, newcomer: Newcomer) -> Island:
    return Island(
        name=name,
        region=newcomer.region or run.home_region or min(island.region for island in run.islands),
        batch_tokens=newcomer.batch_tokens or run.settings.train.batch_tokens,
        local_steps=run.settings.sync.every,
        tokens_per_s=0.0,
        step_s=0.0,
        accelerator=device or "cpu",
        infra="joined",
    )


def _restore_moments(trainer: Trainer, joined: Joined, store: Store) -> bool:
    """The newest saved moments, if they are the very bytes that their key names."""
    data = _saved_moments(joined, store)
    if data is None or not restore_inner_state(trainer.replica.model, trainer.replica.optimizer, data):
        return False
    trainer.exchange.inner = joined.inner
    return True


def _saved_moments(joined: Joined, store: Store) -> bytes | None:
    if joined.inner is None:
        return None
    try:
        data = store.get(joined.inner)
    except BadKeyError:  # an offer is a stranger's word
        return None
    return data if data is not None and joined.inner.endswith(digest(data)) else None


def _say_hello(joined: Joined, run: RunFormat, trainer: Trainer) -> None:
    moments = "new"
    if trainer.moments_lost:
        moments = "lost, warming up anew" if joined.data_start > 0 else "none yet, warming up"
    elif not keeps_moments(trainer.replica.optimizer):
        moments = "none"
    elif trainer.exchange.inner is not None:
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


def _earlier_beat(store: Store, name: str) -> LearnerBeat | None:
    data = store.get(beat_key(name))
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
        blocked_percent=round(100 * facts.blocked_s / facts.busy_s, 3) if facts.busy_s else 0.0,
        note=facts.note,
        retrying=retrying_text(store),
    )
