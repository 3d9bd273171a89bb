"""A learner whose model is one integer a fragment: the product's joining, books, publishing and following around it.

As in the product, training never waits for the store: one thread steps, one uploads in order, one follows the log. Or
all in one thread, for histories that are followed by hand. Its parameters really move, so a delta that does
not stand for the range that its offer claims shows in a replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.errors import FencedError
from diloco_cli.protocol.beats import LearnerBeat
from diloco_cli.protocol.joining import Joined, follow, join, newer_incarnation, publish
from diloco_cli.protocol.keys import beat_key, inner_key
from diloco_cli.protocol.operations import Create, Now, Put, Sleep, Steps
from diloco_cli.protocol.polling import SHORT_SLOT_S, fence_check_every_s, next_request_s
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.records import Offer, OfferId, Output, ProcessClaim, RunFormat, Timings
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.training import awaits_last, is_over, save_is_due
from diloco_cli.protocol.wire import encode
from diloco_cli.simulate.histories.integers import delta_bytes, gradient, numbers
from diloco_cli.simulate.histories.ledger import Account

BEAT_EVERY_S = 3.0
DRAIN_S = 10.0  # at most
PAUSE_S = 0.2
POLL_BOUNDS_S = (0.05, 0.5)
POLLS_A_SLOT = 5  # of a short one; fewer than the product's: most of a history's calls would be in vain


@dataclass
class Habits:
    """What sets one learner apart: its step's time, when it leaves (drained, for some seconds), what it says
    in place of a delta (None: the truth), and whether its payload is other bytes than its offer names."""

    step_s: float = 0.05
    leaves: Callable[[], bool] = lambda: False
    poison: Callable[[], int | str | None] = lambda: None
    corrupts: Callable[[], bool] = lambda: False
    saves_every_rounds: int = 0


@dataclass
class Beliefs:
    """What learners believe: the bytes of every offer whose publication they saw succeed, and what they adopted (who,
    the version, the bytes of its cast). `accounts`: of what each incarnation has processed."""

    offers: dict[OfferId, bytes] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)
    on_adoption: Callable[[str, Output, bytes], None] = lambda learner, output, cast: None
    on_publication: Callable[[OfferId, bytes], None] = lambda offer_id, data: None

    def published(self, offer_id: OfferId, data: bytes) -> None:
        """Its learner has seen the store take it."""
        self.offers[offer_id] = data
        self.on_publication(offer_id, data)


@dataclass(frozen=True)
class Upload:
    """A delta on its way: parameters as adopted, and as they were at the moment of sending."""

    draft: Draft
    base: int
    value: int


class Learner:
    """One process: `train` in one thread, or with `upload` and `follow` as threads of their own if `start_threads` is
    there to start them."""

    poll_bounds_s = POLL_BOUNDS_S

    def __init__(
        self, run: RunFormat, name: str, claim: ProcessClaim, nonce: Callable[[], str], seen: Beliefs, habits: Habits,
        start_threads: Callable[[list[Steps[Any]]], None] | None = None,
    ) -> None:  # fmt: skip
        self.run, self.name, self.claim, self.nonce = run, name, claim, nonce
        self.seen, self.habits, self.start_threads = seen, habits, start_threads
        self.state = RunState()
        self.values: list[int] = []
        self.bases: list[int] = []
        self.sent: list[dict[int, int]] = []
        self.arrived: dict[int, tuple[Output, bytes]] = {}
        self.uploads: deque[Upload | str] = deque()
        self.inner: str | None = None
        self.saved_at = 0
        self.missing = self.uploading = False

    def train(self) -> Steps[RunState]:
        """Until the run is over, or it has left."""
        yield from self._begin((yield from join(self.run, self.name, self.claim)))
        if self._over():
            return self.state
        if self.start_threads is not None:
            self.start_threads([self.follow()])
        while not self._over():
            yield from self._look()
            if self._over():
                break
            if self.habits.leaves():
                yield from self._drain()
                break
            self._hear()
            yield from self._work()
            yield from self._publish()
        return self.state

    def _look(self) -> Steps[None]:
        if self.start_threads is None:
            yield from self._follow_once()

    def _publish(self) -> Steps[None]:
        """What is in the queue: here, or by a thread of its own."""
        if self.start_threads is None:
            yield from self._upload_all()
        elif self.uploads and not self.uploading:
            self.uploading = True
            self.start_threads([self.upload()])

    def _drain(self) -> Steps[None]:
        """Leave in order: offer what no offer holds yet, and hear until every offer has its fate, or time is up (where
        a quorum leaves together, each would wait for the others' progress). Adopt nothing."""
        until_s = (yield Now()) + DRAIN_S
        self._send(self.progress.last_offers())
        yield from self._publish()
        while awaits_last(self.progress.awaits_fates(), (yield Now()) < until_s, self.state, self.joined_n):
            yield Sleep(PAUSE_S)
            yield from self._look()
            self.progress.heard(self.state)

    def _begin(self, joined: Joined) -> Steps[None]:
        self.joined_n, self.fetched = joined.state.n, dict.fromkeys(range(self.run.num_fragments), -1)
        self.state, casts = joined.state, dict[int, tuple[Output, bytes]]()
        while True:
            news = yield from follow(self.run, self.state, self.fetched)
            self.state = news.state
            if self._over():
                return
            casts |= {output.fragment: (output, cast) for output, cast in news.casts}
            self.fetched |= {output.fragment: output.version for output, _ in news.casts}
            if not news.missing:
                break
            yield Sleep(POLL_BOUNDS_S[1])
        self.progress = Progress(self.run, self.name, joined.incarnation, joined.state, joined.data_start)
        for _, (output, cast) in sorted(casts.items()):
            value = self._value(cast)
            self.values.append(value)
            self.bases.append(value)
            self.sent.append({})
            self.progress.adopted(output)
            self.seen.on_adoption(self.name, output, cast)
        batch_tokens, unsent = self.progress.island.batch_tokens, [joined.data_start] * self.run.num_fragments
        self.account = Account(self.name, joined.incarnation, batch_tokens, unsent)
        self.seen.accounts.append(self.account)
        self.inner = joined.inner
        self.progress.begin(self.inner, False)

    def _over(self) -> bool:
        return is_over(self.state, self.joined_n)

    # -- stepping -----------------------------------------------------------------------------------------------

    def _work(self) -> Steps[None]:
        """One step, or a wait; and what is then to be offered."""
        if self.progress.may_step().allowed:
            yield Sleep(self.habits.step_s)
            self._step()
            drafts = self.progress.due()
        else:
            drafts = self.progress.due_at_the_bound()
            yield Sleep(PAUSE_S if self.start_threads is not None else self.habits.step_s)
        self._send(drafts)
        self._save_now_and_then()

    def _send(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            value = self.values[draft.fragment]
            self.sent[draft.fragment][draft.seq] = value
            self.account.sent(draft.fragment, draft.seq, draft.data_start, draft.data_end)
            self.uploads.append(Upload(draft, self.bases[draft.fragment], value))

    def _step(self) -> None:
        moved = gradient(self.name, self.progress.position, self.progress.island.batch_tokens)
        self.values = [value - moved for value in self.values]
        self.account.stepped(self.progress.position)
        self.progress.stepped()

    def _save_now_and_then(self) -> None:
        """The moments of an inner optimizer, or rather their name."""
        step, every_rounds = self.progress.steps, self.habits.saves_every_rounds
        if save_is_due(step, self.progress.island.local_steps, every_rounds, self.saved_at):
            self.saved_at = step
            self.progress.saved(step)
            self.uploads.append(inner_key(self.name, self.progress.incarnation, step, digest(b"%d" % step)))

    # -- adopting -----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Everything that has arrived, as of one and the same head: a rollback arrives whole."""
        state = self.state
        if self.progress.is_behind_rollback(state):
            self.inner = None
        for fragment in sorted(self.arrived):
            self._adopt(*self.arrived.pop(fragment), state)
        position = self.progress.position
        if self.progress.heard(state, self.habits.step_s, self._exchange_s()):
            for fragment in self.fetched:
                self._give_up(fragment, position, "a predecessor's offer, or a quarantine")
        for fragment in self.progress.overgrown():
            self._give_up(fragment, position, "outgrown")

    def _give_up(self, fragment: int, position: int, reason: str) -> None:
        """All own progress since the last adoption."""
        self.values[fragment] = self.bases[fragment]
        self.account.gave_up(fragment, position, reason, self.progress.position)

    def _adopt(self, output: Output, cast: bytes, state: RunState) -> None:
        fragment, value = output.fragment, self._value(cast)
        if self.progress.mixing_of(output, state) == "rebase":
            since = self.progress.kept_since(output, state)
            reference = self.bases[fragment] if since is None else self.sent[fragment][since.seq]
            self.progress.rebased(output, since)
            self.values[fragment] += value - reference
        else:
            self.progress.adopted(output)
            self.account.gave_up(fragment, self.progress.position, "replaced")
            self.values[fragment] = value
        self.bases[fragment], self.sent[fragment] = value, {}
        self.seen.on_adoption(self.name, output, cast)

    def _value(self, cast: bytes) -> int:
        """The integer in a version as learners adopt it."""
        (value,) = numbers(cast, "cast")
        return value

    def _payload(self, fragment: int, delta: int | str) -> bytes:
        return delta_bytes(delta)

    def _exchange_s(self) -> float:
        """How long an exchange takes: a call or two, and a poll. One thread that does it all sees none pass."""
        return 0.0 if self.start_threads is None else 2 * POLL_BOUNDS_S[0]

    def _slot_s(self) -> float:
        return self.habits.step_s * self.progress.local_steps / self.run.num_fragments

    # -- the uploader -------------------------------------------------------------------------------------------

    def upload(self) -> Steps[bool]:
        """Until the queue is empty; whoever fills it again starts another one. So offers go out in their order."""
        yield from self._upload_all()
        self.uploading = False
        return True

    def _upload_all(self) -> Steps[None]:
        while self.uploads:
            job = self.uploads.popleft()
            if isinstance(job, str):
                yield Create(job, job.rpartition("/")[2].partition("-")[0].lstrip("0").encode())
                self.inner = job
            else:
                offer, payload = self._offer(job)
                mine = yield from publish(offer, payload, self.run.keyring)
                self.seen.published(offer.id, mine)

    def _offer(self, job: Upload) -> tuple[Offer, bytes]:
        poison = self.habits.poison()
        payload = self._payload(job.draft.fragment, job.base - job.value if poison is None else poison)
        timings = Timings(self.habits.step_s, self._slot_s())
        offer = self.progress.offer(job.draft, digest(payload), len(payload), self.nonce(), timings, None, self.inner)
        if self.habits.corrupts():
            offer = replace(offer, payload_digest=digest(payload + b"?"))
        return offer, payload

    # -- the follower -------------------------------------------------------------------------------------------

    def follow(self) -> Steps[None]:
        next_beat_s = next_fence_s = next_look_s = yield Now()
        found_s: float | None = None
        while True:
            now_s: float = yield Now()
            if now_s >= next_beat_s:
                next_beat_s = now_s + BEAT_EVERY_S
                yield Put(beat_key(self.name), encode(self._beat()))
            if now_s >= next_fence_s:
                next_fence_s = now_s + fence_check_every_s(self._slot_s())
                if (yield from newer_incarnation(self.name, self.progress.incarnation, self.run.keyring)):
                    raise FencedError(f"a newer process has taken the place of {self.name}")
            if now_s >= next_look_s:
                if (yield from self._follow_once()):
                    found_s = yield Now()
                    continue
                now_s = yield Now()
                next_look_s = self._next_look_s(None if self.missing else found_s, now_s)
            yield Sleep(max(0.0, min(next_look_s, next_beat_s) - now_s))

    def _next_look_s(self, found_s: float | None, now_s: float) -> float:
        """As the product does, but where slots are short; what is missing may be there again at any time."""
        slot_s = self._slot_s()
        if slot_s >= SHORT_SLOT_S:
            return next_request_s(found_s, now_s, slot_s)
        low, high = self.poll_bounds_s
        return now_s + min(high, max(low, slot_s / POLLS_A_SLOT))

    def _follow_once(self) -> Steps[bool]:
        """What is new in the log, and the casts that it brings; False if nothing is."""
        found = yield from follow(self.run, self.state, self.fetched)
        news = found.state.n > self.state.n
        self.state, self.missing = found.state, bool(found.missing)
        for output, cast in found.casts:
            self.arrived[output.fragment] = (output, cast)
            self.fetched[output.fragment] = output.version
        return news

    def _beat(self) -> LearnerBeat:
        progress = self.progress
        return LearnerBeat(
            "TRAINING", progress.incarnation, self.state.n, progress.steps, progress.position, 1.0, progress.behind()
        )
