"""A hostile learner: a process with a learner's credentials that trains nothing and offers what serves its attack.

It reads the log and the honest learners' deltas, as everybody may who can read the bucket, and writes offers that are
well formed: possible slots, bases, data ranges and token counts, payloads with their true norms. A generator of
operations, in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch

from diloco_cli.digests import digest
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import delta_key, incarnation_key, max_fragment_bytes, offer_key
from diloco_cli.protocol.log.operations import Create, Get, Sleep, Steps
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    Offer,
    ProcessClaim,
    RunFormat,
    Timings,
    decode,
    encode,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import max_steps
from diloco_cli.signing import learner_signer
from diloco_cli.tensors.merge import delta_formats

Direction = Literal["flipped", "random", "aligned", "nan"]
PAUSES_A_SLOT = 8
HOSTILE = "x"  # what names of hostile islands begin with


@dataclass(frozen=True)
class Strategy:
    """`scale`: the norm of a bad delta, times that of an honest one. `direction`: the mean of the others' newest deltas
    (`aligned`), its negative, noise, or values that are no numbers. `begins`: the first slot of the attack; before it,
    it offers what the others do. `claims`: times the steps and tokens that an honest offer states. `states_s`: the time
    of a step and of a slot that it states; 0: none."""

    scale: float = 1.0
    direction: Direction = "flipped"
    begins: int = 12
    claims: float = 1.0
    states_s: float = 0.0


@dataclass
class SeenDeltas:
    """The newest delta of each honest learner and fragment, with the slot that it was offered for."""

    deltas: dict[tuple[str, int], tuple[int, torch.Tensor]] = field(default_factory=dict)
    next_seq: dict[str, int] = field(default_factory=dict)

    def of(self, fragment: int, since_slot: int = 0) -> list[torch.Tensor]:
        deltas = sorted(self.deltas.items(), key=lambda item: item[0])
        return [delta for (_, number), (slot, delta) in deltas if number == fragment and slot >= since_slot]


def honest_of(run: RunFormat) -> list[str]:
    return [island.name for island in run.islands if not island.name.startswith(HOSTILE)]


class Hostile:
    """One process of it."""

    def __init__(self, run: RunFormat, name: str, strategy: Strategy, slot_s: float, seed: int = 0) -> None:
        self.run, self.name, self.strategy, self.slot_s = run, name, strategy, slot_s
        self.others = honest_of(run)
        self.formats = delta_formats(run.layout, run.settings.sync)
        self.seen, self.state = SeenDeltas(), RunState()
        self._random = torch.Generator().manual_seed(seed)
        self._seqs, self._position, self._next_slot = count(), 0, 0

    def steps(self) -> Steps[None]:
        claim = ProcessClaim(1, "hostile", "elsewhere", 1, "then", "test")
        yield from self._create(incarnation_key(self.name, 1), encode(claim))
        while True:
            self.state = yield from read_log(self.run, self.state if self.state.n >= 0 else None)
            if self.state.phase == "FINISHED":
                return
            if self.state.outputs:
                yield from self._look()
                yield from self._turn()
            yield Sleep(self.slot_s / PAUSES_A_SLOT)

    def _turn(self) -> Steps[None]:
        """Offer for the slot that is due, once: a bad delta when one of the others has offered, else when all have."""
        slot = self.state.slot
        fragment, attacks = fragment_of_slot(slot, self.run.num_fragments), slot >= self.strategy.begins
        known, fresh = self.seen.of(fragment), len(self.seen.of(fragment, slot))
        if slot < self._next_slot or not known or fresh < (1 if attacks else len(self.others)):
            return
        yield from self._offer(slot, fragment, self._bad(known) if attacks else usual_of(known), attacks)
        self._next_slot = slot + 1

    def _bad(self, known: list[torch.Tensor]) -> torch.Tensor:
        mean = mean_of(known)
        noise = torch.randn(mean.shape, generator=self._random)
        nan = torch.full_like(mean, float("nan"))
        vector = {"flipped": -mean, "aligned": mean, "random": noise, "nan": nan}[self.strategy.direction]
        length = float(usual_of(known).norm()) * self.strategy.scale
        return vector * (length / max(float(vector.norm()), 1e-12))

    def _offer(self, slot: int, fragment: int, delta: torch.Tensor, bad: bool) -> Steps[None]:
        base, payload = self.state.outputs[fragment], self.formats[fragment].encode(delta.float())
        island = self.run.island(self.name)
        assert island is not None
        steps = min(max_steps(self.run), round(island.local_steps * (self.strategy.claims if bad else 1.0)))
        tokens = steps * island.batch_tokens
        start, self._position = self._position, self._position + tokens
        offer = Offer(
            self.name, 1, next(self._seqs), slot, fragment, base.version, base.weights_digest, start, start + tokens,
            tokens, steps, digest(payload), len(payload), "hostile",
            timings=Timings(self.strategy.states_s, self.strategy.states_s),
        )  # fmt: skip
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
        yield from self._create(offer_key(*offer.id), encode(offer))

    def _create(self, key: str, record: bytes) -> Steps[None]:
        yield Create(key, self.run.keyring.sign(learner_signer(self.name), key, record))

    def _look(self) -> Steps[None]:
        """The others' newest offers."""
        for name in self.others:
            while True:
                key = offer_key(name, 1, self.seen.next_seq.get(name, 0))
                data = yield Get(key, MAX_RECORD_BYTES)
                if data is None:
                    break
                self.seen.next_seq[name] = self.seen.next_seq.get(name, 0) + 1
                yield from self._remember(decode(Offer, data, key))

    def _remember(self, offer: Offer) -> Steps[None]:
        size = max_fragment_bytes(self.run.layout, offer.fragment)
        payload = yield Get(delta_key(*offer.id, offer.payload_digest), size)
        if payload:
            read, _ = self.formats[offer.fragment].open(payload)
            delta = read(0, torch.empty(self.formats[offer.fragment].cut.size)).clone()
            self.seen.deltas[offer.learner, offer.fragment] = (offer.slot, delta)


def mean_of(deltas: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(deltas).mean(0)


def usual_of(deltas: list[torch.Tensor]) -> torch.Tensor:
    """Their mean, as long as one of them: what does no harm."""
    mean = mean_of(deltas)
    return mean * (float(torch.stack(deltas).norm(dim=1).median()) / max(float(mean.norm()), 1e-12))
