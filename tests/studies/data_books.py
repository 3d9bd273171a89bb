"""An independent reader of a run's log: what became of every position of the data. It reads plain JSON, and none of the
product's books.

A position of a learner's stream is, for each fragment, one of these: applied (in a merge); discarded (in an offer that
no merge holds; the log has its reason); given up by a living learner (in no offer: its next offer's events say at which
step, and why); or lost with its incarnation (a process died, and its last steps were in no offer). The last is bounded:
no incarnation holds more steps than one offer may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Range = tuple[int, int]
REPLACED = "a merge missed"  # it adopted a version that a merge without it had made
OUTGROWN = "at the drift bound"  # more steps than an offer may hold, as while no syncer serves
MOVED = "held by a predecessor's late offer"


@dataclass(frozen=True)
class Stretch:
    """Positions of a learner's stream, of one fragment, in no offer; `reason` is empty if its incarnation died."""

    learner: str
    incarnation: int
    fragment: int
    tokens: int
    reason: str = ""


@dataclass
class DataBooks:
    """Positions are in tokens of a learner's stream, summed over fragments. `ranges`: that counted, of fragment 0."""

    applied: int = 0
    twice: int = 0
    discarded: int = 0
    stretches: list[Stretch] = field(default_factory=list)
    ranges: dict[str, list[Range]] = field(default_factory=lambda: defaultdict(list))
    violations: list[str] = field(default_factory=list)

    @property
    def given_up(self) -> int:
        return sum(stretch.tokens for stretch in self.stretches if stretch.reason)

    @property
    def lost(self) -> int:
        return sum(stretch.tokens for stretch in self.stretches if not stretch.reason)

    @property
    def longest_lost(self) -> int:
        return max((stretch.tokens for stretch in self.stretches if not stretch.reason), default=0)


@dataclass
class _Incarnation:
    """Its offers' ranges by fragment, and where it gave up what: (fragment, position, reason)."""

    offered: dict[int, list[Range]] = field(default_factory=lambda: defaultdict(list))
    gave_up: list[tuple[int, int, str]] = field(default_factory=list)


def read_data_books(
    commits: list[dict[str, Any]], offers: list[dict[str, Any]], is_over: bool, most_lost: int
) -> DataBooks:
    """`most_lost`: tokens that an incarnation may lose of a fragment when it dies."""
    books = DataBooks()
    refused = {_id(outcome) for commit in commits for outcome in commit["outcomes"]}
    used, counted = set(), defaultdict(list)
    for commit in commits:
        for item in commit.get("inputs", ()):
            used.add(_id(item))
            for output in commit["outputs"]:
                counted[item["learner"], output["fragment"]].append((item["data_start"], item["data_end"]))
    for offer in offers:
        if _id(offer) not in used | refused and not is_over:
            books.violations.append(f"offer {_id(offer)} has no outcome")
    incarnations = _read_events(offers)
    for (learner, fragment), ranges in counted.items():
        books.twice += length(ranges) - length(union(ranges))
        books.applied += length(ranges)
        mine = {number: found for (name, number), found in incarnations.items() if name == learner}
        offered = [each for found in mine.values() for each in found.offered[fragment]]
        books.discarded += length(union([*ranges, *offered])) - length(union(ranges))
        books.stretches += _in_no_offer(learner, fragment, mine)
        if fragment == 0:
            books.ranges[learner] += ranges
    for stretch in books.stretches:
        if not stretch.reason and stretch.tokens > most_lost:
            books.violations.append(f"more than one offer may hold was lost: {stretch}")
        if stretch.reason.startswith("nobody"):
            books.violations.append(f"{stretch}")
    return books


def _id(item: dict[str, Any]) -> tuple[str, int, int]:
    return item["learner"], item["incarnation"], item["seq"]


def _read_events(offers: Iterable[dict[str, Any]]) -> dict[tuple[str, int], _Incarnation]:
    found: dict[tuple[str, int], _Incarnation] = defaultdict(_Incarnation)
    position: dict[tuple[str, int], int] = {}
    for offer in sorted(offers, key=_id):
        name = offer["learner"], offer["incarnation"]
        found[name].offered[offer["fragment"]].append((offer["data_start"], offer["data_end"]))
        if offer.get("began"):
            position[name] = offer["began"]["position"]
        for event in offer.get("events", ()):
            here, fragment = position.get(name, 0), event.get("fragment", 0)
            if event["kind"] == "steps":
                position[name] = here + event["count"] * event["batch_tokens"]
            elif event["kind"] == "moved":
                position[name] = event["position"]
                found[name].gave_up += [(each, event["position"], MOVED) for each in range(64)]
            elif event["kind"] == "dropped":
                found[name].gave_up.append((fragment, here, OUTGROWN))
            elif event["kind"] == "adopted" and event.get("mixing") == "replace":
                found[name].gave_up.append((fragment, here, REPLACED))
    return found


def _in_no_offer(learner: str, fragment: int, incarnations: dict[int, _Incarnation]) -> Iterator[Stretch]:
    """The stretches between the offers of all incarnations, in the order of the stream."""
    reached, owner = 0, min(incarnations)
    for number, found in sorted(incarnations.items()):
        marks = sorted((position, reason) for each, position, reason in found.gave_up if each == fragment)
        for start, stop in sorted(found.offered[fragment]):
            for position, reason in marks:
                if owner == number and reached < position <= start:
                    yield Stretch(learner, number, fragment, position - reached, reason)
                    reached = position
            if start > reached:
                reason = "nobody says why" if owner == number else ""
                yield Stretch(learner, owner, fragment, start - reached, reason)
            reached, owner = max(reached, stop), number


def union(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def length(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)
