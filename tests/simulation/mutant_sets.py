"""Mutants that make operations at the same time which must come one after the other, each as a mutated actor."""

from __future__ import annotations

from msgspec import structs

from diloco_cli.protocol.actors.merging import LoadedDelta, Loader, load_delta, make_resident
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commit_log import fence, fold
from diloco_cli.protocol.log.commits import Commit, Merge, Refuse
from diloco_cli.protocol.log.keys import commit_key, delta_key
from diloco_cli.protocol.log.operations import Get, Steps, together
from diloco_cli.protocol.log.records import Offer, create_signed, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import LOG


class TwoCommitsAtOnce(Syncer):
    """Writes a merge and the record after it at the same time, and counts on both."""

    def _commit(self, draft: Commit) -> Steps[bool]:
        if not isinstance(draft, Merge):
            return (yield from super()._commit(draft))
        merge = structs.replace(self.drafted(draft), n=self.state.n + 1, previous=self.state.digest)
        data = self.run.keyring.sign(LOG, commit_key(merge.n), encode(merge))
        merged = fold(self.run, self.state, data)
        after = structs.replace(self.drafted(Refuse()), n=merged.n + 1, previous=merged.digest)
        more = self.run.keyring.sign(LOG, commit_key(after.n), encode(after))
        records = ((merge.n, data), (after.n, more))
        first, _ = yield from together(
            [create_signed(self.run.keyring, LOG, commit_key(n), record) for n, record in records]
        )
        if first != data:
            self.state = fold(self.run, self.state, first)
            fence(self.state, self.epoch)
            return False
        self.on_commit(merged, merge)
        self.state = fold(self.run, merged, more)
        self.on_commit(self.state, after)
        return True


class MergesLaterBytes(Loader):
    """Checks a payload, and merges what a second read of it has brought."""

    def load(self, state: RunState) -> Steps[list[Offer]]:
        for offer in self.inbox.candidates(state.slot):
            if offer.id not in self.loaded:
                yield from make_resident(self.run, self.arithmetic, state.outputs[offer.fragment], self.recover)
                loaded = yield from self._checked_before(state, offer)
                if isinstance(loaded, str):
                    self.inbox.drop(offer, loaded)
                else:
                    self.loaded[offer.id] = loaded
        return [offer for offer in self.inbox.candidates(state.slot) if offer.id in self.loaded]

    def _checked_before(self, state: RunState, offer: Offer) -> Steps[LoadedDelta | str]:
        checked = yield from load_delta(self.run, self.arithmetic, state, offer)
        if isinstance(checked, str) or offer.base != state.outputs[offer.fragment].version:
            return checked
        later = yield Get(delta_key(*offer.id, offer.payload_digest), offer.payload_bytes)
        return checked if later is None else self.arithmetic.read_delta(offer, later, None)

    def early(self, state: RunState, offer: Offer) -> list[Steps[None]]:
        return []
