"""`diloco syncer`: begins a run whose values are brought, and serves one run until it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import psutil
import torch
from msgspec import structs

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.config.codec import to_plain
from diloco_cli.config.settings import RunSettings
from diloco_cli.corpus.sources import data_places
from diloco_cli.digests import digest
from diloco_cli.errors import (
    DataCheckError,
    FencedError,
    NoSpaceError,
    RefusedError,
    StoreError,
    TerminatedError,
)
from diloco_cli.events.bucket import EventWriter
from diloco_cli.layout import buffer_names
from diloco_cli.protocol.actors.merging import write_surely
from diloco_cli.protocol.actors.standby import counts_of
from diloco_cli.protocol.actors.syncer import (
    DisplacedError,
    NoEvaluator,
    Syncer,
    make_room,
    reading_s,
    serving,
)
from diloco_cli.protocol.log.claims import claim_epoch
from diloco_cli.protocol.log.commit_log import append, read_format, read_log
from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation, Finish, Merge, Skip
from diloco_cli.protocol.log.heartbeats import (
    MAX_HEARTBEAT_BYTES,
    MirrorHeartbeat,
    SyncerHeartbeat,
    of_syncer,
)
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    SYNCER,
    commit_key,
    heartbeat_key,
    state_key,
    weights_key,
)
from diloco_cli.protocol.log.mending import whole_log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    FragmentVersion,
    ProcessClaim,
    RecordError,
    RunFormat,
    decode,
)
from diloco_cli.protocol.log.state import SYNCER as SYNCER_STATES
from diloco_cli.protocol.log.state import RunPhase, RunState, SyncerState, moved
from diloco_cli.protocol.regions import home_of, read_after_relays
from diloco_cli.randomness import nonce
from diloco_cli.runtime.consent import NamedHere, code_of, consented, format_digest, signing_secret, stores_of
from diloco_cli.runtime.daemon import (
    Connections,
    Spending,
    StopSignal,
    SystemClock,
    opened,
    own_claim,
    perform,
    say,
)
from diloco_cli.runtime.processes import usable_cores
from diloco_cli.runtime.registry import run_directory
from diloco_cli.signing import LOG
from diloco_cli.store.open import connections_here, discarding_leftovers, open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import MAKING_ROOM_TRIES_S, retrying_text, store_beside
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import ThrottledStore
from diloco_cli.syncer.arithmetic import (
    Spool,
    TorchArithmetic,
    first_state,
)
from diloco_cli.syncer.evaluation import EvaluatorProcess, held_out_loss
from diloco_cli.syncer.regions import RegionServices, said_as_events
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tasks.weights import Values
from diloco_cli.tensors.codecs import codec, use_threads
from diloco_cli.tensors.flat import bare_tensors
from diloco_cli.tensors.merge import WeightsFormat

Rebuild = Callable[[RunFormat, Store, FragmentVersion], bytes | None]
"""The bytes of a damaged or lost state, made anew from the log (observe/replay.py); None where that cannot be done."""
MAX_EVALUATED = 20_000_000  # parameters: the loss of more takes minutes on a CPU, and the syncer's evaluator has time
Version = tuple[bytes, bytes]  # state and weights


def run_syncer(url: str, rebuild: Rebuild, here: NamedHere = NamedHere()) -> int:
    """Claims the next epoch and serves the run; see `serve_run`."""
    stop = StopSignal()
    stop.hear_signals()
    return serve_run(url, stop, own_claim(), rebuild, here)


def serve_run(
    url: str,
    stop: StopSignal,
    claim: ProcessClaim,
    rebuild: Rebuild,
    here: NamedHere,
    unit: str = SYNCER,
    because: str = "",
    held: dict[str, bytes] | None = None,
) -> int:
    """Exit status: 0 when the run is over. Raises TerminatedError (143) after SIGTERM, FencedError (9) when another
    syncer took over; after a command, which leaves again, it serves on. `here`: what this machine consents to. `unit`
    and `because`: the unit that serves, and why, for `status`; `held`: records that it has read before."""
    while True:
        try:
            return _serve_once(url, stop, claim, rebuild, here, unit, because, held)
        except DisplacedError as error:
            because = "a command had served in its place"
            say(f"{utc_now_text()} {error}; serving again")
        claim = own_claim()


def _serve_once(
    url: str,
    stop: StopSignal,
    claim: ProcessClaim,
    rebuild: Rebuild,
    here: NamedHere,
    unit: str,
    because: str,
    held: dict[str, bytes] | None,
) -> int:
    torch.set_num_threads(1)  # sums in one order
    use_threads(usable_cores())
    home = _Home(url, stop)
    run = perform(read_format(url, signing_secret(), (LOG,)), home.store, home.clock)
    run = replace(run, kept={**(held or {}), **run.kept})
    home.store.mark = (FORMAT_KEY, run.kept[FORMAT_KEY])
    begins = home.store.get(commit_key(0), MAX_RECORD_BYTES) is None  # only the first syncer builds the model
    run = consented(run, url, here, stores_of(run), code=begins)
    home.fit(run)
    evaluator, spending = _evaluator(run, url), Spending(home.pauses, connections_here())
    events = EventWriter(home.bare)
    syncer = Syncer(
        run,
        claim,
        TorchArithmetic(run, spool=Spool(run_directory(url) / "spool")),
        evaluator,
        time_text=utc_now_text,
        nonce=nonce,
        on_commit=lambda state, commit: _note_commit(run, state, commit, spending),
        recover=lambda output: rebuild(run, home.store, output),
        because=because,
        tell=said_as_events(events, "mended"),
    )
    before = _last_heartbeat(run, home.store)
    tell, earlier = said_as_events(events), _earlier_mirrors(before)
    regions = RegionServices(run, home.beside, home_of(syncer), earlier, tell, events_to=home.bare)
    read_after_relays(syncer, regions.links)
    syncer.heartbeat_facts = _heartbeat_facts(home, unit, regions, spending, counts_of(before))
    home.served_by(syncer)
    regions.start()
    over = False
    try:
        with discarding_leftovers([url, *run.region_urls]):
            state = perform(serving(syncer), home.store, home.clock, tries_once=home.meter, spending=spending)
        if state.phase == RunPhase.STOPPED and not syncer.epoch:
            say(f"{utc_now_text()} run {run.name} is stopped; to go on with it: diloco resume {url}")
        over = True
    except TerminatedError as error:
        _say_goodbye(syncer, home.meter, str(error))
        raise
    except (StoreError, NoSpaceError):
        stop.check()  # a stop ends the retries of a failing store: that is no failure of this syncer
        raise
    finally:
        evaluator.close()
        regions.end(over and not stop.is_set())
        events.close()
    if regions.services:
        _heartbeat_unless_it_fails(syncer, home.meter, home.clock)  # with the regions' final state
    return 0


class _Home:
    """The home bucket as this process calls it. `bare`: at once; `meter`: counted, and no faster than the store takes
    calls; `store`: again and again until there is an answer; `beside`: likewise, for threads that must not collect
    beside the syncer. `reads_back`: whether versions are read back."""

    def __init__(self, url: str, stop: StopSignal) -> None:
        self.bare, self.reads_back, self._stop = open_store(url), True, stop
        self.throttled = ThrottledStore(self.bare, stop.wait)
        self.meter, self.store, self._news, self.clock = opened(url, stop, throttled=self.throttled)
        self.beside = store_beside(self.meter, stop.wait, stop.is_set, self._news)

    def fit(self, run: RunFormat) -> None:
        """The syncer's share of the calls to a store that throttles; whether the store checks uploads."""
        self.throttled.pace.weight = max(1, len(run.all_islands))
        self.reads_back = not parse_url(self.bare.url).kind.checks_uploads
        how = "versions are read back" if self.reads_back else "the store checks uploads: versions are not read back"
        say(f"{utc_now_text()} {how}")

    def pauses(self) -> int:
        """How often calls were repeated, or had to wait for their turn."""
        return self.store.pauses + self.throttled.pace.waits

    def served_by(self, syncer: Syncer) -> None:
        """Heartbeats while a call is repeated, and collecting while a write waits for room. That may run on a
        connection's thread, beside other calls of the same turn: the turn itself waits for all of them. What is wrong
        with the log, and a successor, the turn finds itself."""
        tries = store_beside(self.meter, self._stop.wait, self._stop.is_set, self._news, deadline_s=MAKING_ROOM_TRIES_S)
        own = Connections()  # those of the process may all wait for room

        def make() -> None:
            with suppress(StoreError, NoSpaceError, FencedError, DataCheckError, RefusedError):
                perform(make_room(syncer), tries, self.clock, tries_once=self.meter, own=own)

        self._news.heartbeat = partial(_heartbeat_unless_it_fails, syncer, self.meter, self.clock)
        self._news.make_room = make


