"""A recorded tape, played on one process, gives the run's parameters bit for bit, whatever the timing was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec import structs

from diloco_cli.config.settings import ColdStartSettings, SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.observe.replay import LogVerifier, verified
from diloco_cli.protocol.log.records import RunFormat, TapeEvent
from diloco_cli.protocol.log.tape import Tape, TapeMerge, Track
from diloco_cli.store.memory import MemoryStore
from diloco_cli.tapes.files import read_tape, write_tape
from diloco_cli.tapes.player import PlayedMerge, Player
from diloco_cli.tapes.recorder import record
from diloco_cli.tasks.build import build_data
from tests.numerics.harness import outer_parameters
from tests.numerics.live import Chance, SlowData, live_format, run_live
from tests.numerics.player_snapshot import resume, save_snapshot

pytestmark = pytest.mark.usefixtures("one_thread")
SYNC = SyncSettings(
    every=12, fragments=3, overlap=1, codec="int8", weights_codec="bf16", local_steps="measured", blend=0.25
)  # fmt: skip
REBASING = {"mixing": "rebase", "codec": "int4", "error_feedback": True, "clip": 1.05}


@cache
def recorded(sync: SyncSettings) -> tuple[RunFormat, MemoryStore, Tape]:
    """Learners of three speeds, versions adopted on arrival, a store that answers late, a learner that dies and comes
    back with restored moments. Once more if it came back too late to be merged (`rebase` throws nothing away, and such
    a run is soon over), or if nothing was clipped that should: both depend on the timing."""
    for seed in range(6):
        run = live_format(sync, rounds=30 if sync.mixing in ("rebase", "adaptive") else 8)
        store = run_live(run, Chance(late_s=0.002, seed=seed, dies_after=20))
        tape = record(store, run)
        restored = any(track.incarnation == 2 and track.inner_step for track in tape.tracks)
        if restored and (sync.clip == SYNC.clip or any(merge.scales for merge in tape.merges)):
            return run, store, tape
    raise AssertionError("no moments were restored, or nothing was clipped")


def play(tape: Tape) -> list[PlayedMerge]:
    return list(Player(tape).merges())


@cache
def recorded_and_played(sync: SyncSettings) -> list[PlayedMerge]:
    return play(recorded(sync)[2])


def first_difference(tape: Tape) -> int | None:
    """The number of the first merge that comes out otherwise than the tape says."""
    return next((merge.n for merge in Player(tape).merges() if not merge.as_recorded), None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        REBASING,
        pytest.param({"mixing": "rebase"}, marks=pytest.mark.long),
        pytest.param({"mixing": "blend", "codec": "bf16"}, marks=pytest.mark.long),
        pytest.param({"mixing": "adaptive", "codec": "int4"}, marks=pytest.mark.long),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "paper",
)
def test_a_recorded_run_is_repeated_bit_for_bit(changes: dict[str, object]) -> None:
    run, store, tape = recorded(replace(SYNC, **changes))
    player = Player(tape)
    played = list(player.merges())
    assert len(played) == len(tape.merges) >= 12
    assert all(merge.expected is not None for merge in played)
    assert [merge.n for merge in played if not merge.as_recorded] == []
    assert any(event.kind == "adopted" for track in tape.tracks for event in track.events)
    outer, expected = player.outer_parameters(), outer_parameters(run, store)
    assert all(torch.equal(outer[name], expected[name]) for name in expected)
    assert LogVerifier(store, run).replay().ok
    if "clip" in changes:
        assert any(merge.scales for merge in tape.merges), "nothing was clipped"
        assert any(event.since is not None for track in tape.tracks for event in track.events if event.kind == "sent")


def test_a_replay_takes_the_micro_batches_that_each_learner_took() -> None:
    """Batches of four rows in micro-batches of three and one, of one by one, and whole: the sums round differently."""
    run = live_format(SYNC, rounds=4)
    sizes = dict(zip([island.name for island in run.islands], (3, 1, None), strict=True))
    run = replace(run, islands=tuple(replace(i, micro_batch_tokens=sizes[i.name]) for i in run.islands))
    tape = record(run_live(run, Chance(late_s=0.002)), run)
    assert {name: Player(tape).replica_of(name).micro_batch_tokens for name in sizes} == sizes
    assert first_difference(tape) is None
    whole = replace(run, islands=tuple(replace(island, micro_batch_tokens=None) for island in run.islands))
    assert first_difference(replace(tape, run=whole)) is not None


def test_the_replays_own_timing_changes_nothing(tmp_path: Path) -> None:
    """Through a file, with slow data, and a look at the parameters in between."""
    run, _, tape = recorded(SYNC)
    write_tape(tape, tmp_path / "run.tape.gz")
    again = read_tape(tmp_path / "run.tape.gz")
    assert again == tape
    slow = SlowData(build_data(run.settings), 0.0003)
    player, played, losses = Player(replace(again, run=run), data=slow), [], []  # a tape by itself consents to nothing
    for merge in player.merges():
        played.append(merge)
        losses.append(player.held_out_loss(1))
    assert played == recorded_and_played(SYNC)
    assert losses[-1] < losses[0], "the run learned nothing"


def test_what_the_replay_says_of_losses_is_what_the_learners_said() -> None:
    _, store, tape = recorded(SYNC)
    said = [offer_loss(store, merge) for merge in tape.merges]
    assert [list(merge.losses) for merge in recorded_and_played(SYNC)] == said


def offer_loss(store: MemoryStore, merge: TapeMerge) -> list[float]:
    from diloco_cli.protocol.log.keys import offer_key
    from diloco_cli.protocol.log.records import Offer
    from diloco_cli.protocol.log.wire import decode

    offers = [decode(Offer, store.get(offer_key(*offer)) or b"", "offer") for offer, _ in merge.inputs]
    return [offer.loss for offer in offers if offer.loss is not None]


# -- one altered event shows ------------------------------------------------------------------------------------------


def altered(tape: Tape, kind: str, alter: Callable[[TapeEvent], TapeEvent | None], most: int) -> Tape:
    """The tape with the longest track's first `most` events of a kind replaced, or left out for None."""
    track = max(tape.tracks, key=lambda track: len(track.events))
    chosen = set([i for i, event in enumerate(track.events) if event.kind == kind][:most])
    events = [alter(event) if i in chosen else event for i, event in enumerate(track.events)]
    kept = tuple(event for event in events if event is not None)
    other = replace(track, events=kept)
    return replace(tape, tracks=tuple(other if t is track else t for t in tape.tracks))


