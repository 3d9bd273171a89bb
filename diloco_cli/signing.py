"""Signatures on records: Ed25519 (RFC 8032) under keys that the run's operator has certified for one role each.

    the operator's secret --+-- operator key      its public half is in FORMAT.json; it certifies all other keys
                            +-- log               signs the format, epochs, commits and snapshots
                            +-- operator          signs requests
                            +-- learner/<name>    signs its incarnations, its offers, and its request to join

A record ends with its signer, the signer's public key, the operator's certificate for that key, and the signature. The
certificate covers the run's id, the signer and its public key; the signature covers the run's id, the object's key, the
signer and the record's bytes, which include a nonce. So a record is not valid under another key of the bucket, in
another run, or for another signer, and whoever knows the operator's public key can check every record: the syncer needs
no list of learners, and a learner that joins later needs no change of the format.

A process can sign only as the signers for which it holds a private key. A learner's own machine holds that learner's; a
machine that hosts a syncer holds the log's too, and is trusted with it. The operator's secret gives all of them.

Private keys are never written to the bucket, logged or shown. A key that was handed over names the operator's public
key, so its holder does not depend on what FORMAT.json says. A process without any key believes the one in FORMAT.json.

Records of an unsigned run end with a checksum in the signature's place (`Checksummed`): not every store notices a
flipped bit, and a commit depends on the one before it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, RefusedError, UsageError

ALGORITHM: Literal["ed25519"] = "ed25519"
LOG = "log"
OPERATOR = "operator"
KEY_VARIABLE = "DILOCO_SIGNING_KEY"
KEY_FILE_VARIABLE = "DILOCO_SIGNING_KEY_FILE"
KEY_HINT = f"give it by {KEY_VARIABLE} or {KEY_FILE_VARIABLE}"
SHORTEST_SECRET = 32  # characters: 128 bits as hexadecimal
MAX_SECRET = 4096
CERTIFIED = "certified:"  # what a key begins with that was made of an operator's secret
_SIGNER = r"[a-z0-9][a-z0-9/-]{0,79}"
_PUBLIC, _CODE = "[0-9a-f]{64}", "[0-9a-f]{128}"  # an Ed25519 public or private key, and a signature, in hexadecimal
_GRANT = re.compile(f"({_SIGNER}):({_PUBLIC}):({_CODE})")
_OPERATOR = re.compile(_PUBLIC)
_SUM_CHARACTERS = 16  # 64 bits: by chance no damage ever passes
_SUM = re.compile(rb',"sum":"([0-9a-f]{%d})"\}' % _SUM_CHARACTERS)
_SUM_BYTES = len(b',"sum":""}') + _SUM_CHARACTERS
_TAIL = re.compile(f',"signature":"({_SIGNER}):({_PUBLIC}):({_CODE}):({_CODE})"}}'.encode())
MAX_TAIL_BYTES = 512
CERTIFICATES = 4096  # remembered: a run has a few signers, and each signs many records


class SignatureError(DataCheckError):
    """A record is damaged, or, in a signed run, not signed by the required signer."""

    code = "signature"


def learner_signer(name: str) -> str:
    return f"learner/{name}"


def short_key(public: str) -> str:
    """How a public key is shown to people."""
    return public[:16]


@dataclass(frozen=True)
class Signing:
    """In FORMAT.json: how records are signed, and the operator's public key (64 hexadecimal digits), whose certificates
    count in this run."""

    operator: str
    algorithm: Literal["ed25519"] = ALGORITHM


class Unsigned:
    """For a run without signatures and checksums: bytes stay as they are, and nothing is checked."""

    wrong = "is not what was written"  # what a record is that is not authentic

    def sign(self, signer: str, key: str, body: bytes) -> bytes:
        """The record to write under this object key."""
        return body

    def authenticates(self, signer: str, key: str, data: bytes) -> bool:
        """Whether these bytes are what `signer` wrote under this object key, as far as this process can tell."""
        return True

    def holds(self, signer: str) -> bool:
        return True


class Checksummed(Unsigned):
    """For a run that is not signed. A checksum shows damage by a disk or a network, but not the writer of a record. It
    is bound to the run and to the object's key."""

    wrong = "is damaged: its checksum does not fit"

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id.encode()

    def sign(self, signer: str, key: str, body: bytes) -> bytes:
        return b'%b,"sum":"%b"}' % (body[:-1], self._sum(key, body))

    def authenticates(self, signer: str, key: str, data: bytes) -> bool:
        start = len(data) - _SUM_BYTES
        tail = _SUM.fullmatch(data, start) if start > 0 else None
        return tail is not None and tail[1] == self._sum(key, data[:start] + b"}")

    def _sum(self, key: str, body: bytes) -> bytes:
        return digest(b"\0".join([self._run_id, key.encode(), body]))[-_SUM_CHARACTERS:].encode()


