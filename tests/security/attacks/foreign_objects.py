"""What is no record of the log, at a key of the log. Nobody steps over it: the log would fork. The error must name the
object and what to do, and the run must go on once it is gone."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.protocol.log.keys import commit_key
from tests.security.attacks.stage import AttackedRun, AttackSeen, running


def symlink_at_a_coming_commit(directory: Path) -> AttackSeen:
    with running(AttackedRun(directory)) as stage:
        key = commit_key(stage.head + 6)
        planted = stage.bucket / key
        planted.symlink_to(directory / "elsewhere")
        stage.until(lambda: says(stage, key) or stage.head > int(planted.stem) + 3, 45.0)
        told = says(stage, key)
        planted.unlink(missing_ok=True)
        goes_on = stage.merges_on(4, within_s=120.0)
        seen = f"the error {'names it: ' + told if told else 'names no object'}; once it is gone the run "
        return AttackSeen(
            bool(told) and "hint" in told and goes_on, seen + ("goes on" if goes_on else "does not go on")
        )


def says(stage: AttackedRun, key: str) -> str:
    """The syncer's words about the object, and its hint."""
    log = Path(stage.home) / stage.run.name / "logs" / "syncer.log"
    lines = log.read_text().splitlines() if log.exists() else []
    found = [number for number, line in enumerate(lines) if key in line and "error" in line]
    return " ".join(lines[found[-1] : found[-1] + 2]) if found else ""