def _evaluator(run: RunFormat, url: str) -> EvaluatorProcess | NoEvaluator:
    """One that evaluates nothing where nothing builds the model, and where this machine has not consented to its code
    or its data: that is no reason not to merge."""
    if not run.settings.model.is_built:
        return NoEvaluator()
    if run.settings.consented:
        return EvaluatorProcess(url, reading_s(run.layout))
    named = ", ".join([*map(str, code_of(run.settings)), *data_places(run.settings.data)])
    say(f"{utc_now_text()} no evaluations here: this machine has not consented to {named}; to have them, start this")
    say(f"{utc_now_text()} syncer with --allow-code MODULE, --allow-store URL or --allow-code {format_digest(run)}")
    return NoEvaluator()


def _last_heartbeat(run: RunFormat, store: Store) -> bytes | None:
    return of_syncer(run.keyring, store.get(heartbeat_key(SYNCER), MAX_HEARTBEAT_BYTES))


def _earlier_mirrors(data: bytes | None) -> tuple[MirrorHeartbeat, ...]:
    try:
        return () if data is None else decode(SyncerHeartbeat, data, heartbeat_key(SYNCER)).mirrors
    except RecordError:
        return ()


def _heartbeat_facts(
    home: _Home, unit: str, regions: RegionServices, spending: Spending, earlier: dict[str, int]
) -> Callable[[], dict[str, Any]]:
    """This process's own figures for the syncer's heartbeat; counts go on from `earlier`, the syncer's before."""
    process = psutil.Process()

    def facts() -> dict[str, Any]:
        counts = home.meter.counts
        return {
            "unit": unit,
            "up_bytes": counts.up_bytes + earlier.get("up_bytes", 0),
            "down_bytes": counts.down_bytes + earlier.get("down_bytes", 0),
            "requests": counts.num_requests + earlier.get("requests", 0),
            "writes": counts.num_writes + earlier.get("writes", 0),
            "memory_bytes": process.memory_info().rss,
            "retrying": retrying_text(home.store) or retrying_text(home.beside),
            **spending.facts(),
            "calls_a_s": home.throttled.calls_a_s,
            "reads_back": home.reads_back,
            "connections": connections_here(),
            "mirrors": [to_plain(heartbeat) for heartbeat in regions.heartbeats()],
        }

    return facts


