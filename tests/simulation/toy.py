"""A run small enough to check by hand: a fragment is one integer, a delta is the sum of the data that made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from diloco_cli.config.settings import RunSettings, SyncSettings, TrainSettings
from diloco_cli.digests import digest
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.joining import fetch_cast, join, publish
from diloco_cli.protocol.keys import FORMAT_KEY
from diloco_cli.protocol.log import next_commit
from diloco_cli.protocol.membership import enter
from diloco_cli.protocol.mixing import mixing_of
from diloco_cli.protocol.operations import Sleep, Steps
from diloco_cli.protocol.progress import Progress
from diloco_cli.protocol.records import Island, Offer, Output, ProcessClaim, RunFormat, Timings
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.syncer import Merged, Syncer
from diloco_cli.protocol.wire import encode
from diloco_cli.simulate.world import Actor, World

BATCH_TOKENS = 4
STEP_S = 0.05


def make_run(learners: int = 2, fragments: int = 2, merges: int = 10, **sync: object) -> RunFormat:
    """Equal islands, two steps a slot; the run ends after about `merges` merges by everybody."""
    every = 2 * fragments
    tokens = merges * every * BATCH_TOKENS * learners // fragments
    settings = RunSettings(
        name="toy",
        train=TrainSettings(tokens=tokens, batch_tokens=BATCH_TOKENS),
        sync=replace(SyncSettings(every=every, fragments=fragments, skip_after_s=2.0), **sync),  # type: ignore[arg-type]
    )
    islands = tuple(Island(f"l{i}", "here", BATCH_TOKENS, every, 80.0, STEP_S) for i in range(learners))
    layout = balanced_layout([ParameterFact(f"w{i}", (1,), False) for i in range(fragments)], fragments)
    return RunFormat("id", "toy", "2026-01-01T00:00:00.000Z", settings, islands, layout, "test")


def number(data: bytes, kind: str) -> list[int]:
    name, *values = data.decode().split(":")
    assert name == kind
    return [int(value) for value in values]


def outer_step(parameter: int, momentum: int, deltas: list[tuple[int, float]]) -> tuple[int, int]:
    """Integer momentum descent on the weighted mean, rounded down: exact, and it depends on every input."""
    mean = sum(delta * int(weight) for delta, weight in deltas) // sum(int(weight) for _, weight in deltas)
    moved = momentum // 2 + mean
    return parameter - mean - moved // 2, moved


def state_bytes(parameter: int, momentum: int) -> bytes:
    return f"state:{parameter}:{momentum}".encode()


def cast_bytes(parameter: int) -> bytes:
    return f"cast:{parameter}".encode()


class ToyArithmetic:
    """Implements protocol.syncer.Arithmetic. `refuse` may give the reason for refusing an offer's payload."""

    def __init__(self, run: RunFormat, refuse: Callable[[Offer], str | None] = lambda offer: None) -> None:
        self.run, self.refuse = run, refuse
        self.current: dict[int, bytes] = {}
        self.candidate: dict[int, bytes] = {}

    def initial(self) -> list[Merged]:
        return [self._version(fragment, 100 * fragment, 0) for fragment in range(self.run.num_fragments)]

    def _version(self, fragment: int, parameter: int, momentum: int) -> Merged:
        self.candidate[fragment] = state_bytes(parameter, momentum)
        return Merged(self.candidate[fragment], cast_bytes(parameter))

    def holds(self, fragment: int, state_digest: str) -> bool:
        self.settle(fragment, state_digest)
        return fragment in self.current and digest(self.current[fragment]) == state_digest

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None:
        self.current[fragment] = state

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> int | str:
        refused = self.refuse(offer)
        if refused is not None:
            return refused
        (delta,) = number(payload, "delta")
        if decoded_base is not None:
            delta += number(self.current[offer.fragment], "state")[0] - number(decoded_base, "cast")[0]
        return delta

    def merge(self, fragment: int, deltas: list[tuple[int, float]]) -> Merged:
        parameter, momentum = number(self.current[fragment], "state")
        return self._version(fragment, *outer_step(parameter, momentum, deltas))

    def settle(self, fragment: int, state_digest: str) -> None:
        if fragment in self.candidate and digest(self.candidate[fragment]) == state_digest:
            self.current[fragment] = self.candidate.pop(fragment)


class NoEvaluator:
    """Answers every evaluation with a failure, at once."""

    def __init__(self) -> None:
        self.asked: int | None = None

    def submit(self, n: int, outputs: tuple[Output, ...], final: bool) -> bool:
        self.asked = n
        return True

    def result(self) -> tuple[int, float | None] | None:
        asked, self.asked = self.asked, None
        return None if asked is None else (asked, None)


@dataclass
class Published:
    """What learners believe: the bytes of every offer whose publication they saw succeed."""

    offers: dict[tuple[str, int, int], bytes] = field(default_factory=dict)


