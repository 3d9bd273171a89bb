"""Claims and offers of learners, where another writer may have put an object under their keys first.

A learner's record lies at the first of MAX_PLACES places of its key that was free: at the key itself, for example
`offer/iowa/00000001/0000000007.json`, then at `...07-1.json`, and so on. Its number stays the same, so a stranger's
object in front of it changes neither the order of the records nor what the log says of them. The signature (or
checksum) is over the key itself: the same bytes are genuine at each place, and relays may carry them to another one.

What is not genuine counts as not there. So claims are dense, and the newest one is found by few looks (epochs.py); but
where a process claimed the number after one whose key was revoked, before it knew, that one is a gap (ClaimWatch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.log.epochs import CLAIMS_TRIED, REACH, furthest
from diloco_cli.protocol.log.keys import incarnation_key, offer_key, placed_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.protocol.log.signed import LOOKS, create_signed, read_signed
from diloco_cli.protocol.log.together import together
from diloco_cli.protocol.log.wire import encode
from diloco_cli.signing import Unsigned, learner_signer

MAX_PLACES = 16
CLAIMS_PER_LOOK = 1024  # that one look passes over
MOST_GAPS = 8  # numbers in a row that others' objects have taken, which a reader passes by; it stops at more
PLACES_PER_LOOK = 4  # that are occupied by others: a flood under one learner's keys must not delay the other learners


class OccupiedError(DataCheckError):
    """Other writers' objects lie at all places of a learner's next record."""

    code = "occupied"


@dataclass(frozen=True)
class PlacedRecord:
    """A genuine record's bytes and its place; without one (`data` None) the place to look at the next time."""

    data: bytes | None
    place: int


def read_placed(
    keyring: Unsigned, signer: str, key: str, place: int = 0, most: int = MAX_PLACES, same: int = 2
) -> Steps[PlacedRecord]:
    """The genuine record of this key, looked for from `place` on, past at most `most` objects of others. `same`: see
    `read_signed`."""
    for at in range(place, min(MAX_PLACES, place + most)):
        data = yield from read_signed(keyring, signer, key, placed_key(key, at), same)
        if data is None:
            return PlacedRecord(None, at)
        if keyring.authenticates(signer, key, data):
            return PlacedRecord(data, at)
    return PlacedRecord(None, place + most if place + most < MAX_PLACES else 0)


def create_placed(keyring: Unsigned, signer: str, key: str, mine: bytes, same: int = 2) -> Steps[bytes]:
    """Create a record at the first free place of its key. Returns the genuine bytes that then lie there: `mine`, or
    those of another process with the same key to sign. `same`: see read_signed."""
    for place in range(MAX_PLACES):
        data = yield from create_signed(keyring, signer, key, mine, placed_key(key, place), same)
        if data == mine or keyring.authenticates(signer, key, data):
            return data
    hint = "delete them; a bucket policy keeps others from writing there: diloco bucket-policy --help"
    what = f"objects that {signer} has not written lie at this key and its {MAX_PLACES - 1} other places"
    raise OccupiedError(what, where=key, hint=hint)


def genuine_of(get: Callable[[str], bytes | None], keyring: Unsigned, signer: str, key: str) -> bytes | None:
    """For readers of a store that check a run from outside: the genuine record of this key, else what lies there."""
    first = data = get(key)
    for place in range(1, MAX_PLACES):
        if data is None or keyring.authenticates(signer, key, data):
            break
        data = get(placed_key(key, place))
    else:
        data = None
    return first if data is None else data


@dataclass(frozen=True)
class Claimed:
    """The newest claim of a learner: its number and bytes."""

    number: int
    data: bytes


def newest_claim(
    keyring: Unsigned, learner: str, known: int, reach: int = REACH, same: int = 2
) -> Steps[Claimed | None]:
    """The newest claim of a learner beyond number `known`, within `reach` of it; None if there is none."""

    def look(number: int) -> Steps[bytes | None]:
        key = incarnation_key(learner, number)
        return (yield from read_placed(keyring, learner_signer(learner), key, same=same)).data

    found = yield from furthest(known, reach, look)
    return None if found is None else Claimed(*found)