def _heartbeat_unless_it_fails(syncer: Syncer, store: Store, clock: SystemClock) -> None:
    """Write a heartbeat while a call is repeated, so that `status` shows the failure if heartbeats can be written."""
    with suppress(StoreError, NoSpaceError):
        perform(syncer.send_heartbeat(monotonic_s(), force=True), store, clock)


def _say_goodbye(syncer: Syncer, store: Store, why: str) -> None:
    """The last heartbeat of a syncer that was told to leave: nobody need wait for its silence to know it."""
    if syncer.epoch and syncer.doing is not SyncerState.FENCED:
        syncer.doing, syncer.reason = moved(SYNCER_STATES, syncer.doing, SyncerState.DONE), why
        _heartbeat_unless_it_fails(syncer, store, SystemClock(monotonic_s, sleep_s, lambda: None))


def _note_commit(run: RunFormat, state: RunState, commit: Commit, spending: Spending) -> None:
    if isinstance(commit, Merge):
        spending.merged()
    _log_commit(run, state, commit)


def _log_commit(run: RunFormat, state: RunState, commit: Commit) -> None:
    """One plain line a commit, for `diloco logs syncer`."""
    names = ",".join(item.learner for item in commit.inputs)
    refused = ", ".join(f"{outcome.learner} {outcome.reason}" for outcome in commit.outcomes)
    parts = [
        commit.time,
        f"commit {commit.n} {commit.kind}",
        f"slot {commit.slot}" if isinstance(commit, Merge | Skip) else "",
        f"[{names}]" if names else "",
        _loss_text(commit) if isinstance(commit, Evaluation) else "",
        f"tokens {state.tokens(run.layout):,}" if isinstance(commit, Merge | Finish) else "",
        commit.reason,
        f"refused: {refused}" if refused else "",
    ]
    say(" ".join(part for part in parts if part))


