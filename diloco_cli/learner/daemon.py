"""`diloco learner`: joins a run by its URL and a name, trains until the log says that the run is over.

Beside the training: its first and last heartbeats, the figures of heartbeats (`Facts`), a store whose slow calls show
that the process lives (`AttendedStore`), and a standby syncer as a child process (`HostedSyncer`)."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.config.hardware import data_class_of
from diloco_cli.environment import DEVICE_VARIABLE, environment_with
from diloco_cli.errors import DilocoError, FencedError, NoSpaceError, StoreError, UsageError
from diloco_cli.events.bucket import tell_event
from diloco_cli.events.cause import cause_of, note_position
from diloco_cli.learner.group import MEET_S, as_resized, at_ranks, device_here, join_group, part_of, threads_of
from diloco_cli.learner.parent import RankBeats, RankPlace, own_beats
from diloco_cli.methods import INNER_OPTIMIZERS
from diloco_cli.protocol.actors.joining import refuse_beside_living
from diloco_cli.protocol.actors.learner import Learner, Observer, Phase
from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.keys import FORMAT_KEY, heartbeat_key, number_of
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.randomness import nonce
from diloco_cli.runtime.consent import NamedHere, check_operator, consented, signing_secret, stores_of
from diloco_cli.runtime.daemon import Connections, Lanes, StopSignal, SystemClock, own_claim, perform, say
from diloco_cli.runtime.processes import is_started_by_diloco
from diloco_cli.runtime.units import diloco_command, own_start
from diloco_cli.signing import LOG, learner_signer
from diloco_cli.store.open import disturbable, open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, RetryNews, background_store, retrying_text
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import DisturbedStore, EmulatedLink, MeteredStore, StoreWrapper
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.devices import choose_device
from diloco_cli.training.inner import shared_out
from diloco_cli.training.replica import (
    DeviceTraining,
    Prefetched,
    Replica,
    check_layout,
    micro_batch_here,
    parameters_of,
)
from diloco_cli.training.trial import check_task
from diloco_cli.training.wire import TensorWire

HOSTED_LEAVE_S = 3.0
CLEAN_STOP_S = 1.5  # for each background thread; the supervisor kills 8 s after SIGTERM
RATE_SMOOTHING = 0.05
RECENT = 20  # heartbeats, about a minute: what shares of time are of
BEHIND_THE_LOOP: tuple[Phase, ...] = ("hear", "offer", "wait", "save")  # phases that training alone would not have
T = TypeVar("T")
ATTEND_S, MOST_S = 2.0, 3600.0
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0
SHORT_LIFE_S = 60.0
ONE_CORE_NO_DEVICE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    DEVICE_VARIABLE: "cpu",
}
KILLED_AFTER_S = 1.0


@dataclass(frozen=True)
class Newcomer:
    """An island that the run may not know yet, as its options describe it; None: the value of the run's islands."""

    region: str | None = None
    batch_tokens: int | None = None
    ranks: int = 1


def run_learner(
    url: str,
    name: str,
    device: str | None,
    drain_s: float = 0.0,
    newcomer: Newcomer | None = None,
    host_syncer: bool = False,
    here: NamedHere = NamedHere(),
    place: RankPlace | None = None,
) -> int:
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
    if not is_started_by_diloco():
        perform(refuse_beside_living(run, name), store, clock)
    torch.set_num_threads(threads_of(run, island, place))
    meter = MeteredStore(behind_its_link(bare, island))
    store, news = background_store(meter, stop.wait, stop.is_due, _log_of(name))
    store.mark = (FORMAT_KEY, run.kept[FORMAT_KEY])
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
        return own_start(island.name, url)
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

    def command(dead_pid: int | None) -> list[str]:
        words = diloco_command("syncer", f"--run={url}", "--standby", f"--name=standby-{name}", "--hosted")
        return [*words, *([] if dead_pid is None else [f"--instead-of={dead_pid}"])]

    hosted = HostedSyncer(command, lambda line: say(f"{utc_now_text()} {name}: {line}"))
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
        learner.ended_by(error, cause_of(error).text)
        if hasattr(learner, "progress"):
            note_position(error, learner.progress.position)
        raise
    finally:
        depart(learner, lanes, store)


