"""When a syncer looks whether committed weights can be read: models are large, and nobody is served meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest

from diloco_cli.protocol.actors import repair
from diloco_cli.protocol.actors.inbox import Inbox, Mailbox
from diloco_cli.protocol.actors.repair import LOOKS, ROUNDS, SOONEST_S, Repairer
from diloco_cli.protocol.log.commit_log import Pulse, no_pulse
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.records import genesis, make_run, output

FRAGMENTS, SKIP_AFTER_S, HOUR_S = 4, 60.0, 3600.0


class Serving:
    """A repairer that is called twice a second, on a clock of its own. `looks`: when it read a whole weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slot_s: float, readable: bool = True) -> None:
        self.run = make_run(FRAGMENTS, skip_after_s=SKIP_AFTER_S)
        self.inbox, self.repairer = Inbox(self.run), Repairer(self.run, None, None)  # type: ignore[arg-type]
        self.outputs = list(genesis(self.run).outputs)
        self.slot_s, self.now_s, self.merges = slot_s, 0.0, 0
        self.looks: list[float] = []

        def is_readable(run: RunFormat, output: FragmentVersion, pulse: Pulse) -> Steps[bool]:
            self.looks.append(self.now_s)
            yield from ()
            return readable

        monkeypatch.setattr(repair, "is_readable", is_readable)

    def until(self, end_s: float, merging_every_s: float | None = None, first_offer_s: float = 0.0) -> Serving:
        due_s = self.now_s + (merging_every_s or end_s)
        while self.now_s < end_s:
            if self.now_s >= first_offer_s and merging_every_s is not None:
                self.inbox.mailboxes["l0", 1] = Mailbox("l0", 1, found_s=first_offer_s)
            if self.now_s >= due_s and merging_every_s is not None:
                due_s += merging_every_s
                fragment = self.merges % FRAGMENTS
                self.merges += 1
                self.outputs[fragment] = output(fragment, self.merges, self.merges - 1)
            self._turn()
            self.now_s += 0.5
        return self

    def _turn(self) -> None:
        state = RunState(n=self.merges, outputs=tuple(self.outputs))
        steps = self.repairer.due(state, 1, self.slot_s, self.inbox, no_pulse)
        try:
            next(steps)
            while True:
                steps.send(self.now_s)
        except StopIteration:
            pass


@pytest.mark.parametrize(
    ("fastest_s", "merging_every_s"), [(12.5, 50.0), (60.0, 60.0), (60.0, 240.0), (150.0, 600.0)]
)  # fmt: skip
def test_a_quorum_that_waits_for_slow_islands_makes_no_look(
    monkeypatch: pytest.MonkeyPatch, fastest_s: float, merging_every_s: float
) -> None:
    serving = Serving(monkeypatch, fastest_s).until(4 * HOUR_S, merging_every_s, first_offer_s=fastest_s + 5)
    assert serving.merges > 20 and serving.looks == []


def test_a_fragment_that_is_not_merged_any_more_is_looked_at_after_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(monkeypatch, 12.5).until(HOUR_S, 50.0)
    newest_s = serving.now_s - 50.0 - 0.5
    serving.until(2 * HOUR_S)
    rounds_s = ROUNDS * FRAGMENTS * 50.0 + SKIP_AFTER_S
    oldest_merge_s = newest_s - 50.0 * (FRAGMENTS - 1)
    assert rounds_s <= serving.looks[0] - oldest_merge_s <= rounds_s + 60.0


@pytest.mark.parametrize("skip_after_s", [0.5, 60.0])
def test_three_looks_that_cost_progress_lie_seconds_apart(monkeypatch: pytest.MonkeyPatch, skip_after_s: float) -> None:
    monkeypatch.setattr(f"{__name__}.SKIP_AFTER_S", skip_after_s)
    monkeypatch.setattr(Repairer, "_supersede", lambda *args: iter(()))
    serving = Serving(monkeypatch, 1.0, readable=False).until(skip_after_s + 4.0)
    assert len(serving.looks) == FRAGMENTS
    serving.until(serving.now_s + 4 * max(SOONEST_S, skip_after_s))
    first = serving.looks[::FRAGMENTS][:LOOKS]
    assert len(first) == LOOKS
    assert all(later - earlier >= max(SOONEST_S, skip_after_s) for earlier, later in pairwise(first))
