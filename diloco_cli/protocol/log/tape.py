"""A tape: everything that decided a run's trajectory, and nothing of its timing.

What each incarnation did, in its own order, and what the log merged. Recorded from a run's bucket or written by a
simulation; played on one process by `diloco replay` (arXiv 2604.21428 made its failure studies this way).
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.protocol.log.records import Event, OfferId, RunFormat

TAPE_SCHEMA = 2


@dataclass(frozen=True)
class Track:
    """One incarnation of a learner. It began `position` tokens into its shard with `versions`, one per fragment.

    `inner_step`: it restored the moments that incarnation `inner_incarnation` (None: the one before) saved at this step
    of the optimizer; None: its moments were fresh. `moments_lost`: they should not have been, so it warmed up anew.
    """

    learner: str
    incarnation: int
    position: int
    versions: tuple[int, ...]
    inner_step: int | None = None
    inner_incarnation: int | None = None
    moments_lost: bool = False
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class TapeMerge:
    """One merge of the log. `inputs`: (learner, incarnation, seq) and weight, in the order of reduction. `n` is the
    commit's number, and so the version it made; `tokens`: merged tokens of the run after it. `state_digest`: of the
    version's bytes, where known. `scales`: what the norm clip multiplied each delta by; empty if it left all alone."""

    n: int
    slot: int
    fragment: int
    inputs: tuple[tuple[OfferId, float], ...]
    tokens: int
    state_digest: str | None = None
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tape:
    """Playable as it stands: `run` holds every setting. Version 0 of each fragment is the seeded model's."""

    run: RunFormat
    tracks: tuple[Track, ...]
    merges: tuple[TapeMerge, ...]
    schema: int = TAPE_SCHEMA
