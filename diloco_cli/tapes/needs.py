"""The part of a tape that its merges depend on, and whether the tape can be played at all. Pure: no torch.

A track is performed up to its last event on which a merge, or a successor's restored moments, depend.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.records import MAX_EXACT, OfferId, RunFormat, TapeEvent, fragment_of_slot
from diloco_cli.protocol.log.tape import Tape, Track

TrackId = tuple[str, int]
Version = tuple[int, int]  # (fragment, version)
Save = tuple[str, int, int]  # (learner, incarnation, step of the optimizer)


@dataclass
class Needs:
    """`until`: how many events of each track to perform. `versions`: how often each is adopted, or is the base of a
    merged offer. `applied`: merged offers. `since`: offers after which progress is kept in a later adoption. `saves`:
    moments that successors restore, and how many do."""

    until: dict[TrackId, int] = field(default_factory=dict)
    versions: Counter[Version] = field(default_factory=Counter)
    applied: set[OfferId] = field(default_factory=set)
    since: set[OfferId] = field(default_factory=set)
    saves: Counter[Save] = field(default_factory=Counter)


def needs_of(tape: Tape) -> Needs:
    """Raises UsageError if the tape refers to something that it does not hold."""
    _check_run(tape.run)
    _check_merges(tape)
    tracks = {(track.learner, track.incarnation): track for track in tape.tracks}
    _expect(len(tracks) == len(tape.tracks), "a track appears twice")
    needs = Needs(applied={offer for merge in tape.merges for offer, _ in merge.inputs})
    _find_horizons(tape, tracks, needs)
    for number, track in tracks.items():
        if needs.until[number] > 0:
            _follow(tape, track, needs)
    unsent = needs.applied - {
        (*number, event.seq) for number, track in tracks.items() for event in track.events if event.kind == "sent"
    }
    _expect(not unsent, f"offer {min(unsent, default=None)} is merged, but never sent")
    _check_versions(tape, needs)
    return needs


def save_restored(track: Track) -> Save | None:
    """The saved moments that a track began with."""
    if track.inner_step is None:
        return None
    before = track.incarnation - 1 if track.inner_incarnation is None else track.inner_incarnation
    return (track.learner, before, track.inner_step)


def _find_horizons(tape: Tape, tracks: dict[TrackId, Track], needs: Needs) -> None:
    """From the newest incarnation back: an older one must have saved the moments that it restored."""
    restored: set[Save] = set()
    for number in sorted(tracks, reverse=True):
        track = tracks[number]
        last = 0
        for index, event in enumerate(track.events, start=1):
            sends = event.kind == "sent" and (*number, event.seq) in needs.applied
            if sends or (event.kind == "saved" and (*number, event.count) in restored):
                last = index
        needs.until[number] = last
        save = save_restored(track)
        if save is not None and last > 0:
            source = tracks.get((save[0], save[1]))
            found = source is not None and any(e.kind == "saved" and e.count == save[2] for e in source.events)
            _expect(
                found and save[1] < track.incarnation, f"{_name(track)} restores moments that no track saved: {save}"
            )
            restored.add(save)
            needs.saves[save] += 1


def _follow(tape: Tape, track: Track, needs: Needs) -> None:
    """Check one track's events up to its horizon: each must be possible after those before it."""
    fragments = tape.run.num_fragments
    _expect(tape.run.island(track.learner) is not None, f"the run has no learner {track.learner!r}")
    _expect(0 <= track.position < MAX_EXACT, f"{_name(track)} begins at token {track.position}")
    _expect(len(track.versions) == fragments, f"{_name(track)} begins with {len(track.versions)} versions")
    base = list(track.versions)
    needs.versions.update(enumerate(base))
    sent: dict[int, int] = {}
    ever_sent: dict[int, int] = {}
    number = (track.learner, track.incarnation)
    for event in track.events[: needs.until[number]]:
        _check_event(event, track, fragments)
        if event.kind == "adopted":
            if event.since is not None:
                _expect(sent.get(event.since) == event.fragment, f"{_name(track)} keeps progress since no such send")
                needs.since.add((*number, event.since))
            if event.since is not None or (event.mixing or tape.run.settings.sync.mixing) != "rebase":
                sent = {seq: fragment for seq, fragment in sent.items() if fragment != event.fragment}
            base[event.fragment] = event.version
            needs.versions[event.fragment, event.version] += 1
        elif event.kind == "sent":
            if event.since is not None:
                paid = ever_sent.get(event.since) == event.fragment and (*number, event.since) in needs.applied
                _expect(paid, f"{_name(track)} makes up for the rounding error of no such offer")
            sent[event.seq] = ever_sent[event.seq] = event.fragment
            if (*number, event.seq) in needs.applied:
                needs.versions[event.fragment, base[event.fragment]] += 1


