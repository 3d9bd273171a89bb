"""Seeded worst cases: the product survives them, each seed repeats, and what is broken is told shortly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from statistics import median_low
from typing import get_args

import pytest

from diloco_cli.protocol.log.commits import Commit
from tests.faulty_world import Fault
from tests.histories.campaign import (
    Totals,
    campaign,
    lived,
    swarm,
    sweep,
    sweep_points,
    work_of,
)
from tests.histories.history import History
from tests.histories.options import (
    BATCH_TOKENS,
    LONG_MERGES,
    LOSSES_FROM,
    REGION,
    SLOW_LINK,
    MixingSetting,
    NemesisKind,
    Options,
    drawn_options,
)
from tests.histories.replayer import in_one
from tests.histories.script import Actors, HistoryResult
from tests.simulation.mutant_logs import Gullible
from tests.simulation.traces import trace_of

DRAWN: dict[str, Callable[[Options], bool]] = {  # what a history must have drawn that is to show this
    **{mixing: lambda options, mixing=mixing: options.mixing == mixing for mixing in get_args(MixingSetting)},
    "feedback": lambda options: options.feedback,
    "rollback": lambda options: "rollback" in options.nemesis_events,
    "region": lambda options: options.apart > 0,
    "join": lambda options: "join" in options.nemesis_events,
    "drain": lambda options: "leave" in options.nemesis_events,
    "partial": lambda options: "partial" in options.nemesis_events,
    "quarantine": lambda options: "poison" in options.nemesis_events,
    "slow link": lambda options: SLOW_LINK in options.nemesis_events,
    "harm": lambda options: "harm" in options.nemesis_events and options.on_divergence == "rollback",
    "revoked key": lambda options: "rotate" in options.nemesis_events,
    "long": lambda options: options.merges >= LONG_MERGES[0],
}
OF_EACH, OF_LONG = 4, 1
OVER = ("stop", "finish")
FEEDS_BACK = re.compile(rb'"feeds_back": ?[0-9]')
TRACE = (
    "from tests.histories.history import History\n"
    "from tests.histories.options import drawn_options\n"
    "from tests.simulation.traces import trace_of\n"
    "for seed in (3, 11): print(trace_of(History(seed, drawn_options(seed)).live()))"
)


def stories(totals: Totals) -> str:
    return "\n".join(line for violation in totals.violations for line in violation.story)


def sample() -> list[int]:
    """The first seeds as they come, and the first ones that draw each of what is to be shown."""
    seeds = set(range(24))
    for name, is_drawn in DRAWN.items():
        fitting = (seed for seed in count() if is_drawn(drawn_options(seed)))
        seeds |= set(islice(fitting, OF_LONG if name == "long" else OF_EACH))
    return sorted(seeds)


def shown(options: Options, outcome: HistoryResult) -> set[str]:
    """What did happen in a history."""
    commits = [in_one(data) for data in outcome.log]
    kinds = {commit["kind"] for commit in commits}
    inputs = [item for commit in commits for item in commit.get("inputs", [])]
    facts = {
        options.mixing: "merge" in kinds,
        "feedback": any(FEEDS_BACK.search(data) for data in offers_of(outcome, "offer/")),
        "rollback": "rollback" in kinds,
        "region": bool(offers_of(outcome, f"{REGION}/offer/")),
        "join": any(item["learner"].startswith("n") for item in inputs),
        "drain": any(drained(outcome)),
        "partial": any(item["tokens"] < item["steps"] * BATCH_TOKENS for item in inputs),
        "quarantine": "quarantine" in kinds,
        "slow link": any("slow_link" in what.split() for _, what, _ in outcome.tail),
        "harm": any(commit["kind"] == "rollback" and commit["evaluated"] is not None for commit in commits),
        "revoked key": "revoke" in kinds,
        "long": len(commits) >= LONG_MERGES[0],
    }
    return {name for name, is_so in facts.items() if is_so}


def offers_of(outcome: HistoryResult, prefix: str) -> list[bytes]:
    return [data for key, data in outcome.objects.items() if key.startswith(prefix)]


def drained(outcome: HistoryResult) -> Iterator[str]:
    """Learners that were asked to leave, and left in order while the run went on."""
    asked, newest = set(), ""
    for _, what, key in outcome.tail:
        words = what.split()
        if key.startswith("commit/"):
            newest = in_one(outcome.objects[key])["kind"]
        elif len(words) > 4 and words[3] == "leave":
            asked.add(words[4])
        elif what.endswith("left with status 0") and words[0].split(".")[0] in asked and newest not in OVER:
            yield words[0]


def test_a_sample_of_seeds_breaks_nothing_and_shows_everything() -> None:
    totals, kinds, reasons, seen = Totals(), set(), "", set()
    seeds = sample()
    for seed in seeds:
        options = drawn_options(seed)
        outcome = lived(seed, options)
        assert outcome.violation is None, stories(swarm(range(seed, seed + 1)))
        totals.add(outcome)
        seen |= shown(options, outcome)
        commits = [in_one(data) for data in outcome.log]
        kinds |= {commit["kind"] for commit in commits}
        reasons += "".join(commit["reason"] for commit in commits if commit["kind"] == "epoch_start")
    assert seen == set(DRAWN)
    assert median_low(totals.lengths) >= 12 and sum(n < 10 for n in totals.lengths) <= len(seeds) // 8
    assert totals.crashes > 2 * len(seeds)
    all_kinds = {kind.__struct_config__.tag for kind in Commit.__subclasses__()}
    assert kinds == all_kinds, "everything that a log may say has been said"
    assert "takes over" in reasons, "standbys served, too"


def test_under_an_engine_a_syncer_that_leaves_is_followed_and_learners_come_back() -> None:
    of_jobs = (seed for seed in count(LOSSES_FROM) if drawn_options(seed).engine)
    reasons, back = "", 0
    for seed in islice(of_jobs, 2 * OF_EACH):
        outcome = lived(seed, drawn_options(seed))
        assert outcome.violation is None, stories(swarm(range(seed, seed + 1)))
        starts = [commit for commit in map(in_one, outcome.log) if commit["kind"] == "epoch_start"]
        reasons += "".join(commit["reason"] for commit in starts)
        back += len(list(returned(outcome)))
    assert "has left" in reasons and back


def returned(outcome: HistoryResult) -> Iterator[str]:
    """Learners that were told to leave by their engine, and joined anew."""
    told = set()
    for _, what, key in outcome.tail:
        words = what.split()
        if len(words) > 4 and words[3] == "notice":
            told.add(words[4].rstrip(","))
        elif key.startswith("incarnation/") and key.split("/")[1] in told:
            yield key


def test_a_crash_at_a_sample_of_all_operations_breaks_nothing() -> None:
    points = sweep_points(2)
    totals = sweep(2, points[::40])
    assert not totals.violations, stories(totals)
    assert totals.crashes == len(totals.lengths) == len(points[::40]) >= 15


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_crash_at_every_operation_breaks_nothing(seed: int) -> None:
    totals = campaign(work_of(seed, 1, True), os.cpu_count() or 1)
    assert not totals.violations, stories(totals)
    assert totals.crashes == len(totals.lengths)


def test_the_swarm_uses_everything_that_it_has() -> None:
    """Over many seeds every fault and every nemesis_event is drawn, and so are all sizes of fleets."""
    drawn = [drawn_options(seed) for seed in range(1000, 1400)]
    assert {fault for options in drawn for fault in options.calls} == set(Fault)
    assert {kind for options in drawn for kind in options.nemesis_events} == set(get_args(NemesisKind))
    assert any(options.nemesis_events == (SLOW_LINK,) for options in drawn)
    assert {1, 2, 3, 4, 5, 8} <= {options.learners for options in drawn}
    assert {options.syncers for options in drawn} == {1, 2, 3}
    assert all(options.quorum <= options.learners >= options.apart for options in drawn)
    assert {options.apart for options in drawn} >= {0, 1, 2}


# -- determinism --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_trace_in_another_process_and_under_another_hash_seed() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-c", TRACE], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    here = [trace_of(History(seed, drawn_options(seed)).live()) for seed in (3, 11)]
    assert traces[0] == traces[1] == "".join(f"{trace}\n" for trace in here)
    assert here[0] != here[1]


def test_a_history_is_repeated_by_the_list_of_its_faults() -> None:
    options = replace(
        drawn_options(5), calls=(Fault.CRASH, Fault.LOST_ANSWER, Fault.TWICE, Fault.PAUSE), write_rate=0.1
    )
    drawn = History(5, options).live()
    assert len(drawn.faulty.calls) >= 2
    assert trace_of(History(5, options, drawn.faulty).live()) == trace_of(drawn)


def _apart(number: int) -> list[int]:
    """The first so many seeds in which some learners live in a region of their own."""
    return [seed for seed in range(100) if drawn_options(seed).apart][:number]


# -- what is broken is told --------------------------------------------------------------------------------------


def test_a_violations_story_is_short_and_names_the_command() -> None:
    """Of all the faults of a seed, the few that the mutant needs are left."""
    for seed in range(60):
        options = drawn_options(seed)
        if "poison" not in options.nemesis_events:
            continue
        outcome = History(seed, options, actors=Actors(arithmetic=Gullible)).live()
        if outcome.violation is not None and len(outcome.faulty) > 6:
            break
    totals = swarm(range(seed, seed + 1), actors=Actors(arithmetic=Gullible))
    (violation,) = totals.violations
    assert (violation.seed, violation.invariant) == (seed, "8")
    assert violation.command == f"python -m tests.histories --seed {seed} --histories 1"
    assert any("poison" in line for line in violation.story)
    told = next(line for line in violation.story if "enough" in line)
    assert int(told.split()[0]) <= 3, violation.story
    assert "nan" in violation.story[-1]
