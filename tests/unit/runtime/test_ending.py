"""What ends a supervision, what a signal is taken for, and the words for it: pure decisions."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest

from diloco_cli.runtime.ending import (
    Answer,
    Participants,
    StopPolicy,
    answer_alone,
    answer_to_ctrl_c,
    drain_text,
    last_words,
    next_ending,
)

ISLANDS = ("iowa", "ohio")
ALIVE = {"iowa": True, "ohio": True, "syncer": True}


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_always_leave(signum: int, launched: bool) -> None:
    answer = answer_alone(signum, launched)
    assert answer is not None and not answer.stops and signal.Signals(signum).name in answer.reason


def test_ctrl_c_elsewhere_than_in_a_launch_of_the_whole_run_leaves() -> None:
    answer = answer_alone(signal.SIGINT, launched=False)
    assert answer is not None and not answer.stops
    assert answer_alone(signal.SIGINT, launched=True) is None


def test_ctrl_c_in_a_launch_that_has_all_of_the_run_stops_it() -> None:
    answer = answer_to_ctrl_c(ALIVE, Participants(ISLANDS))
    assert answer.stops and "iowa, ohio and syncer" in answer.reason and "nobody has joined" in answer.reason


@pytest.mark.parametrize(
    ("living", "participants", "why"),
    [
        (ALIVE, None, "the bucket does not say"),
        ({"iowa": True, "syncer": True}, Participants(ISLANDS), "ohio is not alive here"),
        ({**ALIVE, "ohio": False}, Participants(ISLANDS), "ohio is not alive here"),
        ({**ALIVE, "syncer": False}, Participants(ISLANDS), "syncer is not alive here"),
        ({**ALIVE, "ohio": False, "syncer": False}, Participants(ISLANDS), "ohio and syncer are not alive here"),
        (ALIVE, Participants(ISLANDS, joined=("spot-1",)), "spot-1 takes part elsewhere"),
        (ALIVE, Participants(ISLANDS, ("spot-1",), ("standby-eu",)), "spot-1 and standby-eu take part elsewhere"),
    ],
)
def test_ctrl_c_leaves_if_anybody_else_takes_part_or_may(
    living: dict[str, bool], participants: Participants | None, why: str
) -> None:
    answer = answer_to_ctrl_c(living, participants)
    assert not answer.stops and why in answer.reason


def test_where_a_machine_leaves_learners_are_asked_first_and_syncers_once_they_have_gone() -> None:
    ending = ending_after((1, "RUNNING"), answer=LEAVE)[0]
    assert ending.reason == "left"
    assert ending.terminates("learner", True, 0.0) and not ending.terminates("syncer", True, 5.9)
    assert ending.terminates("syncer", False, 0.1) and ending.terminates("syncer", True, 6.0)
    assert ending.syncers_at_s < ending.kill_at_s < ending.give_up_at_s <= 10.0


def test_while_it_is_not_known_what_a_signal_means_nothing_ends_unless_it_comes_again() -> None:
    first, second = ending_after((1, "RUNNING"), (2, "RUNNING"), answer=None)
    assert first is None
    assert second.kill_at_s == 1.0


def test_the_screen_says_what_goes_on_and_how_to_come_back() -> None:
    text = drain_text("SIGTERM ends what runs here", ("iowa",), ("syncer",))
    assert text == (
        "SIGTERM ends what runs here: iowa offers its last deltas, then syncer ends; the run itself goes on. "
        "Ask again to end at once"
    )
    words = last_words("diloco resume U", "diloco syncer U", ("iowa", "syncer"), True, Participants(ISLANDS))
    assert "ended here: iowa and syncer" in words[0] and words[0].endswith("Come back: diloco resume U")
    assert "no syncer is left: ohio, if alive, trains on up to the drift bound" in words[1]
    assert words[1].endswith("diloco syncer U")


@pytest.mark.parametrize(
    ("left", "served", "others", "word"),
    [
        (("iowa",), False, Participants(ISLANDS, (), ("syncer on a",)), "not here: syncer on a; the merges go on"),
        ((*ISLANDS, "syncer"), True, Participants(ISLANDS), "nothing of the run is left elsewhere"),
        ((*ISLANDS, "syncer"), True, Participants(ISLANDS, ("spot-1",)), "spot-1, if alive"),
    ],
)
def test_the_last_words_say_who_is_left(left: tuple[str, ...], served: bool, others: Participants, word: str) -> None:
    assert word in last_words("come", "serve", left, served, others)[1]


def test_without_an_answer_of_the_bucket_the_last_words_claim_nothing_of_others() -> None:
    assert len(last_words("come", "serve", ("iowa",), True, None)) == 1


STOP, LEAVE = Answer(True, "all of the run is here"), Answer(False, "SIGTERM ends what runs here")


def ending_after(*heard: tuple[int, str | None], answer: Answer | None = STOP):
    ending = None
    steps = []
    for second, (num_signals, state) in enumerate(heard):
        ending = next_ending(ending, num_signals, answer, state, float(second), StopPolicy())
        steps.append(ending)
    return steps


def test_nothing_heard_ends_nothing():
    assert ending_after((0, None), (0, "RUNNING")) == [None, None]


@pytest.mark.parametrize(
    ("state", "reason", "times"), [("FINISHED", "finished", (34.0, 38.0)), ("STOPPED", "stopped", (4.0, 8.0))]
)
def test_the_end_of_the_run_leaves_units_time_to_leave(state, reason, times):
    """At a clean finish a learner in a long step is not told to end, and so not shown as terminated."""
    first, second = ending_after((0, state), (0, state))
    assert first == second
    assert (first.reason, (first.terminate_at_s, first.kill_at_s)) == (reason, times)


def test_only_syncers_have_longer_for_their_regions():
    """A learner that hangs at the end does not hold the command for as long as a version may take to a region."""
    ending = next_ending(None, 0, None, "FINISHED", 0.0, StopPolicy(syncer_finish_s=190.0))
    assert ending.text == "the run is FINISHED; a syncer has 3.17 min to fill its regions"
    told = {
        kind: [next(s for s in range(300) if asks(s)) for asks in (
            lambda s: ending.terminates(kind, False, s), lambda s: ending.kills(kind, s))]  # noqa: B023
        for kind in ("learner", "syncer")
    }  # fmt: skip
    assert told == {"learner": [34, 38], "syncer": [194, 198]}
    assert next_ending(ending, 2, None, "FINISHED", 5.0, StopPolicy()).kills("learner", 5.0)


def test_an_interruption_ends_and_a_second_one_kills_at_once():
    first, second, third = ending_after((1, "RUNNING"), (1, "STOPPED"), (2, "STOPPED"))
    assert first == second
    assert (first.reason, first.kill_at_s) == ("interrupted", 8.0)
    assert third.kill_at_s == third.terminate_at_s == 2.0


def test_an_interruption_of_an_ending_run_does_not_prolong_it():
    first, second = ending_after((0, "FINISHED"), (1, "FINISHED"))
    assert second.kill_at_s < first.kill_at_s
    assert (second.reason, second.terminate_at_s, second.kill_at_s) == ("interrupted", 1.0, 9.0)


def test_endings_take_at_most_ten_seconds():
    ending = ending_after((1, None))[0]
    assert ending.kill_at_s < ending.give_up_at_s <= 10.0
    assert all(a <= b for a, b in pairwise([ending.terminate_at_s, ending.kill_at_s, ending.give_up_at_s]))
