"""The learner as a state machine: step, hear, offer, adopt (arXiv 2604.21428, algorithm 2, through a bucket).

It holds no torch, no clock and no thread: training and wire are ports (real in training/, integers in the histories),
everything else is yielded operations. Three generators share its state, so that training never waits for the store:

    train                            upload, one offer after the other       follow
    step
    hear   <---------------------------------------------------------------  commit n+1, new versions
    offer  ------------------------> delta, codec, payload, offer             heartbeats, fences
    adopt

Its states are those of protocol/log/state.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from statistics import median_low
from typing import Any, Literal, Protocol

from diloco_cli.digests import digest
from diloco_cli.errors import FencedError, TerminatedError
from diloco_cli.protocol.actors.joining import Joined, Saves, fetch_moments, fetch_weights, join, publish
from diloco_cli.protocol.actors.progress import OfferDraft, Progress, is_over
from diloco_cli.protocol.log.claims import ClaimWatch
from diloco_cli.protocol.log.commit_log import read_log, refuse_revoked
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, process_on, sealed
from diloco_cli.protocol.log.keys import heartbeat_key, inner_key, key_of, max_moments_bytes, number_of, offer_key
from diloco_cli.protocol.log.mending import MOST_WANTED, Mender, patient_log
from diloco_cli.protocol.log.operations import Create, Now, Put, Sleep, Steps, together
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, Offer, ProcessClaim, RunFormat, Timings
from diloco_cli.protocol.log.state import LEARNER, LearnerState, RunPhase, RunState, moved
from diloco_cli.protocol.rules.pacing import expected_slot_s, fence_check_every_s, next_request_s
from diloco_cli.protocol.rules.quorum import moving_average
from diloco_cli.signing import learner_signer

Values = Any
"""The parameters of one fragment as a training port reads and writes them: [n] float32 in the product, one integer in
the histories, nothing in simulations of time alone."""
Phase = Literal["hear", "step", "offer", "wait", "save"]
Lane = Literal["follow", "upload", "moments"]
Background = Callable[[Lane, Steps[Any]], None]
"""Performs steps beside the training; the steps of one lane one after the other, in their order."""
FetchedVersion = tuple[FragmentVersion, Values, float]
"""A version, its decoded values, and when the learner first saw it in the log."""

PAUSE_S = 0.2
STEPS_SEEN = 33  # H_i follows the median of these step times, so that one long step does not change it
HEARTBEAT_EVERY_S = 3.0
MAX_NOTE = 300  # characters of what ended a learner
SLEEP_BOUNDS_S = (0.02, 0.5)
DRAINS_LOOK_S = 1.0  # an operator waits for the learner's end, or its machine is about to be taken away
LOOKS_FOR_ROLLBACK, LOOK_AGAIN_S = 3, 0.5  # before a learner goes back without a version that cannot be read


@dataclass(frozen=True)
class Progression:
    """The position of a step: at `fraction` in [0, 1] of the run's schedule, `own_steps` after this incarnation began,
    or after it lost its moments if `moments_lost`."""

    fraction: float
    own_steps: int
    moments_lost: bool


@dataclass(frozen=True)
class Stepped:
    """One inner step: the tokens it took (fewer than asked for while a part of the island is gone), and the loss of its
    batch in nats per token, if there is one."""

    tokens: int
    loss: float | None = None


@dataclass(frozen=True)
class Moments:
    """The inner optimizer's state after its own step number `step`; `encode` gives its bytes, on any thread."""

    step: int
    encode: Callable[[], bytes]


class Training(Protocol):
    """The model of one island with its inner optimizer. One thread calls it, one call at a time; if it stands for
    several devices or processes, all of them do the same."""

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        """One inner step on the batch at `position`, in tokens into the island's shard. Yields operations only to let
        time pass. Raises RunFailedError if the loss or the gradients are not finite."""
        ...

    def read(self, fragment: int) -> Values:
        """A copy of the fragment's parameters."""
        ...

    def write(self, fragment: int, values: Values) -> None: ...

    def save(self) -> Moments | None:
        """The present moments; None: there are none (plain SGD, or no step yet)."""
        ...

    def restore(self, moments: bytes) -> bool:
        """Restore saved moments. False, with nothing changed, if they are not this model's."""
        ...

    def reset(self) -> bool:
        """Begin with fresh moments. False if there is nothing to lose: the optimizer keeps none."""
        ...


