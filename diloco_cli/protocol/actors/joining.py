"""How a learner's process joins and publishes: its requests to the store beside the training loop.

`Saves`: the saved moments of the inner optimizer, with the commit of each, and how to return to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from diloco_cli.errors import FencedError, TakenError
from diloco_cli.protocol.actors.membership import refuse_unless_running
from diloco_cli.protocol.log.claims import claim_incarnation, next_offer
from diloco_cli.protocol.log.commit_log import refuse_revoked
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, LearnerHeartbeat, genuine
from diloco_cli.protocol.log.keys import (
    delta_key,
    heartbeat_key,
    max_fragment_bytes,
    number_of,
    offer_key,
    read_inner_key,
    weights_key,
)
from diloco_cli.protocol.log.mending import patient_log
from diloco_cli.protocol.log.operations import Create, Get, Now, Sleep, Steps, together
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Offer,
    ProcessClaim,
    RecordError,
    RunFormat,
    create_signed,
    decode,
    encode,
    get_named,
)
from diloco_cli.protocol.log.state import LearnerRecord, LearnerState, RunState
from diloco_cli.signing import UNSIGNED, Authenticator, learner_signer

WAIT_FOR_GENESIS_S = 0.1
HEARD_WITHIN_S, LOOK_AGAIN_S = 8.0, 0.5  # a living learner writes a heartbeat every 3 s
OVER = (LearnerState.DONE, LearnerState.FAILED, LearnerState.FENCED)
MAX_PREDECESSORS = 16
REMEMBERED = 16  # the newest saves; an older one is hardly worth going back to


@dataclass(frozen=True)
class Joined:
    """What a new incarnation starts from: the log's state, where its data begins, its saved moments as in `Saves`, the
    newest last, and its predecessor's last heartbeat.

    The data begins after everything that a predecessor published: no sample is merged twice, and samples that the
    predecessor drew and did not publish are skipped. Saved moments that an offer from before a rollback names are not
    used, unless that rollback undid no merge. `state` is the log before the claim: a stop after it counts.
    """

    incarnation: int
    state: RunState
    data_start: int
    saves: tuple[tuple[int, str], ...]
    heartbeat: LearnerHeartbeat | None


def join(run: RunFormat, learner: str, claim: ProcessClaim) -> Steps[Joined]:
    """Become the next incarnation of `learner`. Waits for commit 0, because no learner trains from weights of its own.

    An island of the launch may start before the syncer that resumes the run. An island that joined later raises
    UsageError if the run has been stopped, or has ended, since its admission."""
    state = yield from patient_log(run)
    if all(island.name != learner for island in run.islands):
        refuse_unless_running(run, state)
    while not state.outputs:
        yield Sleep(WAIT_FOR_GENESIS_S)
        state = yield from patient_log(run, state)
    refuse_revoked(run, state, learner_signer(learner))
    known = state.learner(learner)
    keyring = run.keyring.without(state.revoked)
    place = yield from claim_incarnation(keyring, learner, claim, known.floor)
    head, seen = state, None
    newest: dict[int, Offer] = {}  # also those that were found before a floor rose above them
    while seen is None or seen.gc_floor < head.gc_floor:  # behind a floor that has risen meanwhile, offers may be gone
        seen = head
        newest |= yield from _newest_offers(keyring, seen.learner(learner), learner, place.earlier)
        if number_of(place.incarnation) > 1:  # an earlier process may have gone on for long
            head = yield from patient_log(run, seen)
    offers = [newest[number] for number in sorted(newest)]
    heartbeat = yield from _last_heartbeat(keyring, learner)
    saves = [(head.n, o.inner) for o in offers if o.inner and o.base >= head.moments_floor][-1:]
    if heartbeat is not None and heartbeat.moments:  # the newest, if its process made no offer after it
        saves.append((heartbeat.moments_n, heartbeat.moments))
    found = [(key[1:], save) for save in saves if (key := read_inner_key(save[1])) is not None and key[0] == learner]
    data_start = max([head.learner(learner).data_end, *(offer.data_end for offer in offers)])
    return Joined(place.incarnation, state, data_start, tuple(save for _, save in sorted(found)), heartbeat)


def refuse_beside_living(run: RunFormat, learner: str) -> Steps[None]:
    """A process that a person starts takes nobody's place without a word. One that lives writes another heartbeat while
    this waits; one that has ended, or has said that it leaves, is not waited for. Raises TakenError."""
    heard = before = yield from _last_heartbeat(run.keyring, learner)
    until_s = (yield Now()) + HEARD_WITHIN_S
    while heard is not None and heard.state not in OVER and heard == before:
        if (yield Now()) >= until_s:
            return
        yield Sleep(LOOK_AGAIN_S)
        heard = yield from _last_heartbeat(run.keyring, learner)
    if heard is not None and heard.state not in OVER:
        raise TakenError(
            f"{learner} takes part already: {heard.process}, {heard.state}",
            where=run.name,
            hint="end it first (Ctrl-C or SIGTERM to its supervisor, which would start it again); or take part as one"
            " more: --join with a --name of your own",
        )


def _last_heartbeat(keyring: Authenticator, learner: str) -> Steps[LearnerHeartbeat | None]:
    key = heartbeat_key(learner)
    data = genuine(keyring, learner_signer(learner), key, (yield Get(key, MAX_HEARTBEAT_BYTES)))
    try:
        return None if data is None else decode(LearnerHeartbeat, data, key)
    except RecordError:
        return None


def _newest_offers(
    keyring: Authenticator, known: LearnerRecord, learner: str, predecessors: Sequence[int]
) -> Steps[dict[int, Offer]]:
    """The last offer of each predecessor that has published any, where this is `known` of the learner. Each incarnation
    began after what those MAX_PREDECESSORS before it had published, so these are enough, and the floor's; if an older
    one offers late, the log refuses an overlap (rules/merging.py)."""
    earlier = sorted({*predecessors[-MAX_PREDECESSORS:], *(one for one in predecessors if one == known.floor)})
    settled = [known.next_seq if number == known.floor else 0 for number in earlier]
    newest = yield from together([_newest_offer(keyring, learner, *one) for one in zip(earlier, settled, strict=True)])
    return {number: offer for number, offer in zip(earlier, newest, strict=True) if offer is not None}


def _newest_offer(keyring: Authenticator, learner: str, incarnation: int, settled: int) -> Steps[Offer | None]:
    """The last offer of an incarnation: offers are dense, so the walk starts at the last one known to be settled."""
    newest: Offer | None = None
    seq = max(0, settled - 1)
    while True:
        found = yield from next_offer(keyring, learner, incarnation, seq, is_overdue=True)
        if found.data is None and not found.damaged:
            return newest
        with suppress(RecordError):  # the syncer refuses a bad offer; the next one may be good
            newest = newest if found.data is None else decode(Offer, found.data, offer_key(learner, incarnation, seq))
        seq += 1


def publish(offer: Offer, payload: bytes, keyring: Authenticator = UNSIGNED) -> Steps[bytes]:
    """Write the payload, if there is one, then the offer that names it. Returns the offer's bytes. FencedError if
    another process with the learner's key has written this offer. If a stranger's object is in the way, the offer is as
    good as damaged, and refused: its progress goes into the next one."""
    if payload:
        yield Create(delta_key(*offer.id, offer.payload_digest), payload)
    key = offer_key(*offer.id)
    signer = learner_signer(offer.learner)
    mine = keyring.sign(signer, key, encode(offer))
    there = yield from create_signed(keyring, signer, key, mine)
    if there != mine and keyring.authenticates(signer, key, there):
        number = number_of(offer.incarnation)
        raise FencedError(f"another process publishes as incarnation {number} of {offer.learner}", where=key)
    return mine


def fetch_weights(run: RunFormat, output: FragmentVersion) -> Steps[bytes | None]:
    """A committed version's weights; None if they are gone (read the log again) or their digest differs."""
    key = weights_key(output.fragment, output.version, output.epoch, output.weights_digest)
    data = yield from get_named(key, output.weights_digest, max_fragment_bytes(run.layout, output.fragment))
    return None if isinstance(data, str) else data


