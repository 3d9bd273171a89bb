"""Records a run's tape from its bucket alone, at any time: merges from the log, the learners' events from the offers.

Nothing is guessed: if a part cannot be reconstructed, DataCheckError names the object's key and the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_cli.config.own_loops import data_class_of
from diloco_cli.errors import DataCheckError, TryAgainError, UsageError
from diloco_cli.observe.checker import disagreements
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.commits import Commit, Merge, Rollback
from diloco_cli.protocol.log.keys import commit_key, incarnation_key, offer_key, read_inner_key
from diloco_cli.protocol.log.places import genuine_of
from diloco_cli.protocol.log.records import (
    Beginning,
    MergedOffer,
    Offer,
    OfferId,
    ProcessClaim,
    RunFormat,
    TapeEvent,
)
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.tape import Tape, TapeMerge, Track
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode
from diloco_cli.signing import learner_signer
from diloco_cli.store.port import Store
from diloco_cli.tapes.needs import Save, TrackId


@dataclass
class _Wanted:
    """How far a track must be read: to its last applied offer, and to the moments that successors restored."""

    last_seq: int = -1
    saves: set[int] = field(default_factory=set)


def record(store: Store, run: RunFormat) -> Tape:
    """The tape of all merges in the log so far. Raises DataCheckError; TryAgainError before the first merge."""
    merges: list[TapeMerge] = []
    inputs: dict[OfferId, tuple[MergedOffer, int]] = {}
    for commit, state in _log(store, run):
        run = state.with_members(run)
        _expect(not isinstance(commit, Rollback), commit_key(commit.n), "a tape holds no rollback")
        if not isinstance(commit, Merge):
            continue
        output, tokens = commit.outputs[0], state.tokens(run.layout)
        taken = tuple(((i.learner, i.incarnation, i.seq), i.weight) for i in commit.inputs)
        scales = tuple(item.scale for item in commit.inputs)
        scales = () if set(scales) == {1.0} else scales
        merges.append(TapeMerge(commit.n, commit.slot, output.fragment, taken, tokens, output.state_digest, scales))
        inputs |= {offer: (item, output.fragment) for (offer, _), item in zip(taken, commit.inputs, strict=True)}
    _refuse_own_loops(run)
    if not merges:
        raise TryAgainError(f"run {run.name} has no merge yet: there is nothing to record", hint="diloco status")
    return Tape(run, tuple(_read_tracks(store, run, inputs)), tuple(merges))


def _refuse_own_loops(run: RunFormat) -> None:
    """A tape is repeated by the run's own model, data and optimizer; what a user's loop does is not in it."""
    own = [island.name for island in run.all_islands if data_class_of(island.infra) is not None]
    if own:
        raise UsageError(
            f"run {run.name} cannot be recorded: {', '.join(own)} trained with a loop of its owner's",
            hint=f"diloco verify {run.name} computes its merges anew",
        )


def _log(store: Store, run: RunFormat) -> Iterator[tuple[Commit, RunState]]:
    """Every commit from 0 on, the chain checked, with the state after it."""
    state = RunState()
    while (data := store.get(key := commit_key(state.n + 1), MAX_RECORD_BYTES)) is not None:
        state = fold(run, state, data)
        yield decode(Commit, data, key), state


def _read_tracks(store: Store, run: RunFormat, inputs: dict[OfferId, tuple[MergedOffer, int]]) -> list[Track]:
    """The tracks of the merged offers, and the tracks whose saved moments those began with."""
    wanted: dict[TrackId, _Wanted] = {}
    for learner, incarnation, seq in inputs:
        track = wanted.setdefault((learner, incarnation), _Wanted())
        track.last_seq = max(track.last_seq, seq)
    tracks: dict[TrackId, Track] = {}
    waiting = deque(sorted(wanted))
    while waiting:
        number = waiting.popleft()
        tracks[number], save = _read_track(store, run, number, wanted[number], inputs)
        if save is not None:
            source = wanted.setdefault(save[:2], _Wanted())
            if save[2] not in source.saves:
                source.saves.add(save[2])
                waiting.append(save[:2])
    return [tracks[number] for number in sorted(tracks)]


def _read_track(
    store: Store, run: RunFormat, number: TrackId, wanted: _Wanted, inputs: dict[OfferId, tuple[MergedOffer, int]]
) -> tuple[Track, Save | None]:
    """One incarnation's events, from its offers up to the last one needed."""
    began, events, missing = None, [], set(wanted.saves)
    seq = 0
    while seq <= wanted.last_seq or missing:
        offer, key = _read_offer(store, run, (*number, seq))
        item = inputs.get(offer.id)
        if item is not None:
            _expect(not disagreements(offer, *item), key, "it is not the offer that the log names")
        began = offer.began if seq == 0 else began
        events += [
            *offer.events,
            TapeEvent("sent", seq=seq, fragment=offer.fragment, slot=offer.slot, since=offer.feeds_back),
        ]
        missing -= {event.count for event in offer.events if event.kind == "saved"}
        lost = any(event.kind in ("lost", "sent") for event in offer.events)
        _expect(not lost, key, "more happened before it than an offer keeps")
        seq += 1
    if began is None:
        raise DataCheckError("this run cannot be recorded: it does not tell how it began", where=offer_key(*number, 0))
    save = _save_of(began, number)
    track = Track(
        learner=number[0],
        incarnation=number[1],
        position=began.position,
        versions=began.versions,
        inner_step=save[2] if save else None,
        inner_incarnation=save[1] if save else None,
        moments_lost=began.moments_lost,
        ranks=_ranks_of(store, run, number),
        events=tuple(events),
    )
    return track, save


def _read_offer(store: Store, run: RunFormat, offer: OfferId) -> tuple[Offer, str]:
    key, signer = offer_key(*offer), learner_signer(offer[0])
    data = genuine_of(lambda at: store.get(at, MAX_RECORD_BYTES), run.keyring, signer, key)
    if data is None:
        what = "this run cannot be recorded: this offer, or what comes after it, is missing"
        raise DataCheckError(
            what, where=key, hint="a run that is to be recorded keeps everything: retention.rounds: all"
        )
    found = decode(Offer, data, key)
    _expect(found.id == offer, key, "it holds another offer")
    return found, key


def _ranks_of(store: Store, run: RunFormat, number: TrackId) -> int:
    key = incarnation_key(*number)
    data = genuine_of(lambda at: store.get(at, MAX_RECORD_BYTES), run.keyring, learner_signer(number[0]), key)
    return 1 if data is None else decode(ProcessClaim, data, key).ranks


def _save_of(began: Beginning, number: TrackId) -> Save | None:
    """The moments that an incarnation began with. Only those of an earlier incarnation, so that the walk ends."""
    if began.inner is None:
        return None
    save, key = read_inner_key(began.inner), offer_key(*number, 0)
    if save is None or save[0] != number[0] or not 0 < save[1] < number[1]:
        raise DataCheckError(f"this run cannot be recorded: it restored {began.inner!a}", where=key)
    return save


def _expect(holds: bool, key: str, otherwise: str) -> None:
    if not holds:
        raise DataCheckError(f"this run cannot be recorded: {otherwise}", where=key)
