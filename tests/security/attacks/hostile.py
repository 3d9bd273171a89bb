"""A hostile learner: a process with a learner's credentials that trains nothing and offers what serves its attack.

    python -m tests.security.attacks.hostile URL NAME STRATEGY      the strategy as JSON

It reads the log and the honest learners' deltas, as everybody may who can read the bucket, and writes offers that are
well formed: possible slots, bases, data ranges and token counts, payloads with their true norms. One generator of
operations: a search drives it in virtual time, this module's `main` on a real store.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Literal

import torch

from diloco_cli.digests import digest
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import delta_key, incarnation_key, max_fragment_bytes, offer_key
from diloco_cli.protocol.log.operations import Create, Get, Now, Sleep, Steps
from diloco_cli.protocol.log.records import Offer, ProcessClaim, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode, encode
from diloco_cli.protocol.rules.eligibility import max_ahead, max_steps
from diloco_cli.signing import learner_signer
from diloco_cli.tensors.delta import delta_formats

Direction = Literal["flipped", "random", "aligned", "stale"]
PAUSES_A_SLOT = 8
HOSTILE = "x"  # what names of hostile islands begin with
SILENT_SLOTS = 2.0  # without a commit, after which it takes the syncer for dead


@dataclass(frozen=True)
class Strategy:
    """`scale`: the norm of a bad delta, times that of an honest one; each bad delta is `ratchet` times as long as the
    one before. `direction`: the mean of the others' newest deltas (`aligned`), its negative, that of `stale_rounds`
    ago, or noise. `focus`: whether all of the norm lies in the fragment's smallest tensor. `begins`: the first slot of
    the attack; before it, and for `honest_between` slots between two bad ones, it offers what the others do, once all
    of them have: with what they offered a round ago it would go on attacking. `copies`: bad offers in one slot.
    `claims`: times the steps and tokens that an honest offer states. `ahead`: for how many coming slots it offers
    already now. `in_silence`: bad offers only while no syncer serves. The syncer is killed every `restart_every` slots
    (0: never), and the next one comes `outage_slots` later. `waits`: it offers bad deltas only once one of the others
    has.
    """

    scale: float = 1.0
    ratchet: float = 1.0
    direction: Direction = "flipped"
    stale_rounds: int = 5
    focus: bool = False
    begins: int = 12
    honest_between: int = 0
    copies: int = 1
    claims: float = 1.0
    ahead: int = 0
    waits: bool = True
    in_silence: bool = False
    restart_every: int = 0
    outage_slots: float = 2.0


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
    """One process of it. `bad`: how many bad offers it has made."""

    def __init__(self, run: RunFormat, name: str, strategy: Strategy, slot_s: float, seed: int = 0) -> None:
        self.run, self.name, self.strategy, self.slot_s = run, name, strategy, slot_s
        self.others = honest_of(run)
        self.formats = delta_formats(run.layout, run.settings.sync)
        self.seen, self.state, self.bad = SeenDeltas(), RunState(), 0
        self._random = torch.Generator().manual_seed(seed)
        self._seqs, self._position = count(), 0
        self._next_slot, self._since_bad, self._heard_s = 0, strategy.honest_between, 0.0
        self._silent = False
        self._means: dict[int, deque[torch.Tensor]] = defaultdict(lambda: deque(maxlen=strategy.stale_rounds))

    def steps(self) -> Steps[None]:
        claim = ProcessClaim(1, "hostile", "elsewhere", 1, "then", "test")
        yield from self._create(incarnation_key(self.name, 1), encode(claim))
        while True:
            before = self.state.n
            self.state = yield from read_log(self.run, self.state if before >= 0 else None)
            if self.state.phase == "FINISHED":
                return
            now_s: float = yield Now()
            if self.state.n != before:
                self._heard_s = now_s
            if self.state.outputs:
                yield from self._look()
                yield from self._turn(now_s - self._heard_s > SILENT_SLOTS * self.slot_s)
            yield Sleep(self.slot_s / PAUSES_A_SLOT)

    def _turn(self, silent: bool) -> Steps[None]:
        """Offer for each slot from the head on that it has not offered for; again for those of a head in silence."""
        head = self.state.slot
        if silent and not self._silent and self.strategy.in_silence:
            self._next_slot = head
        self._silent = silent
        last = head + min(self.strategy.ahead, max_ahead(self.run))
        first = max(self._next_slot, head)
        for slot in range(first, last + 1):
            fragment, attacks = fragment_of_slot(slot, self.run.num_fragments), self._attacks(slot, silent)
            known, fresh = self.seen.of(fragment), len(self.seen.of(fragment, slot))
            early = attacks and (silent or not self.strategy.waits)
            if not known or (not early and fresh < (1 if attacks else len(self.others))):
                return
            for number in range(self.strategy.copies if attacks else 1):
                yield Sleep(self.slot_s / PAUSES_A_SLOT if number else 0.0)  # each of them is read by itself
                delta = self._bad(fragment, known) if attacks else usual_of(known)
                yield from self._offer(slot, fragment, delta, attacks)
            self._since_bad = 0 if attacks else self._since_bad + 1
            self._means[fragment].append(mean_of(known))
            self._next_slot = slot + 1

    def _attacks(self, slot: int, silent: bool) -> bool:
        plan = self.strategy
        return slot >= plan.begins and self._since_bad >= plan.honest_between and (silent or not plan.in_silence)

    def _bad(self, fragment: int, known: list[torch.Tensor]) -> torch.Tensor:
        plan, mean = self.strategy, mean_of(known)
        usual = float(usual_of(known).norm())
        noise = torch.randn(mean.shape, generator=self._random)
        old = self._means[fragment][0] if self._means[fragment] else mean
        vector = {"flipped": -mean, "aligned": mean, "random": noise, "stale": old}[plan.direction].clone()
        if plan.focus:
            vector = self._focused(fragment, vector)
        length = usual * plan.scale * plan.ratchet**self.bad
        return vector * (length / max(float(vector.norm()), 1e-12))

    def _focused(self, fragment: int, vector: torch.Tensor) -> torch.Tensor:
        sizes = [tensor.num_elements for tensor in self.run.layout.fragments[fragment].tensors]
        smallest, kept = sizes.index(min(sizes)), torch.zeros_like(vector)
        start = sum(sizes[:smallest])
        kept[start : start + sizes[smallest]] = vector[start : start + sizes[smallest]]
        return kept

    def _offer(self, slot: int, fragment: int, delta: torch.Tensor, bad: bool) -> Steps[None]:
        self.bad += bad
        base, payload = self.state.outputs[fragment], self.formats[fragment].encode(delta.float())
        island = self.run.island(self.name)
        assert island is not None
        steps = min(max_steps(self.run), round(island.local_steps * (self.strategy.claims if bad else 1.0)))
        tokens = steps * island.batch_tokens
        start, self._position = self._position, self._position + tokens
        offer = Offer(
            self.name, 1, next(self._seqs), slot, fragment, base.version, base.weights_digest, start, start + tokens,
            tokens, steps, digest(payload), len(payload), "hostile",
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


def main() -> None:
    from diloco_cli.clock import monotonic_s, sleep_s
    from diloco_cli.protocol.log.commit_log import read_format
    from diloco_cli.runtime.daemon import SystemClock, perform
    from diloco_cli.store.open import open_store

    url, name, plan = sys.argv[1:]
    torch.set_num_threads(1)
    store, clock = open_store(url), SystemClock(monotonic_s, sleep_s, lambda: None)
    run = perform(read_format(url), store, clock)
    island = run.island(name)
    assert island is not None
    slot_s = island.local_steps * island.step_s / run.num_fragments
    perform(Hostile(run, name, Strategy(**json.loads(plan)), slot_s).steps(), store, clock)


def as_json(strategy: Strategy) -> str:
    return json.dumps(asdict(strategy))


if __name__ == "__main__":
    main()