def gradient(learner: str, position: int) -> int:
    """What one batch at `position` adds to a delta: different for each learner and batch."""
    return (position // BATCH_TOKENS * 7919 + ord(learner[-1]) * 104729) % 1009


def delta_of(offer: Offer) -> int:
    return sum(gradient(offer.learner, at) for at in range(offer.data_start, offer.data_end, BATCH_TOKENS))


@dataclass
class Habits:
    """What sets one learner apart: its step's time, and when it leaves (drained, as the training loop does)."""

    step_s: float = STEP_S
    leaves: Callable[[], bool] = lambda: False


def learner_steps(
    run: RunFormat, name: str, claim: ProcessClaim, nonce: Callable[[], str], seen: Published, habits: Habits
) -> Steps[RunState]:
    """A learner without a model, on the product's joining, books and publishing."""
    joined = yield from join(run, name, claim)
    state, progress = joined.state, Progress(run, name, joined.incarnation, joined.state, joined.data_start)
    for output in state.outputs:
        assert (yield from fetch_cast(output)) is not None, "a committed cast is missing"
        progress.adopted(output)
    leaving = False
    while state.phase != "FINISHED" and not (state.phase == "STOPPED" and state.n > joined.state.n):
        while (later := (yield from next_commit(run, state))) is not None:
            newer = [o for o in later.outputs if o not in state.outputs]
            state = later
            for output in newer:
                assert (yield from fetch_cast(output)) is not None, "a committed cast is missing"
                if mixing_of(run.settings.sync, output) == "rebase":
                    progress.rebased(output, progress.kept_since(output, state))
                else:
                    progress.adopted(output)
        progress.heard(state, habits.step_s)
        if leaving and not progress.awaits_fates():
            return state
        yield Sleep(habits.step_s)
        progress.overgrown()
        if leaving:
            drafts = []
        elif habits.leaves():
            leaving, drafts = True, progress.last_offers()
        elif progress.may_step().allowed:
            progress.stepped()
            drafts = progress.due()
        else:
            drafts = progress.due_at_the_bound()
        for draft in drafts:
            slot_s = habits.step_s * progress.local_steps / run.num_fragments
            offer = progress.offer(draft, "", 0, nonce(), Timings(habits.step_s, slot_s), None, None)
            payload = f"delta:{delta_of(offer)}".encode()
            offer = replace(offer, payload_digest=digest(payload), payload_bytes=len(payload))
            yield from publish(offer, payload)
            seen.offers[offer.id] = encode(offer)
    return state


class Fleet:
    """Starts the run's actors in a world and restarts those that crash, as a supervisor would."""

    def __init__(self, run: RunFormat, world: World | None = None) -> None:
        self.run, self.world = run, world or World()
        self.published = Published()
        self.habits: dict[str, Habits] = {}
        self.restart = True
        self._numbers = count()
        self._refuse: Callable[[Offer], str | None] = lambda offer: None
        self.world.store.create(FORMAT_KEY, encode(run))
        self.world.on_end = self._ended

    def nonce(self) -> str:
        return f"{next(self._numbers):032x}"

    def claim(self) -> ProcessClaim:
        return ProcessClaim(0, self.nonce(), "host", 1, "then", "test")

    def syncer(self, name: str = "syncer", delay_s: float = 0.0) -> Actor:
        claim = self.claim()
        arithmetic = ToyArithmetic(self.run, self._refuse)
        self.served = syncer = Syncer(self.run, claim, arithmetic, NoEvaluator(), lambda: "then", self.nonce)
        return self.world.start(name, syncer.serve(), delay_s)

    def learner(self, name: str, delay_s: float = 0.0) -> Actor:
        steps = learner_steps(self.run, name, self.claim(), self.nonce, self.published, self._habits(name))
        return self.world.start(name, steps, delay_s)

    def newcomer(self, name: str, batch_tokens: int = BATCH_TOKENS) -> Actor:
        """An island that the launch did not know: it asks, and takes part once it is admitted."""
        island, habits = Island(name, "elsewhere", batch_tokens, 1, 1e9, 1e-9), self._habits(name)

        def steps() -> Steps[RunState]:
            known = yield from enter(self.run, island, self.nonce(), "then")
            return (yield from learner_steps(known, name, self.claim(), self.nonce, self.published, habits))

        return self.world.start(name, steps())

    def _habits(self, name: str) -> Habits:
        return self.habits.setdefault(name, Habits())

    def refuse_payloads(self, refuse: Callable[[Offer], str | None]) -> None:
        self._refuse = refuse

    def start(self) -> Fleet:
        self.syncer()
        for island in self.run.islands:
            self.learner(island.name)
        return self

    def living(self, name: str) -> list[Actor]:
        return [actor for actor in self.world.actors if actor.name == name and not actor.ended]

    def ended(self) -> bool:
        return all(actor.ended for actor in self.world.actors)

    def finish(self, within_s: float = 60.0) -> None:
        assert self.world.run(self.ended, within_s), f"not over after {within_s} s: {self.log_tail()}"

    def log_tail(self) -> list[str]:
        return [key for _, _, key in self.world.writes if key.startswith("commit/")][-3:]

    def _ended(self, actor: Actor) -> None:
        """A crash (no result) or a lost answer is restarted; an error of the code's own is not hidden."""
        crashed = actor.result is None and (
            actor.error is None or type(actor.error).__name__ == "StoreUnavailableError"
        )
        if not (crashed and self.restart):
            return
        if actor.name == "syncer":
            self.syncer(delay_s=0.2)
        elif self.run.island(actor.name) is not None:
            self.learner(actor.name, delay_s=0.2)
        elif actor.name in self.habits:
            self.newcomer(actor.name)

    def errors(self) -> list[BaseException]:
        return [a.error for a in self.world.actors if a.error and type(a.error).__name__ != "StoreUnavailableError"]
