"""Which events of a tape matter, and which tapes contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.records import Mixing, TapeEvent
from diloco_cli.protocol.log.tape import Tape, Track
from diloco_cli.tapes.needs import needs_of
from tests.unit.tapes.tiny_tape import AGAIN, FIRST, MERGES, OTHER, RUN, TAPE, sent, steps


def test_a_track_is_performed_to_the_last_event_that_a_merge_or_a_successor_depends_on() -> None:
    needs = needs_of(TAPE)
    assert needs.until == {("l0", 1): 5, ("l0", 2): 2, ("l1", 1): 4}, "what comes after the last merged send is idle"
    assert needs.saves == {("l0", 1, 2): 1}
    assert needs.since == set(), "that adoption lies beyond the horizon"
    # what each begins with, and one more use for each applied offer based on it
    assert needs.versions == {(0, 0): 4, (1, 0): 4, (0, 1): 2, (1, 2): 1}


def test_moments_alone_keep_a_predecessor_in_the_play() -> None:
    only_saved = replace(FIRST, events=(steps(2), TapeEvent("saved", count=2), steps(9), TapeEvent("saved", count=11)))
    merges = (
        replace(MERGES[0], inputs=MERGES[0].inputs[1:]),
        replace(MERGES[1], inputs=MERGES[1].inputs[1:]),
        MERGES[2],
    )
    needs = needs_of(Tape(RUN, (only_saved, AGAIN, OTHER), merges))
    assert needs.until["l0", 1] == 2


def with_track(track: Track, **changes: Any) -> Tape:
    other = replace(track, **changes)
    return replace(TAPE, tracks=tuple(other if t is track else t for t in TAPE.tracks))


def with_merge(index: int, **changes: Any) -> Tape:
    return replace(TAPE, merges=tuple(replace(m, **changes) if i == index else m for i, m in enumerate(MERGES)))


def events_of(*events: TapeEvent) -> Tape:
    return with_track(OTHER, events=(steps(2), sent(0), *events, steps(1), sent(1)))


def adopted(version: int, since: int | None = None, mixing: Mixing | None = None) -> TapeEvent:
    return TapeEvent("adopted", fragment=0, version=version, since=since, mixing=mixing)


def test_progress_may_be_kept_since_a_send_that_a_version_was_adopted_after() -> None:
    """While its offer was on its way: what was sent is shifted then, and still there."""
    needs = needs_of(events_of(adopted(1), adopted(4, since=0)))
    assert needs.since == {("l1", 1, 0)} and needs.versions[0, 1] == needs_of(TAPE).versions[0, 1] + 1


@pytest.mark.parametrize(
    ("tape", "reason"),
    [
        (replace(TAPE, tracks=TAPE.tracks[:2]), "is merged, but never sent"),
        (replace(TAPE, tracks=(*TAPE.tracks, OTHER)), "appears twice"),
        (with_track(OTHER, learner="l9"), "never sent|no learner"),
        (with_track(OTHER, versions=(0,)), "begins with 1 versions"),
        (with_track(OTHER, position=-1), "begins at token -1"),
        (with_track(AGAIN, inner_step=3), "restores moments that no track saved"),
        (with_track(AGAIN, inner_incarnation=2), "restores moments that no track saved"),
        (with_track(AGAIN, versions=(3, 2)), "no merge made version 3 of fragment 0"),
        (events_of(TapeEvent("adopted", fragment=0, version=9)), "no merge made version 9 of fragment 0"),
        (events_of(TapeEvent("adopted", fragment=0, version=1, since=5)), "since no such send"),
        (events_of(TapeEvent("adopted", fragment=1, version=2, since=0)), "since no such send"),
        (events_of(adopted(1, mixing="replace"), adopted(4, since=0)), "since no such send"),
        (events_of(adopted(1, since=0), adopted(4, since=0)), "since no such send"),
        (events_of(TapeEvent("adopted", fragment=7, version=1)), "no fragment 7"),
        (events_of(TapeEvent("steps", count=1)), "steps on batches of no tokens"),
        (events_of(TapeEvent("steps", count=-1, batch_tokens=4)), "impossible numbers"),
        (events_of(TapeEvent("heard", n=1)), "rounds of no steps"),
        (events_of(TapeEvent("sent", seq=7, fragment=1, slot=2)), "slot 2 is not fragment 1's"),
        (events_of(TapeEvent("lost")), "more happened"),
        (with_merge(1, n=1), "out of order"),
        (with_merge(1, slot=0), "out of order"),
        (with_merge(1, fragment=0), "its slot is another fragment's"),
        (with_merge(1, inputs=()), "merges nothing"),
        (with_merge(1, inputs=MERGES[0].inputs), "a second time"),
        (with_merge(2, inputs=((("l0", 2, 0), 0.0),)), "all zero"),
        (with_merge(2, scales=(1.0, 0.5)), "scales other deltas"),
        (replace(TAPE, run=replace(RUN, islands=RUN.islands[:1] * 2)), "two of one name"),
        (replace(TAPE, run=replace(RUN, islands=(replace(RUN.islands[0], local_steps=0),))), "impossible numbers"),
    ],
)  # fmt: skip
def test_a_tape_that_contradicts_itself_is_refused(tape: Tape, reason: str) -> None:
    needs_of(TAPE)
    with pytest.raises(UsageError, match=f"cannot be played: .*({reason})"):
        needs_of(tape)
