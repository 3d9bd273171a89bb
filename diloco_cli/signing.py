"""Signatures on records: each signer has a key pair of its own, which the run's operator has certified for one role.

    operator              its public key is in FORMAT.json; signs that, certificates, requests, and the log while no
                          syncer serves (then without merges)
    syncer/<name>         a machine that runs a syncer: signs its epochs, and the commits and snapshots of them
    learner/<name>        signs its incarnations, its offers, and its request to join

A record ends with its signer, the signer's public key, the operator's certificate for that key, and the signature. The
certificate covers the run's id, the signer (role and name) and its public key; the signature covers the run's id, the
object's key, the signer and the record's bytes, which include a nonce (of a long record, their digest). So a record is
not valid under another key of the bucket, in another run, or for another signer, and whoever knows the operator's
public key can check every record. A learner that joins, a new machine for the syncer and a new key of either need one
more certificate, and no change of the run.

A certificate counts until the operator revokes its key, by a commit; a key that was revoked counts for nothing that is
judged after that commit (protocol/log/commits.py, which also binds each epoch to one key).

Private keys are never written to the bucket, logged or shown, and no machine needs another's. A key file also names the
operator's public key, so its holder does not depend on what FORMAT.json says; a process without a key believes what it
saw there first (runtime/consent.py).

Records of an unsigned run end with a checksum in the signature's place (`Checksummed`): not every store notices a
flipped bit, and a commit depends on the one before it.

Ed25519 (RFC 8032) by `cryptography`, on hexadecimal text: keys of 64 digits, signatures of 128.

`cryptography` is imported where it is needed, because commands on unsigned runs start faster without it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, RefusedError, UsageError

KEYS = 256  # remembered: a run has few signers, and each signs many records


def public_key(private: str) -> str:
    """The public half of a private key."""
    return _private(private)[1]


def signature(private: str, text: bytes) -> str:
    signed: bytes = _private(private)[0].sign(text)
    return signed.hex()


def is_signature(public: str, code: str, text: bytes) -> bool:
    """Whether `code` is a signature on `text` by the holder of this key."""
    from cryptography.exceptions import InvalidSignature

    try:
        _public(public).verify(bytes.fromhex(code), text)
    except (InvalidSignature, ValueError):  # the latter: a public key that is no point of the curve
        return False
    return True


@lru_cache(maxsize=KEYS)
def _private(private: str) -> tuple[Any, str]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    return key, key.public_key().public_bytes_raw().hex()


@lru_cache(maxsize=KEYS)
def _public(public: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))


ALGORITHM: Literal["ed25519"] = "ed25519"
LOG = "log"  # what a record of the log must be signed as: by a syncer, or by the operator
OPERATOR = "operator"
KEY_VARIABLE = "DILOCO_SIGNING_KEY"
KEY_FILE_VARIABLE = "DILOCO_SIGNING_KEY_FILE"
KEY_HINT = f"give it by {KEY_VARIABLE} or {KEY_FILE_VARIABLE}"
SHORTEST_SECRET = 32  # characters: 128 bits as hexadecimal
MAX_SECRET = 4096
CERTIFIED = "certified:"  # what the key of a unit begins with that `launch` starts
MACHINE = "machine:"  # what a machine's own key begins with
SYNCERS = "syncer/"
BELOW_KEYS = ("incarnation/", "offer/")  # what a learner signs lies there below its name and its key (log/keys.py)
FINGERPRINT_DIGITS = 8
PLAIN_BYTES = 64 << 10  # a longer record is compressed
ZLIB_LEVEL = 3
MAX_PLAIN_BYTES = 8 << 20  # of any record, decompressed
LONG_BYTES = 64 << 10  # of longer records the digest is signed
_SIGNER = r"[a-z0-9][a-z0-9/-]{0,79}"
_PUBLIC, _CODE = "[0-9a-f]{64}", "[0-9a-f]{128}"  # an Ed25519 public or private key, and a signature, in hexadecimal
_GRANT = re.compile(f"({_SIGNER}):({_PUBLIC}):({_CODE})")
_KEY = re.compile(_PUBLIC)
_MACHINE = re.compile("(?:syncer|learner)/[a-z0-9][a-z0-9-]{0,62}")
_SUM_CHARACTERS = 16  # 64 bits: by chance no damage ever passes
_SUM = re.compile(rb',"sum":"([0-9a-f]{%d})"\}' % _SUM_CHARACTERS)
_SUM_BYTES = len(b',"sum":""}') + _SUM_CHARACTERS
_TAIL = re.compile(f',"signature":"({_SIGNER}):({_PUBLIC}):((?:{_CODE})?):({_CODE})"}}'.encode())
MAX_TAIL_BYTES = 512
CERTIFICATES = 4096  # remembered: a run has a few signers, and each signs many records


class SignatureError(DataCheckError):
    """A record is damaged, or, in a signed run, not signed by the required signer."""

    code = "signature"


def learner_signer(name: str) -> str:
    return f"learner/{name}"


def syncer_signer(name: str) -> str:
    """`name`: of the machine, or of the unit on it."""
    return f"{SYNCERS}{name}"


def may_sign(signer: str, role: str) -> bool:
    """Whether a record that must be signed as `role` may be signed by this signer."""
    return signer == role or (role == LOG and (signer == OPERATOR or signer.startswith(SYNCERS)))


def is_public_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def short_key(public: str) -> str:
    """How a public key is shown to people."""
    return public[:16]


@dataclass(frozen=True)
class Signing:
    """In FORMAT.json: how records are signed, and the operator's public key (64 hexadecimal digits), whose certificates
    count in this run."""

    operator: str
    algorithm: Literal["ed25519"] = ALGORITHM


@dataclass(frozen=True)
class Signature:
    """Whose signature a record ends with, and that key's public half; both are empty in an unsigned run."""

    signer: str = ""
    public: str = ""


