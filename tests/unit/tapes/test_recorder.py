"""What a bucket must hold to become a tape; what it lacks is said, never guessed. And what a learner writes down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, TryAgainError, UsageError
from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.protocol.log.keys import incarnation_key, inner_key, offer_key, read_inner_key
from diloco_cli.protocol.log.records import Beginning, Offer, ProcessClaim, TapeEvent
from diloco_cli.protocol.log.tape import MAX_EVENTS, EventLog
from diloco_cli.protocol.log.wire import encode
from diloco_cli.store.memory import MemoryStore
from diloco_cli.tapes.recorder import record
from tests.unit.protocol.books import hear, stepped
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.records import RUN, applied, genesis, merge, offer, output

STEPS = TapeEvent("steps", count=2, batch_tokens=4)
BEGAN = Beginning(0, (0, 0))
SAVED = inner_key("l0", 1, 2, digest(b"moments"))


def offers() -> list[Offer]:
    """Two of l0's first incarnation, one of its second, which restored what the first had saved."""
    first = offer(genesis(), events=(STEPS, TapeEvent("saved", count=2)), began=BEGAN)
    second = offer(genesis(), fragment=1, seq=1, slot=1, events=(TapeEvent("heard", n=1, local_steps=4),), inner=SAVED)
    again = offer(genesis(), incarnation=2, slot=2, data_start=8, events=(STEPS,), began=Beginning(8, (1, 0), SAVED))
    return [first, second, again]


def bucket(*published: Offer, merged: tuple[tuple[int, int], ...] = ((1, 0), (2, 0))) -> MemoryStore:
    """A log whose merges apply l0's offers (incarnation, seq), one each."""
    log = WrittenLog(RUN)
    for one in published:
        log.store.create(offer_key(*one.id), encode(one))
    for slot, (incarnation, seq) in enumerate(merged):
        known = next((o for o in published if o.id == ("l0", incarnation, seq)), published[0])
        taken = applied(
            incarnation=incarnation, seq=seq, base=known.base, data_start=known.data_start, data_end=known.data_end
        )  # fmt: skip
        log.append("merge", slot=slot, inputs=(taken,), outputs=(output(slot % 2, slot + 1, slot),), alive=2)
    return log.store


def fit(published: list[Offer]) -> list[Offer]:
    """Slots 0 and 1 are merged here; the second incarnation's offer is for fragment 1."""
    return [*published[:2], replace(published[2], slot=1, fragment=1)]


def test_a_tape_holds_what_the_offers_tell_in_the_order_of_happening() -> None:
    tape = record(bucket(*fit(offers())), RUN)
    first, again = tape.tracks
    assert (first.learner, first.incarnation, first.position, first.versions) == ("l0", 1, 0, (0, 0))
    assert first.events == (STEPS, TapeEvent("saved", count=2), TapeEvent("sent", seq=0)), (
        "no further than what was merged"
    )
    assert (again.incarnation, again.position, again.inner_step, again.inner_incarnation) == (2, 8, 2, 1)
    assert again.events == (STEPS, TapeEvent("sent", seq=0, fragment=1, slot=1))
    assert [(m.n, m.slot, m.fragment, m.inputs) for m in tape.merges] == [
        (1, 0, 0, ((("l0", 1, 0), 32.0),)), (2, 1, 1, ((("l0", 2, 0), 32.0),)),
    ]  # fmt: skip
    # 8 tokens on fragment 0 and 8 on fragment 1, each half of the parameters
    assert [m.tokens for m in tape.merges] == [4, 8]
    assert [m.state_digest for m in tape.merges] == ["state-1", "state-2"]


def test_a_tape_tells_how_many_ranks_each_incarnation_had() -> None:
    store = bucket(*fit(offers()))
    store.create(incarnation_key("l0", 2), encode(ProcessClaim(2, "nonce", "host", 1, "then", "test", ranks=4)))
    assert [(track.incarnation, track.ranks) for track in record(store, RUN).tracks] == [(1, 1), (2, 4)]


