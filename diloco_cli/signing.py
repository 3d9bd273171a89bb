"""Signatures on records: HMAC-SHA256 (RFC 2104) under keys that come from one secret of the run's operator.

    the run's secret --+-- log               signs the format, epochs, commits, snapshots; every learner holds it too
                       +-- operator          signs requests
                       +-- learner/<name>    signs its incarnations, its offers, and its request to join

A signature covers the run's id, the object's key, the signer and the record's bytes, which include a nonce. So a record
is not valid under another key, in another run, or for another signer. A learner holds two keys, its own and the log's:
it cannot sign as another learner or as an operator. But HMAC is symmetric: a process that can check the log could also
sign commits. The bucket's policy (templates/bucket-policy) keeps learners from writing commits.

Keys are never written, logged or shown; a record and FORMAT.json name them by `key_id`.

Records of an unsigned run end with a checksum in the signature's place (`Checksummed`): not every store notices a
flipped bit, and a commit depends on the one before it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, RefusedError, UsageError

ALGORITHM: Literal["hmac-sha256"] = "hmac-sha256"
LOG = "log"
OPERATOR = "operator"
KEY_VARIABLE = "DILOCO_SIGNING_KEY"
KEY_FILE_VARIABLE = "DILOCO_SIGNING_KEY_FILE"
SHORTEST_SECRET = 32  # characters: 128 bits as hexadecimal
MAX_SECRET = 4096
_LEARNER_TEXT = re.compile(r"learner:([a-z0-9][a-z0-9-]{0,62}):([0-9a-f]{64}):([0-9a-f]{64})")
_SUM_CHARACTERS = 16  # 64 bits: by chance no damage ever passes
_SUM = re.compile(rb',"sum":"([0-9a-f]{%d})"\}' % _SUM_CHARACTERS)
_SUM_BYTES = len(b',"sum":""}') + _SUM_CHARACTERS
_TAIL = re.compile(rb',"signature":"([a-z0-9/-]{1,80}):([0-9a-f]{64})"\}')
MAX_TAIL_BYTES = 200


class SignatureError(DataCheckError):
    """A record is damaged, or, in a signed run, not signed by the required signer."""

    code = "signature"


def learner_signer(name: str) -> str:
    return f"learner/{name}"


def key_id(key: bytes) -> str:
    """16 hexadecimal digits that distinguish keys and reveal nothing about them."""
    return hashlib.sha256(b"diloco key id\0" + key).hexdigest()[:16]


@dataclass(frozen=True)
class Signing:
    """In FORMAT.json: how records are signed, and the ids of the keys that may sign: (signer, id), sorted. A learner
    that joins later is not among them: its key follows from its name."""

    signers: tuple[tuple[str, str], ...]
    algorithm: Literal["hmac-sha256"] = ALGORITHM

    def id_of(self, signer: str) -> str | None:
        return dict(self.signers).get(signer)


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


class Keyless(Unsigned):
    """For a process without keys in a signed run: it may read, and checks no signature."""

    def sign(self, signer: str, key: str, body: bytes) -> bytes:
        raise RefusedError("the run's records are signed, and this process holds no key", where=key, hint=KEY_HINT)

    def holds(self, signer: str) -> bool:
        return False


class Keyring(Unsigned):
    """The keys that one process holds for one run. With the run's secret it holds all keys."""

    wrong = "is not signed by the signer that it needs"

    def __init__(self, run_id: str, keys: Mapping[str, bytes], secret: bytes | None = None) -> None:
        self._run_id, self._keys, self._secret = run_id, dict(keys), secret

    def __repr__(self) -> str:
        return f"Keyring({self._run_id})"

    def sign(self, signer: str, key: str, body: bytes) -> bytes:
        if not self.holds(signer):
            raise RefusedError(f"this process holds no key to sign as {signer}", where=key, hint=KEY_HINT)
        if len(body) <= len("{}") or not body.endswith(b"}"):
            raise ValueError("only a record that is an object with fields can be signed")
        signature = f',"signature":"{signer}:{self._code(signer, key, body)}"}}'
        return body[:-1] + signature.encode()

    def authenticates(self, signer: str, key: str, data: bytes) -> bool:
        start = data.rfind(b',"signature":', max(0, len(data) - MAX_TAIL_BYTES))
        tail = _TAIL.fullmatch(data, start) if start > 0 else None
        if tail is None or tail[1] != signer.encode() or not self.holds(signer):
            return False
        return hmac.compare_digest(tail[2].decode(), self._code(signer, key, data[:start] + b"}"))

    def holds(self, signer: str) -> bool:
        return self._secret is not None or signer in self._keys

    def key_id(self, signer: str) -> str:
        return key_id(self._key(signer))

    def _key(self, signer: str) -> bytes:
        if self._secret is not None:
            return derived_key(self._secret, self._run_id, signer)
        return self._keys[signer]

    def _code(self, signer: str, key: str, body: bytes) -> str:
        message = b"\0".join([b"diloco record", self._run_id.encode(), signer.encode(), key.encode(), body])
        return hmac.new(self._key(signer), message, hashlib.sha256).hexdigest()