NOBODY = Signature()


class Authenticator:
    """How a run's records are sealed, and who wrote them told. This one is for a run without signatures and checksums:
    bytes stay as they are, and nothing is checked."""

    wrong = "is not what was written"  # what a record is that is not authentic
    signs = False
    revoked: Collection[str] = ()  # public keys, whose signatures do not count

    def sign(self, role: str, key: str, body: bytes) -> bytes:
        """The record to write under this object key."""
        return packed(self._signed(role, key, body))

    def signature(self, role: str, key: str, data: bytes) -> Signature | None:
        """Who wrote these bytes under this object key, if it was one who may sign as `role`; None otherwise."""
        return self._signature(role, key, unpacked(data))

    def _signed(self, role: str, key: str, body: bytes) -> bytes:
        return body

    def _signature(self, role: str, key: str, data: bytes) -> Signature | None:
        return NOBODY

    def authenticates(self, role: str, key: str, data: bytes) -> bool:
        """Whether one who may sign as `role` wrote these bytes under this object key, as far as can be told."""
        return self.signature(role, key, data) is not None

    def without(self, revoked: Collection[str]) -> Authenticator:
        """As this one, but what these public keys have signed is not authentic: to judge as of a state of the log."""
        return self

    def holds(self, role: str) -> bool:
        return True

    def public(self, role: str) -> str:
        """The public half of the key with which this process signs as `role`; empty if it holds none."""
        return ""


class Checksummed(Authenticator):
    """For a run that is not signed. A checksum shows damage by a disk or a network, but not the writer of a record. It
    is bound to the run and to the object's key."""

    wrong = "is damaged: its checksum does not fit"

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id.encode()

    def _signed(self, role: str, key: str, body: bytes) -> bytes:
        return b'%b,"sum":"%b"}' % (body[:-1], self._sum(key, body))

    def _signature(self, role: str, key: str, data: bytes) -> Signature | None:
        start = len(data) - _SUM_BYTES
        tail = _SUM.fullmatch(data, start) if start > 0 else None
        fits = tail is not None and tail[1] == self._sum(key, data[:start] + b"}")
        return NOBODY if fits else None

    def _sum(self, key: str, body: bytes) -> bytes:
        return digest(b"\0".join([self._run_id, key.encode(), body]))[-_SUM_CHARACTERS:].encode()


@dataclass(frozen=True)
class Grant:
    """A private key for one signer of one run, and the operator's certificate for it; all of it in hexadecimal."""

    private: str
    certificate: str

    def __repr__(self) -> str:
        return "Grant()"