@dataclass(frozen=True)
class Grant:
    """A private key for one signer of one run, and the operator's certificate for it; all of it in hexadecimal."""

    private: str
    certificate: str

    def __repr__(self) -> str:
        return "Grant()"


class Keyring(Unsigned):
    """What one process needs in one run: the operator's public key to check records, and the private keys that it holds
    to sign them. With the operator's secret it holds them all."""

    wrong = "is not signed by the signer that it needs"

    def __init__(
        self, run_id: str, operator: str, grants: Mapping[str, Grant] | None = None, secret: bytes | None = None
    ) -> None:
        self.run_id, self.operator = run_id, operator
        self._grants, self._secret = dict(grants or {}), secret

    def __repr__(self) -> str:
        return f"Keyring({self.run_id})"

    def sign(self, signer: str, key: str, body: bytes) -> bytes:
        """Raises RefusedError without a key for this signer."""
        if not self.holds(signer):
            raise RefusedError(f"this process holds no key to sign as {signer}", where=key, hint=KEY_HINT)
        if len(body) <= len("{}") or not body.endswith(b"}"):
            raise ValueError("only a record that is an object with fields can be signed")
        grant = self.grant(signer)
        code = _signature(grant.private, _record_text(self.run_id, signer, key, body))
        tail = f',"signature":"{signer}:{public_key(grant.private)}:{grant.certificate}:{code}"}}'
        return body[:-1] + tail.encode()

    def authenticates(self, signer: str, key: str, data: bytes) -> bool:
        start = data.rfind(b',"signature":', max(0, len(data) - MAX_TAIL_BYTES))
        tail = _TAIL.fullmatch(data, start) if start > 0 else None
        if tail is None or tail[1] != signer.encode():
            return False
        public, certificate, code = (part.decode() for part in tail.groups()[1:])
        text = _record_text(self.run_id, signer, key, data[:start] + b"}")
        return is_certified(self.operator, self.run_id, signer, public, certificate) and _is_signature(
            public, code, text
        )

    def holds(self, signer: str) -> bool:
        return self._secret is not None or signer in self._grants

    def grant(self, signer: str) -> Grant:
        """This signer's key and certificate, which must be there, or be given by the operator's secret."""
        if signer not in self._grants and self._secret is not None:
            private = derived_key(self._secret, self.run_id, signer).hex()
            text = _certificate_text(self.run_id, signer, public_key(private))
            self._grants[signer] = Grant(private, _signature(operator_key(self._secret), text))
        return self._grants[signer]

    def misfits(self) -> list[str]:
        """The signers whose keys were certified for another run, or by another operator."""
        return [
            signer
            for signer, grant in sorted(self._grants.items())
            if not is_certified(self.operator, self.run_id, signer, public_key(grant.private), grant.certificate)
        ]


UNSIGNED = Unsigned()


def body_of(data: bytes) -> bytes:
    """The record's own bytes, without a signature or a checksum, whether that holds or not."""
    start = data.rfind(b',"s', max(0, len(data) - MAX_TAIL_BYTES))
    signed = start > 0 and (_SUM.fullmatch(data, start) or _TAIL.fullmatch(data, start))
    return data[:start] + b"}" if signed else data


