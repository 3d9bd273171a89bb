"""A tape: everything that decided a run's trajectory, without its timing.

A tape holds the events of each incarnation, in their order, and the merges of the log. It is recorded from a run's
bucket or written by a simulation, and `diloco replay` plays it on one process (arXiv 2604.21428 made its failure
studies this way). `EventLog`: a learner's events since its last offer, in order; the next offer carries them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from diloco_cli.protocol.log.records import Beginning, OfferId, RunFormat, TapeEvent

TAPE_SCHEMA = 3
MAX_EVENTS = 4096  # between two offers; an honest learner's are a few per merge


@dataclass(frozen=True)
class Track:
    """One incarnation of a learner. It began `position` tokens into its shard with `versions`, one per fragment.

    `inner_step`: it restored the moments that incarnation `inner_incarnation` (None: the one before) saved at this step
    of the optimizer; None: its moments were fresh. `moments_lost`: saved moments were expected and not found, so the
    learning rate warmed up anew. `ranks`: how many processes trained in it together.
    """

    learner: str
    incarnation: int
    position: int
    versions: tuple[int, ...]
    inner_step: int | None = None
    inner_incarnation: int | None = None
    moments_lost: bool = False
    ranks: int = 1
    events: tuple[TapeEvent, ...] = ()


@dataclass(frozen=True)
class TapeMerge:
    """One merge of the log. `inputs`: (learner, incarnation, seq) and weight, in the order of reduction. `n` is the
    commit's number, and so the version it made; `tokens`: merged tokens of the run after it. `state_digest`: of the
    version's bytes, where known. `scales`: the factor of each delta (rules/norms.py); empty if none was scaled."""

    n: int
    slot: int
    fragment: int
    inputs: tuple[tuple[OfferId, float], ...]
    tokens: int
    state_digest: str | None = None
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tape:
    """A replay needs nothing else: `run` holds every setting, and version 0 of each fragment is the seeded model's."""

    run: RunFormat
    tracks: tuple[Track, ...]
    merges: tuple[TapeMerge, ...]
    schema: int = TAPE_SCHEMA


@dataclass
class EventLog:
    """The events of one incarnation that no offer carries yet. Its first offer carries `began`."""

    began: Beginning | None = None
    events: list[TapeEvent] = field(default_factory=list)

    def begin(self, began: Beginning) -> None:
        self.began, self.events = began, []

    def stepped(self, batch_tokens: int) -> None:
        """One more inner step: steps in a row on equal batches are one event."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "steps" and last.batch_tokens == batch_tokens:
            self.events[-1] = structs.replace(last, count=last.count + 1)
        else:
            self.note(TapeEvent("steps", count=1, batch_tokens=batch_tokens))

    def note(self, event: TapeEvent) -> None:
        if len(self.events) >= MAX_EVENTS:
            self.events = [TapeEvent("lost")]
        self.events.append(event)

    def take(self) -> tuple[Beginning | None, tuple[TapeEvent, ...]]:
        """The events that the next offer carries; later events go to the offer after it."""
        taken = (self.began, tuple(self.events))
        self.began, self.events = None, []
        return taken