@pytest.mark.parametrize(
    ("kind", "most", "alter"),
    [
        ("steps", 1, lambda e: structs.replace(e, count=e.count + 1)),
        ("steps", 1, lambda e: structs.replace(e, batch_tokens=2 * e.batch_tokens)),
        ("heard", 9, lambda e: structs.replace(e, local_steps=1)),
        ("heard", 9, lambda e: None),
        ("adopted", 9, lambda e: None),
    ],
    ids=["one step more", "a larger batch", "another pace", "nothing heard", "nothing adopted"],
)
def test_another_history_is_noticed(kind: str, most: int, alter: Callable[[TapeEvent], TapeEvent | None]) -> None:
    _, _, tape = recorded(SYNC)
    assert all(merge.as_recorded for merge in recorded_and_played(SYNC))
    assert first_difference(altered(tape, kind, alter, most)) is not None


def test_another_weight_an_earlier_position_or_lost_moments_are_noticed() -> None:
    _, _, tape = recorded(SYNC)
    first = next(merge for merge in tape.merges if len(merge.inputs) > 1)
    (offer, weight), *others = first.inputs
    heavier = replace(first, inputs=((offer, 2 * weight), *others))
    merges = tuple(heavier if merge is first else merge for merge in tape.merges)
    assert first_difference(replace(tape, merges=merges)) == first.n
    track = tape.tracks[0]
    shifted = replace(track, position=track.position + 4)
    assert first_difference(replace(tape, tracks=(shifted, *tape.tracks[1:]))) == tape.merges[0].n
    fresh = tuple(replace(t, inner_step=None, inner_incarnation=None) for t in tape.tracks)
    assert first_difference(replace(tape, tracks=fresh)) is not None


