"""Checks of learners' saved moments: those that an offer names exist, a restart uses those named last, and no learner
uses moments from merges that a rollback has undone."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.joining import MAX_PREDECESSORS
from diloco_cli.protocol.log.keys import CERTIFICATES
from tests.histories.client import Bucket
from tests.histories.replayer import Replayer, expect, number_of, numbered, plain, signed_by

FRESH = -1  # the commit of moments that were never saved


def moments_bytes(step: int, n: int) -> bytes:
    """The bytes of moments after `step` steps of the optimizer, as of commit n."""
    return f"moments:{step}:{n}".encode()


def read_moments(data: bytes) -> tuple[int, int]:
    step, n = data.decode().removeprefix("moments:").split(":")
    return int(step), int(n)


def digest_of(key: str) -> str:
    """The digest at the end of a key of saved moments (digests have dashes, too)."""
    return key.rpartition("/")[2].partition("-")[2]


@dataclass(frozen=True)
class Promise:
    """The moments that the newest offer of an incarnation names, and the base that the offer was made from."""

    incarnation: int
    base: int
    key: str
    signed_by: str


@dataclass(frozen=True)
class Offered:
    """Up to where an offer holds its learner's data, and the key that signs it."""

    incarnation: int
    data_end: int
    key: str
    signed_by: str


@dataclass
class MomentsWatch:
    """The moments of all learners, and the data that they have offered: `drawn` holds, of each incarnation, the offers
    of its predecessors that were there when it claimed its number. `named`: by learner and incarnation, those that its
    newest offer names; `promised`:
    those that an incarnation must find when it begins; `outdated`: those that were named by then, and by no offer since
    (a predecessor that lives on may still make an offer that names them)."""

    replayer: Replayer
    saved: set[str] = field(default_factory=set)
    named: dict[str, dict[int, Promise | None]] = field(default_factory=dict)
    known: dict[str, set[str]] = field(default_factory=dict)
    promised: dict[tuple[str, int], tuple[Promise, Bucket]] = field(default_factory=dict)
    outdated: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    offered: dict[str, list[Offered]] = field(default_factory=dict)
    drawn: dict[tuple[str, int], tuple[list[Offered], Bucket]] = field(default_factory=dict)

    def born(self, key: str, data: bytes, bucket: Bucket) -> None:
        """A learner has written this object, in its own bucket."""
        kind = key.partition("/")[0]
        if kind not in ("inner", "incarnation", "offer"):
            return
        learner, incarnation, _ = numbered(key)
        if kind == "inner":
            self.saved.add(key)
        elif kind == "incarnation":
            self._came_to_be(learner, incarnation, bucket)
        elif kind == "offer":
            if numbered(key) in self.replayer.settled:
                return  # a held-up request, behind the floor
            offer = plain(data)
            found = Offered(incarnation, offer["data_end"], key, signed_by(offer)[1])
            self.offered.setdefault(learner, []).append(found)
            inner = offer["inner"]
            expect(inner is None or inner in self.saved, "9", f"{key} names {inner}, which was never saved")
            promise = None if inner is None else Promise(incarnation, offer["base"], inner, signed_by(offer)[1])
            self.named.setdefault(learner, {})[incarnation] = promise
            if inner is not None:
                self.known.setdefault(learner, set()).add(inner)
                self._named_again(learner, incarnation, digest_of(inner))

    def _came_to_be(self, learner: str, incarnation: int, bucket: Bucket) -> None:
        floor = self.replayer.floors[learner]
        oldest = number_of(incarnation) - MAX_PREDECESSORS
        # A process looks for its predecessors under the keys of its learner whose certificates a listing shows.
        prefix = f"{CERTIFICATES}learner/{learner}/"
        unseen = {key.removeprefix(prefix).removesuffix(".json") for key in bucket.withheld.get(prefix, ())}
        all_offered = [one for one in self.offered.get(learner, []) if one.signed_by not in unseen]
        before = [one for one in all_offered if floor <= one.incarnation < incarnation]
        offered = [one for one in before if number_of(one.incarnation) >= oldest]
        self.drawn[learner, incarnation] = offered, bucket
        named = sorted(self.named.get(learner, {}).items(), reverse=True)
        promises = [p for number, p in named if number >= floor and p is not None and p.signed_by not in unseen]
        # Who has saved often since its last offer, and died, left only later ones that nothing names.
        newest = next((promise for promise in promises if bucket.get(promise.key) is not None), None)
        if newest is not None:
            self.promised[learner, incarnation] = newest, bucket
            earlier = [
                key for key in self.known[learner] if numbered(key) <= numbered(newest.key)
            ]  # no zombie's later ones
            self.outdated[learner, incarnation] = set(map(digest_of, earlier))

    def _named_again(self, learner: str, by: int, moments: str) -> None:
        """The moments are named again, by the incarnation that made the promise or a newer one."""
        for (of, successor), outdated in self.outdated.items():
            promise, _ = self.promised[of, successor]
            if of == learner and by >= promise.incarnation:
                outdated.discard(moments)

    def restored(self, learner: str, incarnation: int, moments: bytes | None) -> None:
        """Check that a new incarnation restored the moments named last before it began, or later ones. (If a rollback
        or a collection has come since, it may have none. Nor if so many have died since that it does not look as far
        back.)"""
        promise, bucket = self.promised.get((learner, incarnation), (None, None))
        if promise is None or bucket is None or promise.base < self.replayer.base_floor:
            return
        if promise.signed_by in self.replayer.revoked:  # then nothing of it counts
            return
        if number_of(incarnation) - number_of(promise.incarnation) > MAX_PREDECESSORS:
            return
        fits = bucket.get(promise.key) is None
        if moments is not None:
            named = digest(moments)
            fits = named == digest_of(promise.key) or named not in self.outdated[learner, incarnation]
        expect(fits, "loss", f"{learner} {incarnation} does not go on from {promise.key}")

    def began(self, learner: str, incarnation: int, data_start: int) -> None:
        """Check that a new incarnation's data begins after all that its predecessors had offered when it claimed its
        number, as far as these offers are still there."""
        offered, bucket = self.drawn.get((learner, incarnation), ([], None))
        for one in offered:
            known = bucket is not None and one.key in bucket.objects and one.signed_by not in self.replayer.revoked
            text = f"{learner} {incarnation} begins at {data_start}, and {one.key} ends at {one.data_end}"
            expect(not known or data_start >= one.data_end, "4", text)

    def fitting(self, learner: str, head: int, n: int) -> None:
        """Check that a learner that knows the log up to `head` may use moments as of commit n."""
        fits = n == FRESH or n > head or self.replayer.leads_to(head, n)
        expect(fits, "6", f"{learner} goes on at {head} with the moments of {n}, which a rollback left behind")
