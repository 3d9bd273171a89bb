"""Which process is which incarnation of a learner, under which of its keys it writes, and which epoch a syncer has.

A claim is an object that is created once: the number that follows all those of the learner's keys (ARCHITECTURE.md,
"Keys"; `LearnerKeys`). Objects of strangers in the way use their numbers up: they are no claims. Claims are dense, so
the furthest one is found by doubling and halving steps. Claims that lie apart are made by no process of this program;
they drive a number on by REACH a look at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from diloco_cli.errors import DataCheckError, TryAgainError
from diloco_cli.protocol.log.keys import (
    CERTIFICATES,
    MOST_INCARNATIONS,
    certificate_key,
    claims_prefix,
    epoch_key,
    fingerprint,
    incarnation_key,
    incarnation_of,
    key_of,
    number_of,
    offer_key,
    read_certificate_key,
    read_claim_key,
)
from diloco_cli.protocol.log.operations import Create, Get, List, Steps, got, together, together_got
from diloco_cli.protocol.log.records import (
    LOOKS,
    MAX_RECORD_BYTES,
    ProcessClaim,
    RecordError,
    RunFormat,
    create_signed,
    decode,
    encode,
    read_signed,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import LOG, OPERATOR, Authenticator, Keyring, Secret, is_certified, learner_signer, public_key


@dataclass(frozen=True)
class Certificate:
    """The operator's word that this public key signs as `signer` in this run."""

    signer: str
    public: str
    code: str


def certificate_record(run_id: str, secret: Secret, signer: str, public: str) -> tuple[str, bytes]:
    """Key and bytes of the record for this public key. Raises UsageError if `secret` is not the operator's."""
    key = certificate_key(signer, public)
    record = Certificate(signer, public, secret.certificate(run_id, signer, public))
    return key, secret.keyring(run_id).sign(OPERATOR, key, encode(record))


def certificate_in(keyring: Authenticator, key: str, data: bytes) -> Certificate | None:
    """The certificate in an object, if the operator has given it: its code tells, whoever has written the object."""
    try:
        said = decode(Certificate, data, key)
    except RecordError:
        return None
    if not isinstance(keyring, Keyring) or certificate_key(said.signer, said.public) != key:
        return None
    return said if is_certified(keyring.operator, keyring.run_id, said.signer, said.public, said.code) else None


def own_certificate(keyring: Authenticator, signer: str) -> tuple[str, bytes] | None:
    """Key and bytes of the certificate with which this process signs as `signer`; None in an unsigned run."""
    grant = keyring.grants.get(signer) if isinstance(keyring, Keyring) else None
    if grant is None:
        return None
    public = public_key(grant.private)
    return certificate_key(signer, public), encode(Certificate(signer, public, grant.certificate))


def own_keyring(run_id: str, secret: Secret) -> Steps[Keyring]:
    """The keyring of a machine with its own key: with the certificates for it that lie in the bucket."""
    public, trusted = public_key(secret.own), Keyring(run_id, secret.operator)
    found: dict[str, str] = {}
    for signer in secret.signers:
        key = certificate_key(signer, public)
        data: bytes | None = yield Get(key, MAX_RECORD_BYTES)
        said = None if data is None else certificate_in(trusted, key, data)
        if said is not None:
            found[signer] = said.code
    return secret.keyring(run_id, found)


REACH = 1 << 20  # numbers beyond the last one known: more than processes ever die in a row
CLAIMS_TRIED = 64  # of numbers that others take first
Found = TypeVar("Found")


