"""Certificates in the bucket: an operator leaves one there for a key that another machine has made.

    certificate/<role>/<name>/<public key>.json     create-once, signed by the operator

They are how certificates travel, no more: each record carries its signer's, so that no reader looks here.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.ed25519 import public_key
from diloco_cli.protocol.log.keys import certificate_key
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, RecordError, decode, encode
from diloco_cli.signing import OPERATOR, Keyring, Secret, Unsigned, is_certified


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


def genuine_certificate(keyring: Unsigned, key: str, data: bytes) -> Certificate | None:
    """The certificate under this key, if the operator has written it there."""
    try:
        said = decode(Certificate, data, key)
    except RecordError:
        return None
    genuine = certificate_key(said.signer, said.public) == key and keyring.authenticates(OPERATOR, key, data)
    return said if genuine else None


def own_keyring(run_id: str, secret: Secret) -> Steps[Keyring]:
    """The keyring of a machine with its own key: with the certificates for it that lie in the bucket."""
    public, found = public_key(secret.own), dict[str, str]()
    for signer in secret.signers:
        key = certificate_key(signer, public)
        data: bytes | None = yield Get(key, MAX_RECORD_BYTES)
        try:
            said = None if data is None else decode(Certificate, data, key)
        except RecordError:
            continue
        if said is not None and is_certified(secret.operator, run_id, signer, public, said.code):
            found[signer] = said.code
    return secret.keyring(run_id, found)
