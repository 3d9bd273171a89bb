"""Certificates in the bucket: an operator leaves one there for a key that another machine has made.

    certificate/<role>/<name>/<public key>.json     create-once, signed by the operator

A process whose key came with its certificate leaves it there, too. They tell under which keys a learner writes
(claims.py). Who signed a record, the record itself tells: it carries its signer's certificate.
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


def certificate_in(keyring: Unsigned, key: str, data: bytes) -> Certificate | None:
    """The certificate in an object, if the operator has given it: its code tells, whoever has written the object."""
    try:
        said = decode(Certificate, data, key)
    except RecordError:
        return None
    if not isinstance(keyring, Keyring) or certificate_key(said.signer, said.public) != key:
        return None
    return said if is_certified(keyring.operator, keyring.run_id, said.signer, said.public, said.code) else None


def own_certificate(keyring: Unsigned, signer: str) -> tuple[str, bytes] | None:
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
