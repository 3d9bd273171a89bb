"""How fast one learner of a virtual fleet steps: its seconds per step, its links, and the slices that it has when."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE_S = 1e-6  # of sums of step times


@dataclass(frozen=True)
class Spell:
    """From `start_s` on, this share of the learner's slices is there; 0: it does not step (down, or reconfiguring)."""

    start_s: float
    share: float


@dataclass(frozen=True)
class Pacing:
    """One learner in virtual time. `upload_s`: from sending to the syncer; `download_s`: from commit to adoption.
    `waits`: for each merge, which it adopts exactly `sync.overlap` slots after its slot."""

    step_s: float = 1.0
    upload_s: float = 0.0
    download_s: float = 0.0
    spells: tuple[Spell, ...] = (Spell(0.0, 1.0),)
    waits: bool = False


@dataclass(frozen=True)
class TimedStep:
    end_s: float
    batch_tokens: int


class StepClock:
    """When the next step ends and how many tokens it takes. A step that an outage interrupts starts anew after it.

    Batches are whole multiples of `quantum_tokens` (a sequence); what rounding leaves over goes to later steps.
    """

    def __init__(self, pacing: Pacing, quantum_tokens: int) -> None:
        self.pacing, self.quantum_tokens = pacing, quantum_tokens
        self._spell = 0
        self._left_over = 0.0

    def next_step(self, now_s: float, full_batch: int) -> TimedStep | None:
        """The step that begins at `now_s` or as soon as there are slices again; None if that never happens."""
        spells = self.pacing.spells
        while True:
            while self._spell + 1 < len(spells) and spells[self._spell + 1].start_s <= now_s + TOLERANCE_S:
                self._spell += 1
            end_s = now_s + self.pacing.step_s - TOLERANCE_S
            change = spells[self._spell + 1] if self._spell + 1 < len(spells) else None
            if spells[self._spell].share > 0 and (change is None or change.start_s >= end_s or change.share > 0):
                return TimedStep(now_s + self.pacing.step_s, self._batch(spells[self._spell].share * full_batch))
            if change is None:
                return None
            now_s = max(now_s, change.start_s)

    def _batch(self, wanted: float) -> int:
        whole = int((wanted + self._left_over) / self.quantum_tokens + 1e-9) * self.quantum_tokens
        batch = max(self.quantum_tokens, whole)
        self._left_over += wanted - batch
        return batch