class Wire(Protocol):
    """Encodes deltas and decodes versions. May be called by any thread."""

    def encode(self, fragment: int, seq: int, applied: int | None, base: Values, values: Values) -> bytes:
        """The payload of the delta base - values, old minus new. `applied`: see OfferDraft; with error feedback, the
        rounding error of that offer is added."""
        ...

    def decode(self, output: FragmentVersion, data: bytes) -> Values:
        """A committed version from its bytes; their digest has been checked."""
        ...

    def mix(
        self,
        fragment: int,
        mixing: Mixing,
        merged: Values,
        own: Values,
        reference: Values | None,
        last: bool = False,
    ) -> Values:
        """The fragment after a `rebase`: merged + (own - reference). `last`: nobody needs `own` any more, so the result
        may take its memory."""
        ...


class Stopwatch:
    """How long the learner's actions take on its own clock: its offers state this, its aim uses it. Each figure is
    written by one thread alone. `step_s`: a step with the loop's work before it, without waiting. `slot_s`: the planned
    time between slots, used before the first step."""

    def __init__(self) -> None:
        self.step_s = self.upload_s = self.adoption_s = self.slot_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=STEPS_SEEN)
        self._between_s = 0.0

    def took(self, phase: Phase, seconds: float) -> None:
        if phase == "step":
            self._steps_s.append(seconds + self._between_s)
            self._between_s, self.step_s = 0.0, median_low(self._steps_s)
        elif phase != "wait":
            self._between_s += seconds

    def uploaded(self, seconds: float) -> None:
        self.upload_s = moving_average(self.upload_s or None, seconds)

    def adopted(self, seconds: float) -> None:
        """A version was adopted `seconds` after its commit appeared."""
        self.adoption_s = moving_average(self.adoption_s or None, seconds)

    def timings(self, local_steps: float, num_fragments: int) -> Timings:
        return Timings(self.step_s, self.expected_slot_s(local_steps, num_fragments), self.upload_s, self.adoption_s)

    def expected_slot_s(self, local_steps: float, num_fragments: int) -> float:
        """The time between two of the learner's slots by its step time, without pauses: it polls soon after any."""
        return self.step_s * local_steps / num_fragments if self.step_s else self.slot_s


