"""Keys of a signed history: operators replace and revoke them, and a thief goes on with what was revoked.

A thief writes straight into the bucket, for it runs no code of the product's. What it puts in the log's next place ends
every reader until an operator removes it, and must never count; a claim of a learner under a revoked key must be as if
it were not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.keys import SYNCER, commit_key, fingerprint, incarnation_key, incarnation_of, number_of
from diloco_cli.protocol.log.records import ProcessClaim, RunFormat, encode
from diloco_cli.signing import LOG, learner_signer
from tests.histories.options import with_key
from tests.histories.replayer import in_one, numbered
from tests.histories.supervisor import syncers_signer

if TYPE_CHECKING:
    from tests.histories.history import History


REMOVED_AFTER_S = 1.0
STOLEN_NONCE = "5701e" * 6


class KeyEvents:
    """`planted`: a thief's objects in the log, until an operator removes them."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.planted: dict[str, bytes] = {}

    def replace(self, role: str, which: int) -> str:
        """From now on the role's processes start with another key; the public half of the old one, to revoke."""
        run, made = self.history.run, self.history.nemesis.keys_made
        signer = syncers_signer(which) if role == SYNCER else learner_signer(role)
        old = with_key(run, signer, made[signer]).keyring.public(LOG if role == SYNCER else signer)
        made[signer] += 1
        return old

    def steal(self, role: str, which: int) -> None:
        """Who holds a role's first key writes under it: as a learner if it is revoked, into the log if the epoch is
        another key's."""
        history, replayer = self.history, self.history.monitor.replayer
        signer = syncers_signer(which) if role == SYNCER else learner_signer(role)
        thief = with_key(history.run, signer)
        if role == SYNCER:
            living = bool(replayer.kinds) and replayer.kinds[-1] not in ("stop", "finish")
            if living and replayer.epoch_key != thief.keyring.public(LOG):
                self._commit(thief)
        elif thief.keyring.public(signer) in replayer.revoked:
            self._claim(thief, role)

    def _commit(self, thief: RunFormat) -> None:
        """A skip in the living epoch of another key."""
        replayer = self.history.monitor.replayer
        key = commit_key(replayer.n + 1)
        skip = commits.Skip(
            slot=replayer.slot, n=replayer.n + 1, previous=replayer.previous, epoch=replayer.epoch, nonce=STOLEN_NONCE
        )
        if key in self.history.bucket.objects:
            return
        data = self.planted[key] = thief.keyring.sign(LOG, key, encode(skip))
        self.history.bucket.put(key, data)
        self.history.note(f"a thief wrote {key}, signed by {in_one(data)['signature'].partition(':')[0]}")
        self.history.world.call_at(self.history.world.now_s + REMOVED_AFTER_S, self.remove)

    def _claim(self, thief: RunFormat, name: str) -> None:
        region = self.history.region
        bucket = region.bucket if region is not None and name in region.residents else self.history.bucket
        key_of = fingerprint(thief.keyring.public(learner_signer(name)))
        claims = [numbered(key)[1] for key in bucket.objects if key.startswith(f"incarnation/{name}/{key_of:08x}/")]
        incarnation = incarnation_of(number_of(max(claims, default=0)) + 1, key_of)
        key = incarnation_key(name, incarnation)
        claim = ProcessClaim(incarnation, STOLEN_NONCE, "elsewhere", 1, "then", "stolen")
        bucket.create(key, thief.keyring.sign(learner_signer(name), key, encode(claim)))
        self.history.note(f"a thief wrote {key}")

    def remove(self) -> None:
        """As the error that every reader gives tells an operator to."""
        for key in self.planted:
            self.history.note(f"an operator removed {key}")
            self.history.bucket.delete(key)
        self.planted.clear()
