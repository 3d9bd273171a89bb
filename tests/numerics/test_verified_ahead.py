"""`verify` reads many commits at a time, and comes to the same result."""

from __future__ import annotations

import threading
from dataclasses import asdict

from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.store.port import Store
from diloco_cli.store.wrappers import StoreWrapper
from tests.numerics.harness import make_run, run_to_end


class GrowsMeanwhile(StoreWrapper):
    """The commits from `first` on are not there yet when they are read ahead, which other threads do."""

    def __init__(self, store: Store, first: int) -> None:
        super().__init__(store)
        self.first, self.missed = first, set[str]()

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        is_ahead = threading.current_thread() is not threading.main_thread()
        if is_ahead and key >= commit_key(self.first):
            self.missed.add(key)
            return None
        return super().get(key, max_bytes)


def test_a_log_that_grows_while_it_is_read_ahead_is_verified_to_its_end() -> None:
    run = make_run(2, 4, SyncSettings(every=4, fragments=2), OuterSettings(), InnerSettings())
    store, _ = run_to_end(run)
    whole = LogVerifier(store, run).replay()
    growing = GrowsMeanwhile(store, whole.commits - 4)
    assert whole.ok and asdict(LogVerifier(growing, run).replay()) == asdict(whole)
    assert growing.missed >= {commit_key(whole.commits - before) for before in (3, 2, 1)}
