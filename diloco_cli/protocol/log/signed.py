"""Reading and creating signed records: damage in the read is told from damage in the bucket."""

from __future__ import annotations

from diloco_cli.protocol.log.operations import Create, Get, Steps
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.signing import Unsigned
from diloco_cli.store.port import Created

LOOKS = 4  # reads of an object that seems damaged: the damage may be in the read


def read_signed(keyring: Unsigned, signer: str, key: str, same: int = 2) -> Steps[bytes | None]:
    """A record's bytes. Bytes that are not authentic may have been damaged in the read: they are read again until they
    are authentic, or the same `same` times in a row."""
    data: bytes | None = yield Get(key, MAX_RECORD_BYTES)
    equal = 1
    for _ in range(LOOKS - 1):
        if data is None or equal == same or keyring.authenticates(signer, key, data):
            break
        before, data = data, (yield Get(key, MAX_RECORD_BYTES))
        equal = equal + 1 if data == before else 1
    return data


def create_signed(keyring: Unsigned, signer: str, key: str, mine: bytes, same: int = 2) -> Steps[bytes]:
    """Create a record, and return the bytes that then lie under the key: `mine`, or the record that was there before.
    The bytes in the store's answer may be damaged, so others than `mine` are checked and read again. `same`: see
    read_signed."""
    answer = yield Create(key, mine)
    if isinstance(answer, Created):
        return mine
    if answer.data == mine or keyring.authenticates(signer, key, answer.data):
        return bytes(answer.data)
    return (yield from read_signed(keyring, signer, key, same)) or bytes(answer.data)
