"""What chaos refuses to do, and why. Pure: a function of the target's facts."""

from __future__ import annotations

from typing import Literal

from diloco_cli.chaos.targets import Target
from diloco_cli.runtime.registry import SUPERVISOR

Action = Literal["kill", "pause", "revive"]
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 24 * 3600.0


def refusal(action: Action, target: Target, *, hold: bool = False, for_s: float | None = None) -> str | None:
    """Why `action` may not be done to `target`; None if it may."""
    if target.condition == "unknown" and not (action == "revive" and target.held):
        return target.why
    if target.untouchable is not None:
        return target.untouchable
    if action == "revive":
        return _refusal_to_revive(target)
    if target.condition == "dead":
        return f"{target.name} does not run: {target.why}"
    if action == "pause":
        return _refusal_to_pause(target, for_s)
    if hold and target.kind == SUPERVISOR:
        return "nobody restarts a supervisor, so --hold means nothing for it"
    return None


def _refusal_to_pause(target: Target, for_s: float | None) -> str | None:
    if target.condition == "paused":
        return f"{target.name} is paused already"
    if for_s is not None and not MIN_PAUSE_S <= for_s <= MAX_PAUSE_S:
        return f"a pause must last {MIN_PAUSE_S} s to {MAX_PAUSE_S:.0f} s, got {for_s:g} s"
    return None


def _refusal_to_revive(target: Target) -> str | None:
    if target.condition == "paused" or target.held:
        return None
    if target.condition == "running":
        return f"{target.name} runs, and nothing holds it"
    if target.kind == SUPERVISOR:
        return "a dead supervisor is not revived but replaced"
    if target.supervised:
        return f"{target.name} is dead but not held: the supervisor restarts it, or has ended it for good"
    return f"{target.name} is dead and no supervisor lives that could restart it"


def hint_for(action: Action, target: Target) -> str:
    """One command to try after a refusal."""
    if action == "revive" and not target.supervised:
        return f"go on with `diloco resume {target.run}`"
    if target.condition == "paused":
        return f"let it go on with `diloco chaos revive {target.name} --run {target.run}`"
    return f"see who lives with `diloco chaos list --run {target.run}`"
