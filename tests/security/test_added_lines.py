"""Row 10: a line that somebody adds to a genuine record makes it another one, which nobody has signed."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.heartbeats import Beats, of_syncer, sealed
from diloco_cli.protocol.log.keys import SYNCER, commit_key, epoch_key, heartbeat_key, snapshot_key
from diloco_cli.signing import LOG, Checksummed, Unsigned
from tests.security.signed import SECRET

LONG = b'{"parts":[]}\n{"first":1}'
keyrings = pytest.mark.parametrize(
    "keyring", [SECRET.keyring("run"), Checksummed("run")], ids=["signed", "with checksums"]
)


@keyrings
def test_only_the_parts_of_a_long_commit_lie_behind_what_is_signed(keyring: Unsigned) -> None:
    """Their digests stand in its head."""
    for key in (heartbeat_key(SYNCER), snapshot_key(3), epoch_key(2), commit_key(3)):
        whole = keyring.sign(LOG, key, b'{"kind":"\\"parts\\":"}')
        assert keyring.authenticates(LOG, key, whole) and not keyring.authenticates(LOG, key, whole + b"\n7"), key
    assert keyring.authenticates(LOG, commit_key(3), keyring.sign(LOG, commit_key(3), LONG))
    assert not keyring.authenticates(LOG, snapshot_key(3), keyring.sign(LOG, snapshot_key(3), LONG))


@keyrings
def test_who_adds_lines_to_a_dead_syncers_heartbeat_does_not_keep_standbys_waiting(keyring: Unsigned) -> None:
    last = sealed(keyring, LOG, heartbeat_key(SYNCER), {"epoch": 2, "heartbeats": 9})
    beats = Beats()
    assert beats.is_new(of_syncer(keyring, last))
    assert not any(beats.is_new(of_syncer(keyring, b"%b\n%d" % (last, count))) for count in range(4))
