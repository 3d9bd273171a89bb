"""The learner as a state machine: step, hear, offer, adopt (arXiv 2604.21428, algorithm 2, through a bucket).

It holds no torch, no clock and no thread: training comes in as a port, everything else is yielded operations. Three
generators share its state, so that training never waits for the store:

    train                            upload, one offer after the other       follow
    step
    hear   <---------------------------------------------------------------  commit n+1, new versions
    offer  ------------------------> delta, codec, payload, offer             heartbeats, fences
    adopt

Its states are those of protocol/log/state.py.

The fragments of one incarnation as it adopted and sent them, beside the parameters that it trains. Does the steps of
an adoption in their order. Values are those of the training port.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

from diloco_cli.digests import digest
from diloco_cli.errors import FencedError, TerminatedError
from diloco_cli.protocol.actors.follower import FetchedVersion, Follower, Mail
from diloco_cli.protocol.actors.joining import Joined, Saves, fetch_moments, join, publish
from diloco_cli.protocol.actors.ports import Moments, Observer, Phase, Progression, Stopwatch, Training, Values, Wire
from diloco_cli.protocol.actors.progress import (
    OfferDraft,
    Progress,
    awaits_last,
    is_over,
    merge_is_due,
    save_is_due,
    waited_for,
)
from diloco_cli.protocol.log.keys import inner_key, max_moments_bytes, number_of
from diloco_cli.protocol.log.operations import Create, Now, Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, Offer, ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import LEARNER, LearnerState, RunState, moved
from diloco_cli.protocol.rules.merging import keeps_progress


class Fragments:
    """`bases`: each fragment as it was adopted last; its next delta is measured from there."""

    def __init__(self, training: Training, wire: Wire) -> None:
        self._training, self._wire = training, wire
        self.bases: dict[int, Values] = {}
        self.sent: dict[int, dict[int, Values]] = {}

    def begin(self, fragment: int, merged: Values) -> None:
        """The version that an incarnation begins with."""
        self._training.write(fragment, merged)
        self.bases[fragment], self.sent[fragment] = merged, {}

    def adopt(self, fragment: int, merged: Values, mixing: Mixing, since: int | None) -> None:
        """Take over a merged version. `since`: with `rebase`, the progress since this offer is kept; None: all progress
        is kept, and the values sent are moved onto the new version too. Beside the merged version and the values sent
        it makes one copy of the fragment at a time."""
        base, sent = self.bases[fragment], self.sent[fragment]
        reference = None
        if mixing == "rebase":
            reference = base if since is None else sent[since]
        if mixing == "rebase" and since is None:
            for seq, values in sent.items():  # an upload may still read the old ones
                sent[seq] = self._wire.mix(mixing, merged, values, base)
        else:
            self.sent[fragment] = {}
        self._write_mixed(fragment, merged, mixing, reference)
        self.bases[fragment] = merged

    def _write_mixed(self, fragment: int, merged: Values, mixing: Mixing, reference: Values | None) -> None:
        own = merged
        if mixing != "replace":
            own = self._wire.mix(mixing, merged, self._training.read(fragment), reference, last=True)
        self._training.write(fragment, own)

    def send(self, fragment: int, seq: int, keep: bool) -> Values:
        """The parameters as they are now; `keep`: remember them for a later `rebase`."""
        values = self._training.read(fragment)
        if keep:
            self.sent[fragment][seq] = values
        return values

    def forget(self, fragment: int) -> None:
        """Forget the values sent of a fragment: no merge holds them, and none will."""
        self.sent[fragment] = {}

    def go_back(self, fragment: int) -> None:
        """Give up the progress since the adoption."""
        self._training.write(fragment, self.bases[fragment])
        self.sent[fragment] = {}


PAUSE_S = 0.2
Lane = Literal["follow", "upload", "moments"]
Background = Callable[[Lane, Steps[Any]], None]
"""Performs steps beside the training; the steps of one lane one after the other, in their order."""


class Learner:
    """One incarnation of one learner.

    `leaves` is asked before every step: once it holds, the learner drains for as long as `may_drain` holds, and leaves.
    `observer` hears what happens; `wakes` is called when there is news for a learner that sleeps.
    """

    progress_type: type[Progress] = Progress
    follower_type: type[Follower] = Follower

    def __init__(
        self,
        run: RunFormat,
        name: str,
        claim: ProcessClaim,
        training: Training,
        wire: Wire,
        nonce: Callable[[], str],
        background: Background,
        observer: Observer | None = None,
        leaves: Callable[[], bool] = lambda: False,
        may_drain: Callable[[], bool] = lambda: False,
        heartbeat_facts: Callable[[], dict[str, Any]] = dict,
        wakes: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.name, self.claim, self.nonce = run, name, claim, nonce
        self.training, self.wire, self.background = training, wire, background
        self.observer = observer or Observer()
        self.leaves, self.may_drain = leaves, may_drain
        self.at_tau = run.settings.sync.adoption == "at_tau"
        self.fragments = Fragments(training, wire)
        self.watch = Stopwatch()
        self.saves = Saves()
        self.state = RunState()
        self.doing = LearnerState.STARTING
        self.loss: float | None = None
        self.note = ""
        self.moments_lost = False
        self.steps_at_loss = self.saved_at = 0
        self.arrived: dict[int, FetchedVersion] = {}
        self.awaited: deque[OfferDraft] = deque()
        self.delivered: deque[tuple[int, float | None, float]] = deque()
        self.progress: Progress
        self.follower = self.follower_type(self, heartbeat_facts, wakes)

    def train(self) -> Steps[RunState]:
        """Train until the run is over for this process, or it leaves. FencedError: a newer process has its place."""
        yield from self._begin()
        self.background("follow", self.follower.follow())
        while not self._is_over():
            if self._may_step():
                yield from self._timed("step", self.step())
                yield from self._timed("hear", self.hear())
                yield from self._timed("offer", self.offer())
                yield from self._timed("hear", self.adopt())
                yield from self._timed("wait", self.await_merges())
                yield from self._timed("save", self.save())
            else:
                yield from self._timed("wait", self.wait_at_the_bound())
        if self.leaves():
            yield from self.drain()
        self.follower.leaves = True
        self.go(LearnerState.DONE)
        return self.state

    def go(self, to: LearnerState) -> None:
        """Raises IllegalStateError (protocol/log/state.py)."""
        self.doing = moved(LEARNER, self.doing, to)

    def ended_by(self, error: BaseException) -> None:
        """The state for the last heartbeat, by the error that ended `train` or a thread beside it."""
        if isinstance(error, FencedError):
            self.go(LearnerState.FENCED)
        else:
            self.go(LearnerState.DONE if isinstance(error, TerminatedError) else LearnerState.FAILED)

    def _is_over(self) -> bool:
        return self.leaves() or is_over(self.state, self.joined.state.n)

    def _timed(self, phase: Phase, steps: Steps[None]) -> Steps[None]:
        started_s: float = yield Now()
        yield from steps
        seconds: float = (yield Now()) - started_s
        self.watch.took(phase, seconds)
        self.observer.took(phase, seconds)

    # -- beginning ----------------------------------------------------------------------------------------------

    def _begin(self) -> Steps[None]:
        """Begin as the next incarnation, always from the newest committed versions, never from weights of its own."""
        self.joined = joined = yield from self._join()
        if number_of(joined.incarnation) > 1:
            self.go(LearnerState.RECOVERING)
        self.state = joined.state
        state, versions = yield from self.follower.newest(joined.state)
        self.progress = self.progress_type(self.run, self.name, joined.incarnation, joined.state, joined.data_start)
        self.watch.slot_s = self.progress.island.local_steps * self.progress.island.step_s / self.run.num_fragments
        for fragment, (output, values, _) in sorted(versions.items()):
            self.fragments.begin(fragment, values)
            self.progress.adopted(output)
            self.observer.adopted(output, None)
        self.state, now_s = state, (yield Now())
        self.progress.aim.heard(state, now_s, now_s)
        self.progress.heard(state)
        yield from self._restore(joined)
        self.observer.began(self)

    def _join(self) -> Steps[Joined]:
        return (yield from join(self.run, self.name, self.claim))

    def _restore(self, joined: Joined) -> Steps[None]:
        """Restore the saved moments. If they should exist and cannot be restored, the learning rate warms up anew."""
        late = joined.data_start > 0 or joined.state.merges > 0
        if not late or not self.training.reset():
            return
        self.saves.go_back(self.state.rollbacks)  # a rollback may have come since the offers were read
        if joined.inner is not None:
            self.saves.add(joined.inner, joined.inner_n)
        data = yield from fetch_moments(self.saves.newest, max_moments_bytes(self.run.layout))
        if data is None or not self.training.restore(data):
            self.saves.forget()
            self.moments_lost = True

    # -- hear, adopt --------------------------------------------------------------------------------------------

    def hear(self) -> Steps[None]:
        """Take note of the log's head. Versions that have arrived are adopted after the next offers, because an
        adoption may drop progress that those would hold; but at once where no offer can be made before it."""
        while self.delivered:
            self.progress.aim.delivered(*self.delivered.popleft())
        mail = self.follower.take()
        if mail is not None:
            yield from self._take_note(mail)
        self._go_back(self.progress.overgrown(), "outgrown")

    def _take_note(self, mail: Mail) -> Steps[None]:
        now_s: float = yield Now()
        state = self.state = mail.state
        if self.progress.is_behind_rollback(state):
            yield from self._leave_behind(state)
        self.progress.aim.heard(*self.follower.head)
        if self.progress.heard(state, self.watch.step_s):
            self._go_back(range(self.run.num_fragments), "a predecessor's offer, or a quarantine")
        for fragment, book in enumerate(self.progress.books):
            if book.sent is None:
                self.fragments.forget(fragment)
        self.arrived |= mail.versions
        for fragment in sorted(self.arrived):
            if self._adopts_at_once(fragment):
                self._adopt(*self.arrived.pop(fragment), now_s)

    def _adopts_at_once(self, fragment: int) -> bool:
        """Whether no offer of the fragment can be made before the adoption."""
        progress = self.progress
        if progress.is_left_behind(fragment, self.state) or (not self.at_tau and progress.awaits(fragment)):
            return True
        is_out = any(draft.fragment == fragment for draft in self.awaited) or progress.books[fragment].waits is not None
        return not is_out and progress.is_too_old(fragment)

    def adopt(self) -> Steps[None]:
        """Adopt all versions that have arrived; with `at_tau`, await_merges does so instead."""
        if not self.at_tau:
            yield from self._adopt_all()

    def _adopt_all(self) -> Steps[None]:
        now_s: float = yield Now()
        for fragment in sorted(self.arrived):
            self._adopt(*self.arrived.pop(fragment), now_s)

    def _adopt(self, output: FragmentVersion, values: Values, seen_s: float, now_s: float) -> None:
        """Take over a committed version as `sync.mixing` says. The inner optimizer's moments, the learning rate and the
        data position go on unchanged."""
        fragment, mixing = output.fragment, self.progress.mixing_of(output, self.state)
        since = self.progress.kept_since(fragment) if mixing == "rebase" else None
        self.fragments.adopt(fragment, values, mixing, None if since is None else since.seq)
        if mixing == "rebase":
            self.progress.rebased(output, since)
        else:
            self.progress.adopted(output, mixing)
            self.observer.gave_up(fragment, "replaced")
        self.watch.adopted(now_s - seen_s)
        self.observer.adopted(output, since)

    def _leave_behind(self, state: RunState) -> Steps[None]:
        """Follow a rollback: all fragments arrive anew; the moments are the newest saved ones that it has not undone,
        or fresh ones, and then the learning rate warms up anew. The data position goes on."""
        self.arrived, self.awaited = {}, deque()
        key = self.saves.go_back(state.rollbacks)
        data = yield from fetch_moments(key, max_moments_bytes(self.run.layout))
        if data is None or not self.training.restore(data):
            self.saves.forget()
            if self.training.reset():
                self.moments_lost, self.steps_at_loss = True, self.progress.steps
        self.observer.rolled_back(self, state.rolled_back_to)

    def _go_back(self, fragments: Iterable[int], reason: str) -> None:
        """Drop the progress on these fragments: their parameters become those last adopted."""
        for fragment in fragments:
            self.fragments.go_back(fragment)
            self.observer.gave_up(fragment, reason)

    # -- step ---------------------------------------------------------------------------------------------------

    def _may_step(self) -> bool:
        permit = self.progress.may_step()
        self.note = permit.reason or self.follower.trouble
        self.go(LearnerState.TRAINING if permit.allowed else LearnerState.WAITING)
        return permit.allowed

    def step(self) -> Steps[None]:
        """One inner step on one batch of this learner's shard."""
        progress = self.progress
        own_steps = progress.steps - self.steps_at_loss
        at = Progression(progress.fraction(), own_steps, self.moments_lost)
        done = yield from self.training.step(progress.position, progress.island.batch_tokens, at)
        self.loss = done.loss
        self.observer.stepped(progress.position, done.tokens)
        progress.stepped(done.tokens)

    # -- offer --------------------------------------------------------------------------------------------------

    def offer(self) -> Steps[None]:
        """Hand the offers that are due after this step to the upload lane; the training never waits for the store."""
        now_s: float = yield Now()
        self.progress.unreadable = self.follower.unreadable
        for draft in self.progress.due(now_s, self.watch.step_s):
            self._send(draft)

    def _offer_everything(self) -> Steps[None]:
        now_s: float = yield Now()
        for draft in self.progress.everything(now_s):
            self._send(draft)

    def _send(self, draft: OfferDraft) -> None:
        keep = keeps_progress(self.run.settings.sync)
        base = self.fragments.bases[draft.fragment]
        values = self.fragments.send(draft.fragment, draft.seq, keep)
        self.observer.sent(draft)
        if self.at_tau:
            self.awaited.append(draft)
        self.background("upload", self._upload(draft, base, values, self.loss, self.saves.newest))

    def _upload(
        self, draft: OfferDraft, base: Values, values: Values, loss: float | None, moments: str | None
    ) -> Steps[None]:
        """Upload the payload, then the offer. If the log has passed the offer's slot, only the record is written,
        because its number must not be missing. `moments`: the newest saved ones when the offer was drafted."""
        started_s: float = yield Now()
        passed = draft.slot < self.follower.state.slot
        payload = b"" if passed else self._encoded(draft, base, values)
        timings = self.watch.timings(self.progress.round_steps, self.run.num_fragments)
        offer = self.progress.offer(draft, digest(payload), len(payload), self.nonce(), timings, loss, moments)
        mine = yield from self._publish(offer, payload)
        self.observer.published(offer, mine)
        now_s: float = yield Now()
        if not passed:
            self.watch.uploaded(now_s - started_s)
        self.delivered.append((draft.slot, None if passed else now_s - started_s, now_s))

    def _encoded(self, draft: OfferDraft, base: Values, values: Values) -> bytes:
        return self.wire.encode(draft.fragment, draft.seq, draft.applied, base, values)

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        return (yield from publish(offer, payload, self.run.keyring))

    # -- wait ---------------------------------------------------------------------------------------------------

    def wait_at_the_bound(self) -> Steps[None]:
        yield from self._offer_everything()
        yield Sleep(PAUSE_S)
        self.progress.turn.waited((yield Now()))
        yield from self.hear()
        yield from self._adopt_all()

    def await_merges(self) -> Steps[None]:
        """`at_tau`: adopt each merge exactly tau slots after its own slot, and wait for it if it is not here yet. A
        learner whose offer was refused offers for a later slot, because other learners may wait for it."""
        sync = self.run.settings.sync
        aim = self.progress.aim
        while self.awaited and merge_is_due(sync, self.awaited[0], max(aim.next_slot, aim.head)):
            draft = self.awaited.popleft()
            while not self._is_over():
                version = self.arrived.get(draft.fragment)
                base = self.progress.books[draft.fragment].base
                found = waited_for(draft, base, None if version is None else version[0], self.state)
                if found == "here":
                    self._adopt(*self.arrived.pop(draft.fragment), (yield Now()))
                if found != "to come":
                    break
                self.go(LearnerState.WAITING)
                if self.progress.is_refused(draft):
                    yield from self._offer_everything()
                    if not self.progress.awaits_outcomes():
                        break  # there is nothing to offer before the next step
                yield Sleep(PAUSE_S)
                yield from self.hear()
        self.go(LearnerState.TRAINING)

    # -- save, leave --------------------------------------------------------------------------------------------

    def save(self) -> Steps[None]:
        """Save the inner optimizer's moments when that is due, beside the training; later offers name them."""
        progress, every_rounds = self.progress, self.run.settings.train.inner.save_every
        if not save_is_due(progress.steps, progress.island.local_steps, every_rounds, self.saved_at):
            return
        self.saved_at = progress.steps
        moments = self.training.save()
        if moments is not None:
            self.background("moments", self._upload_moments(moments, progress.log_n))
        yield from ()

    def _upload_moments(self, moments: Moments, log_n: int) -> Steps[None]:
        data = moments.encode()
        key = inner_key(self.name, self.progress.incarnation, moments.step, digest(data))
        yield Create(key, data)
        self.saves.add(key, log_n)

    def drain(self) -> Steps[None]:
        """Leave in order: offer the progress that no offer holds yet, and wait until the outcome of every offer is
        known. Nothing is adopted any more."""
        if not self.may_drain():
            return
        self.go(LearnerState.DRAINING)
        yield from self._offer_everything()
        while awaits_last(self.progress.awaits_outcomes(), self.may_drain(), self.state, self.joined.state.n):
            yield Sleep(PAUSE_S)
            mail = self.follower.take()
            if mail is not None:
                self.state = mail.state
                self.progress.heard(mail.state)