def _learn(
    run: RunFormat,
    island: Island,
    store: RetryingStore,
    meter: MeteredStore,
    device_name: str | None,
    stop: StopSignal,
    news: RetryNews,
    place: RankPlace | None,
    beats: RankBeats,
) -> None:
    device = device_here(device_name or island.accelerator, place)
    planned, island = island, at_ranks(run, island, 1 if place is None else place.world_size, device)
    if island is not planned:
        _log_of(island.name)(as_resized(island, planned))
    training, wire = _ports(run, island, device, place, beats, _hasty(stop, beats).check)
    attended = store if place is None else AttendedStore(store, training.keep_alive)
    facts = Facts(island.name, url=meter.url)
    if (rules := shared_out(training.replica.optimizer)) is not None:
        facts.say(rules)
    # what is being uploaded when the stop comes may still be published
    lanes = Lanes(store, SystemClock(monotonic_s, stop.wait, lambda: stop.check(CLEAN_STOP_S)), meter)
    lanes.hurries = lambda: learner.is_leaving
    learner = Learner(
        run,
        island.name,
        own_claim(island.ranks),
        training,
        wire,
        nonce,
        lanes.start,
        facts,
        stop.is_set,
        lambda: not stop.is_due(),
        lambda: facts.heartbeat(training.replica.passed, training.replica.data_s) | traffic(meter, store, learner),
        lanes.news.set,
    )

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
    run: RunFormat,
    island: Island,
    device: torch.device,
    place: RankPlace | None,
    beats: RankBeats,
    attend: Callable[[], None],
) -> tuple[DeviceTraining, TensorWire]:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread, for what it pins
    if place is not None:
        join_group(place, device, MEET_S, attend, part_of(island))  # first of all: the others are there, and wait
    data = Prefetched(build_data(run.settings), device)
    wire = TensorWire(run)
    if device.type == "cuda":
        from diloco_cli.training.devices import CudaTraining, CudaWire

        wire = CudaWire(run, device)
    if place is not None:  # a learner of one device starts by a second sooner without torch.distributed.tensor
        from diloco_cli.training.ranks import RankedTraining, build_rank

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
    known = perform(read_log(run), store, clock).with_members(run)
    if newcomer is None or known.island(name) is not None:
        return known
    island = _island_of(run, str(parse_url(store.url)), name, device, newcomer)
    refuse_another_regions_bucket(run, island, store.url)
    try_here(run, island.batch_tokens)
    say(f"{utc_now_text()} {name}: asks to join run {run.name}")
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


def try_here(run: RunFormat, batch_tokens: int) -> None:
    """What a newcomer lacks on this machine (packages, data) or cannot do, it learns before it is admitted. Raises
    UsageError."""
    check_batch(run, batch_tokens)
    if run.settings.is_worth_a_try(run.layout.num_parameters):
        check_task(run.settings, batch_tokens)


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


def _log_of(name: str) -> Callable[[str], None]:
    return lambda line: say(f"{utc_now_text()} {name}: {line}")


def behind_its_link(store: Store, island: Island) -> Store:
    link = island.link
    if not link.emulate:
        return store
    bare = store.undisturbed if isinstance(store, DisturbedStore) else store  # what disturbs it comes once, outside
    return disturbable(EmulatedLink(bare, link.up_bps, link.down_bps, link.rtt_s or 0.0))


def depart(learner: Learner, lanes: Lanes, store: Store) -> None:
    """End the lanes, then write the last heartbeat; a successor's must stay."""
    learner.follower.leaves = True
    lanes.close(CLEAN_STOP_S)
    has_successor = isinstance(lanes.failure, FencedError)
    if hasattr(learner, "progress") and not has_successor:
        with suppress(DilocoError):  # nothing depends on it
            perform(learner.follower.send_heartbeat(), store, SystemClock(monotonic_s, sleep_s, lambda: None))