def claim_incarnation(keyring: Unsigned, learner: str, claim: ProcessClaim, known: int) -> Steps[int]:
    """The first free number beyond `known`, which was claimed before; now it is claimed by this process."""
    signer, number = learner_signer(learner), known
    for _ in range(CLAIMS_TRIED):
        newest = yield from newest_claim(keyring, learner, number, same=LOOKS)
        number = 1 + (number if newest is None else newest.number)
        key = incarnation_key(learner, number)
        mine = keyring.sign(signer, key, encode(replace(claim, number=number)))
        if (yield from create_placed(keyring, signer, key, mine, LOOKS)) == mine:
            return number
    what = f"other processes with this learner's key have claimed {CLAIMS_TRIED} numbers first"
    raise OccupiedError(what, where=incarnation_key(learner, number), hint="have its key revoked: diloco key revoke")


class ClaimWatch:
    """Looks for newer claims of one learner, at few requests a look. `newest`: the newest known one."""

    def __init__(self, keyring: Unsigned, learner: str, newest: int) -> None:
        self.keyring, self.learner, self.newest = keyring, learner, newest
        self._places: dict[int, int] = {}  # of these numbers, where the next look begins

    def look(self) -> Steps[Claimed | None]:
        """The newest claim, if it is newer than the one known before."""
        first, is_taken = yield from self._read(self.newest + 1)
        if first is None and is_taken and self.keyring.revoked:
            first = yield from self._beyond_gaps()
        if first is None:
            return None
        later = yield from newest_claim(self.keyring, self.learner, first.number, CLAIMS_PER_LOOK)
        newest = later or first
        self.newest = newest.number
        self._places.clear()
        return newest

    def _read(self, number: int) -> Steps[tuple[Claimed | None, bool]]:
        """The claim of this number, looked for where the look before ended; whether others' objects lie there."""
        place = self._places.get(number, 0)
        key, signer = incarnation_key(self.learner, number), learner_signer(self.learner)
        found = yield from read_placed(self.keyring, signer, key, place, PLACES_PER_LOOK)
        self._places[number] = found.place
        return None if found.data is None else Claimed(number, found.data), bool(place or found.place)

    def _beyond_gaps(self) -> Steps[Claimed | None]:
        """The next claim behind numbers that others' objects have taken: it was made when these still counted."""
        numbers = range(self.newest + 2, self.newest + 2 + MOST_GAPS)
        found = yield from together([self._read(number) for number in numbers])
        return next((claim for claim, _ in found if claim is not None), None)


def newest_past_gaps(keyring: Unsigned, learner: str, known: int) -> Steps[Claimed | None]:
    """The newest claim beyond number `known`, also behind gaps: that to which a ClaimWatch from there comes in
    CLAIMS_TRIED looks. None if there is none."""
    newest = yield from newest_claim(keyring, learner, known)
    if keyring.revoked:
        watch, looks_in_vain = ClaimWatch(keyring, learner, known if newest is None else newest.number), 0
        for _ in range(CLAIMS_TRIED):
            later = yield from watch.look()
            newest, looks_in_vain = (newest, looks_in_vain + 1) if later is None else (later, 0)
            if looks_in_vain == MAX_PLACES // PLACES_PER_LOOK:  # it has tried all places
                break
    return newest


@dataclass(frozen=True)
class FoundOffer:
    """What lies under an offer's number: its bytes (None: nothing genuine yet) and its place, as in PlacedRecord.
    `damaged`: only bytes that are not genuine, though the learner has published the next offer, and so this one.
    `flooded`: as many objects of others lie there as one look passes over."""

    data: bytes | None
    place: int = 0
    damaged: bool = False
    flooded: bool = False


def next_offer(
    keyring: Unsigned, learner: str, incarnation: int, seq: int, place: int = 0, most: int = PLACES_PER_LOOK
) -> Steps[FoundOffer]:
    """Look for the offer of this number. A learner publishes its offers one after the other."""
    signer, key = learner_signer(learner), offer_key(learner, incarnation, seq)
    found = yield from read_placed(keyring, signer, key, place, most)
    if found.data is not None or found.place == place == 0:
        return FoundOffer(found.data, found.place)
    later = yield from read_placed(keyring, signer, offer_key(learner, incarnation, seq + 1), most=most)
    if later.data is None:
        return FoundOffer(None, found.place, flooded=not place <= found.place < place + most)
    again = yield from read_placed(keyring, signer, key, same=LOOKS)  # the first bytes may have come damaged
    return FoundOffer(again.data, again.place, damaged=again.data is None)
