"""Histories in which some learners live in a region with a bucket of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from diloco_cli.protocol.log.operations import Sleep, Steps
from diloco_cli.protocol.regions.mirrors import Mirror
from diloco_cli.virtual.faulty_calls import Fault
from tests.histories.campaign import lived
from tests.histories.history import History
from tests.histories.options import REGION, Options, drawn_options
from tests.histories.outcome import Actors
from tests.histories.replayer import ViolationError, in_one
from tests.histories.shrinking import told

SEEDS = 20


def apart(seed: int) -> Options:
    """Of two learners the second lives in the region."""
    return replace(drawn_options(seed), learners=2, quorum=1, apart=1)


def quiet(seed: int) -> Options:
    return replace(apart(seed).without_faults(), standbys=0, syncers=1)


def test_both_take_part_and_the_regions_bucket_shows_the_whole_log() -> None:
    outcome = History(3, quiet(3)).live()
    assert outcome.violation is None
    inputs = [item["learner"] for data in outcome.log for item in in_one(data).get("inputs", [])]
    assert inputs.count("l0") >= 2 and inputs.count("l1") >= 2
    far = {key.removeprefix(f"{REGION}/") for key in outcome.objects if key.startswith(f"{REGION}/")}
    assert sum(key.startswith("commit/") for key in far) == outcome.commits
    assert not any("/l0/" in key for key in far)
    assert any(f"{REGION}/offer/l1/" in line for line in told(outcome, 1000))


class _Idle(Mirror):
    """It never copies a commit."""

    def _mirror_next(self) -> Steps[None]:
        yield Sleep(1.0)


def test_a_region_that_gets_no_commits_while_its_learners_wait_for_them_is_seen() -> None:
    options = replace(quiet(3), merges=200)
    violation = History(3, options, actors=Actors(mirror=_Idle)).live().violation
    assert violation is not None and re.search("the region has 0 commits of .*, and got none for", str(violation))


@pytest.mark.parametrize("kinds", [(Fault.TORN, Fault.FLIPPED), (Fault.CRASH, Fault.CRASH_AFTER), tuple(Fault)])
def test_whatever_befalls_calls_between_two_buckets_breaks_nothing(kinds: tuple[Fault, ...]) -> None:
    """Also what is read damaged: a relay must not bring it home, where it would lie for ever."""
    struck: set[Fault] = set()
    for seed in range(SEEDS):
        options = replace(apart(seed), calls=kinds, write_rate=0.03, read_rate=0.03, nemesis_events=("region_outage",))
        outcome = lived(seed, options)
        assert outcome.violation is None, (seed, outcome.violation)
        struck |= {call.fault.kind for call in outcome.faulty.calls if call.actor.startswith("syncer.1/")}
    assert struck, "the mirror's and the relay's calls, too"


def test_an_outage_of_the_region_stops_neither_the_others_nor_the_run() -> None:
    noted = 0
    for seed in range(SEEDS):
        outcome = lived(seed, replace(apart(seed), calls=(), nemesis_events=("region_outage",)))
        assert outcome.violation is None, (seed, outcome.violation)
        noted += sum("region_outage" in text for _, text, _ in outcome.tail)
    assert noted >= SEEDS // 2


def test_what_the_mirror_may_not_write_shows() -> None:
    history = History(3, quiet(3))
    assert history.live().violation is None and history.region is not None
    for key, data, says in (
        ("commit/000000000099.json", b"{}", "ends before it"),
        ("offer/l1/00000001/0000000099.json", b"{}", "the mirror wrote"),
        ("weights/0000/000000000099-0000000001-blake3-00", b"weights:1", "other bytes than its name says"),
        ("FORMAT.json", b"{}", "other bytes than at home"),
    ):
        with pytest.raises(ViolationError, match=says):
            history.region.created("syncer", key, data, 0.0)