def furthest(known: int, reach: int, look: Callable[[int], Steps[Found | None]]) -> Steps[tuple[int, Found] | None]:
    """The furthest number beyond `known`, within `reach` of it, under which `look` finds something, and that; None if
    there is none."""
    found: tuple[int, Found] | None = None
    low, high, step = known, known + reach + 1, 1
    while high - low > 1:
        number = min(low + step, (low + high + 1) // 2)
        there = yield from look(number)
        if there is None:
            high = number
        else:
            low, found, step = number, (number, there), 2 * step
    return found


def newest_epoch(known: int) -> Steps[tuple[int, bytes] | None]:
    """The furthest epoch beyond `known` under whose key anything lies, and these bytes; None if there is none."""
    return (yield from furthest(known, REACH, lambda epoch: got(epoch_key(epoch), MAX_RECORD_BYTES)))


def claim_epoch(run: RunFormat, claim: ProcessClaim, state: RunState) -> Steps[int]:
    """A free epoch after the log's, now claimed by this process."""
    epoch = state.epoch + 1
    for _ in range(CLAIMS_TRIED):
        mine = run.keyring.sign(LOG, epoch_key(epoch), encode(replace(claim, number=epoch)))
        if (yield from create_signed(run.keyring, LOG, epoch_key(epoch), mine)) == mine:
            return epoch
        newest = yield from newest_epoch(epoch)
        epoch = 1 + (epoch if newest is None else newest[0])
    raise TryAgainError(f"{CLAIMS_TRIED} epochs in a row were claimed by other processes first", where=epoch_key(epoch))


STRANGERS_PASSED = 16  # objects that are no claims, on the way down from the furthest one
LONGEST_LEAP = 1 << 14  # of numbers that one claim leaves out: a stolen key must not use up all numbers
LISTS_EVERY = 8  # looks
PAGE = 1000
CERTIFICATES_PER_LOOK = 1024
DAMAGED_IN_A_ROW = 8  # offers, or lost, that are passed over together
KEYS_BELIEVED = 8  # of a learner, beyond which a damaged certificate is no reason to look for claims


class OccupiedError(DataCheckError):
    """Another process, or a stranger's object, has taken every number that this process tried."""

    code = "occupied"


@dataclass
class LearnerKeys:
    """The fingerprints of the keys that the operator has certified for learners, as far as one bucket tells."""

    keyring: Authenticator
    known: dict[str, set[int]] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def look(self, learner: str = "") -> Steps[list[tuple[str, bytes]]]:
        """Look for certificates, all or one learner's. Returns the object keys and bytes of those found now."""
        if not self.keyring.signs:
            return []
        prefix, after = f"{CERTIFICATES}learner/{learner}" + ("/" if learner else ""), ""
        new: list[str] = []
        while len(new) < CERTIFICATES_PER_LOOK:
            keys: list[str] = yield List(prefix, after, PAGE)
            new += [key for key in keys if key not in self._seen and read_certificate_key(key) is not None]
            if len(keys) < PAGE:
                break
            after = keys[-1]
        self._seen.update(new)
        found: dict[str, bytes] = {}
        for _ in range(LOOKS):  # the bytes may be damaged in a read
            left = [key for key in new if key not in found]
            for key, data in zip(left, (yield from together_got(left, MAX_RECORD_BYTES)), strict=True):
                if data is not None and certificate_in(self.keyring, key, data) is not None:
                    found[key] = data
        for key in sorted(new, key=lambda key: key not in found):
            learner, public = read_certificate_key(key) or ("", "")
            known = self.known.setdefault(learner, set())
            if key in found or len(known) < KEYS_BELIEVED:  # else a stranger's, or written by halves
                known.add(fingerprint(public))
        return list(found.items())

    def of(self, learner: str) -> list[int]:
        """The fingerprints of a learner's keys that are not revoked; 0 alone in an unsigned run."""
        if not self.keyring.signs:
            return [0]
        revoked = {fingerprint(public) for public in self.keyring.revoked}
        return sorted(self.known.get(learner, set()) - revoked)


class ClaimWatch:
    """Looks for newer claims of one learner under one key, at few requests a look. `newest`: the newest known one."""

    def __init__(self, keyring: Authenticator, learner: str, key: int, newest: int) -> None:
        self.keyring, self.learner, self.key, self.newest = keyring, learner, key, newest
        self.last = newest  # the furthest number under which anything lies, as far as is known
        self.taken = [range(newest, newest + 1)] if newest > 0 else []  # such numbers
        self._looks = 0

    @classmethod
    def beside(cls, keyring: Authenticator, learner: str, key: int, incarnation: int) -> ClaimWatch:
        """For the claims under this key that come after an incarnation, perhaps one under another key."""
        return cls(keyring, learner, key, number_of(incarnation) - (key_of(incarnation) != key))

    def look(self, beyond: int = 0) -> Steps[int | None]:
        """The newest claim's number, if it is newer than the one known before. `beyond`: the newest number under any of
        the learner's keys, which the next claim follows, under whichever key it comes."""
        before = self.last
        yield from self._go_on(max(self.last, beyond))  # also before a listing, which may not show the newest claims
        if self.key and self._looks % LISTS_EVERY == 0:  # in case two keys' processes began at the same time
            yield from self._list()
        self._looks += 1
        for number in range(self.last, max(before, self.last - STRANGERS_PASSED), -1):
            claim = self._key(number)
            data = yield from read_signed(self.keyring, learner_signer(self.learner), claim)
            if data is not None and self.keyring.authenticates(learner_signer(self.learner), claim, data):
                self.newest = number
                return number
        return None

    def _go_on(self, known: int) -> Steps[None]:
        """Note the numbers that are taken right behind a known one."""
        found = yield from furthest(known, REACH, lambda number: got(self._key(number), MAX_RECORD_BYTES))
        if found is not None:
            self.taken.append(range(known + 1, found[0] + 1))
            self.last = found[0]

    def _list(self) -> Steps[None]:
        for _ in range(STRANGERS_PASSED):
            after = self._key(self.last) if self.last > 0 else ""
            keys: list[str] = yield List(claims_prefix(self.learner, self.key), after, 1)
            named = read_claim_key(keys[0]) if keys else None
            number = 0 if named is None else number_of(named[1])
            if not 0 < number <= min(MOST_INCARNATIONS, self.last + LONGEST_LEAP):
                return
            yield from self._go_on(number - 1)

    def _key(self, number: int) -> str:
        return incarnation_key(self.learner, incarnation_of(number, self.key))


@dataclass(frozen=True)
class Claimed:
    """The incarnation that a process has claimed, and the earlier ones of its learner beyond the floor, rising."""

    incarnation: int
    earlier: tuple[int, ...]


def claim_incarnation(keyring: Authenticator, learner: str, claim: ProcessClaim, floor: int = 0) -> Steps[Claimed]:
    """Claim the first number above all claims of the learner's keys, and above the log's `floor`."""
    signer, keys = learner_signer(learner), LearnerKeys(keyring)
    own = fingerprint(keyring.public(signer))
    certificate = own_certificate(keyring, signer)
    if certificate is not None:
        yield Create(*certificate)  # so that readers know where to look
    yield from keys.look(learner)
    watches = {key: ClaimWatch.beside(keyring, learner, key, floor) for key in {own, *keys.of(learner)}}
    yield from together([watch.look() for watch in watches.values()])
    number = 0
    for _ in range(CLAIMS_TRIED):
        number = 1 + max(number, number_of(floor), *(watch.last for watch in watches.values()))
        incarnation = incarnation_of(number, own)
        key = incarnation_key(learner, incarnation)
        mine = keyring.sign(signer, key, encode(replace(claim, number=incarnation)))
        if number > MOST_INCARNATIONS and own:
            break
        if (yield from create_signed(keyring, signer, key, mine, LOOKS)) == mine:
            taken = [
                incarnation_of(number, key) for key, watch in watches.items() for run in watch.taken for number in run
            ]
            return Claimed(incarnation, tuple(sorted(one for one in taken if max(1, floor) <= one < incarnation)))
        yield from watches[own].look(number - 1)
    what = f"other processes with this learner's key have claimed {CLAIMS_TRIED} numbers first"
    raise OccupiedError(what, where=key, hint="have its key revoked: diloco key revoke")


@dataclass(frozen=True)
class FoundOffer:
    """The bytes of an offer; None: there is none yet, or (`damaged`) it is lost or not what its learner wrote, though
    the learner has published a later one, and so this one."""

    data: bytes | None
    damaged: bool = False


def next_offer(
    keyring: Authenticator, learner: str, incarnation: int, seq: int, is_overdue: bool = False
) -> Steps[FoundOffer]:
    """Look for the offer of this number. A learner publishes its offers one after the other, so a genuine one behind
    up to DAMAGED_IN_A_ROW damaged ones shows that these were published, too. So are lost ones, which are no sign of it
    themselves: where an offer `is_overdue`, later ones are asked for without any."""
    there, data = yield from _read_offer(keyring, learner, incarnation, seq)
    if data is not None or not (there or is_overdue):
        return FoundOffer(data)
    if not (yield from _is_published_beyond(keyring, learner, incarnation, seq, is_overdue)):
        return FoundOffer(None)
    _, again = yield from _read_offer(keyring, learner, incarnation, seq, LOOKS)  # the first bytes may be damaged
    return FoundOffer(again, damaged=again is None)


def _is_published_beyond(
    keyring: Authenticator, learner: str, incarnation: int, seq: int, is_overdue: bool
) -> Steps[bool]:
    later = range(seq + 1, seq + 1 + DAMAGED_IN_A_ROW)
    if is_overdue:
        read = yield from together([_read_offer(keyring, learner, incarnation, number) for number in later])
        return any(data is not None for _, data in read)
    for number in later:  # mostly the first one decides
        there, data = yield from _read_offer(keyring, learner, incarnation, number)
        if data is not None or not there:
            return data is not None
    return False


def _read_offer(
    keyring: Authenticator, learner: str, incarnation: int, seq: int, same: int = 2
) -> Steps[tuple[bool, bytes | None]]:
    """Whether anything lies under this number, and the offer's genuine bytes."""
    signer, key = learner_signer(learner), offer_key(learner, incarnation, seq)
    data = yield from read_signed(keyring, signer, key, same)
    genuine = data is not None and keyring.authenticates(signer, key, data)
    return data is not None, data if genuine else None
