"""`diloco verify` on toy runs: the product's own replay, for integers on their own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_cli.histories.integers import IntegerArithmetic
from diloco_cli.observe.replay import LogVerifier, Replay
from diloco_cli.protocol.actors.ports import Merged, Refused
from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.store.port import Store


@dataclass(frozen=True)
class ScaledDelta:
    """A delta of the toy arithmetic as the replay wants it: with a scale, which is 1 without a norm clip, and with
    norms, for which the toy arithmetic has a cap of its own."""

    delta: Any
    scale: float = 1.0
    norms: tuple[float, ...] = (0.0,)


class ReplayedIntegers(IntegerArithmetic):
    """The toy arithmetic for a replay."""

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        found = super().read_delta(offer, payload, decoded_base)
        return found if isinstance(found, str) else ScaledDelta(found)

    def merge(self, slot: int, deltas: list[tuple[Any, float]]) -> Merged | Refused:
        return super().merge(slot, [(found.delta, weight) for found, weight in deltas])


class IntegerReplayer(LogVerifier):
    """The product's replay, reading integers."""

    def __init__(self, store: Store, run: RunFormat) -> None:
        super().__init__(store, run)
        self.arithmetic = ReplayedIntegers(run)  # type: ignore[assignment]


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
