"""The folded log as one learner needs it: of the learners only its own record, and no memory of others.

A learner reads of a long commit the head and one part (parts.py), from which the whole state cannot be folded. From its
first long commit on it therefore keeps this state, in which everything that concerns the run or itself is as in the
whole state. Its decisions need nothing else, except the pace of the fastest of late: that follows from what each merge
says of all its inputs together.
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_cli.layout import Layout
from diloco_cli.protocol.log.commits import Commit, Merge, own
from diloco_cli.protocol.log.state import LearnerRecord, RunState, advanced
from diloco_cli.signing import NOBODY, Signature

PACES_KEPT = 64
REMEMBERED = ("norms", "opposition", "metrics", "stability")  # of all learners, for the syncer's decisions and people


class NarrowState(RunState, frozen=True):
    """`whose`: the only learner of which it knows. `paces`: (n, shortest step in seconds) of merges, both rising: one
    with a longer step than a later merge tells nothing any more."""

    whose: str = ""
    paces: tuple[tuple[int, float], ...] = ()

    def knows(self, name: str) -> bool:
        return name == self.whose

    def learner(self, name: str) -> LearnerRecord:
        """Raises LookupError for another learner: nothing is known of it, which is not what its record would say."""
        if name != self.whose:
            raise LookupError(f"{self.whose} does not read what the log says of {name}")
        return super().learner(name)

    def recent_paces(self, num_commits: int) -> list[float]:
        return [step_s for n, step_s in self.paces if n > self.n - num_commits]


def narrowed(state: RunState, learner: str) -> NarrowState:
    """What is left of a state for this learner."""
    if isinstance(state, NarrowState):
        return state
    kept = {name: getattr(state, name) for name in RunState.__struct_fields__ if name not in REMEMBERED}
    kept["learners"] = {name: known for name, known in state.learners.items() if name == learner}
    paces: tuple[tuple[int, float], ...] = ()
    merged = ((max(a.produced for a in k.applied.values()), k.step_s) for k in state.learners.values() if k.applied)
    for n, step_s in sorted(merged):
        paces = _with_pace(paces, n, step_s)
    return NarrowState(**kept, whose=learner, paces=paces)


def apply_own(
    state: NarrowState, commit: Commit, digest: str, layout: Layout, kept_versions: int, by: Signature = NOBODY
) -> NarrowState:
    """As `apply`, for the commit as its learner needs it. Raises RecordError likewise."""
    commit = own(commit, state.whose)
    after = advanced(state, commit, digest, layout, kept_versions, by)
    assert isinstance(after, NarrowState)
    if isinstance(commit, Merge):
        after = replace(after, paces=_with_pace(after.paces, commit.n, commit.shortest_step_s))
    return after


def _with_pace(paces: tuple[tuple[int, float], ...], n: int, step_s: float) -> tuple[tuple[int, float], ...]:
    if step_s <= 0:
        return paces
    return (*(pace for pace in paces if pace[1] < step_s), (n, step_s))[-PACES_KEPT:]
