"""What every syncer's process begins with, a standby's too: who it is, and the bucket."""

from __future__ import annotations

import os

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import StopSignal, say
from diloco_cli.runtime.driver import SystemClock
from diloco_cli.store.open import open_store
from diloco_cli.store.retry import RetryingStore, RetryNews, background_store
from diloco_cli.store.wrapper import MeteredStore


def own_claim() -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__)


def opened(url: str, stop: StopSignal, who: str = "") -> tuple[MeteredStore, RetryingStore, RetryNews, SystemClock]:
    """The bucket at `url`, metered and patient; what it refuses is told in this process's log, after `who`."""
    meter = MeteredStore(open_store(url))
    store, news = background_store(meter, stop.wait, stop.is_set, lambda line: say(f"{utc_now_text()} {who}{line}"))
    return meter, store, news, SystemClock(monotonic_s, stop.wait, stop.check)
