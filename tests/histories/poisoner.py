"""One hostile learner among at least three: its deltas are too long at moments that it chooses, or point the other way.
Nothing longer than the bound of protocol/rules/norms.py may be merged once the honest ones are known, or counts for
more than CLIP times those of two honest ones in its slot, and its good deltas must not save it from a quarantine. What
points the other way, or holds next to nothing, beside two honest ones weighs next to nothing. That no honest one is
refused, kept out or weighs less than it holds is demanded in every history (monitor.py, replayer.py), but where the
poisoner's word alone stands against it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

from diloco_cli.protocol.log.faults import HOSTILE, PAID_BACK, faults_for_quarantine
from tests.histories.replayer import BLAME, EMPTY, FLOODER, FULL, Plain, Replayer, expect, is_poisoner
from tests.histories.stream import Stream

Tactic = Literal["always", "absent", "in turn", "burst", "ratchet", "flipped", "empty"]
"""When its deltas are too long: always; while no syncer lives; every second one; many in a row now and then; ever more,
until they are as long as can be, and then again from the beginning. Or never, and all of them point the other way, or
hold next to nothing."""
TACTICS: tuple[Tactic, ...] = ("always", "absent", "in turn", "burst", "ratchet", "empty")
LONG, RATCHET, LONGEST, SHORT = 1000.0, 1.5, 1e6, 1e-3
BOUND, CLIP = 8.0, 1.25
KNOWN, ROUNDS_KEPT = 2, 16  # merges; rounds without one, after which a learner is forgotten
COMPANY = 3  # deltas in a merge, from which on they are compared
LEAST = 1 / 64  # of its weight, is what a delta keeps that flips
SLACK = 6.0  # faults beyond those for a quarantine


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
            case "flipped":
                return -1.0
            case "empty":
                return SHORT


@dataclass
class NormBooks:
    """The norms, directions and faults that commits state, by a reader of its own. `merged`: (norm, steps) by fragment
    and learner, since the memory last began anew or forgot the learner, which was in no merge for so long; `last`: the
    round of its newest merge; `forgot`: whether a readmission has emptied `merged`."""

    replayer: Replayer
    merged: dict[int, dict[str, list[tuple[float, int]]]] = field(default_factory=dict)
    last: dict[tuple[int, str], int] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    forgot: bool = False

    def committed(self, commit: Plain) -> None:
        if commit["kind"] == "merge" and commit.get("outputs"):
            self._check_norms(commit)
            self._check_directions(commit)
        elif commit["kind"] == "readmit":
            self.merged, self.forgot = {}, True
        self._count_faults(commit)

    def only_the_poisoner_is_known(self, commit: Plain) -> bool:
        """Whether, before this merge or skip, it alone is known for the fragment, and a single honest one is there: its
        delta may be the one that is refused, and it may be kept out, for of two nobody can tell."""
        fragments, slot = self.replayer.run.num_fragments, commit["slot"]
        known = [
            name
            for name, pairs in self.merged.get(slot % fragments, {}).items()
            if len(pairs) >= KNOWN and slot // fragments - self.last[slot % fragments, name] < ROUNDS_KEPT
        ]
        judged = [*commit.get("inputs", ()), *(one for one in commit["outcomes"] if one.get("norm") is not None)]
        honest = sum(not is_poisoner(one["learner"]) for one in judged)
        return (bool(known) or self.forgot) and all(map(is_poisoner, known)) and honest < 2

    def _check_norms(self, commit: Plain) -> None:
        """8: no delta is merged that is longer than BOUND times those of the honest, for its steps; none beside two of
        them counts for more than CLIP times theirs."""
        fragment, now = commit["outputs"][0]["fragment"], commit["slot"] // self.replayer.run.num_fragments
        known = self.merged.setdefault(fragment, defaultdict(list))
        for name in [name for name in known if now - self.last[fragment, name] >= ROUNDS_KEPT]:
            del known[name]
        usual = [pairs for name, pairs in known.items() if not is_poisoner(name) and len(pairs) >= KNOWN]
        here = [(item["norm"], item["steps"]) for item in commit["inputs"] if not is_poisoner(item["learner"])]
        for item in commit["inputs"]:
            if is_poisoner(item["learner"]):
                who = f"commit {commit['n']}: offer {item['incarnation']}/{item['seq']} of {item['learner']}"
                if len(usual) >= 2:
                    _check(item, [pair for pairs in usual for pair in pairs], f"{who} is merged in spite of the log")
                if len(here) >= 2:
                    _check(item, here, f"{who} is merged in spite of its company")
                    counts = {**item, "norm": item["norm"] * item["scale"]}
                    _check(counts, here, f"{who} is not shortened", CLIP)
                    self._check_weight(item, here, who)
        for item in commit["inputs"]:
            known[item["learner"]].append((item["norm"], item["steps"]))
            self.last[fragment, item["learner"]] = now

    def _check_weight(self, item: Plain, honest: list[tuple[float, int]], who: str) -> None:
        """8: beside two honest ones, a delta weighs no more than its length is worth, for the fewest steps of all."""
        fewest = min(item["steps"], *(steps for _, steps in honest))
        least = min(norm * (fewest / steps) ** 2 for norm, steps in honest)
        if item["norm"] < FULL * least:
            share = max(EMPTY, item["norm"] / (FULL * least))
            expect(item["weight"] <= share * _full_weight(item) * (1 + 1e-9), "8", f"{who} is empty, and weighs much")

    def _check_directions(self, commit: Plain) -> None:
        """8: the commit states whose delta points against the others'; beside two others it weighs little."""
        for item in commit["inputs"]:
            who = f"commit {commit['n']}: offer {item['incarnation']}/{item['seq']} of {item['learner']}"
            agrees = item.get("agrees")
            if not is_poisoner(item["learner"]):
                expect(agrees is None or agrees >= 0, "8", f"{who} is said to point against the others")
                continue
            if len(commit["inputs"]) >= COMPANY:
                flips = self.replayer.poison.get((item["learner"], item["incarnation"], item["seq"]), 1) < 0
                expect(agrees is not None and (agrees < 0) == flips, "8", f"{who} agrees by {agrees} with the others")
                most = _full_weight(item) * (LEAST if flips else 1.0)
                expect(item["weight"] <= most * (1 + 1e-9), "8", f"{who} points the other way, and weighs much")

    def _count_faults(self, commit: Plain) -> None:
        """Good deltas pay little of a fault back: who goes on is kept out, as long as enough others are left."""
        for item in commit.get("inputs", ()):
            self.faults[item["learner"]] = max(0.0, self.faults[item["learner"]] - PAID_BACK)
        for outcome in commit["outcomes"]:
            self.faults[outcome["learner"]] += outcome["reason"] in HOSTILE
        if commit["kind"] in ("quarantine", "readmit"):
            self.faults[commit["learner"]] = 0.0
        run = self.replayer.run
        trusted = self.replayer.batches.keys() - self.replayer.kept_out
        if commit["kind"] == "merge" and len(trusted) > run.settings.sync.quorum:
            most = faults_for_quarantine(run.num_fragments) + SLACK
            for name in sorted(trusted - {FLOODER}):  # which has many refused at once
                expect(self.faults[name] < most, BLAME, f"{name} has {self.faults[name]:g} faults, and is not kept out")


def _full_weight(item: Plain) -> float:
    full: float = item["tokens"] ** 2 / item["steps"]
    return full


def _check(item: Plain, honest: Iterable[tuple[float, int]], text: str, bound: float = BOUND) -> None:
    most = max(norm * max(item["steps"] / steps, sqrt(item["steps"] / steps)) for norm, steps in honest)
    expect(
        item["norm"] <= bound * most * (1 + 1e-9), "8", f"{text}: its norm is {item['norm'] / most:.3g} times theirs"
    )
