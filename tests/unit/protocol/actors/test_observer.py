"""How long a learner's own doings take, as it says and as its aim reckons with it."""

from __future__ import annotations

from diloco_cli.protocol.actors.learner import Phase, Stopwatch
from diloco_cli.protocol.log.records import Timings


def watched(*phases: tuple[Phase, float]) -> Stopwatch:
    watch = Stopwatch()
    for phase, seconds in phases:
        watch.took(phase, seconds)
    return watch


def test_a_step_takes_from_one_step_to_the_next_with_what_is_done_between_and_without_waiting() -> None:
    """At the drift bound, or for a merge: that says nothing of how fast its machine is."""
    watch = watched(("hear", 0.125), ("step", 1.0))
    assert watch.step_s == 1.125
    watch = watched(("offer", 0.25), ("save", 0.5), ("wait", 60.0), ("hear", 0.25), ("step", 1.0))
    assert watch.step_s == 2.0


def test_neither_a_hiccup_nor_a_pause_in_one_step_changes_the_pace() -> None:
    watch = watched(*[("step", 1.0)] * 5, ("step", 3600.0), ("step", 1.0), ("step", 0.001))
    assert watch.step_s == 1.0


def test_uploads_and_adoptions_are_moving_averages_that_begin_with_the_first() -> None:
    watch = Stopwatch()
    assert watch.timings(4, 2) == Timings()
    for seconds in (4.0, 2.0):
        watch.uploaded(seconds)
        watch.adopted(2 * seconds)
    watch.took("step", 0.5)
    assert watch.timings(4, 2) == Timings(step_s=0.5, slot_s=1.0, upload_s=3.0, adoption_s=6.0)