class Observer:
    """Hears what a learner does, for heartbeats and the accounts of a simulation; no action depends on one."""

    def began(self, learner: Learner) -> None:
        """Everything is loaded; the first step comes next."""

    def took(self, phase: Phase, seconds: float) -> None: ...

    def stepped(self, position: int, tokens: int) -> None:
        """A step on the batch that begins at `position` was done."""

    def sent(self, draft: OfferDraft) -> None: ...

    def published(self, offer: Offer, data: bytes) -> None:
        """The store has the offer; `data` are its bytes."""

    def adopted(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        """`since`: the offer since which own progress was kept, see Progress.kept_since."""

    def gave_up(self, fragment: int, reason: str) -> None:
        """The learner has dropped all progress on the fragment that is in no merge."""

    def rolled_back(self, learner: Learner, to: int) -> None: ...

    def missed(self, text: str) -> None:
        """`text` says which version cannot be read and is waited for."""

    def mended(self, text: str) -> None:
        """`text` says which record was put back."""


class Fragments:
    """The fragments of one incarnation as it adopted and sent them, beside the parameters that it trains. `bases`: each
    as it was adopted last, from where its next delta is measured; `sent`: values of offers, for a `rebase`."""

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
        is kept, and the values sent are moved onto the new version too. Makes one copy of the fragment at a time."""
        base, sent, values = self.bases[fragment], self.sent[fragment], merged
        reference = base if since is None else sent[since]
        if mixing == "rebase" and since is None:
            for seq, before in sent.items():  # an upload may still read the old ones
                sent[seq] = self._wire.mix(fragment, mixing, merged, before, base)
        else:
            self.sent[fragment] = {}
        if mixing == "rebase":
            values = self._wire.mix(fragment, mixing, merged, self._training.read(fragment), reference, last=True)
        self._training.write(fragment, values)
        self.bases[fragment] = merged

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


@dataclass(frozen=True)
class Mail:
    """News for the training: the state at the log's head, and of each fragment the newest version that has arrived
    since the last mail was taken."""

    state: RunState
    versions: dict[int, FetchedVersion] = field(default_factory=dict)


class Follower:
    """Follows the log beside the training: it passes on a new head at once, then each version that the head brings when
    it has arrived; between these it sends heartbeats and checks for a successor. The training thread takes the mail,
    reads the plain attributes, sets `leaves`."""

    def __init__(
        self, learner: Learner, heartbeat_facts: Callable[[], dict[str, Any]], wakes: Callable[[], None]
    ) -> None:
        self._learner, self._heartbeat_facts, self._wakes = learner, heartbeat_facts, wakes
        self._mail: deque[Mail] = deque()  # at most one: put by the follower, taken by the training
        self._fetched: dict[int, int] = {}
        self._looked_s = 0.0
        self._fetched_last = False  # in the look before this one
        self.state = RunState()
        self.head = (self.state, 0.0, 0.0)  # the state, and two times between which its commit appeared
        self.found_s: float | None = None
        self.trouble = ""
        self.unreadable: frozenset[int] = frozenset()
        self.leaves = False

    def take(self) -> Mail | None:
        try:
            return self._mail.popleft()
        except IndexError:
            return None

    def _put(self, versions: list[FetchedVersion]) -> None:
        """Add to the mail that waits. Versions from before a rollback are dropped, also those not taken yet."""
        before = self.take()
        known = ({} if before is None else before.versions) | {version[0].fragment: version for version in versions}
        known = {f: version for f, version in known.items() if version[0].version >= self.state.base_floor}
        self._mail.append(Mail(self.state, known))
        self._wakes()

    # -- the log ------------------------------------------------------------------------------------------------

    def newest(self, state: RunState) -> Steps[tuple[RunState, dict[int, FetchedVersion]]]:
        """The newest committed version of every fragment, from which a new incarnation starts. Some are missing if the
        run ends while they cannot be read."""
        self.state, joined_at = state, state.n
        self._fetched = {output.fragment: -1 for output in state.outputs}
        versions = yield from self._fetch_all(lambda looks: not is_over(self.state, joined_at))
        return self.state, versions

    def look(self) -> Steps[bool]:
        """Read the new commits of the log and fetch their versions; False if there are none."""
        since_s, asked_s = self._looked_s, (yield Now())
        known, learner = self.state, self._learner
        self.state = yield from patient_log(learner.run, known)
        self._looked_s = asked_s
        fetched, news, seen_s = self._fetched_last, self.state.n > known.n, (yield Now())
        self._fetched_last = news
        if news:
            refuse_revoked(learner.run, self.state, learner_signer(learner.name))
            if self.state.learner(learner.name).floor > learner.joined.incarnation:  # under another key
                raise self._fenced()
            self.head = (self.state, since_s, seen_s)
        if self.state.slot > known.slot:  # an evaluation may come right before a merge, which is a slot after another
            self.found_s = self._appeared_s(self.state.slot - known.slot, since_s, seen_s) if fetched else seen_s
        if self.state.base_floor > known.base_floor:
            # All versions of a rollback at once, so that nobody trains on a mixture of old and restored fragments. One
            # that cannot be read is left for later: a merge must supersede it, so none may wait for it.
            versions = yield from self._fetch_all(lambda looks: looks < LOOKS_FOR_ROLLBACK)
            self._put(list(versions.values()))
            return True
        if news:
            self._put([])
        elif not self.trouble:
            return False  # every version of this head was read
        yield from together([self._pass_on(output, seen_s) for output in self._wanted()])
        self._tell_trouble()
        return news

    def _appeared_s(self, slots: int, since_s: float, seen_s: float) -> float:
        """When a commit was due that was found behind a fetch, `slots` after the one before: a version that took so
        long must not make it seem later, or the next one would be found later still. It was not there at `since_s`."""
        if self.found_s is None:
            return seen_s
        return min(max(since_s, self.found_s + slots * self._slot_s()), seen_s)

    def _pass_on(self, output: FragmentVersion, seen_s: float) -> Steps[None]:
        version = yield from self._fetch(output, seen_s)
        if version is not None:
            self._put([version])

    def _fetch_all(self, goes_on: Callable[[int], bool]) -> Steps[dict[int, FetchedVersion]]:
        """Every wanted version by fragment. What cannot be read is looked for again while `goes_on(looks)`: it may have
        been collected, and then the log names a newer one."""
        versions: dict[int, FetchedVersion] = {}
        for looks in count(1):
            now_s: float = yield Now()
            found = yield from together([self._fetch(output, now_s) for output in self._wanted()])
            versions |= {version[0].fragment: version for version in found if version is not None}
            self._tell_trouble()
            if not self.trouble or not goes_on(looks):
                break
            yield Sleep(LOOK_AGAIN_S)
            self.state = yield from read_log(self._learner.run, self.state)
        return versions

    def _wanted(self) -> list[FragmentVersion]:
        return [output for output in self.state.outputs if output.version > self._fetched[output.fragment]]

    def _fetch(self, output: FragmentVersion, seen_s: float) -> Steps[FetchedVersion | None]:
        data = yield from fetch_weights(self._learner.run, output)
        if data is None:
            return None
        self._fetched[output.fragment] = output.version
        return output, self._learner.wire.decode(output, data), seen_s

    def _tell_trouble(self) -> None:
        """State in the heartbeat, and once to the observer, which version cannot be read, until a newer one is."""
        wanted = self._wanted()
        gone = [f"version {output.version} of fragment {output.fragment} cannot be read" for output in wanted]
        self.unreadable = frozenset(output.fragment for output in wanted)
        before, self.trouble = self.trouble, ", ".join(gone[:1])
        if self.trouble and self.trouble != before:
            self._learner.observer.missed(self.trouble)

    # -- behind the training ------------------------------------------------------------------------------------

    def follow(self) -> Steps[None]:
        """Follow until the learner leaves. Raises FencedError when a newer incarnation has its place."""
        next_heartbeat_s = next_fence_s = next_look_s = asked_s = self._looked_s = yield Now()
        own = self._learner.joined.incarnation
        mender = Mender(self._learner.run, self._learner.observer.mended)
        claims = ClaimWatch.beside(self._learner.run.keyring, self._learner.name, key_of(own), own)
        while not self.leaves:
            now_s: float = yield Now()
            if now_s >= next_heartbeat_s:
                next_heartbeat_s = now_s + HEARTBEAT_EVERY_S
                yield from self.send_heartbeat()
            yield from mender.follow(self.state, now_s, self._unsettled)
            if now_s >= next_fence_s:
                next_fence_s = now_s + fence_check_every_s(self._slot_s())
                if (yield from claims.look()) is not None:
                    raise self._fenced()
            if now_s >= next_look_s:
                if (yield from self.look()):
                    next_look_s = yield Now()
                    continue
                asked_s = now_s
            # computed anew each time, as the measured time of a step may have changed
            known_s = None if self.trouble else self.found_s  # a missing version may be readable again at any time
            next_look_s = next_request_s(known_s, asked_s, self._slot_s())
            if self._learner.doing is LearnerState.DRAINING:
                next_look_s = min(next_look_s, asked_s + DRAINS_LOOK_S)
            low, high = SLEEP_BOUNDS_S
            yield Sleep(min(high, max(low, next_look_s - (yield Now()))))

    def _unsettled(self) -> dict[str, bytes]:
        """Own offers whose outcome is not known yet, the earliest ones: if one is lost, learner and merge may wait for
        each other."""
        name, own, offers = self._learner.name, self._learner.joined.incarnation, self._learner.offers
        known = self.state.learner(name)
        waiting = [seq for seq in sorted(offers) if not (known.floor == own and known.has_outcome(seq))]
        return {offer_key(name, own, seq): offers[seq] for seq in waiting[:MOST_WANTED]}

    def _fenced(self) -> FencedError:
        mine = f"incarnation {number_of(self._learner.joined.incarnation)} of {self._learner.name}"
        return FencedError(f"a newer process has taken the place of {mine}")

    def _slot_s(self) -> float:
        """The expected time between two commits: as the log states it, limited by the learner's own measurement."""
        learner = self._learner
        own_s = learner.watch.expected_slot_s(learner.progress.local_steps, learner.run.num_fragments)
        return expected_slot_s(0.0 if self.state.window is None else self.state.window.slot_s, own_s)

    def send_heartbeat(self) -> Steps[None]:
        yield Put(heartbeat_key(self._learner.name), self.heartbeat_record())

    def heartbeat_record(self) -> bytes:
        run, name = self._learner.run, self._learner.name
        return sealed(run.keyring, learner_signer(name), heartbeat_key(name), self.heartbeat())

    def heartbeat(self) -> LearnerHeartbeat:
        learner, progress = self._learner, self._learner.progress
        uploading = learner.doing is LearnerState.TRAINING and progress.aim.delivery.waiting > 0
        facts: dict[str, Any] = {
            "state": "UPLOADING" if uploading else learner.doing,
            "incarnation": number_of(progress.incarnation),
            "n": self.state.n,
            "step": progress.steps,
            "position": progress.position,
            "behind": progress.behind(),
            "loss": learner.loss if learner.loss is not None and isfinite(learner.loss) else None,
            "tokens_per_s": 0.0,
            "moments": learner.saves.last[1],
            "moments_n": learner.saves.last[0],
            "process": process_on(learner.claim.host, learner.claim.pid),
            **self._heartbeat_facts(),
            **({"note": learner.note} if learner.note else {}),
        }
        return LearnerHeartbeat(**facts)


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
        self.fragments = Fragments(training, wire)
        self.watch = Stopwatch()
        self.saves = Saves()
        self.state = RunState()
        self.doing = LearnerState.STARTING
        self.loss: float | None = None
        self.note = ""
        self.moments_lost = False
        self.steps_at_loss = self.saved_at = self.uploaded_at = 0  # in own steps
        self.arrived: dict[int, FetchedVersion] = {}
        self.offers: dict[int, bytes] = {}  # the newest own ones by number, as they were published, one a fragment
        self.delivered: deque[tuple[int, float | None, float]] = deque()
        self.joined: Joined
        self.progress: Progress
        self.follower = self.follower_type(self, heartbeat_facts, wakes)

    def train(self) -> Steps[RunState]:
        """Train until the run is over for this process, or it leaves. FencedError: a newer process has its place."""
        yield from self._begin()
        self.background("follow", self.follower.follow())
        while not self.is_leaving:
            if self._may_step():
                yield from self._timed("step", self.step())
                yield from self._timed("hear", self.hear())
                yield from self._timed("offer", self.offer())
                yield from self._timed("hear", self.adopt())
                yield from self._timed("save", self.save())
            else:
                yield from self._timed("wait", self.wait_at_the_bound())
        if self.state.phase != RunPhase.FINISHED:
            yield from self.drain()
        self.follower.leaves = True
        self.note = "the run was stopped" if self.state.phase == RunPhase.STOPPED else ""
        self.go(LearnerState.DONE)
        return self.state

    def go(self, to: LearnerState) -> None:
        """Raises IllegalStateError (protocol/log/state.py)."""
        self.doing = moved(LEARNER, self.doing, to)

    def ended_by(self, error: BaseException, cause: str) -> None:
        """The state for the last heartbeat, by the error that ended `train` or a thread beside it. `cause`: in words
        that everybody may read."""
        if isinstance(error, TerminatedError):
            said = self.note if self.doing is LearnerState.DONE else ""
            self.go(LearnerState.DONE)
            self.note = said or cause
        else:
            self.go(LearnerState.FENCED if isinstance(error, FencedError) else LearnerState.FAILED)
            self.note = cause[:MAX_NOTE]

    @property
    def is_leaving(self) -> bool:
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
        for n, key in joined.saves:
            self.saves.add(key, n)
        self.moments_lost = not (yield from self._restore_newest())

    def _restore_newest(self) -> Steps[bool]:
        """Whether saved moments were restored: the newest ones that can be had."""
        while (key := self.saves.newest) is not None:
            data = yield from fetch_moments(key, max_moments_bytes(self.run.layout))
            if data is not None and self.training.restore(data):
                return True
            self.saves.forget(key)
        return False

    # -- hear, adopt --------------------------------------------------------------------------------------------

    def hear(self) -> Steps[None]:
        """Take note of the log's head. Versions that have arrived are adopted after the next offers, because an
        adoption may drop progress that those would hold; but at once where no offer can be made before it."""
        self.progress.unreadable = self.follower.unreadable
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
        if progress.is_left_behind(fragment, self.state) or progress.awaits(fragment):
            return True
        return progress.books[fragment].waits is None and progress.is_too_old(fragment)

    def adopt(self) -> Steps[None]:
        """Adopt all versions that have arrived."""
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
            self.progress.adopted(output)
            self.observer.gave_up(fragment, "replaced")
        self.watch.adopted(now_s - seen_s)
        self.observer.adopted(output, since)

    def _leave_behind(self, state: RunState) -> Steps[None]:
        """Follow a rollback: all fragments arrive anew; the moments are the newest saved ones that it has not undone,
        or fresh ones, and then the learning rate warms up anew. The data position goes on."""
        self.arrived = {}
        self.saves.go_back(state.rollbacks)
        if not (yield from self._restore_newest()) and self.training.reset():
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
        for draft in self.progress.due(now_s, self.watch.step_s):
            self._send(draft)

    def _offer_everything(self, leaves: bool) -> Steps[None]:
        now_s: float = yield Now()
        for draft in self.progress.everything(now_s) if leaves else self.progress.standing(now_s):
            self._send(draft)

    def _send(self, draft: OfferDraft) -> None:
        keep = self.run.settings.sync.mixing == "rebase"
        base = self.fragments.bases[draft.fragment]
        values = self.fragments.send(draft.fragment, draft.seq, keep)
        self.observer.sent(draft)
        self.background("upload", self._upload(draft, base, values, self.loss, self.saves.newest))

    def _upload(
        self, draft: OfferDraft, base: Values, values: Values, loss: float | None, moments: str | None
    ) -> Steps[None]:
        """Upload the payload, then the offer. If the log has passed the offer's slot, only the record is written,
        because its number must not be missing. `moments`: the newest saved ones when the offer was drafted."""
        started_s: float = yield Now()
        passed = draft.slot < self.follower.state.slot
        payload = b"" if passed else self.wire.encode(draft.fragment, draft.seq, draft.applied, base, values)
        timings = self.watch.timings(self.progress.local_steps, self.run.num_fragments)
        offer = self.progress.offer(draft, digest(payload), len(payload), self.nonce(), timings, loss, moments)
        mine = yield from self._publish(offer, payload)
        self.offers = dict([*self.offers.items(), (draft.seq, mine)][-self.run.num_fragments :])
        self.observer.published(offer, mine)
        now_s: float = yield Now()
        if not passed:
            self.watch.uploaded(now_s - started_s)
        self.delivered.append((draft.slot, None if passed else now_s - started_s, now_s))

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        return (yield from publish(offer, payload, self.run.keyring))

    # -- wait ---------------------------------------------------------------------------------------------------

    def wait_at_the_bound(self) -> Steps[None]:
        yield from self._offer_everything(leaves=False)
        yield Sleep(PAUSE_S)
        self.progress.turn.waited((yield Now()))
        yield from self.hear()
        yield from self.adopt()

    # -- save, leave --------------------------------------------------------------------------------------------

    def save(self) -> Steps[None]:
        """Save the inner optimizer's moments once in `save_every` rounds of own steps (0: never), beside the
        training; later offers name them. One save at a time is on its way."""
        every, steps = self.save_every * self.progress.island.local_steps, self.progress.steps
        if every > 0 and steps // every > self.saved_at // every and self.uploaded_at == self.saved_at:
            self._save()
        yield from ()

    @property
    def save_every(self) -> int:
        return self.run.settings.train.inner.save_every

    def _save(self) -> None:
        self.saved_at = steps = self.progress.steps
        moments = self.training.save()
        if moments is None:
            self.uploaded_at = steps
        else:
            self.background("moments", self._upload_moments(moments, self.progress.log_n, steps))

    def _upload_moments(self, moments: Moments, log_n: int, steps: int) -> Steps[None]:
        data = moments.encode()
        key = inner_key(self.name, self.progress.incarnation, moments.step, digest(data))
        yield Create(key, data)
        self.saves.add(key, log_n)
        self.uploaded_at = steps

    def drain(self) -> Steps[None]:
        """Leave in order, while there is time: save the moments, and unless the run is stopped offer the progress that
        is in no merge, again where an offer was not merged. A version is adopted only where no offer can be made
        before."""
        if not self.may_drain():
            return
        self.go(LearnerState.DRAINING)
        if self.save_every > 0 and self.progress.steps > self.saved_at:
            self._save()
        while self.uploaded_at < self.saved_at or self._may_offer_more():
            if self._may_offer_more():
                yield from self._offer_everything(leaves=True)
            yield Sleep(PAUSE_S)
            yield from self.hear()
            if not self.may_drain():
                return

    def _may_offer_more(self) -> bool:
        return self.progress.is_unmerged() and not is_over(self.state, self.joined.state.n)
