"""`diloco verify` on toy runs: the product's own replay, for integers on their own arithmetic."""

from __future__ import annotations

from diloco_cli.observe.replay import LogVerifier, Replay
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.store.port import Store
from tests.histories.integers import IntegerArithmetic


class IntegerReplayer(LogVerifier):
    """The product's replay, reading integers."""

    def __init__(self, store: Store, run: RunFormat) -> None:
        super().__init__(store, run)
        self.arithmetic = IntegerArithmetic(run)  # type: ignore[assignment]


def problems_of(replay: Replay) -> list[str]:
    twice = [f"{replay.duplicates} offers applied twice"] if replay.duplicates else []
    return [*(f"missing: {key}" for key in replay.missing), *replay.mismatches, *twice]


def verified_integers(store: Store, run: RunFormat) -> Replay:
    """One replay; where the log's floor rose meanwhile and took away what that one still wanted, another from there."""
    while True:
        replayer = IntegerReplayer(store, run)
        found = replayer.replay()
        if found.ok or replayer.floor() <= found.floor:
            return found