def _loss_text(commit: Evaluation) -> str:
    return "loss not finite" if commit.loss is None else f"loss {commit.loss:.4f}"


def begin(
    run: RunFormat,
    versions: Iterable[Version],
    claim: ProcessClaim,
    time_text: Callable[[], str],
    nonce: Callable[[], str],
    loss: Callable[[], float | None] = lambda: None,
) -> Steps[RunState]:
    """Commit 0 with these versions, one of each fragment, and a commit with their `loss`, unless that is None. Nothing
    if the log has begun. `versions` are made one by one, as they are written."""
    state: RunState = yield from whole_log(run)
    if state.n >= 0:
        return state
    try:
        epoch = yield from claim_epoch(run, claim, state)
        outputs = []
        for fragment, version in enumerate(versions):
            outputs.append((yield from _published(fragment, version, epoch)))
        reason = f"{claim.host} pid {claim.pid}, with {run.settings.model.brought or 'the values of the seed'}"
        drafts: list[Callable[[], Commit | None]] = [
            lambda: EpochStart(outputs=tuple(outputs), reason=reason, serves=False, format=run.format_digest),
            lambda: _evaluation(loss()),
        ]
        for draft in drafts:
            made = draft()
            if made is not None:
                mine = structs.replace(made, epoch=epoch, nonce=nonce(), time=time_text(), software=claim.software)
                state, appended = yield from append(run, state, mine)
                if not appended:
                    break  # another process was faster: what it has begun with need not have this loss
        return state
    except FencedError:  # the same, or a syncer has begun to serve already
        return (yield from read_log(run, state))


def _evaluation(loss: float | None) -> Commit | None:
    return None if loss is None else Evaluation(evaluated=0, loss=loss if isfinite(loss) else None, tokens=0)


def first_versions(run: RunFormat, values: Values) -> Iterator[Version]:
    """(state, weights) of one fragment after the other. Buffers that `values` lack are as the model's code makes
    them."""
    if buffer_names(run.layout) - values.keys():
        values = {**bare_tensors(build_model(run.settings)), **values}
    for fragment in run.layout.fragments:
        blank = first_state(fragment, values, run.settings.outer.name)
        weights = WeightsFormat(codec(run.settings.sync.weights_codec), fragment).to_bytes(blank.tensors)
        yield blank.seal(), weights


def first_loss(settings: RunSettings, values: Values) -> float:
    """The held-out loss of these values, as the evaluator computes it. The code that the settings name is run."""
    model = build_model(settings).eval()
    with torch.no_grad():
        for name, tensor in bare_tensors(model).items():
            tensor.copy_(values.get(name, tensor))
    return held_out_loss(model, build_data(settings, ("held_out",)), settings.evaluation.sequences)


def _published(fragment: int, version: Version, epoch: int) -> Steps[FragmentVersion]:
    """Version 0 of a fragment, in the bucket before a commit names it."""
    state, weights = version
    output = FragmentVersion(fragment, 0, -1, epoch, digest(state), digest(weights))
    yield from write_surely(state_key(fragment, 0, epoch, output.state_digest), state)
    yield from write_surely(weights_key(fragment, 0, epoch, output.weights_digest), weights)
    return output
