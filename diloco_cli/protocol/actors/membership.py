"""Islands that join a run after its launch: they ask, the syncer admits them in the log, they enter at its head.

There is no record of a refusal: whoever reads the log can tell by the same rule whether an island may join, and so each
island finds that out itself. From the `membership` commit on the island is like any other. The data is divided into
`data.shards` streams at the launch, and the k-th island ever known to the run reads stream k, for ever; without a free
one no island is admitted. The learning-rate schedule's pace, warm-up and goodput's denominator stay those of the
launch.

Requests lie under the name of each island, so that a bucket policy confines each to its own. Only those to the present
epoch's syncer count, which their keys tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from diloco_cli.config.settings import RESERVED_NAMES
from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.commit_log import refuse_revoked
from diloco_cli.protocol.log.commits import Membership
from diloco_cli.protocol.log.keys import JOINS, is_name, join_key, read_join_key
from diloco_cli.protocol.log.mending import patient_log
from diloco_cli.protocol.log.operations import List, Now, Sleep, Steps, together
from diloco_cli.protocol.log.records import (
    Island,
    Join,
    RecordError,
    RunFormat,
    create_signed,
    decode,
    encode,
    read_signed,
)
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.signing import Authenticator, learner_signer

LOOK_AGAIN_S = 0.5
ASK_ANEW_S = 15.0  # while a syncer serves: the request may have been damaged
MAX_REQUESTS = 1000  # of one island to one syncer
MAX_TEXT = 64
MAX_ACCELERATORS = 1 << 20
SHOWN = 8  # names in a hint
MAX_TIMES = 8  # a newcomer's batch over the largest of the launch


def refusal_of_island(island: Island, run: RunFormat) -> str | None:
    """Why `island` may not become a member of `run` (with the members it has), or None."""
    if not (is_name(island.region) and _is_short(island.accelerator) and _is_short(island.infra)):
        return "its region is no name, or what it says of its machine is no short text"
    if not 0 < island.num_accelerators < MAX_ACCELERATORS:
        return f"{island.num_accelerators} accelerators are not in 1 to {MAX_ACCELERATORS - 1}"
    if not (0 < island.nodes <= island.ranks < MAX_ACCELERATORS):
        return f"{island.ranks} ranks on {island.nodes} nodes are no island"
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


def admitted(run: RunFormat, state: RunState, wanted: Iterable[Island]) -> Membership | None:
    """The commit that admits all of these islands that may join; None if none may. Values that come from a plan are not
    taken from an island's request."""
    known = state.with_members(run)
    for island in wanted:
        if refusal_of_island(island, known) is None:
            member = replace(island, local_steps=known.settings.sync.every, tokens_per_s=0.0, step_s=0.0)
            known = replace(known, members=(*known.members, member))
    islands = known.members[len(state.members) :]
    if not islands:
        return None
    return Membership(islands=islands, reason=f"{len(known.all_islands)} of {known.num_shards} data shards are taken")


def enter(run: RunFormat, island: Island, nonce: str, time: str) -> Steps[RunFormat]:
    """Ask for `island` to be admitted, wait for the answer, and return the run with it.

    Waits as long as no syncer serves the run. Raises UsageError if it is refused, or if the run is over or stopped,
    also of an island that is a member already.
    """
    state = yield from patient_log(run)
    asked, asked_s = (-1, -1), 0.0  # the epoch and the commit when it asked last
    refuse_unless_running(run, state)
    refuse_revoked(run, state, learner_signer(island.name))
    while state.with_members(run).island(island.name) is None:
        known = state.with_members(run)
        hopeless = refusal_of_island(island, known)
        if hopeless is not None:
            raise _refused(island.name, hopeless, known)
        unheard = state.n > asked[1] and (yield Now()) >= asked_s + ASK_ANEW_S  # a syncer serves, and has not found it
        if state.n >= 0 and (state.epoch != asked[0] or unheard):
            yield from _ask(run, state.epoch, island, nonce, time)
            asked, asked_s = (state.epoch, state.n), (yield Now())
        yield Sleep(LOOK_AGAIN_S)
        state = yield from patient_log(run, state)
        refuse_unless_running(run, state)
    return state.with_members(run)


def _refused(name: str, hopeless: str, run: RunFormat) -> UsageError:
    islands = run.all_islands
    if len(islands) < run.num_shards:
        return UsageError(f"{name!a} may not join: {hopeless}", where=run.name)
    more = f" and {len(islands) - SHOWN} more" if len(islands) > SHOWN else ""
    return UsageError(
        f"no island of the run is called {name!a}, and it may not join: {hopeless}",
        where=run.name,
        hint=f"the run's islands: {', '.join(one.name for one in islands[:SHOWN])}{more}. Room for islands that join "
        "is made when a run begins, for 16 in all: data: {shards: 16} in run.yaml",
    )


def _ask(run: RunFormat, epoch: int, island: Island, nonce: str, time: str) -> Steps[None]:
    """Write the request under the first free number."""
    signer = learner_signer(island.name)
    for number in range(MAX_REQUESTS):
        key = join_key(island.name, epoch, number)
        mine = run.keyring.sign(signer, key, encode(Join(island, epoch, number, nonce, time)))
        if (yield from create_signed(run.keyring, signer, key, mine)) == mine:
            return


def refuse_unless_running(run: RunFormat, state: RunState) -> None:
    """An island that wants to join does not wait for a run that may never go on. Raises UsageError."""
    if state.phase != RunPhase.RUNNING:
        raise UsageError(f"run {run.name} is {state.phase}: no island can join it", hint="diloco status URL says why")


PAGE = 1000  # of the listing, for one look
MAX_JOINS_PER_LOOK = 32  # and so in one commit


@dataclass(frozen=True)
class FoundJoin:
    """A request with its key and bytes."""

    key: str
    data: bytes
    island: Island


@dataclass
class JoinQueue:
    """The requests of one bucket, for a syncer, or for the relay of a region. `_after`: the key after which the next
    look goes on with the listing."""

    run: RunFormat
    _after: str = ""

    def look(self, state: RunState) -> Steps[list[FoundJoin]]:
        """The next genuine requests to the present syncer, in the order of their keys. After the last one it begins
        anew."""
        run = state.with_members(self.run)
        if len(run.all_islands) >= run.num_shards:
            return []  # nobody can join
        keys: list[str] = yield List(JOINS, self._after, PAGE)
        counting = [key for key in keys if _counts(key, state.epoch, run)]
        asked = counting[:MAX_JOINS_PER_LOOK]
        if asked != counting:
            self._after = asked[-1]
        else:
            self._after = keys[-1] if len(keys) == PAGE else ""
        keyring = run.keyring.without(state.revoked)
        found = yield from together([_read_join(key, keyring) for key in asked])
        return [join for join in found if join is not None]


def _counts(key: str, epoch: int, run: RunFormat) -> bool:
    """Whether the key is one of a request to this epoch's syncer, of an island that is none of the run's."""
    named = read_join_key(key)
    return named is not None and named[1] == epoch and run.island(named[0]) is None


def _read_join(key: str, keyring: Authenticator) -> Steps[FoundJoin | None]:
    """The request, if it is a genuine one of the island that its key names."""
    named = read_join_key(key)
    assert named is not None
    data = yield from read_signed(keyring, learner_signer(named[0]), key)
    if data is None or not keyring.authenticates(learner_signer(named[0]), key, data):
        return None
    try:
        join = decode(Join, data, key)
    except RecordError:
        return None
    return FoundJoin(key, data, join.island) if join_key(join.island.name, join.epoch, join.number) == key else None