def _check_event(event: TapeEvent, track: Track, fragments: int) -> None:
    numbers = (event.count, event.batch_tokens, event.n, event.local_steps, event.position, event.version, event.seq)
    _expect(all(0 <= number < MAX_EXACT for number in numbers), f"{_name(track)}: impossible numbers in {event}")
    _expect(0 <= event.fragment < fragments, f"{_name(track)}: no fragment {event.fragment}")
    _expect(event.kind != "lost", f"{_name(track)}: more happened than is known")
    if event.kind == "steps":
        _expect(event.batch_tokens > 0, f"{_name(track)}: steps on batches of no tokens")
    if event.kind == "heard":
        _expect(event.local_steps > 0, f"{_name(track)}: rounds of no steps")
    if event.kind == "sent":
        right = event.slot >= 0 and fragment_of_slot(event.slot, fragments) == event.fragment
        _expect(right, f"{_name(track)}: slot {event.slot} is not fragment {event.fragment}'s")


def _check_run(run: RunFormat) -> None:
    names = [island.name for island in run.all_islands]
    _expect(bool(names) and len(set(names)) == len(names), "its islands are none, or two of one name")
    paces = [number for island in run.all_islands for number in (island.batch_tokens, island.local_steps)]
    numbers = [run.settings.train.tokens, run.num_fragments, run.num_shards, *paces]
    _expect(all(0 < number < MAX_EXACT for number in numbers), "impossible numbers in its run")


def _check_merges(tape: Tape) -> None:
    fragments, last_n, last_slot, used = tape.run.num_fragments, 0, -1, set[OfferId]()
    for merge in tape.merges:
        what = f"merge {merge.n}"
        _expect(merge.n > last_n and merge.slot > last_slot, f"{what} is out of order")
        _expect(fragment_of_slot(merge.slot, fragments) == merge.fragment, f"{what}: its slot is another fragment's")
        offers = [offer for offer, _ in merge.inputs]
        _expect(bool(offers), f"{what} merges nothing")
        _expect(len(merge.scales) in (0, len(offers)), f"{what} scales other deltas than it merges")
        _expect(used.isdisjoint(offers) and len(set(offers)) == len(offers), f"{what} merges an offer a second time")
        _expect(sum(weight for _, weight in merge.inputs) > 0, f"{what}: its weights are all zero")
        _expect(all(weight >= 0 for _, weight in merge.inputs), f"{what}: a weight below zero")
        used.update(offers)
        last_n, last_slot = merge.n, merge.slot


def _check_versions(tape: Tape, needs: Needs) -> None:
    known = {(fragment, 0) for fragment in range(tape.run.num_fragments)} | {(m.fragment, m.n) for m in tape.merges}
    unknown = needs.versions.keys() - known
    if unknown:
        fragment, version = min(unknown)
        _expect(False, f"no merge made version {version} of fragment {fragment}, which a learner adopts")


def _name(track: Track) -> str:
    return f"incarnation {track.incarnation} of {track.learner}"


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UsageError(
            f"this tape cannot be played: {otherwise}", hint="record it again: diloco export RUN --tape FILE"
        )
