"""The regions that have a bucket of their own, served beside the home log: a thread each for what goes there, for what
comes home, and for the events that their units have told there.

A merge never waits for them: a failed call to a region's bucket is repeated by that region's threads alone and shown in
`status`; the region catches up when the bucket answers again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.errors import (
    DataCheckError,
    DilocoError,
    NoSpaceError,
    StoreError,
    TerminatedError,
)
from diloco_cli.events.bucket import WRITE_EVERY_S, EventCarrier, EventWriter
from diloco_cli.events.cause import safe
from diloco_cli.protocol.log.heartbeats import (
    MirrorHeartbeat,
    moving_s,
)
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import RegionStore, RunFormat
from diloco_cli.protocol.regions import TRIES_AGAIN_S, Home, RegionLink, RegionStoppedError, Tell
from diloco_cli.runtime.daemon import (
    Connections,
    Side,
    SystemClock,
    perform,
    say,
)
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import MAKING_ROOM_TRIES_S, RetryingStore, background_store, retrying_text, store_beside
from diloco_cli.store.wrappers import MeteredStore

PROVEN_S = 2 * TRIES_AGAIN_S
ENDS_WITHIN_S = 30.0  # once the run is over: for the last commits to reach every region
LEAVES_WITHIN_S = 1.0
LINE_EVERY_S = 60.0
MAX_UNHEARD = 16  # of a region, told in a heartbeat: heartbeats are small


def said_in_the_log(line: str) -> None:
    say(f"{utc_now_text()} {line}")


def said_as_events(events: EventWriter, kind: str = "region") -> Tell:
    """What takes a line about a region: this process's log, and the home bucket as an event."""

    def tell(line: str) -> None:
        said_in_the_log(line)
        events.note(kind, SYNCER, safe(line))

    return tell


@dataclass
class Trouble:
    """The error that a thread's work ended with, and since when it recurs, until the work has gone well for long."""

    text: str = ""
    since_s: float = 0.0
    works_since_s: float | None = None

    def began(self, now_s: float) -> None:
        self.works_since_s = now_s

    def failed(self, text: str, now_s: float) -> None:
        if self._is_over(now_s):
            self.since_s = now_s
        self.text, self.works_since_s = text, None

    def told(self, now_s: float) -> str:
        return "" if self._is_over(now_s) else f"fails for {now_s - self.since_s:.0f} s: {self.text}"

    def _is_over(self, now_s: float) -> bool:
        return not self.text or (self.works_since_s is not None and now_s - self.works_since_s >= PROVEN_S)


