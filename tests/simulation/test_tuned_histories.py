"""Short histories see what only long runs do: constants of the protocol are smaller there."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from diloco_cli.protocol.actors import syncer
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import MAX_EXACT, RunFormat
from tests.histories.campaign import swarm
from tests.histories.memo import tuned
from tests.histories.options import drawn_options

SEEDS = range(16)


def test_readers_on_a_long_way_look_for_newer_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that is lost or old shows by the length of the way, in the histories of the swarm as they are."""
    calls: Counter[str] = Counter()
    newest_snapshot = log.newest_snapshot

    def counted(run: RunFormat, beyond: int, before: int = MAX_EXACT) -> Steps[Any]:
        caller = sys._getframe(1).f_code.co_name
        found = yield from newest_snapshot(run, beyond, before)
        calls[f"{caller}, {'found' if found else 'none'}"] += 1
        return found

    monkeypatch.setattr(log, "newest_snapshot", counted)
    assert not swarm(SEEDS).violations
    print(dict(calls))
    assert calls["read_log, found"] >= len(SEEDS) // 4 and calls["read_log, none"] > 0


def test_every_constant_of_a_history_is_tuned_wherever_it_is_known() -> None:
    constants = drawn_options(0).constants
    every, way = log.SNAPSHOT_EVERY, log.LONG_WAY
    with tuned(**constants):
        assert log.SNAPSHOT_EVERY == syncer.SNAPSHOT_EVERY == constants["SNAPSHOT_EVERY"] != every
        assert way // every == log.LONG_WAY // log.SNAPSHOT_EVERY, "one follows from the other"
    assert (every, way) == (log.SNAPSHOT_EVERY, log.LONG_WAY)


def test_a_constant_that_no_module_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="SNAPSHOTS_NEVER"), tuned(SNAPSHOT_EVERY=3, SNAPSHOTS_NEVER=3):
        raise NotImplementedError
    assert log.SNAPSHOT_EVERY > 3