class Keyring(Authenticator):
    """What one process needs in one run: the operator's public key to check records, and the private keys that it holds
    to sign them. The operator's own needs no certificate."""

    wrong = "is not signed by the signer that it needs"
    signs = True

    def __init__(
        self, run_id: str, operator: str, grants: Mapping[str, Grant] | None = None, revoked: Collection[str] = ()
    ) -> None:
        self.run_id, self.operator, self.revoked = run_id, operator, revoked
        self.grants = dict(grants or {})

    def __repr__(self) -> str:
        return f"Keyring({self.run_id})"

    def _signed(self, role: str, key: str, body: bytes) -> bytes:
        """Raises RefusedError without a key for this role."""
        signer = self._signer(role)
        if signer is None:
            raise RefusedError(f"this process holds no key to sign as {role}", where=key, hint=KEY_HINT)
        if len(body) <= len("{}") or not body.endswith(b"}"):
            raise ValueError("only a record that is an object with fields can be signed")
        grant = self.grants[signer]
        code = signature(grant.private, _record_text(self.run_id, signer, key, body))
        tail = f',"signature":"{signer}:{public_key(grant.private)}:{grant.certificate}:{code}"}}'
        return body[:-1] + tail.encode()

    def _signature(self, role: str, key: str, data: bytes) -> Signature | None:
        start = data.rfind(b',"signature":', max(0, len(data) - MAX_TAIL_BYTES))
        tail = _TAIL.fullmatch(data, start) if start > 0 else None
        if tail is None:
            return None
        signer, public, certificate, code = (part.decode() for part in tail.groups())
        counts = may_sign(signer, role) and public not in self.revoked and _is_below_its_key(key, public)
        if not counts or not is_certified(self.operator, self.run_id, signer, public, certificate):
            return None
        text = _record_text(self.run_id, signer, key, data[:start] + b"}")
        return Signature(signer, public) if is_signature(public, code, text) else None

    def without(self, revoked: Collection[str]) -> Authenticator:
        return Keyring(self.run_id, self.operator, self.grants, revoked) if revoked else self

    def holds(self, role: str) -> bool:
        return self._signer(role) is not None

    def public(self, role: str) -> str:
        signer = self._signer(role)
        return "" if signer is None else public_key(self.grants[signer].private)

    def _signer(self, role: str) -> str | None:
        """As whom this process signs where `role` is needed. A machine with a syncer's key signs the log with that."""
        able = [signer for signer in sorted(self.grants) if may_sign(signer, role)]
        return able[-1] if able else None  # "operator" comes before "syncer/"

    def misfits(self) -> list[str]:
        """The signers whose keys were certified for another run, or by another operator."""
        return [
            signer
            for signer, grant in sorted(self.grants.items())
            if not is_certified(self.operator, self.run_id, signer, public_key(grant.private), grant.certificate)
        ]


UNSIGNED = Authenticator()


def _is_below_its_key(key: str, public: str) -> bool:
    """Whether a record lies where this public key writes: no key can take the place of another one's records."""
    return not key.startswith(BELOW_KEYS) or key.split("/")[2:3] == [public[:FINGERPRINT_DIGITS]]


def packed(data: bytes) -> bytes:
    """A record as it lies in the bucket: compressed if it is long, as commits that name many learners are."""
    return zlib.compress(data, ZLIB_LEVEL) if len(data) > PLAIN_BYTES else data


def unpacked(data: bytes) -> bytes:
    """The record that lies in the bucket as these bytes; unchanged if they are not a compressed record. Its length is
    bounded, because any process with credentials may have written it."""
    if data[:1] == b"{":
        return data
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(data, MAX_PLAIN_BYTES)
    except zlib.error:
        return data
    return plain if reader.eof and not reader.unused_data else data


def body_of(data: bytes) -> bytes:
    """The record's own bytes, without a signature or a checksum, whether that holds or not."""
    data = unpacked(data)
    start = data.rfind(b',"s', max(0, len(data) - MAX_TAIL_BYTES))
    signed = start > 0 and (_SUM.fullmatch(data, start) or _TAIL.fullmatch(data, start))
    return data[:start] + b"}" if signed else data