class RegionService:
    """The service of one region. `earlier`: the heartbeat of the syncers before, from which the counts go on. `tell`
    takes a line for the log. `events_to`: the home bucket, each call tried once; None: events stay where they are."""

    def __init__(
        self,
        run: RunFormat,
        region: RegionStore,
        store: Store,
        home: Home,
        earlier: MirrorHeartbeat,
        tell: Tell,
        events_to: Store | None = None,
    ) -> None:
        self.run, self.region, self.store, self.earlier, self.tell = run, region, store, earlier, tell
        self.head = home.head
        self.leaving, self.closing = threading.Event(), threading.Event()
        self.link = RegionLink(run, region.name, home, self.leaving.is_set, self._tell)
        self.stopped = ""
        self.troubles = {what: Trouble() for what in self.link.works()}
        self._opening = threading.Lock()
        self._opened: tuple[RetryingStore, MeteredStore] | None = None
        self._behind_since_s: float | None = None
        self._said = ("", 0.0)
        clock = SystemClock(monotonic_s, self.closing.wait, self._check)
        self.threads = [
            threading.Thread(
                target=self._work, args=(steps, clock, self.troubles[what]), name=f"{what}-{region.name}", daemon=True
            )
            for what, steps in self.link.works().items()
        ]
        if events_to is not None:
            work = partial(self._carry_events, events_to, tuple(self.threads))
            self.threads.append(threading.Thread(target=work, name=f"events-{region.name}", daemon=True))

    def heartbeat(self) -> MirrorHeartbeat:
        """The region's progress, for `status`."""
        now_s, behind = monotonic_s(), self.link.mirror.behind
        if behind == 0:
            self._behind_since_s = None
        elif self._behind_since_s is None:
            self._behind_since_s = now_s
        counts = self._opened[1].counts if self._opened else None
        return MirrorHeartbeat(
            region=self.region.name,
            n=self.link.mirror.state.n,
            behind=behind,
            behind_s=0.0 if self._behind_since_s is None else round(now_s - self._behind_since_s, 1),
            offers=self.link.relay.offers + self.earlier.offers,
            up_bytes=(counts.up_bytes if counts else 0) + self.earlier.up_bytes,
            down_bytes=(counts.down_bytes if counts else 0) + self.earlier.down_bytes,
            stopped=bool(self.stopped),
            error=self._error(now_s),
            requests=(counts.num_requests if counts else 0) + self.earlier.requests,
            writes=(counts.num_writes if counts else 0) + self.earlier.writes,
            unheard={who: why for (who, _), why in sorted(self.link.relay.unheard.copy().items())[:MAX_UNHEARD]},
        )

    def _error(self, now_s: float) -> str:
        retrying = retrying_text(self._opened[0]) if self._opened else ""
        lasting = (trouble.told(now_s) for trouble in self.troubles.values())
        damaged = sorted(self.link.mirror.weights.damaged.copy().values())
        return self.stopped or retrying or next(filter(None, (*lasting, *damaged)), "")

    def _check(self) -> None:
        """Called before every operation of both threads, and after every pause."""
        if self.closing.is_set():
            raise TerminatedError("the syncer leaves")
        if self.stopped:
            raise TerminatedError("what is written here answers to another log than the run's")

    def _work(self, steps: Callable[[], Steps[None]], clock: SystemClock, trouble: Trouble) -> None:
        own = Connections()  # calls to a region that does not answer must not keep home's from being made
        while True:
            try:
                store, meter = self._open()
                trouble.began(monotonic_s())
                perform(steps(), self.store, clock, other=Side(store, meter), own=own)
                return
            except TerminatedError:
                return
            except RegionStoppedError as error:
                self.stopped = f"{error}; {error.hint}"
                self.leaving.set()
                self._tell(f"STOPPED: {self.stopped}")
                return
            except Exception as error:  # any error is reported and the work tried again
                text = str(error) if isinstance(error, DilocoError) else repr(error)
            if self.closing.is_set() or self.stopped:
                return
            trouble.failed(text, monotonic_s())
            self._say(text)
            self.closing.wait(TRIES_AGAIN_S)

    def _carry_events(self, home: Store, others: Iterable[threading.Thread]) -> None:
        """Now and then, and once more after what the others carry last. Events are for display: what fails is tried
        again, and told by nobody."""
        carrier = EventCarrier()
        while not (self.closing.is_set() or self.stopped):
            if is_last := self.leaving.is_set():
                for thread in others:
                    thread.join(ends_within_s(self.run))
            islands = self.head().with_members(self.run).all_islands
            with suppress(DilocoError, OSError):
                there = self._open()[1]
                carrier.carry(there, home, {island.name for island in islands if island.region == self.region.name})
            if is_last:
                return
            self.leaving.wait(WRITE_EVERY_S)

    def _say(self, error: str) -> None:
        """A line for the log, but not the same one every few seconds."""
        now_s = monotonic_s()
        said, said_s = self._said
        if said != error or now_s - said_s >= LINE_EVERY_S:
            self._said = (error, now_s)
            self._tell(f"{error}; tries again every {TRIES_AGAIN_S:g} s")

    def _open(self) -> tuple[RetryingStore, MeteredStore]:
        """Open the region's store once, so that its meter counts all that this process moves."""
        with self._opening:
            if self._opened is None:
                meter = MeteredStore(open_store(self.region.url))
                store, news = background_store(meter, self.closing.wait, self._is_over, self._tell)
                tries = store_beside(meter, self.closing.wait, self._is_over, news, deadline_s=MAKING_ROOM_TRIES_S)
                news.make_room = partial(self._make_room, Side(tries, meter), Connections())
                self._opened = store, meter
            return self._opened

    def _is_over(self) -> bool:
        return self.closing.is_set() or bool(self.stopped)

    def _make_room(self, there: Side, own: Connections) -> None:
        """Collect in the region's bucket while a write there waits for room: only its mirror writes there."""
        clock = SystemClock(monotonic_s, self.closing.wait, self._check)
        with suppress(StoreError, NoSpaceError, DataCheckError):
            perform(self.link.mirror.make_room(), self.store, clock, other=there, own=own)

    def _tell(self, line: str) -> None:
        self.tell(f"region {self.region.name}: {line}")


def ends_within_s(run: RunFormat) -> float:
    """For how long the end of a run waits for its regions, which may lack a version of the largest fragment."""
    return ENDS_WITHIN_S + moving_s(run.layout)


class RegionServices:
    """The services of a run's regions with a bucket of their own, but for those whose URLs are in `without`; there may
    be none."""

    def __init__(
        self,
        run: RunFormat,
        store: Store,
        home: Home,
        earlier: Iterable[MirrorHeartbeat] = (),
        tell: Tell = said_in_the_log,
        without: Container[str] = (),
        events_to: Store | None = None,
    ) -> None:
        self.run = run
        known = {heartbeat.region: heartbeat for heartbeat in earlier}
        self.services = [
            RegionService(
                run, region, store, home, known.get(region.name, MirrorHeartbeat(region.name)), tell, events_to
            )
            for region in run.regions
            if region.url not in without
        ]

    def start(self) -> None:
        for service in self.services:
            for thread in service.threads:
                thread.start()

    @property
    def links(self) -> dict[str, RegionLink]:
        """By region."""
        return {service.region.name: service.link for service in self.services}

    def heartbeats(self) -> list[MirrorHeartbeat]:
        return [service.heartbeat() for service in self.services]

    def end(self, over: bool, within_s: float | None = None) -> None:
        """End the services; if the run is `over`, after at most `within_s` (None: as long as a version may take) for
        every region to catch up."""
        if over:
            for service in self.services:
                service.leaving.set()
            self._join(ends_within_s(self.run) if within_s is None else within_s)
            for service in self.services:
                behind = service.link.mirror.behind
                if behind and not service.stopped:
                    service.tell(
                        f"region {service.region.name}: left {behind} commits behind; the next syncer of the run"
                        f" completes it"
                    )
        for service in self.services:
            service.closing.set()
            service.leaving.set()
        self._join(LEAVES_WITHIN_S)

    def _join(self, within_s: float) -> None:
        end_s = monotonic_s() + within_s
        for service in self.services:
            for thread in service.threads:
                if thread.ident is not None:
                    thread.join(max(0.0, end_s - monotonic_s()))
