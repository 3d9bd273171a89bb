"""The regions that have a bucket of their own, served beside the home log: two threads each, one per direction.

A merge never waits for them: what fails in a region's bucket is repeated by that region's threads alone, told in
`status`, and made up for when the bucket answers again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.errors import DilocoError, TerminatedError
from diloco_cli.processes.daemon import say
from diloco_cli.protocol.beats import MirrorBeat
from diloco_cli.protocol.driver import Side, SystemClock, perform
from diloco_cli.protocol.mirrors import HeadOf, Mirror, RegionStoppedError
from diloco_cli.protocol.operations import Steps
from diloco_cli.protocol.records import RegionStore, RunFormat
from diloco_cli.protocol.relays import Relay
from diloco_cli.store.metered import MeteredStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, retrying_text
from diloco_cli.store.retry_news import RetryNews

TRIES_AGAIN_S = 5.0  # after an error that repeating one call does not mend: no such bucket, a version lost at home
ENDS_WITHIN_S = 30.0  # once the run is over: for the last commits to reach every region
LEAVES_WITHIN_S = 1.0
LINE_EVERY_S = 60.0


def said_in_the_log(line: str) -> None:
    say(f"{utc_now_text()} {line}")


class RegionService:
    """Of one region. `earlier`: what the syncers before this one said of it, whose counts go on. `tell`: a line for the
    log, or for whoever waits."""

    def __init__(
        self, run: RunFormat, region: RegionStore, home: Store, head: HeadOf, earlier: MirrorBeat,
        tell: Callable[[str], None] = said_in_the_log,
    ) -> None:  # fmt: skip
        self.region, self.home, self.earlier, self.tell = region, home, earlier, tell
        self.leaving, self.closing = threading.Event(), threading.Event()
        self.mirror = Mirror(run, head, self.leaving.is_set)
        self.relay = Relay(run, region.name, head, self.leaving.is_set)
        self.error = self.stopped = ""
        self._opening = threading.Lock()
        self._opened: tuple[RetryingStore, MeteredStore] | None = None
        self._behind_since_s: float | None = None
        self._said = ("", 0.0)
        clock = SystemClock(monotonic_s, self.closing.wait, self._check)
        works: tuple[tuple[str, Callable[[], Steps[None]]], ...] = (
            ("mirror", self.mirror.serve),
            ("relay", self.relay.serve),
        )
        self.threads = [
            threading.Thread(target=self._work, args=(steps, clock), name=f"{what}-{region.name}", daemon=True)
            for what, steps in works
        ]

    def beat(self) -> MirrorBeat:
        """How far the region is, for `status`."""
        now_s, behind = monotonic_s(), self.mirror.behind
        if behind == 0:
            self._behind_since_s = None
        elif self._behind_since_s is None:
            self._behind_since_s = now_s
        counts = self._opened[1].counts if self._opened else None
        retrying = retrying_text(self._opened[0]) if self._opened else ""
        return MirrorBeat(
            region=self.region.name,
            n=self.mirror.state.n,
            behind=behind,
            behind_s=0.0 if self._behind_since_s is None else round(now_s - self._behind_since_s, 1),
            offers=self.relay.offers + self.earlier.offers,
            up_bytes=(counts.bytes_up if counts else 0) + self.earlier.up_bytes,
            down_bytes=(counts.bytes_down if counts else 0) + self.earlier.down_bytes,
            stopped=bool(self.stopped),
            error=self.stopped or retrying or self.error,
        )

    def _check(self) -> None:
        if self.closing.is_set():
            raise TerminatedError("the syncer leaves")

    def _work(self, steps: Callable[[], Steps[None]], clock: SystemClock) -> None:
        while not self.closing.is_set() and not self.stopped:
            try:
                store, meter = self._open()
                perform(steps(), self.home, clock, other=Side(store, meter))
                return
            except TerminatedError:
                return
            except RegionStoppedError as error:
                self.stopped = str(error)
                self._tell(f"STOPPED: {error}; {error.hint}")
            except Exception as error:  # whatever it is, the region must not fall silent: it is told, and tried again
                if self.closing.is_set():
                    return
                self._note(str(error) if isinstance(error, DilocoError) else repr(error))
            self.closing.wait(TRIES_AGAIN_S)

    def _note(self, error: str) -> None:
        """For `status`; and a line for the log, but not the same one every few seconds."""
        now_s, self.error = monotonic_s(), error
        said, said_s = self._said
        if said != error or now_s - said_s >= LINE_EVERY_S:
            self._said = (error, now_s)
            self._tell(f"{error}; tries again every {TRIES_AGAIN_S:g} s")

    def _open(self) -> tuple[RetryingStore, MeteredStore]:
        """Once, when it first answers to opening: the counts are of all that this process moved."""
        with self._opening:
            if self._opened is None:
                meter, news = MeteredStore(open_store(self.region.url)), RetryNews(self._tell)
                store = RetryingStore(
                    meter, sleep=self.closing.wait, stop=self.closing.is_set,
                    on_retry=news.failing, on_answer=news.answered,
                )  # fmt: skip
                self._opened = store, meter
            self.error = ""
            return self._opened

    def _tell(self, line: str) -> None:
        self.tell(f"region {self.region.name}: {line}")


@dataclass
class RegionServices:
    """All of a run's; of a run without any, nothing."""

    services: tuple[RegionService, ...] = ()

    def start(self) -> None:
        for service in self.services:
            for thread in service.threads:
                thread.start()

    def withheld_by(self, run: RunFormat, head: HeadOf) -> Callable[[str, int, int], bool]:
        """What protocol/inbox.py must not read: offers in the name of a region's learner that its bucket has not."""
        relays = {service.region.name: service.relay for service in self.services}

        def withheld(learner: str, incarnation: int, seq: int) -> bool:
            island = head().with_members(run).island(learner)
            relay = None if island is None else relays.get(island.region)
            return relay is not None and relay.withheld(learner, incarnation, seq)

        return withheld

    def beats(self) -> list[MirrorBeat]:
        return [service.beat() for service in self.services]

    def end(self, over: bool, within_s: float = ENDS_WITHIN_S) -> None:
        """Leave. Once the run is `over`, not before every region has heard of it, as far as that can be."""
        if over:
            for service in self.services:
                service.leaving.set()
            self._join(within_s)
            for service in self.services:
                if service.mirror.behind and not service.stopped:
                    service.tell(
                        f"region {service.region.name}: left {service.mirror.behind} commits behind; the next syncer of"
                        f" the run completes it"
                    )
        for service in self.services:
            service.closing.set()
        self._join(LEAVES_WITHIN_S)

    def _join(self, within_s: float) -> None:
        end_s = monotonic_s() + within_s
        for service in self.services:
            for thread in service.threads:
                if thread.ident is not None:
                    thread.join(max(0.0, end_s - monotonic_s()))


def region_services(
    run: RunFormat, home: Store, head: HeadOf, earlier: Iterable[MirrorBeat],
    tell: Callable[[str], None] = said_in_the_log,
) -> RegionServices:  # fmt: skip
    known = {beat.region: beat for beat in earlier}
    return RegionServices(
        tuple(RegionService(run, r, home, head, known.get(r.name, MirrorBeat(r.name)), tell) for r in run.regions)
    )
