"""Islands that join a run after its launch: they ask, the syncer admits them in the log, they enter at its head.

    request/<r>.json  kind join, with the island as it describes itself
    commit/<n>.json   kind membership, with the island as admitted; or refuse, with the reason

From the membership commit on the island is like any other: a learner process of its name takes its first incarnation,
starts from the newest committed versions, offers, and may leave at any time. The island keeps its data stream for ever:
the data is divided into `data.shards` streams at the launch, and the k-th island ever known to the run reads stream k,
so no data is repeated and no island's stream changes. Without a free stream no island is admitted.

The learning-rate schedule's pace, warm-up and goodput's denominator stay those of the launch.
"""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.config.settings import RESERVED_NAMES
from diloco_cli.errors import UsageError
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.commit_log import read_log, refuse_revoked
from diloco_cli.protocol.log.keys import is_name
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import RunPhase
from diloco_cli.signing import learner_signer

LOOK_AGAIN_S = 0.5
ASK_ANEW_S = 60.0  # with the same bytes, which count as the same request: it may have been overlooked
MAX_TEXT = 64
MAX_ACCELERATORS = 1 << 20
MAX_TIMES = 8  # a newcomer's batch over the largest of the launch, so that it cannot outweigh all other islands


def refusal_of_island(island: Island, run: RunFormat) -> str | None:
    """Why `island` may not become a member of `run` (with the members it has), or None."""
    if not (is_name(island.region) and _is_short(island.accelerator) and _is_short(island.infra)):
        return "its region is no name, or what it says of its machine is no short text"
    if not 0 < island.num_accelerators < MAX_ACCELERATORS:
        return f"{island.num_accelerators} accelerators are not in 1 to {MAX_ACCELERATORS - 1}"
    if island.micro_batch_tokens is not None and not 0 < island.micro_batch_tokens <= island.batch_tokens:
        return f"a micro-batch of {island.micro_batch_tokens} tokens is not in 1 to its batch of {island.batch_tokens}"
    return contradiction_of_member(island, run)


def contradiction_of_member(island: Island, run: RunFormat) -> str | None:
    """Why no log can hold a commit that admits `island` to `run`, or None. The limits on what an island says of its
    machine are not checked here: they are newer than some logs, and nothing is computed from those values."""
    if not is_name(island.name) or island.name in RESERVED_NAMES:
        return "that is not a name that an island can have"
    if run.island(island.name) is not None:
        return "an island of that name takes part already"
    most = MAX_TIMES * max(known.batch_tokens for known in run.islands)
    if not 0 < island.batch_tokens <= most:
        return f"a batch of {island.batch_tokens} tokens is not in 1 to {most} ({MAX_TIMES} x the launch's largest)"
    known = len(run.islands) + len(run.members)
    if known >= run.num_shards:
        return f"the data has {run.num_shards} shards (data.shards at the launch), and {known} islands have one each"
    return None


def _is_short(text: str) -> bool:
    """Whether a text is short enough for the log, which keeps it for ever, and for every snapshot."""
    return len(text) <= MAX_TEXT and text.isprintable()


def as_admitted(island: Island, run: RunFormat) -> Island:
    """The new member as the log states it: values that come from a plan are not taken from the island's request."""
    return replace(island, local_steps=run.settings.sync.every, tokens_per_s=0.0, step_s=0.0)


def enter(run: RunFormat, island: Island, nonce: str, time: str) -> Steps[RunFormat]:
    """Ask for `island` to be admitted, wait for the answer, and return the run with it.

    Waits as long as no syncer serves the run. Raises UsageError if it is refused, or if the run is over or stopped,
    also of an island that is a member already.
    """
    state = yield from read_log(run)
    asked: int | None = None
    ask_s: float = yield Now()
    before = _refusals(state, island)
    relayed = run.region_store(island.region) is not None  # then the request has another number at home
    refuse_unless_running(run, state)
    refuse_revoked(run, state, learner_signer(island.name))
    while state.with_members(run).island(island.name) is None:
        hopeless = refusal_of_island(island, state.with_members(run))
        if hopeless is not None:
            raise UsageError(refusal_text(island.name, hopeless), where=run.name)
        refused = [note for note in _refusals(state, island) if note not in before]
        if asked is not None and (refused if relayed else state.next_request > asked):
            raise UsageError(_answer(state, island), where=run.name)
        if state.n >= 0 and (yield Now()) >= ask_s:
            asked = yield from ask(state, "join", nonce, time, island=island, keyring=run.keyring)
            ask_s = (yield Now()) + ASK_ANEW_S
        yield Sleep(LOOK_AGAIN_S)
        state = yield from read_log(run, state)
        refuse_unless_running(run, state)
    return state.with_members(run)


def refuse_unless_running(run: RunFormat, state: RunState) -> None:
    """An island that wants to join does not wait for a run that may never go on. Raises UsageError."""
    if state.phase != RunPhase.RUNNING:
        raise UsageError(f"run {run.name} is {state.phase}: no island can join it", hint=f"diloco status {run.name}")


def refusal_text(name: str, reason: str) -> str:
    return f"{name!a} may not join: {reason}"


def _answer(state: RunState, island: Island) -> str:
    texts = _refusals(state, island)
    return texts[-1][1] if texts else refusal_text(island.name, "the run refused it")


def _refusals(state: RunState, island: Island) -> list[tuple[str, str]]:
    """(Time, text) of the log's recent refusals of such an island."""
    begins = refusal_text(island.name, "")
    return [(note.time, note.text) for note in state.metrics.notes if note.text.startswith(begins)]
