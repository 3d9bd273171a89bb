"""One hostile learner among at least three, whose deltas are too long at moments that it chooses. Beside two honest
deltas, or where most of the learners that the log remembers are honest, none of its own counts for more than CLIP times
an honest one. Honest deltas of a round that are believed in whole are never clipped. Who makes too many bad offers in a
row is kept out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

from diloco_cli.protocol.log.health import are_too_many, is_bad
from tests.histories.replayer import BLAME, EMPTY, FULL, Plain, Replayer, expect, is_poisoner
from tests.histories.stream import Stream

Tactic = Literal["always", "absent", "in turn", "burst", "ratchet", "empty"]
"""When its deltas are too long: always; while no syncer lives; every second one; many in a row now and then; ever more,
until they are as long as can be, and then again from the beginning. Or never, and all of them hold next to nothing."""
TACTICS: tuple[Tactic, ...] = ("always", "absent", "in turn", "burst", "ratchet", "empty")
LONG, RATCHET, LONGEST, SHORT = 1000.0, 1.5, 1e6, 1e-3
CLIP, GROWS = 2.0, 4.0
COMPARED = 3  # deltas in a merge, and learners in the log's memory, from which on a majority of them decides
Measured = tuple[float, int]  # a norm, and its steps


@dataclass
class Poisoner:
    """`served`: whether a syncer lives."""

    tactic: Tactic
    draw: Stream
    served: Callable[[], bool]
    made: int = 0
    left: int = 0

    def factor(self) -> float:
        """How many times as long as it should be the next delta is."""
        self.made += 1
        match self.tactic:
            case "always":
                return LONG
            case "absent":
                return 1.0 if self.served() else LONG
            case "in turn":
                return LONG if self.made % 2 else 1.0
            case "burst":
                self.left = self.draw.whole(2, 12) if not self.left and self.draw.chance(0.2) else max(0, self.left - 1)
                return LONG if self.left else 1.0
            case "ratchet":
                length: float = RATCHET**self.made
                self.made = 0 if length > LONGEST else self.made
                return min(length, LONGEST)
            case "empty":
                return SHORT


@dataclass
class NormBooks:
    """The norms that commits state, by a reader of its own. `known`: by fragment, all (norm, steps) that each learner
    brought since it was last kept out or readmitted; `led`: honest learners whose newest delta there was clipped while
    half of the memory was the poisoner's and that of such ones; `bad`: offers of each learner in a row."""

    replayer: Replayer
    known: dict[int, dict[str, list[Measured]]] = field(default_factory=lambda: defaultdict(dict))
    led: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    bad: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def committed(self, commit: Plain) -> None:
        if commit["kind"] == "merge" and commit.get("outputs"):
            self._check_lengths(commit)
        if commit["kind"] in ("quarantine", "readmit"):
            for fragment, lengths in self.known.items():
                lengths.pop(commit["learner"], None)
                self.led[fragment].discard(commit["learner"])
        self._count_bad(commit)

    def _check_lengths(self, commit: Plain) -> None:
        fragment = commit["outputs"][0]["fragment"]
        known, led = self.known[fragment], self.led[fragment]
        here = [(item["norm"], item["steps"]) for item in commit["inputs"] if not is_poisoner(item["learner"])]
        honest = [pairs for name, pairs in known.items() if not is_poisoner(name)]
        is_led = 2 * (len(honest) - len(led)) <= len(known)  # of two nobody can tell
        is_heard = len(commit["inputs"]) < COMPARED or len(known) >= COMPARED
        for item in commit["inputs"]:
            who = f"commit {commit['n']}: offer {item['incarnation']}/{item['seq']} of {item['learner']}"
            if not is_poisoner(item["learner"]):
                # more steps than a round's may count in part, and so do those of a newcomer who is faster than is usual
                whole = item["steps"] <= self._round_steps(item["learner"]) and _is_believed(item)
                fair = item["scale"] == 1.0 or not whole or (is_led and is_heard and _grows(item, known))
                expect(fair, "8", f"{who} is clipped, and as long as usual")
                continue
            if len(here) >= 2:
                expect(_is_bounded(item, here, CLIP), "8", f"{who} is longer than its company allows")
                expect(_is_weighed(item, here), "8", f"{who} is empty, and weighs much")
            if len(honest) > len(known) - len(honest) and len(known) >= COMPARED:
                seen = [pair for pairs in honest for pair in pairs]
                expect(_is_bounded(item, seen, CLIP * GROWS), "8", f"{who} is longer than the log allows")
        for item in commit["inputs"]:
            led.discard(item["learner"])
            if is_led and item["scale"] < 1.0 and not is_poisoner(item["learner"]):
                led.add(item["learner"])
            known.setdefault(item["learner"], []).append((item["norm"] * item["scale"], item["steps"]))

    def _round_steps(self, learner: str) -> int:
        run = self.replayer.run
        island = run.island(learner)
        return run.settings.sync.every if island is None else island.local_steps

    def _count_bad(self, commit: Plain) -> None:
        trusted = self.replayer.batches.keys() - self.replayer.kept_out
        if commit["kind"] == "merge" and len(trusted) > self.replayer.run.settings.sync.quorum:
            for name in sorted(trusted):
                text = f"{name} has made {self.bad[name]} bad offers in a row, and is not kept out"
                expect(not are_too_many(self.bad[name]), BLAME, text)
        for item in commit.get("inputs", ()):
            self.bad[item["learner"]] = 0
        for outcome in commit["outcomes"]:
            self.bad[outcome["learner"]] += is_bad(outcome["reason"])
        if commit["kind"] in ("quarantine", "readmit"):
            self.bad[commit["learner"]] = 0


def _is_believed(item: Plain) -> bool:
    return item.get("believed") is None or bool(item["believed"] >= item["tokens"])


def _is_bounded(item: Plain, honest: list[Measured], times: float) -> bool:
    most = max(norm * max(item["steps"] / steps, sqrt(item["steps"] / steps)) for norm, steps in honest)
    return bool(item["norm"] * item["scale"] <= times * most * (1 + 1e-9))


def _grows(item: Plain, known: dict[str, list[Measured]]) -> bool:
    """Whether a clipped delta is GROWS times as long as the shortest that is remembered: so what is usual recovers."""
    newest = [pairs[-1] for pairs in known.values()]
    least = min(norm * min(item["steps"] / steps, sqrt(item["steps"] / steps)) for norm, steps in newest)
    return bool(item["norm"] * item["scale"] >= GROWS * least * (1 - 1e-9))


def _is_weighed(item: Plain, honest: list[Measured]) -> bool:
    """Whether a delta weighs no more than its norm is worth beside these, for the fewest steps of all."""
    fewest = min(item["steps"], *(steps for _, steps in honest))
    least = FULL * min(norm * fewest / steps for norm, steps in honest)
    share = 1.0 if item["norm"] >= least else max(EMPTY, item["norm"] / least)
    return bool(item["weight"] <= share * item["tokens"] ** 2 / item["steps"] * (1 + 1e-9))
