"""What shaped a learner's parameters since its last offer, in the order of happening: it travels with the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from diloco_cli.protocol.log.records import Beginning, Event

MAX_EVENTS = 4096  # between two offers; an honest learner's are a few per merge


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