# -- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, REBASING], ids=["paper", "rebase"])
def test_a_snapshot_at_any_moment_resumes_to_the_same_trajectory(changes: dict[str, object], tmp_path: Path) -> None:
    sync = replace(SYNC, **changes)
    _, _, tape = recorded(sync)
    whole, path = recorded_and_played(sync), tmp_path / "player.safetensors"
    moments = range(0, len(whole), max(1, len(whole) // 3))
    player = Player(tape)
    for moment in moments:
        while player.played < moment:
            next(player.merges())
        save_snapshot(player, path)
        resumed = resume(tape, path)
        assert list(resumed.merges()) == whole[moment:], f"after {moment} merges"


def test_a_snapshot_belongs_to_its_tape(tmp_path: Path) -> None:
    _, _, tape = recorded(SYNC)
    save_snapshot(Player(tape), tmp_path / "s.safetensors")
    with pytest.raises(UsageError, match="another tape"):
        resume(replace(tape, merges=tape.merges[:-1]), tmp_path / "s.safetensors")
    (tmp_path / "torn").write_bytes(b"{")
    with pytest.raises(UsageError, match="not a snapshot"):
        resume(tape, tmp_path / "torn")


# -- moments that go from one incarnation to the next -----------------------------------------------------------------


def test_an_incarnation_of_which_nothing_was_merged_still_hands_on_its_moments() -> None:
    """A chain by hand: the first incarnation saves, the second restores, saves and dies unmerged, the third is merged.
    Left out, any link changes the result."""
    run = live_format(replace(SYNC, local_steps="planned"), learners=1)
    batch = run.islands[0].batch_tokens

    def steps(count: int) -> TapeEvent:
        return TapeEvent("steps", count=count, batch_tokens=batch)

    def saved(count: int) -> TapeEvent:
        return TapeEvent("saved", count=count)

    start = (0,) * run.num_fragments
    first = Track("l0", 1, 0, start, events=(steps(2), saved(2)))
    second = Track("l0", 2, 4 * batch, start, inner_step=2, events=(steps(3), saved(5), steps(1)))
    third = Track("l0", 3, 9 * batch, start, inner_step=5, events=(steps(2), TapeEvent("sent", seq=0)))
    merge = TapeMerge(1, 0, 0, ((("l0", 3, 0), 1.0),), tokens=8)

    def outcome(*tracks: Track) -> str:
        return play(Tape(run, tracks, (merge,)))[0].state_digest

    chained = outcome(first, second, third)
    assert chained == outcome(third, second, first)
    unchained = replace(second, inner_step=None)
    assert len({chained, outcome(first, unchained, third), outcome(replace(third, inner_step=None))}) == 3


# -- the first rounds -------------------------------------------------------------------------------------------------


def test_a_run_whose_outer_optimizer_warms_up_is_repeated_and_verified_by_its_slots() -> None:
    """A player or a replay that took another round's learning rate would come to other bytes."""
    run = live_format(SYNC, rounds=6)
    start = ColdStartSettings(rounds=3, outer_lr=0.1, outer_momentum=0.0)
    run = replace(run, settings=replace(run.settings, cold_start=start))
    store = run_live(run, Chance(late_s=0.002, seed=0))
    tape = record(store, run)
    assert first_difference(tape) is None and verified(store, run).mismatches == []
    plain = replace(tape.run, settings=replace(tape.run.settings, cold_start=ColdStartSettings()))
    assert first_difference(replace(tape, run=plain)) is not None