def fetch_moments(key: str | None, max_bytes: int) -> Steps[bytes | None]:
    """Saved moments, if their digest is that in their key. Such keys come from offers and heartbeats, which are not
    trusted."""
    if key is None or read_inner_key(key) is None:
        return None
    data = yield from get_named(key, key.rpartition("/")[2].partition("-")[2], max_bytes)
    return None if isinstance(data, str) else data


class Saves:
    """Keys of this process's saves, each with the newest commit known when it was made. The lane that uploads moments
    adds them, the training thread asks for them."""

    def __init__(self) -> None:
        self._saves: tuple[tuple[int, str], ...] = ()
        self._rollbacks: tuple[tuple[int, int], ...] = ()

    def add(self, key: str, n: int) -> None:
        left = (save for save in self._saves if self._counts(save[0]))  # undone saves must not displace valid ones
        self._saves = (*left, (n, key))[-REMEMBERED:]

    @property
    def last(self) -> tuple[int, str | None]:
        """The save that offers and heartbeats name, behind its commit. What a rollback has undone does not count."""
        return next((save for save in reversed(self._saves) if self._counts(save[0])), (0, None))

    @property
    def newest(self) -> str | None:
        return self.last[1]

    def _counts(self, n: int) -> bool:
        return all(n <= to or n >= at for to, at in self._rollbacks)

    def go_back(self, rollbacks: tuple[tuple[int, int], ...]) -> str | None:
        """`rollbacks`: as in RunState. Saves made between the two commits of a rollback do not count, nor do those of
        them that are still being uploaded. Returns the newest save that counts."""
        self._rollbacks = rollbacks
        return self.newest

    def forget(self, key: str) -> None:
        """It could not be restored."""
        self._saves = tuple(save for save in self._saves if save[1] != key)