class Secret:
    """What one process is given to sign with; its text is never shown. It is one of

    an operator's secret                                any text of 32 characters or more
    machine:OPERATOR,PRIVATE,SIGNER,...                 a machine's own key, and for whom it is to be certified
    certified:OPERATOR,SIGNER:PRIVATE:CERTIFICATE,...   keys of one unit, made by `launch` on the operator's machine
    """

    def __init__(self, text: str, where: str) -> None:
        """Raises UsageError, which never quotes the text, if it cannot be a secret."""
        self.where = where
        self.operator, self._grants = "", dict[str, Grant]()
        self.own, self.signers = "", tuple[str, ...]()
        self._root = ""
        if text.startswith(CERTIFIED):
            self.operator, self._grants = _parsed_grants(text, where)
        elif text.startswith(MACHINE):
            self.operator, self.own, self.signers = _parsed_machine(text, where)
        if not SHORTEST_SECRET <= len(text) <= MAX_SECRET or not text.isprintable():
            allowed = f"{SHORTEST_SECRET} to {MAX_SECRET} printable characters"
            raise UsageError(f"a signing key has {allowed}", where=where, hint="make one: diloco key new FILE")
        if not self.operator:
            self._root = hmac.new(text.encode(), b"diloco operator", hashlib.sha256).hexdigest()
            self.operator = public_key(self._root)
            self._grants = {OPERATOR: Grant(self._root, "")}

    def __repr__(self) -> str:
        return f"Secret(from {self.where})"

    @property
    def is_operators(self) -> bool:
        """Whether other keys can be certified with it."""
        return bool(self._root)

    def keyring(self, run_id: str, certificates: Mapping[str, str] | None = None) -> Keyring:
        """`certificates`, by signer: those that a machine's own key has in this run."""
        own = {signer: Grant(self.own, code) for signer, code in (certificates or {}).items()}
        return Keyring(run_id, self.operator, self._grants | own)

    def signing(self) -> Signing:
        """The signing record in FORMAT.json of a new run. Raises UsageError for a key that cannot certify others."""
        if not self.is_operators:
            raise UsageError("only an operator's secret starts a run", where=self.where, hint="diloco key new FILE")
        return Signing(self.operator)

    def certificate(self, run_id: str, signer: str, public: str) -> str:
        """The operator's certificate for this public key. Raises UsageError if this is not the operator's secret."""
        if not self.is_operators:
            raise UsageError("only the operator's secret certifies keys", where=self.where)
        return signature(self._root, _certificate_text(run_id, signer, public))

    def certified(self, run_id: str, privates: Mapping[str, str]) -> str:
        """The text of these private keys, by signer, with certificates: for units that this machine starts."""
        codes = {signer: self.certificate(run_id, signer, public_key(key)) for signer, key in privates.items()}
        keys = ",".join(f"{signer}:{privates[signer]}:{code}" for signer, code in codes.items())
        return f"{CERTIFIED}{self.operator},{keys}"


def _parsed_grants(text: str, where: str) -> tuple[str, dict[str, Grant]]:
    operator, *keys = text.removeprefix(CERTIFIED).split(",")
    found = [_GRANT.fullmatch(key) for key in keys]
    if not is_public_key(operator) or not found or None in found:
        raise _no_key(where)
    return operator, {match[1]: Grant(match[2], match[3]) for match in found if match is not None}


def machine_text(operator: str, private: str, signers: tuple[str, ...]) -> str:
    return f"{MACHINE}{','.join((operator, private, *signers))}"


def _parsed_machine(text: str, where: str) -> tuple[str, str, tuple[str, ...]]:
    operator, private, signers = [*text.removeprefix(MACHINE).split(",", 2), "", ""][:3]
    named = tuple(signers.split(","))
    if not (is_public_key(operator) and is_public_key(private) and all(map(_MACHINE.fullmatch, named))):
        raise _no_key(where)
    return operator, private, named


def _no_key(where: str) -> UsageError:
    return UsageError("this is not a key as diloco writes it", where=where, hint="make one: diloco key request")


@lru_cache(maxsize=CERTIFICATES)
def is_certified(operator: str, run_id: str, signer: str, public: str, certificate: str) -> bool:
    """Whether the operator has certified this public key for this signer in this run."""
    if signer == OPERATOR:
        return public == operator
    return is_signature(operator, certificate, _certificate_text(run_id, signer, public))


def _certificate_text(run_id: str, signer: str, public: str) -> bytes:
    return "\0".join(["diloco certificate", run_id, signer, public]).encode()


def _record_text(run_id: str, signer: str, key: str, body: bytes) -> bytes:
    is_long = len(body) > LONG_BYTES
    what, said = (b"diloco digest", digest(body).encode()) if is_long else (b"diloco record", body)
    return b"\0".join([what, run_id.encode(), signer.encode(), key.encode(), said])
