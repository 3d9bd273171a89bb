"""What stands in for links in virtual time."""

from __future__ import annotations

import pytest

from diloco_cli.forecast.stand_ins import Condition, SharedWire, Sizes
from diloco_cli.protocol.log.operations import Create
from tests.unit.forecast.test_run import make_run


def test_objects_on_an_uplink_have_equal_shares() -> None:
    wire = SharedWire(8.0)
    wire.begin("moments", 10, 0.0)
    assert wire.ends_s("moments", 0.0) == 10.0
    wire.begin("offer", 2, 4.0)
    assert wire.ends_s("offer", 4.0) == 8.0 and wire.ends_s("moments", 4.0) == 12.0
    assert wire.ends_s("offer", 9.0) == 8.0, "what has ended keeps its time"
    wire.begin("later", 1, 11.0)
    assert wire.ends_s("moments", 11.0) == 13.0 and wire.ends_s("later", 20.0) == 13.0


def test_a_call_is_held_while_what_was_sent_later_has_its_share() -> None:
    run = make_run(learners=1)
    island = run.islands[0]
    condition = Condition(island, Sizes((2.0,), (2.0,), 10.0))
    condition.up, call_s = SharedWire(8.0), 0.5
    moments, offer = Create("inner/x", b"1"), Create("delta/x", b"0:x")
    assert condition.transfer_s(moments, 0.0) == 10.0
    assert condition.transfer_s(offer, 4.0) == 4.0
    assert condition.held_until_s(offer, call_s, 8.5) == 8.5
    assert condition.held_until_s(moments, call_s, 10.5) == pytest.approx(12.5)
    condition.become(2.0, 11.0)
    assert condition.held_until_s(moments, call_s, 12.5) == pytest.approx(13.5)
    assert condition.held_until_s(moments, call_s, 13.5) == 13.5 and "inner/x" not in condition.up
    condition.connect()
    assert condition.up is None or not condition.up.left_bits, "a new process begins with a free link"
