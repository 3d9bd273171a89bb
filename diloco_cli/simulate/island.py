"""A learner without a model, in virtual time: the product's joining, books, publishing and following, over a link.

As in the product, training never waits for the store: uploads queue up on the link behind the loop, and a follower
fetches what the log brings. Sizes of payloads are reckoned with; what lies in the simulated bucket is their name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diloco_cli.digests import digest
from diloco_cli.protocol.joining import fetch_cast, join, publish
from diloco_cli.protocol.keys import inner_key
from diloco_cli.protocol.log import read_log
from diloco_cli.protocol.mixing import mixing_of
from diloco_cli.protocol.operations import Now, Sleep, Steps
from diloco_cli.protocol.polling import next_request_s
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.quorum import moving_average
from diloco_cli.protocol.records import Island, Output, ProcessClaim, RunFormat, Timings
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.training import is_over, merge_is_due, save_is_due, waited_for
from diloco_cli.simulate.world import Actor, World

PAUSE_S = 0.2
MOMENT_BYTES = 8.0  # of one parameter's two float32 moments
BITS = 8.0


@dataclass(frozen=True)
class Sizes:
    """Bytes on the wire: of each fragment's delta and cast, and of the inner optimizer's moments."""

    delta: tuple[float, ...]
    cast: tuple[float, ...]
    moments: float


def sizes_of(run: RunFormat, bits_of: dict[str, float]) -> Sizes:
    """`bits_of`: per parameter, scales included, by codec."""
    sync, parameters = run.settings.sync, [fragment.num_parameters for fragment in run.layout.fragments]
    moments = MOMENT_BYTES * sum(parameters) if run.settings.train.inner.name == "adamw" else 0.0
    return Sizes(
        delta=tuple(n * bits_of[sync.codec] / BITS for n in parameters),
        cast=tuple(n * bits_of[sync.broadcast] / BITS for n in parameters),
        moments=moments,
    )


@dataclass
class Condition:
    """How an island is, across its incarnations: what faults change, and what is measured."""

    island: Island
    slow: float = 1.0  # times that its link is slower
    corrupt: int = 0  # so many of its next payloads get a wrong byte
    poison: int = 0  # so many of its next deltas are far too large
    steps: int = 0
    stalled_s: float = 0.0
    down_s: float = 0.0
    incarnations: int = 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    poisoned: set[tuple[str, int, int]] = field(default_factory=set)


@dataclass
class Wire:
    """One direction of a link: transfers follow each other."""

    bps: float | None
    free_s: float = 0.0

    def done_s(self, now_s: float, num_bytes: float, slow: float) -> float:
        """When a transfer that is asked for now has ended; an unknown rate costs nothing."""
        seconds = num_bytes * BITS / self.bps * slow if self.bps else 0.0
        self.free_s = max(self.free_s, now_s) + seconds
        return self.free_s


class Incarnation:
    """One process of a learner: the loop, the follower, and uploads under way are actors of the same name."""

    def __init__(
        self, run: RunFormat, condition: Condition, sizes: Sizes, claim: ProcessClaim, nonce: Callable[[], str],
        world: World,
    ) -> None:  # fmt: skip
        self.run, self.condition, self.sizes, self.claim, self.nonce = run, condition, sizes, claim, nonce
        self.world, self.island = world, condition.island
        self.up, self.down = Wire(self.island.link.up_bps), Wire(self.island.link.down_bps)
        self.actors: list[Actor] = []
        self.state = RunState()
        self.arrived: dict[int, Output] = {}
        self.awaited: deque[Draft] = deque()
        self.upload_s = self.adoption_s = 0.0
        self.slot_s = self.island.local_steps * self.island.step_s / run.num_fragments
        self.inner: str | None = None
        self.optimizer_steps = self.saved_at = 0

    def start(self, delay_s: float = 0.0) -> None:
        self._spawn(self._train(), delay_s)

    def _spawn(self, steps: Steps[None], delay_s: float = 0.0) -> None:
        self.actors = [actor for actor in self.actors if not actor.ended]
        self.actors.append(self.world.start(self.island.name, steps, delay_s))

    # -- the training loop --------------------------------------------------------------------------------------

    def _train(self) -> Steps[None]:
        joined = yield from join(self.run, self.island.name, self.claim)
        self.condition.incarnations += 1
        self.state, self.joined_at = joined.state, joined.state.n
        for output in joined.state.outputs:
            yield from self._download(self.sizes.cast[output.fragment])
        if joined.inner is not None:
            yield from self._download(self.sizes.moments)
            self.inner, self.optimizer_steps = joined.inner, int(joined.inner.split("/")[-1].split("-")[0])
        self.progress = Progress(self.run, self.island.name, joined.incarnation, joined.state, joined.data_start)
        self.progress.begin(self.inner, joined.inner is None)
        self.fetched = {output.fragment: output.version for output in joined.state.outputs}
        self._spawn(self._follow())
        slot_started_s = self.world.now_s
        while not self._over():
            self._hear()
            if not self.progress.may_step().allowed:
                for draft in self.progress.due_at_the_bound():
                    self._send(draft)
                yield from self._stall()
                continue
            yield Sleep(self.island.step_s)
            self.progress.stepped()
            self.optimizer_steps += 1
            self.condition.steps += 1
            reached = self.progress.slots_reached
            for draft in self.progress.due():
                self._send(draft)
            for _ in range(self.progress.slots_reached - reached):
                self.slot_s = moving_average(self.slot_s, self.world.now_s - slot_started_s)
                slot_started_s = self.world.now_s
            yield from self._await_merges()
            self._save_now_and_then()

    def _over(self) -> bool:
        return is_over(self.state, self.joined_at)

    def _stall(self) -> Steps[None]:
        yield Sleep(PAUSE_S)
        self.condition.stalled_s += PAUSE_S

    def _hear(self) -> None:
        for fragment in sorted(self.arrived):
            if self.run.settings.sync.adoption == "on_arrival" or self.progress.is_left_behind(fragment, self.state):
                self._adopt(self.arrived.pop(fragment))
        self.progress.heard(self.state, self.island.step_s, self.upload_s + self.adoption_s)
        self.progress.overgrown()

    def _adopt(self, output: Output) -> None:
        if mixing_of(self.run.settings.sync, output) == "rebase":
            self.progress.rebased(output, self.progress.kept_since(output, self.state))
        else:
            self.progress.adopted(output)

    def _await_merges(self) -> Steps[None]:
        """`at_tau`: adopt each merge exactly tau slots after its own slot, waiting for it if need be."""
        while self.awaited and merge_is_due(self.run.settings.sync, self.awaited[0], self.progress.next_slot):
            draft = self.awaited.popleft()
            while not self._over():
                self._hear()
                found = waited_for(draft, self.arrived.get(draft.fragment), self.progress.base_floor)
                if found == "here":
                    self._adopt(self.arrived.pop(draft.fragment))
                if found != "to come":
                    break
                yield from self._stall()

    # -- uploads ------------------------------------------------------------------------------------------------

    def _send(self, draft: Draft) -> None:
        if self.run.settings.sync.adoption == "at_tau":
            self.awaited.append(draft)
        self._spawn(self._upload(draft, self.world.now_s, self._up_done_s(self.sizes.delta[draft.fragment])))

    def _up_done_s(self, num_bytes: float) -> float:
        self.condition.bytes_up += num_bytes
        return self.up.done_s(self.world.now_s, num_bytes, self.condition.slow)

    def _upload(self, draft: Draft, asked_s: float, done_s: float) -> Steps[None]:
        yield Sleep(done_s - asked_s)
        payload = f"{self.island.name}/{self.progress.incarnation}/{draft.seq}".encode()
        timings = Timings(self.island.step_s, self.slot_s, self.upload_s, self.adoption_s)
        offer = self.progress.offer(
            draft, digest(payload), len(payload), self.nonce(), timings, None, self.inner
        )  # fmt: skip
        if self.condition.poison:
            self.condition.poison -= 1
            self.condition.poisoned.add(offer.id)
        if self.condition.corrupt:
            self.condition.corrupt -= 1
            offer = replace(offer, payload_digest=digest(payload + b"?"))
        yield from publish(offer, payload)
        self.upload_s = moving_average(self.upload_s or None, self.world.now_s - asked_s)

    def _save_now_and_then(self) -> None:
        steps, every_rounds = self.progress.steps, self.run.settings.train.inner.save_every
        if self.sizes.moments and save_is_due(steps, self.island.local_steps, every_rounds, self.saved_at):
            self.saved_at = steps
            self.progress.saved(self.optimizer_steps)
            key = inner_key(self.island.name, self.progress.incarnation, self.optimizer_steps, digest(b"moments"))
            self._spawn(self._upload_moments(key, self.world.now_s, self._up_done_s(self.sizes.moments)))

    def _upload_moments(self, key: str, asked_s: float, done_s: float) -> Steps[None]:
        yield Sleep(done_s - asked_s)
        self.inner = key

    # -- following the log --------------------------------------------------------------------------------------

    def _follow(self) -> Steps[None]:
        found_s: float | None = None
        while not self._over():
            now_s: float = yield Now()
            state = yield from read_log(self.run, self.state)
            news = state.n > self.state.n
            self.state = state
            for output in state.outputs:
                if output.version > self.fetched[output.fragment]:
                    yield from self._download(self.sizes.cast[output.fragment])
                    if (yield from fetch_cast(self.run, output)) is None:
                        continue
                    self.arrived[output.fragment] = output
                    self.fetched[output.fragment] = output.version
                    self.adoption_s = moving_average(self.adoption_s or None, self.world.now_s - now_s)
            if news:
                found_s = self.world.now_s
            else:
                asked_s: float = yield Now()
                yield Sleep(next_request_s(found_s, asked_s, self.slot_s) - asked_s)

    def _download(self, num_bytes: float) -> Steps[None]:
        self.condition.bytes_down += num_bytes
        now_s: float = yield Now()
        yield Sleep(self.down.done_s(now_s, num_bytes, self.condition.slow) - now_s)