def derived_key(secret: bytes, run_id: str, signer: str) -> bytes:
    """The 32 bytes of a signer's private key for one run. Neither the secret nor another signer's key can be computed
    from it."""
    return hmac.new(secret, b"\0".join([b"diloco key", run_id.encode(), signer.encode()]), hashlib.sha256).digest()


def operator_key(secret: bytes) -> str:
    """The private key with which an operator certifies others, the same in all runs."""
    return hmac.new(secret, b"diloco operator", hashlib.sha256).hexdigest()


class Secret:
    """What one process is given to sign with: an operator's secret, or keys that an operator has made of it. Its text
    is never shown."""

    def __init__(self, text: str, where: str) -> None:
        """Raises UsageError, which never quotes the text, if it cannot be a secret."""
        self.where = where
        self._operator: str | None = None
        self._grants: dict[str, Grant] = {}
        if text.startswith(CERTIFIED):
            self._operator, self._grants = _parsed_keys(text, where)
        self._secret = text.encode() if self._operator is None else None
        if not SHORTEST_SECRET <= len(text) <= MAX_SECRET or not text.isprintable():
            allowed = f"{SHORTEST_SECRET} to {MAX_SECRET} printable characters"
            raise UsageError(f"a signing key has {allowed}", where=where, hint="make one: diloco key new FILE")

    def __repr__(self) -> str:
        return f"Secret(from {self.where})"

    @property
    def is_operators(self) -> bool:
        """Whether other keys can be made of it."""
        return self._secret is not None

    def keyring(self, run_id: str) -> Keyring:
        operator = self._operator or public_key(operator_key(self._secret or b""))
        return Keyring(run_id, operator, self._grants, self._secret)

    def signing(self, run_id: str) -> Signing:
        """The signing record in FORMAT.json of a new run. Raises UsageError for a key that cannot certify others."""
        if self._secret is None:
            raise UsageError("only an operator's secret starts a run", where=self.where, hint="diloco key new FILE")
        return Signing(self.keyring(run_id).operator)

    def certified(self, run_id: str, signers: Iterable[str]) -> str:
        """The text of the keys of these signers, to hand over by environment or file. Raises UsageError."""
        if self._secret is None:
            raise UsageError("only an operator's secret makes other keys", where=self.where)
        ring = self.keyring(run_id)
        grants = [(signer, ring.grant(signer)) for signer in signers]
        keys = ",".join(f"{signer}:{grant.private}:{grant.certificate}" for signer, grant in grants)
        return f"{CERTIFIED}{ring.operator},{keys}"


def _parsed_keys(text: str, where: str) -> tuple[str, dict[str, Grant]]:
    operator, *keys = text.removeprefix(CERTIFIED).split(",")
    found = [_GRANT.fullmatch(key) for key in keys]
    if not _OPERATOR.fullmatch(operator) or not found or None in found:
        raise UsageError("this is not a key as diloco writes it", where=where, hint="diloco key learner")
    return operator, {match[1]: Grant(match[2], match[3]) for match in found if match is not None}


# -- Ed25519 (`cryptography` is imported where it is needed: commands on unsigned runs start faster without it) ---


@lru_cache(maxsize=64)
def public_key(private: str) -> str:
    """The public half of a private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)).public_key().public_bytes_raw().hex()


@lru_cache(maxsize=CERTIFICATES)
def is_certified(operator: str, run_id: str, signer: str, public: str, certificate: str) -> bool:
    """Whether the operator has certified this public key for this signer in this run."""
    return _is_signature(operator, certificate, _certificate_text(run_id, signer, public))


def _signature(private: str, text: bytes) -> str:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)).sign(text).hex()


def _is_signature(public: str, code: str, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(code), text)
    except (InvalidSignature, ValueError):  # the latter: a public key that is no point of the curve
        return False
    return True


def _certificate_text(run_id: str, signer: str, public: str) -> bytes:
    return "\0".join(["diloco certificate", run_id, signer, public]).encode()


def _record_text(run_id: str, signer: str, key: str, body: bytes) -> bytes:
    return b"\0".join([b"diloco record", run_id.encode(), signer.encode(), key.encode(), body])