def heartbeat_unless_it_fails(store: Store, learner: Learner) -> None:
    """Write a heartbeat while a call is repeated: the follower, which usually does so, may be waiting for the call.
    Before its claim is written another process may have this place: then the log alone says what it waits for."""
    if not hasattr(learner, "progress"):
        return
    with suppress(StoreError, NoSpaceError):
        store.put(heartbeat_key(learner.name), learner.follower.heartbeat_record())


def traffic(meter: MeteredStore, store: RetryingStore, learner: Learner) -> dict[str, Any]:
    """Byte and request counts of this process and of the incarnations before it."""
    counts, earlier = meter.counts, learner.joined.heartbeat
    return {
        "up_bytes": counts.up_bytes + (earlier.up_bytes if earlier else 0),
        "down_bytes": counts.down_bytes + (earlier.down_bytes if earlier else 0),
        "requests": counts.num_requests + (earlier.requests if earlier else 0),
        "writes": counts.num_writes + (earlier.writes if earlier else 0),
        "retrying": retrying_text(store),
    }


@dataclass(frozen=True)
class TimeSpent:
    """Seconds so far: of busy time, of it what the exchange took, and what steps took; of these, waiting for data."""

    busy_s: float = 0.0
    blocked_s: float = 0.0
    step_s: float = 0.0
    data_s: float = 0.0


class Facts(Observer):
    """`blocked_s`: the part of its busy time that the exchange took; `step_s`: what its steps took after the first,
    which opens the data. Tokens per second: recent, and since it began. Shares of time are of the last minute.
    `tell`: takes what there is to say; default: this process's log. `url`: the bucket for what is an event."""

    def __init__(self, name: str, tell: Callable[[str], None] | None = None, url: str = "") -> None:
        self._name, self._url = name, url
        self.say = tell or (lambda text: say(f"{utc_now_text()} {name}: {text}"))
        self._step_tokens = self.tokens = 0
        self.tokens_per_s = self.blocked_s = self.step_s = self.busy_s = 0.0
        self._stepped_s = monotonic_s()
        self._has_stepped = False
        self._marks = deque([TimeSpent()], maxlen=RECENT)

    def began(self, learner: Learner) -> None:
        joined, self._stepped_s = learner.joined, monotonic_s()
        moments = "new"
        if learner.moments_lost:
            moments = "lost, warming up anew" if joined.data_start > 0 else "none yet, warming up"
        elif not INNER_OPTIMIZERS[learner.run.settings.train.inner.name].moments:
            moments = "none"
        elif learner.saves.newest is not None:
            moments = "restored"
        self.say(
            f"incarnation {number_of(joined.incarnation)} of run {learner.run.name} joins at commit {joined.state.n}, "
            f"data from token {joined.data_start:,}, inner moments {moments}"
        )

    def stepped(self, position: int, tokens: int) -> None:
        if not self.tokens:
            self.say("made its first step")
        self._step_tokens, self._stepped_s = tokens, monotonic_s()
        self.tokens += tokens

    def took(self, phase: Phase, seconds: float) -> None:
        self.busy_s += seconds
        if phase in BEHIND_THE_LOOP:
            self.blocked_s += seconds
        else:
            self.step_s += seconds if self._has_stepped else 0.0
            self._has_stepped = True
            rate = self._step_tokens / max(seconds, 1e-9)
            self.tokens_per_s += (rate - self.tokens_per_s) * (RATE_SMOOTHING if self.tokens_per_s else 1.0)

    def rolled_back(self, learner: Learner, to: int) -> None:
        since = "new" if learner.saves.newest is None else "from before"
        self.say(f"the run went back to commit {to}, inner moments {since}")

    def missed(self, text: str) -> None:
        self.say(f"{text}; waits for its successor")

    def mended(self, text: str) -> None:
        self.say(text)
        if self._url:
            tell_event(self._url, "mended", self._name, text)

    def heartbeat(self, passed: float, data_s: float | None = None) -> dict[str, Any]:
        """`passed`: the share of the present batch that was computed; `data_s`: how long steps waited for their data.
        The first step may take minutes, and until it ends there is nothing else to tell."""
        now = TimeSpent(self.busy_s, self.blocked_s, self.step_s, data_s or 0.0)
        since = self._marks[0]
        if now.busy_s > self._marks[-1].busy_s:
            self._marks.append(now)
        return ({} if self.tokens else {"note": f"in its first step: {passed:.0%} of the batch"}) | {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "mean_tokens_per_s": round(self.tokens / (self.busy_s or 1.0), 1),
            "blocked_percent": _percent(now.blocked_s - since.blocked_s, now.busy_s - since.busy_s) or 0.0,
            "last_step_s": round(monotonic_s() - self._stepped_s, 1),
            "data_percent": None if data_s is None else _percent(now.data_s - since.data_s, now.step_s - since.step_s),
        }


