"""Which heartbeats of syncers are news: genuine ones, each once, and none that is older than one before."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.heartbeats import Beats, Cadence, genuine, of_syncer, sealed
from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key
from diloco_cli.signing import LOG, Checksummed, learner_signer


def said(epoch: int, count: int, state: str = "SERVING") -> bytes:
    return b'{"epoch":%d,"heartbeats":%d,"state":"%s"}' % (epoch, count, state.encode())


def test_a_heartbeat_that_was_heard_before_is_no_news_when_it_is_put_back() -> None:
    beats = Beats()
    assert [beats.is_new(said(2, count)) for count in (1, 2, 1, 2, 3, 3)] == [True, True, False, False, True, False]


def test_a_later_epoch_is_news_and_an_earlier_one_is_not() -> None:
    beats = Beats()
    assert beats.is_new(said(2, 900)) and beats.is_new(said(3, 1)) and not beats.is_new(said(2, 901))


def test_a_process_without_an_epoch_is_heard_by_each_heartbeat_of_its_own() -> None:
    beats = Beats()
    assert beats.is_new(said(4, 7)) and beats.is_new(said(0, 1, "READING")) and beats.is_new(said(0, 2, "READING"))
    assert not beats.is_new(said(0, 1, "READING")) and not beats.is_new(None)


def test_what_does_not_decode_is_no_news() -> None:
    assert not any(Beats().is_new(junk) for junk in (b"", b"junk", said(2, 1) + b"\n1", b'{"epoch":1,"epoch":2}'))


def test_damage_and_other_objects_bytes_are_no_heartbeat() -> None:
    keyring, key = Checksummed("run"), heartbeat_key(SYNCER)
    mine = sealed(keyring, LOG, key, {"epoch": 1})
    assert of_syncer(keyring, mine) == mine and of_syncer(keyring, None) is None
    assert of_syncer(keyring, mine.replace(b"1", b"2", 1)) is None and of_syncer(keyring, b'{"epoch":9}') is None
    assert genuine(keyring, learner_signer("l0"), heartbeat_key("l0"), mine) is None


@pytest.mark.parametrize(("slot_s", "least_s", "most_s"), [(1.0, 3.0, 30.0), (1800.0, 250.0, 300.0)])
def test_a_long_silence_is_forgotten_within_the_hour_but_not_within_a_slot(
    slot_s: float, least_s: float, most_s: float
) -> None:
    """A merge that takes 300 s comes once a slot, and whoever waits for the syncer must know it until the next one."""
    cadence = Cadence(3.0)
    times_s = [0.0, 300.0, *(300.0 + 3.0 * beat for beat in range(1, 601))]
    for now_s in times_s:
        cadence.said(now_s, slot_s)
    assert least_s <= cadence.slowest_s <= most_s
