"""A tape: everything that decided a run's trajectory, and nothing of its timing.

What each incarnation did, in its own order, and what the log merged. Recorded from a run's bucket or written by a
simulation; played on one process by `diloco replay` (arXiv 2604.21428 made its failure studies this way).

`EventLog`: what shaped a learner's parameters since its last offer, in order; it travels with the next offer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from diloco_cli.protocol.log.records import Beginning, Event, OfferId, RunFormat

TAPE_SCHEMA = 2
MAX_EVENTS = 4096  # between two offers; an honest learner's are a few per merge


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


@dataclass
class EventLog:
    """Of one incarnation. `began` goes with its first offer."""

    began: Beginning | None = None
    events: list[Event] = field(default_factory=list)

    def begin(self, began: Beginning) -> None:
        self.began, self.events = began, []

    def stepped(self, batch_tokens: int) -> None:
        """One more inner step: steps in a row on equal batches are one event."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "steps" and last.batch_tokens == batch_tokens:
            self.events[-1] = structs.replace(last, count=last.count + 1)
        else:
            self.note(Event("steps", count=1, batch_tokens=batch_tokens))

    def note(self, event: Event) -> None:
        if len(self.events) >= MAX_EVENTS:
            self.events = [Event("lost")]
        self.events.append(event)

    def take(self) -> tuple[Beginning | None, tuple[Event, ...]]:
        """What the next offer carries; from here on it is the following one's turn."""
        taken = (self.began, tuple(self.events))
        self.began, self.events = None, []
        return taken
