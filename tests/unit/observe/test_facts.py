"""What is read of a run within the time of a look, however slow its store is."""

from __future__ import annotations

import pytest

from diloco_cli.observe.facts import read_facts
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.runtime.daemon import SystemClock
from diloco_cli.store.port import ObjectStat, StoreUnavailableError
from diloco_cli.store.wrappers import StoreWrapper
from tests.simulation.toy import ToyFleet, make_run


class HungStore(StoreWrapper):
    """Each read takes `call_s` of a clock of its own; keys in `hung` have no answer, and neither have listings."""

    def __init__(self, fleet: ToyFleet, call_s: float, hung: set[str]) -> None:
        super().__init__(fleet.world.store)
        self.now_s, self._call_s, self._hung = 0.0, call_s, hung

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        self._pass(key)
        return super().get(key, max_bytes)

    def stat(self, key: str) -> ObjectStat | None:
        self._pass(key)
        return super().stat(key)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        raise StoreUnavailableError("no answer")

    def _pass(self, key: str) -> None:
        self.now_s += self._call_s
        if key in self._hung:
            raise StoreUnavailableError("no answer")


@pytest.fixture(scope="module")
def fleet() -> ToyFleet:
    return ToyFleet(make_run(merges=100)).start().until_commits(40)


@pytest.mark.parametrize(("call_s", "is_cut"), [(0.0, False), (0.3, True)])
def test_a_slow_store_gives_a_part_which_says_so(fleet: ToyFleet, call_s: float, is_cut: bool) -> None:
    store = HungStore(fleet, call_s, {heartbeat_key("l0")})
    clock = SystemClock(lambda: store.now_s, lambda seconds: None, lambda: None)
    facts = read_facts("memory://", fleet.run, store, clock)
    assert facts.cut == is_cut and facts.state.n >= 0
    assert facts.unread == {"l0"} and "l1" in facts.learners and facts.syncer is not None
    assert "l0" in facts.partial and ("the log was read to commit" in facts.partial) == is_cut
