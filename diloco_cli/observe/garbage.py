"""How much garbage waits to be deleted, as `status` says it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.observe.facts import RunFacts
from diloco_cli.protocol.actors.backlog import NOT_KNOWN
from diloco_cli.protocol.actors.collection import kept_commits


@dataclass(frozen=True)
class GarbageStatus:
    """What the syncer has still to delete: about so many `objects`, left behind by `commits`; `per_h`: how many more
    each hour. None: not known before the syncer's first sweep has ended, and `objects` are those that it has found.
    `note`: that this is more than the run keeps; "" if deletions keep pace."""

    objects: int
    commits: int | None
    per_h: float | None
    note: str


def garbage_of(facts: RunFacts) -> GarbageStatus | None:
    """None where no syncer has said so. Deletions do not keep pace once more commits wait for them than are kept."""
    if facts.syncer is None:
        return None
    said, kept = facts.syncer.heartbeat.garbage, kept_commits(facts.run)
    if said.commits == NOT_KNOWN:
        is_none = facts.state.gc_floor == 0  # nothing may be deleted yet
        return GarbageStatus(said.objects, 0 if is_none else None, 0.0 if is_none else None, "")
    note = ""
    if kept is not None and said.commits > kept:
        note = (
            f"about {said.objects:,} objects of {said.commits:,} commits wait to be deleted, {said.per_h:+,.0f} an"
            f" hour: more than the {kept:,} commits that the run keeps"
        )
    return GarbageStatus(said.objects, said.commits, said.per_h, note)
