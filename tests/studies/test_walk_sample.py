"""The count of modules that a delta and a launch pass: it follows them to their end, and counts what runs."""

from __future__ import annotations

from tests.studies.walk import delta_walk, launch_walk


def test_a_delta_passes_the_loop_the_decision_and_the_merge() -> None:
    passed = delta_walk()
    actors = {f"diloco_cli.protocol.actors.{name}" for name in ("learner", "syncer", "inbox", "follower")}
    assert actors | {"diloco_cli.protocol.rules.quorum", "diloco_cli.tensors.merge"} <= passed
    assert not any(name.startswith(("diloco_cli.cli", "diloco_cli.plan")) for name in passed)


def test_a_launch_passes_the_plan_and_ends_before_anything_trains() -> None:
    passed = launch_walk()
    assert {"diloco_cli.cli.launch", "diloco_cli.plan.planner", "diloco_cli.launch.local_units"} <= passed
    of_daemons = {name for name in passed if name.startswith(("diloco_cli.learner", "diloco_cli.syncer"))}
    assert of_daemons == {"diloco_cli.syncer.operator"}, "which withdraws a stop request"
