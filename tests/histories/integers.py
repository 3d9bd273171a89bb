"""Arithmetic small enough to check by hand: a fragment is one integer and a momentum, a delta is the sum of the
gradients of the data that made it. Exact, and every version depends on every input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.merging import Merged, Refused, Weighed
from diloco_cli.protocol.log.records import Offer, RunFormat, fragment_of_slot

NOT_FINITE = "nan"  # what a poisoned payload says in place of its number
MOST = 1 << 50
"""A payload with a greater number counts as not finite. Honest deltas stay far below it."""
SMALLEST = 64  # by which the least weight of one token is whole
COARSE = 8  # with error feedback, a payload names a multiple of this
VARIES = 99_991  # a prime, small beside the gradient of one token


def gradient(learner: str, start: int, end: int) -> int:
    """The part of a delta from the tokens `start` to `end` of a learner's shard: different for each learner and range,
    and the sum over the parts of a range, for any division. However far a learner is in its shard, a token's gradient
    has nearly the same length, and that of no learner half as long or twice as long as another's: so no honest delta is
    too long beside others (rules/merging.py)."""
    return _gradient_until(learner, end) - _gradient_until(learner, start)


def _gradient_until(learner: str, end: int) -> int:
    return end * sum(learner.encode()) * 7919 + end * end * 1009 % VARIES


def rounded(wanted: int) -> int:
    """A delta after a lossy codec."""
    return wanted // COARSE * COARSE


def cosines(made: list[int], weighed: list[float]) -> tuple[float, ...]:
    """Between each delta and the sum of the others: in one dimension signs."""
    rests = [sum(weighed[:place]) + sum(weighed[place + 1 :]) for place in range(len(weighed))]
    signs = [((one > 0) - (one < 0)) * ((rest > 0) - (rest < 0)) for one, rest in zip(made, rests, strict=True)]
    return tuple(map(float, signs))


def first_version(fragment: int) -> tuple[int, int]:
    """(parameter, momentum) that a run begins with."""
    return 100 * fragment, 0


def outer_step(parameter: int, momentum: int, deltas: list[tuple[int, float]]) -> tuple[int, int]:
    """Integer momentum descent on the weighted mean, rounded down: exact, and it depends on every input."""
    whole = [(delta, int(SMALLEST * weight)) for delta, weight in deltas]
    mean = sum(delta * weight for delta, weight in whole) // sum(weight for _, weight in whole)
    moved = momentum // 2 + mean
    return parameter - mean - moved // 2, moved


def scaled(delta: int, scale: float) -> int:
    """A delta that the norm clip has shortened."""
    return delta if scale == 1.0 else int(delta * scale)


def numbers(data: bytes, kind: str) -> list[int]:
    """Raises ValueError for bytes that are not of this kind."""
    name, *values = data.decode().split(":")
    if name != kind:
        raise ValueError(f"{name!r} where {kind!r} was expected")
    return [int(value) for value in values]


def state_bytes(parameter: int, momentum: int) -> bytes:
    return f"state:{parameter}:{momentum}".encode()


def weights_bytes(parameter: int) -> bytes:
    return f"weights:{parameter}".encode()


def delta_bytes(delta: int | str) -> bytes:
    return f"delta:{delta}".encode()


class IntegerArithmetic:
    """Implements protocol.actors.merging.Arithmetic. `refuse` may give the reason for refusing an offer's payload,
    `unfit` the one that shows only in the merge."""

    def __init__(
        self,
        run: RunFormat,
        refuse: Callable[[Offer], str | None] = lambda offer: None,
        unfit: Callable[[Offer], str | None] = lambda offer: None,
    ) -> None:
        self.run, self.refuse, self.unfit = run, refuse, unfit
        self.current: dict[int, bytes] = {}
        self.candidate: dict[int, bytes] = {}

    def initial(self) -> list[Merged]:
        return [self._version(fragment, *first_version(fragment)) for fragment in range(self.run.num_fragments)]

    def _version(self, fragment: int, parameter: int, momentum: int) -> Merged:
        self.candidate[fragment] = state_bytes(parameter, momentum)
        return Merged(self.candidate[fragment], weights_bytes(parameter))

    def holds(self, fragment: int, state_digest: str) -> bool:
        self.settle(fragment, state_digest)
        return fragment in self.current and digest(self.current[fragment]) == state_digest

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None:
        self.current[fragment] = state

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        refused = self.refuse(offer)
        if refused is not None:
            return refused
        text = payload.decode().removeprefix("delta:")
        if text == NOT_FINITE:
            return "non_finite"
        delta = int(text)
        if abs(delta) > MOST:
            return "non_finite"
        norm = abs(delta) * offer.steps / offer.tokens  # of the mean gradients: what a batch's size does not change
        if decoded_base is not None:
            delta += numbers(self.current[offer.fragment], "state")[0] - numbers(decoded_base, "weights")[0]
        return Delta(delta, offer, norm, int(text))

    def merge(self, slot: int, deltas: list[Weighed]) -> Merged | Refused:
        fragment = fragment_of_slot(slot, self.run.num_fragments)
        late = {place: self.unfit(delta.offer) for place, (delta, *_) in enumerate(deltas)}
        unfit = {place: reason for place, reason in late.items() if reason is not None}
        if unfit:
            return Refused(unfit)
        parameter, momentum = numbers(self.current[fragment], "state")
        weighed = [(scaled(int(delta), scale), weight) for delta, weight, scale, _ in deltas]
        merged = self._version(fragment, *outer_step(parameter, momentum, weighed))
        return replace(
            merged,
            cosines=cosines([delta.made for delta, *_ in deltas], [delta * weight for delta, weight in weighed]),
        )

    def settled(self, fragment: int) -> Merged:
        state = self.current[fragment]
        return Merged(state, weights_bytes(numbers(state, "state")[0]))

    def settle(self, fragment: int, state_digest: str) -> None:
        if fragment in self.candidate and digest(self.candidate[fragment]) == state_digest:
            self.current[fragment] = self.candidate.pop(fragment)


class Delta(int):
    """Implements protocol.actors.merging.LoadedDelta: a delta that remembers its offer, its norm, and what its learner
    made, before it was re-anchored."""

    offer: Offer
    norm: float
    made: int

    def __new__(cls, value: int, offer: Offer, norm: float, made: int) -> Delta:
        delta = super().__new__(cls, value)
        delta.offer, delta.norm, delta.made = offer, norm, made
        return delta
