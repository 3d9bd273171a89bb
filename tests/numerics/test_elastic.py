"""An island joins a real run half way, trains, and leaves: everything adds up, and the log replays bit for bit."""

from __future__ import annotations

import threading

from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import Island, RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.memory import MemoryStore
from tests.numerics.harness import CLOCK, Threads, make_run, process_of, serve
from tests.numerics.test_identities import CONSTANT
from tests.numerics.tiny import ROWS
from tests.waiting import wait_until

GUEST = Island("guest", "elsewhere", 2 * ROWS, 1, 0.0, 0.0)


class Party:
    """A run of two islands in threads, with data shards for four."""

    def __init__(self, rounds: int) -> None:
        run = make_run(2, rounds, SyncSettings(every=6, fragments=3), OuterSettings("nesterov", 0.5, 0.5), CONSTANT)
        data = replace(run.settings.data, shards=4)
        assert isinstance(data, DataSettings)
        self.run: RunFormat = replace(run, settings=replace(run.settings, data=data))
        self.store = MemoryStore()
        self.store.create(FORMAT_KEY, encode(self.run))
        self.threads = Threads()

    def guest(self, stop: threading.Event) -> None:
        run = perform(enter(self.run, GUEST, nonce(), utc_now_text()), self.store, CLOCK)
        process_of(run, self.store, "guest", stop.is_set).train()

    def state(self) -> RunState:
        return perform(read_log(self.run), self.store, CLOCK)

    def wait_for(self, reached) -> RunState:  # type: ignore[no-untyped-def]
        wait_until(lambda: self.threads.failures or reached(self.state()))
        if self.threads.failures:
            raise self.threads.failures[0]
        return self.state()

    def stop(self) -> RunState:
        perform(ask(self.state(), "stop", nonce(), utc_now_text(), "enough"), self.store, CLOCK)
        self.threads.join()
        return self.state()


def test_a_verifier_finds_an_island_that_nobody_admitted() -> None:
    """The same log without its membership commit's island: the replay must object."""
    party = Party(rounds=10_000)
    party.threads.start(serve, party.run, party.store)
    party.threads.start(party.guest, threading.Event())
    party.wait_for(lambda state: state.learner("guest").merges >= 2)
    party.stop()
    assert LogVerifier(party.store, party.run).replay().ok
    full = replace(party.run, settings=replace(party.run.settings, data=replace(party.run.settings.data, shards=2)))
    found = LogVerifier(party.store, full).replay()
    assert not found.ok and any("2 shards" in text for text in found.mismatches)
