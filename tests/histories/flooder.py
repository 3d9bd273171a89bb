"""A flooder: see outsiders.py. What it writes under its own names is genuine, and may cost the others nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.digests import digest
from diloco_cli.protocol.log.keys import (
    fingerprint,
    incarnation_key,
    incarnation_of,
    join_key,
    key_of,
    number_of,
    offer_key,
)
from diloco_cli.protocol.log.records import Island, Join, Offer, ProcessClaim, encode
from diloco_cli.signing import Authenticator, learner_signer
from tests.histories.options import BATCH_TOKENS, with_key
from tests.histories.outsiders import Outsider
from tests.histories.replayer import FLOODER

if TYPE_CHECKING:
    from tests.histories.history import History


PILE = (10, 400)  # objects of one act
MAX_PILED = 2500  # in all: the simulated store lists slowly
FARTHEST = 12  # of sparse claims: 2 to this power
NO_BATCH = 0  # no island with it may join
FEW = 2


class Flooder(Outsider):
    ACTS = ("dead_incarnations", "sparse_claims", "junk", "useless_offers", "useless_offers", "joins", "crash_loop")

    def __init__(self, history: History, name: str) -> None:
        super().__init__(history, name)
        history.monitor.suspects.add(FLOODER)
        self.piled = self.incarnation = self.seq = 0
        self.looped = False
        self._keyrings: dict[tuple[str, int], Authenticator] = {}

    def keyring(self, name: str) -> Authenticator:
        signer = learner_signer(name)
        made = self.history.nemesis.keys_made[signer]
        if (signer, made) not in self._keyrings:
            self._keyrings[signer, made] = with_key(self.history.run, signer, made).keyring
        return self._keyrings[signer, made]

    def _pile(self) -> int:
        """How many objects the next act may write."""
        size = min(self.draw.whole(*PILE), max(FEW, MAX_PILED - self.piled))
        self.piled += size
        return size

    def publish(self, name: str, key: str, body: bytes) -> bool:
        """A genuine record of this learner."""
        bucket = self.bucket_of(name)
        placed = self.place(bucket, key, self.keyring(name).sign(learner_signer(name), key, body))
        if placed:
            self.history.monitor.genuine.created(key)
        return placed

    def claim(self, name: str, number: int) -> int:
        """Returns the incarnation."""
        incarnation = incarnation_of(number, fingerprint(self.keyring(name).public(learner_signer(name))))
        claim = ProcessClaim(incarnation, "d" * 32, "elsewhere", 1, "then", "dead")
        self.publish(name, incarnation_key(name, incarnation), encode(claim))
        return incarnation

    def next_number(self, name: str) -> int:
        return number_of(self.history.monitor.genuine.claims[name]) + 1

    # -- acts -----------------------------------------------------------------------------------------------------

    def _dead_incarnations(self) -> None:
        first, size = self.next_number(FLOODER), self._pile()
        for number in range(first, first + size):
            self.incarnation, self.seq = self.claim(FLOODER, number), 0
        self.history.note(f"a flooder claimed {size} incarnations")

    def _crash_loop(self) -> None:
        """An honest learner's machine has claimed incarnation after incarnation, and none has lived."""
        if self.looped or self.history.monitor.healthy:
            return
        self.looped = True
        name = self.draw.choice(self.others)
        first = self.next_number(name)
        for number in range(first, first + self._pile()):
            self.claim(name, number)
        self.history.note(f"{name} died in a loop")

    def _sparse_claims(self) -> None:
        self.claim(FLOODER, self.next_number(FLOODER) - 1 + (1 << self.draw.whole(1, FARTHEST)))

    def _junk(self) -> None:
        """In the place of its next claim and its next offer."""
        if self.incarnation:
            for key in (
                incarnation_key(FLOODER, incarnation_of(number_of(self.incarnation) + 1, key_of(self.incarnation))),
                offer_key(FLOODER, self.incarnation, self.seq),
            ):
                self.place(self.history.bucket, key, b"junk")

    def _useless_offers(self) -> None:
        if not self.incarnation:
            self.incarnation = self.claim(FLOODER, self.next_number(FLOODER))
        for _ in range(self._pile()):
            key = offer_key(FLOODER, self.incarnation, self.seq)
            if not self.publish(FLOODER, key, encode(self._useless())):
                self._dead_incarnations()  # its own junk is in the way
                return
            self.seq += 1
        self.history.note(f"a flooder offers up to {self.incarnation}/{self.seq}")

    def _useless(self) -> Offer:
        """An offer that brings nothing, in one of several ways."""
        replayer = self.history.monitor.replayer
        slot = replayer.slot + self.draw.whole(0, 2)
        fragment = slot % self.history.run.num_fragments
        versions = replayer.versions.get(fragment)
        base, base_digest = (versions[-1].version, versions[-1].weights_digest) if versions else (0, "")
        payload, size, tokens, steps, seq = digest(b"nothing"), 20, BATCH_TOKENS, 1, self.seq
        match self.draw.whole(0, 6):
            case 0:
                size = 0
            case 1:
                slot += 1000 * self.history.run.num_fragments
            case 2:
                tokens = steps = 0
            case 3:
                tokens = 100 * BATCH_TOKENS
            case 4:
                payload = "none"
            case 5:
                seq += 1
            case _:
                pass  # its payload is not there
        return Offer(
            FLOODER, self.incarnation, seq, slot, fragment, base, base_digest, 0, tokens, tokens, steps, payload, size,
            "d" * 32,
        )  # fmt: skip

    def _joins(self) -> None:
        """Requests of islands that can never be admitted, and junk in requests' place, for the present syncer."""
        epoch = self.history.monitor.replayer.epoch
        names = self.draw.choice((1, 1000))
        for number in range(self._pile()):
            name = f"{FLOODER}-{self.acts}-{number % names}"
            key = join_key(name, epoch, number // names)
            island = Island(name, "here", NO_BATCH, 1, 1.0, 1.0)
            body = encode(Join(island, epoch, number // names, "d" * 32, "then"))
            data = self.keyring(name).sign(learner_signer(name), key, body) if names == 1 else body
            self.place(self.history.bucket, key, data)
        self.history.note("a flooder asked for islands to join")