UNSIGNED = Unsigned()
KEYLESS = Keyless()


def body_of(data: bytes) -> bytes:
    """The record's own bytes, without a signature or a checksum, whether that holds or not."""
    start = data.rfind(b',"s', max(0, len(data) - MAX_TAIL_BYTES))
    signed = start > 0 and (_SUM.fullmatch(data, start) or _TAIL.fullmatch(data, start))
    return data[:start] + b"}" if signed else data


def derived_key(secret: bytes, run_id: str, signer: str) -> bytes:
    """A signer's key for one run. Neither the secret nor another signer's key can be computed from it."""
    return hmac.new(secret, b"\0".join([b"diloco key", run_id.encode(), signer.encode()]), hashlib.sha256).digest()


class Secret:
    """The secret of an operator or a learner: the run's secret, or the two keys of one learner. Its text is never
    shown."""

    def __init__(self, text: str, where: str) -> None:
        """Raises UsageError, which never quotes the text, if it cannot be a secret."""
        self.where = where
        found = _LEARNER_TEXT.fullmatch(text)
        self.learner = None if found is None else found[1]
        self.signer = None if found is None else learner_signer(found[1])
        self._keys = {} if found is None else {learner_signer(found[1]): found[2], LOG: found[3]}
        self._secret = None if found is not None else text.encode()
        if found is None and text.startswith("learner:"):
            raise UsageError("this is not a learner's key as diloco writes it", where=where, hint="diloco key learner")
        if not SHORTEST_SECRET <= len(text) <= MAX_SECRET or not text.isprintable():
            allowed = f"{SHORTEST_SECRET} to {MAX_SECRET} printable characters"
            raise UsageError(f"a signing key has {allowed}", where=where, hint="make one: diloco key new FILE")

    def __repr__(self) -> str:
        return f"Secret(from {self.where})"

    def keyring(self, run_id: str) -> Keyring:
        return Keyring(run_id, {name: bytes.fromhex(key) for name, key in self._keys.items()}, self._secret)

    def signing(self, run_id: str, learners: Iterable[str]) -> Signing:
        """The signing record in FORMAT.json of a new run. Raises UsageError for a learner's key."""
        ring = self.keyring(run_id)
        if self._secret is None:
            raise UsageError("a learner's key cannot start a run", where=self.where, hint="give the run's own secret")
        signers = (LOG, OPERATOR, *map(learner_signer, learners))
        return Signing(tuple(sorted((signer, ring.key_id(signer)) for signer in signers)))

    def for_learner(self, run_id: str, name: str) -> str:
        """The text of that learner's two keys, to hand over by environment or file. Raises UsageError."""
        if self._secret is None:
            raise UsageError("only the run's own secret gives learners' keys", where=self.where)
        own, log = (derived_key(self._secret, run_id, signer).hex() for signer in (learner_signer(name), LOG))
        return f"learner:{name}:{own}:{log}"


KEY_HINT = f"give it by {KEY_VARIABLE} or {KEY_FILE_VARIABLE}"