def test_moments_are_followed_to_an_incarnation_of_which_nothing_was_merged() -> None:
    second = replace(fit(offers())[2], slot=0, fragment=0)
    tape = record(bucket(*offers()[:2], second, merged=((2, 0),)), RUN)
    assert [(t.incarnation, [e.kind for e in t.events]) for t in tape.tracks] == [
        (1, ["steps", "saved", "sent"]), (2, ["steps", "sent"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: o[1:], "this offer, or what comes after it, is missing"),
        (lambda o: [replace(o[0], began=None), *o[1:]], "does not tell how it began"),
        (lambda o: [replace(o[0], events=(TapeEvent("lost"),)), *o[1:]], "more happened before it"),
        (lambda o: [replace(o[0], steps=3), *o[1:]], "not the offer that the log names"),
        (lambda o: [replace(o[0], events=(STEPS,)), o[2]], "missing"),
        (lambda o: [*o[:2], replace(o[2], began=Beginning(8, (1, 0), "inner/l0/x"))], "it restored 'inner/l0/x'"),
        (lambda o: [*o[:2], replace(o[2], began=replace(o[2].began, inner=SAVED.replace("l0", "l1")))], "it restored"),
    ],
    ids=["missing", "no beginning", "lost", "other", "never saved", "no key", "another's moments"],
)
def test_what_cannot_be_reconstructed_is_refused_with_the_key(change: Any, reason: str) -> None:
    with pytest.raises(DataCheckError, match=f"cannot be recorded: .*{reason}") as caught:
        record(bucket(*change(fit(offers()))), RUN)
    assert caught.value.where is not None and caught.value.where.startswith("offer/l0/")


def test_a_run_without_a_merge_is_for_later() -> None:
    with pytest.raises(TryAgainError):
        record(bucket(merged=()), RUN)


def test_a_run_with_a_loop_of_its_owners_cannot_be_recorded() -> None:
    own = replace(RUN, islands=tuple(replace(island, infra="loop/external") for island in RUN.islands))
    with pytest.raises(UsageError, match=r"l0.* trained with a loop of its owner's"):
        record(bucket(*fit(offers())), own)


def test_a_key_of_saved_moments_is_read_back() -> None:
    assert read_inner_key(SAVED) == ("l0", 1, 2)
    assert read_inner_key("inner/l0/1/2-x") is None and read_inner_key("state/l0/00000001/000000000002-x") is None


# -- what a learner writes down ---------------------------------------------------------------------------------------


def test_steps_in_a_row_are_one_event_and_too_many_events_are_a_gap() -> None:
    log = EventLog()
    for batch_tokens in (4, 4, 4, 8):
        log.stepped(batch_tokens)
    assert log.take() == (
        None,
        (TapeEvent("steps", count=3, batch_tokens=4), TapeEvent("steps", count=1, batch_tokens=8)),
    )
    assert log.take() == (None, ())
    for version in range(MAX_EVENTS + 3):
        log.note(TapeEvent("adopted", version=version))
    _, events = log.take()
    assert events[0] == TapeEvent("lost") and len(events) == 4


def test_a_learners_books_tell_all_that_shaped_its_parameters() -> None:
    progress = Progress(RUN, "l0", 2, genesis(), 0)
    progress.begin("key", moments_lost=False)
    assert stepped(progress, 1) == []
    (draft,) = stepped(progress, 1)  # a slot every two steps: 4 local steps, 2 fragments
    assert (draft.began, draft.events) == (Beginning(0, (0, 0), "key"), (TapeEvent("steps", count=2, batch_tokens=4),))
    head = merge(genesis(), applied("l0", incarnation=1, data_end=20))  # a predecessor's offer came late
    assert hear(progress, head)
    assert stepped(progress, 1, tokens=3) == []
    progress.rebased(head.outputs[0], draft)
    progress.saved(7)
    (late,) = stepped(progress, 1)
    assert late.began is None
    assert late.events == (
        TapeEvent("heard", n=1, local_steps=4), TapeEvent("moved", position=20), TapeEvent("dropped", fragment=0),
        TapeEvent("dropped", fragment=1), TapeEvent("steps", count=1, batch_tokens=3),
        TapeEvent("adopted", fragment=0, version=1, mixing="rebase", since=0), TapeEvent("saved", count=7),
        TapeEvent("steps", count=1, batch_tokens=4),
    )  # fmt: skip
