"""Deltas of usual size that do harm: no check finds them, only the held-out loss shows them. The histories' evaluator
knows which offers are harmful, and answers evaluations by that; demands on what the log makes of the losses rest on the
same knowledge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_cli.protocol.log.records import FragmentVersion
from tests.histories.replayer import OfferId, Plain, Replayer, expect

EVALUATION_ASKS = 3
FAILS_EVERY = 4  # evaluations of one process
HARM = 5.0  # nats of one harmful merge
MOST_ROLLBACKS = 1
DIVERGENCE = "divergence"


@dataclass
class Harm:
    """`offers`: the harmful ones; `good`: the losses of commits that evaluated well; `jumped`: the newest evaluation
    has, at `jump_tokens`, and no rollback has followed; `rollbacks`: of the syncer, since one was well beyond `tokens`,
    the furthest jump that it went back for. Jumps that operators undid do not count."""

    replayer: Replayer
    offers: set[OfferId] = field(default_factory=set)
    good: dict[int, float] = field(default_factory=dict)
    rollbacks: int = 0
    tokens: int = 0
    jump_tokens: int = 0
    jumped: bool = False
    paused: bool = False

    def merged(self, head: int) -> Iterator[tuple[int, str]]:
        """(commit, learner) of each harmful merge that commit `head` includes."""
        for offer_id in self.offers:
            n = self.replayer.settled_at.get(offer_id, head + 1)
            if self.replayer.settled.get(offer_id) == "applied" and self.replayer.leads_to(head, n):
                yield n, offer_id[0]

    def loss(self, head: int) -> float:
        return 1.0 / (2 + head) + HARM * len(list(self.merged(head)))

    def committed(self, commit: Plain) -> None:
        """Checks that losses jump by harm alone, and that the run goes back once and then pauses."""
        kind = commit["kind"]
        if kind == "eval":
            self._evaluated(commit)
        elif kind == "rollback":
            self.good = {n: loss for n, loss in self.good.items() if n <= commit["to"]}
            self.jumped = False
            if commit.get("evaluated") is not None:
                expect(commit["to"] in self.good, DIVERGENCE, f"goes back to {commit['to']}, which was never well")
                self.rollbacks, self.tokens = self.rollbacks + 1, max(self.tokens, self.jump_tokens)
                expect(self.rollbacks <= MOST_ROLLBACKS, DIVERGENCE, f"{self.rollbacks} rollbacks, and no progress")
        elif kind == "stop" and commit.get("diverged"):
            expect(bool(self.offers), DIVERGENCE, "the run pauses for a loss, and there was no harm")
            self.paused = True
        elif kind == "epoch_start" and self.paused and commit["serves"]:
            self.good = {} if self.jumped else self.good  # operators accept the loss as it is
            self.rollbacks, self.tokens, self.jumped, self.paused = 0, 0, False, False

    def _evaluated(self, commit: Plain) -> None:
        n, loss = commit["evaluated"], commit["loss"]
        if not commit["jumped"]:
            self.good[n], self.jumped = loss, False
            self.rollbacks = 0 if commit["tokens"] > self.tokens else self.rollbacks
            return
        worse = all(loss > good + 1 for good in self.good.values())
        expect(worse and any(self.merged(n)), DIVERGENCE, f"a loss of {loss:.2f} counts as a jump, and is as before")
        self.jump_tokens, self.jumped = commit["tokens"], True


class HarmEvaluator:
    """Implements protocol.actors.syncer.Evaluator: an answer after a few calls; now and then one fails."""

    def __init__(self, harm: Harm) -> None:
        self.harm = harm
        self._n: int | None = None
        self._asked = self._done = 0

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        if self._n is not None:
            return False
        self._n, self._asked = n, 0
        return True

    def result(self) -> tuple[int, float | None] | None:
        self._asked += 1
        if self._n is None or self._asked < EVALUATION_ASKS:
            return None
        n, self._n = self._n, None
        self._done += 1
        return n, None if self._done % FAILS_EVERY == 0 else self.harm.loss(n)