def _percent(part_s: float, of_s: float) -> float | None:
    """None of no time; of a step that has not ended only the wait is known, so that it may seem to be more than all."""
    return round(min(100.0, 100 * part_s / of_s), 3) if of_s > 0.0 else None


class AttendedStore(StoreWrapper):
    """Each call is made in a thread of its own, and the calling thread calls `attend` every few seconds meanwhile: the
    saved moments of a large model take minutes, and an island's other ranks take silence for a hang. After `most_s` it
    is silent, because a call may hang itself (a network file system): then a watchdog may end the process. If `attend`
    raises, the call is left alone. Only the thread that made this object attends: an island's ranks are told by one
    thread alone."""

    def __init__(
        self, store: Store, attend: Callable[[], object], every_s: float = ATTEND_S, most_s: float = MOST_S
    ) -> None:
        super().__init__(store)
        self._attend, self._every_s, self._most_s = attend, every_s, most_s
        self._owner, self._own = threading.get_ident(), Connections(1)

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        if threading.get_ident() != self._owner:  # one of several calls: the owner waits for them, and attends itself
            return call()
        until_s = monotonic_s() + self._most_s
        try:
            (answer,) = self._own.answers(
                [call], lambda: self._attend() if monotonic_s() < until_s else None, self._every_s
            )
        except BaseException:
            self._own = Connections(1)  # no later call waits for the one that is left alone
            raise
        if isinstance(answer, BaseException):
            raise answer
        return cast(T, answer)


class HostedSyncer:
    """Keeps one standby alive as long as this process lives, or until the run is over. `say`: a line for the log."""

    def __init__(self, command: Callable[[int | None], list[str]], say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="hosted-syncer", daemon=True)
        self._thread.start()

    def close(self, leave_s: float) -> None:
        """Wait `leave_s` for the child to leave (it reads in the log that the run is over), then end it."""
        self._thread.join(max(0.0, leave_s))
        with self._lock:
            self._closing.set()
            child = self._child
        if child is None or child.poll() is not None:
            return
        if child.stdin is not None:
            with suppress(OSError):
                child.stdin.close()
        try:
            child.wait(KILLED_AFTER_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _keep(self) -> None:
        dead_pid, wait_s, pause_s = None, 0.0, FIRST_PAUSE_S
        while not self._closing.wait(wait_s):
            since_s = monotonic_s()
            try:
                child = self._start(dead_pid)
            except OSError as error:  # no memory, too many processes: this may be temporary
                problem = f"cannot be started: {error.strerror}"
            else:
                if child is None:
                    return
                status, dead_pid = child.wait(), child.pid
                if status == 0 or self._closing.is_set():
                    return
                problem = f"ended with status {status}"
            pause_s = FIRST_PAUSE_S if monotonic_s() - since_s >= SHORT_LIFE_S else min(2 * pause_s, MAX_PAUSE_S)
            wait_s = pause_s
            self._say(f"the hosted syncer {problem}; another one stands by in {wait_s:g} s")

    def _start(self, dead_pid: int | None) -> subprocess.Popen[bytes] | None:
        """The next child; None once this is closed. It has its own process group, so that Ctrl-C ends the learner
        alone: the child may still have to merge the learner's last offers."""
        with self._lock:
            if self._closing.is_set():
                return None
            self._child = subprocess.Popen(
                self._command(dead_pid),
                stdin=subprocess.PIPE,
                env=environment_with(**ONE_CORE_NO_DEVICE),
                process_group=0,
            )
            return self._child
