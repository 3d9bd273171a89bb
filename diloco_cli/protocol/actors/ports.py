"""What syncer and learner need beside store and clock: arithmetic, evaluation, training; real or simulated.

Observers of a learner hear what it does, for heartbeats, timing and the accounts of a simulation; no action of the
learner depends on one. `Stopwatch` measures how long its actions take on its own clock: its offers state these times,
and its aim uses them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Literal, Protocol

from diloco_cli.protocol.actors.joining import Joined, Saves
from diloco_cli.protocol.actors.progress import OfferDraft, Progress
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, Offer, RunFormat, Timings
from diloco_cli.protocol.log.state import LearnerState, RunState
from diloco_cli.protocol.rules.quorum import moving_average

Values = Any
"""The parameters of one fragment as a training port reads and writes them: [n] float32 in the product, one integer in
the histories, nothing in simulations of time alone."""


@dataclass(frozen=True)
class Merged:
    """A fragment's new version as bytes: the state that syncers read, and the weights that learners adopt.

    `cosines`: between each delta, in their order, and the merged one, from a sample of their values; of a merge."""

    state: bytes
    weights: bytes
    cosines: tuple[float, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A merge that gave no version: which deltas must be left out, by their place in the list, and why. The others may
    be merged without them."""

    reasons: dict[int, str]


class LoadedDelta(Protocol):
    """A delta as the arithmetic holds it, ready to merge. `norm`: of the delta as its learner made it, before it was
    re-anchored; by the norms that its payload claims, or as measured."""

    @property
    def norm(self) -> float: ...


class Arithmetic(Protocol):
    """The numerical work. Deterministic: the same inputs in the same order give the same bytes."""

    def initial(self) -> Iterable[Merged]:
        """Every fragment's first version, in order. Each is made when it is asked for: all of them at a time would take
        the memory of the model twice."""
        ...

    def holds(self, fragment: int, state_digest: str) -> bool:
        """Whether this version's parameters and momentum are in memory."""
        ...

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None: ...

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> LoadedDelta | str:
        """A delta ready to merge, re-anchored if the base's weights are given; or the reason of its refusal."""
        ...

    def merge(self, slot: int, deltas: list[tuple[Any, float, float]]) -> Merged | Refused:
        """The next version of this slot's fragment from (delta, weight, scale) each; or those that only the merge shows
        to be unfit."""
        ...

    def settled(self, fragment: int) -> Merged:
        """The version in memory, as the bytes that were published."""
        ...

    def settle(self, fragment: int, state_digest: str) -> None:
        """The merged version with this digest is committed: it is the fragment's version now."""
        ...


class Evaluator(Protocol):
    """Evaluates the outer parameters in another process, without delaying a merge. One evaluation at a time."""

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        """Start an evaluation as of commit n; False if one is still under way."""
        ...

    def result(self) -> tuple[int, float | None] | None:
        """A finished evaluation: (n, loss in nats per token). The loss is not finite where the model gives no finite
        one, None if the evaluation failed."""
        ...


@dataclass(frozen=True)
class Progression:
    """The position of a step: at `fraction` in [0, 1] of the run's schedule, `own_steps` after this incarnation began,
    or after it lost its moments if `moments_lost`."""

    fraction: float
    own_steps: int
    moments_lost: bool


@dataclass(frozen=True)
class Stepped:
    """One inner step: the loss of its batch in nats per token (None: there is none), and the tokens it took: fewer than
    asked for while a part of the island is gone."""

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
        """The fragment's parameters as they are now; a copy."""
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

    def mix(self, mixing: Mixing, merged: Values, own: Values, reference: Values | None, last: bool = False) -> Values:
        """The fragment after adoption. rebase: merged + (own - reference); blend: a share of each. `last`: of
        an adoption; nobody needs `own` any more, so the result may take its memory."""
        ...


Phase = Literal["hear", "step", "offer", "wait", "save"]
STEPS_SEEN = 33  # H_i follows the median of these step times, so that one long step does not change it


class Stopwatch:
    """Each figure is written by one thread alone. `step_s`: a step with the loop's work before it, without waiting.
    `slot_s`: the planned time between slots, used before the first step."""

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


class Incarnation(Protocol):
    """The part of a learner that its follower, which works beside the loop, and observers use."""

    run: RunFormat
    name: str
    wire: Wire
    doing: LearnerState
    joined: Joined
    progress: Progress
    saves: Saves
    watch: Stopwatch
    state: RunState
    loss: float | None
    note: str
    moments_lost: bool

    @property
    def observer(self) -> Observer: ...


class Observer:
    """Receives every event and does nothing."""

    def began(self, learner: Incarnation) -> None:
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

    def rolled_back(self, learner: Incarnation, to: int) -> None: ...

    def missed(self, text: str) -> None:
        """`text` says which version cannot be read and is waited for."""
