"""A model of one integer a fragment, and a log in a store, for a learner without torch."""

from __future__ import annotations

from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.learner import Moments, Progression, Stepped
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, weights_key
from diloco_cli.protocol.log.operations import Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, Mixing, RunFormat, encode, fragment_of_slot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import commit

STEP_S = 0.1


class UnitTraining:
    """Implements protocol.actors.learner.Training. A step takes one from every fragment."""

    def __init__(self, fragments: int, keeps_moments: bool = True) -> None:
        self.values = [0] * fragments
        self.steps = 0
        self.moments = 0
        self.keeps_moments = keeps_moments
        self.at: list[Progression] = []

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        yield Sleep(STEP_S)
        self.values = [value - 1 for value in self.values]
        self.steps += 1
        self.moments += 1
        self.at.append(at)
        return Stepped(batch_tokens, 1.5)

    def read(self, fragment: int) -> int:
        return self.values[fragment]

    def write(self, fragment: int, values: int) -> None:
        self.values[fragment] = values

    def save(self) -> Moments | None:
        moments = self.moments
        return Moments(moments, lambda: b"%d" % moments) if self.keeps_moments else None

    def restore(self, moments: bytes) -> bool:
        if not moments.isdigit():
            return False
        self.moments = int(moments)
        return True

    def reset(self) -> bool:
        self.moments = 0
        return self.keeps_moments


class UnitWire:
    """Implements protocol.actors.learner.Wire."""

    def encode(self, fragment: int, seq: int, applied: int | None, base: int, values: int) -> bytes:
        return b"%d" % (base - values)

    def decode(self, output: FragmentVersion, data: bytes) -> int:
        return int(data)

    def mix(
        self, fragment: int, mixing: Mixing, merged: int, own: int, reference: int | None, last: bool = False
    ) -> int:
        assert mixing == "rebase" and reference is not None
        return merged + (own - reference)


class WrittenLog:
    """What a syncer would write, and nothing else does: commits, and versions of one integer each."""

    def __init__(self, run: RunFormat, first: int = 100) -> None:
        self.run, self.store, self.state = run, MemoryStore(), RunState()
        self.store.create(FORMAT_KEY, encode(run))
        outputs = tuple(self.version(fragment, 0, -1, first) for fragment in range(run.num_fragments))
        self.append("epoch_start", outputs=outputs)

    def version(self, fragment: int, version: int, slot: int, value: int) -> FragmentVersion:
        data = b"%d" % value
        self.store.create(weights_key(fragment, version, 1, digest(data)), data)
        return FragmentVersion(fragment, version, slot, 1, "state", digest(data))

    def append(self, kind: Any, **fields: Any) -> RunState:
        data = encode(commit(self.state, kind, **fields))
        self.store.create(commit_key(self.state.n + 1), data)
        self.state = fold(self.run, self.state, data)
        return self.state

    def merge(self, value: int, *inputs: MergedOffer, **fields: Any) -> FragmentVersion:
        """The slot that is due, to this value."""
        slot = self.state.slot
        made = self.version(fragment_of_slot(slot, self.run.num_fragments), self.state.n + 1, slot, value)
        self.append("merge", slot=slot, inputs=inputs, outputs=(made,), alive=2, **fields)
        return made

    def roll_back(self, value: int, to: int = 0) -> tuple[FragmentVersion, ...]:
        """Every fragment to this value."""
        made = tuple(
            self.version(fragment, self.state.n + 1, self.state.slot - 1, value)
            for fragment in range(self.run.num_fragments)
        )
        self.append("rollback", outputs=made, to=to)
        return made

    def hide(self, output: FragmentVersion) -> bytes:
        """Nobody can read this version any more; its bytes."""
        key = weights_key(output.fragment, output.version, output.epoch, output.weights_digest)
        data = self.store.get(key) or b""
        self.store.delete(key)
        return data

    def show(self, output: FragmentVersion, data: bytes) -> None:
        self.store.create(weights_key(output.fragment, output.version, output.epoch, output.weights_digest), data)
