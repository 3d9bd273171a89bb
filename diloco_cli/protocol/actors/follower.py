"""How a learner follows the log beside its training: it passes on a new head at once, then each version that the head
brings when it has arrived; between these it sends heartbeats and checks for a successor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from diloco_cli.errors import FencedError
from diloco_cli.protocol.actors.joining import fetch_weights
from diloco_cli.protocol.actors.ports import Incarnation, Values
from diloco_cli.protocol.actors.progress import is_over
from diloco_cli.protocol.log.claims import ClaimWatch
from diloco_cli.protocol.log.commit_log import read_log, refuse_revoked
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, sealed
from diloco_cli.protocol.log.keys import heartbeat_key, key_of, number_of
from diloco_cli.protocol.log.operations import Now, Put, Sleep, Steps, together
from diloco_cli.protocol.log.records import FragmentVersion
from diloco_cli.protocol.log.state import LearnerState, RunState
from diloco_cli.protocol.rules.pacing import expected_slot_s, fence_check_every_s, next_request_s
from diloco_cli.signing import learner_signer

HEARTBEAT_EVERY_S = 3.0
SLEEP_BOUNDS_S = (0.02, 0.5)
DRAINS_LOOK_S = 1.0  # an operator waits for the learner's end, or its machine is about to be taken away
LOOKS_FOR_ROLLBACK, LOOK_AGAIN_S = 3, 0.5  # before a learner goes back without a version that cannot be read
FetchedVersion = tuple[FragmentVersion, Values, float]
"""A version, its decoded values, and when the learner first saw it in the log."""


@dataclass(frozen=True)
class Mail:
    """News for the training: the state at the log's head, and of each fragment the newest version that has arrived
    since the last mail was taken."""

    state: RunState
    versions: dict[int, FetchedVersion] = field(default_factory=dict)


class Follower:
    """The follower of one learner. The training thread takes the mail, reads the plain attributes, sets `leaves`."""

    def __init__(
        self, learner: Incarnation, heartbeat_facts: Callable[[], dict[str, Any]], wakes: Callable[[], None]
    ) -> None:
        self._learner, self._heartbeat_facts, self._wakes = learner, heartbeat_facts, wakes
        self._mail: deque[Mail] = deque()  # at most one: put by the follower, taken by the training
        self._fetched: dict[int, int] = {}
        self._looked_s = 0.0
        self.state = RunState()
        self.head = (self.state, 0.0, 0.0)  # the state, and two times between which its commit appeared
        self.found_s: float | None = None
        self.trouble = ""
        self.unreadable: frozenset[int] = frozenset()
        self.leaves = False

    def take(self) -> Mail | None:
        try:
            return self._mail.popleft()
        except IndexError:
            return None

    def _put(self, versions: list[FetchedVersion]) -> None:
        """Add to the mail that waits. Versions from before a rollback are dropped, also those not taken yet."""
        before = self.take()
        known = ({} if before is None else before.versions) | {version[0].fragment: version for version in versions}
        known = {f: version for f, version in known.items() if version[0].version >= self.state.base_floor}
        self._mail.append(Mail(self.state, known))
        self._wakes()

    # -- the log ------------------------------------------------------------------------------------------------

    def newest(self, state: RunState) -> Steps[tuple[RunState, dict[int, FetchedVersion]]]:
        """The newest committed version of every fragment, from which a new incarnation starts. Some are missing if the
        run ends while they cannot be read."""
        self.state, joined_at = state, state.n
        self._fetched = {output.fragment: -1 for output in state.outputs}
        versions: dict[int, FetchedVersion] = {}
        while True:
            for version in (yield from self._fetch_wanted((yield Now()))):
                versions[version[0].fragment] = version
            if not self.trouble or is_over(self.state, joined_at):
                return self.state, versions
            yield Sleep(LOOK_AGAIN_S)  # the version may have been collected: then the log names a newer one
            self.state = yield from read_log(self._learner.run, self.state)

    def look(self) -> Steps[bool]:
        """Read the new commits of the log and fetch their versions; False if there are none."""
        since_s, asked_s = self._looked_s, (yield Now())
        known = self.state
        self.state = yield from read_log(self._learner.run, known)
        self._looked_s = asked_s
        news, seen_s = self.state.n > known.n, (yield Now())
        if news:
            refuse_revoked(self._learner.run, self.state, learner_signer(self._learner.name))
            if self.state.learner(self._learner.name).floor > self._learner.joined.incarnation:  # under another key
                raise self._fenced()
            self.head = (self.state, since_s, seen_s)
        if self.state.slot > known.slot:  # an evaluation may come right before a merge, which is a slot after another
            self.found_s = seen_s
        if self.state.base_floor > known.base_floor:
            yield from self._look_for_rollback(seen_s)
            return True
        if news:
            self._put([])
        elif not self.trouble:
            return False  # every version of this head was read
        yield from together([self._pass_on(output, seen_s) for output in self._wanted()])
        self._tell_trouble()
        return news

    def _pass_on(self, output: FragmentVersion, seen_s: float) -> Steps[None]:
        version = yield from self._fetch(output, seen_s)
        if version is not None:
            self._put([version])

    def _look_for_rollback(self, seen_s: float) -> Steps[None]:
        """Pass on all versions of a rollback at once, so that no learner trains on a mixture of old and restored
        fragments. A version that cannot be read is left for later: a merge must supersede it, so none may wait."""
        versions: dict[int, FetchedVersion] = {}
        for attempt in range(LOOKS_FOR_ROLLBACK):
            if attempt:
                yield Sleep(LOOK_AGAIN_S)
                self.state = yield from read_log(self._learner.run, self.state)
            for version in (yield from self._fetch_wanted(seen_s)):
                versions[version[0].fragment] = version
            if not self.trouble:
                break
        self._put(list(versions.values()))

    def _fetch_wanted(self, seen_s: float) -> Steps[list[FetchedVersion]]:
        """All wanted versions that can be read."""
        found = yield from together([self._fetch(output, seen_s) for output in self._wanted()])
        self._tell_trouble()
        return [version for version in found if version is not None]

    def _wanted(self) -> list[FragmentVersion]:
        return [output for output in self.state.outputs if output.version > self._fetched[output.fragment]]

    def _fetch(self, output: FragmentVersion, seen_s: float) -> Steps[FetchedVersion | None]:
        data = yield from fetch_weights(self._learner.run, output)
        if data is None:
            return None
        self._fetched[output.fragment] = output.version
        return output, self._learner.wire.decode(output, data), seen_s

    def _tell_trouble(self) -> None:
        """State in the heartbeat, and once to the observer, which version cannot be read, until a newer one is."""
        wanted = self._wanted()
        gone = [f"version {output.version} of fragment {output.fragment} cannot be read" for output in wanted]
        self.unreadable = frozenset(output.fragment for output in wanted)
        before, self.trouble = self.trouble, ", ".join(gone[:1])
        if self.trouble and self.trouble != before:
            self._learner.observer.missed(self.trouble)

    # -- behind the training ------------------------------------------------------------------------------------

    def follow(self) -> Steps[None]:
        """Follow until the learner leaves. Raises FencedError when a newer incarnation has its place."""
        next_heartbeat_s = next_fence_s = next_look_s = asked_s = self._looked_s = yield Now()
        own = self._learner.joined.incarnation
        claims = ClaimWatch.beside(self._learner.run.keyring, self._learner.name, key_of(own), own)
        while not self.leaves:
            now_s: float = yield Now()
            if now_s >= next_heartbeat_s:
                next_heartbeat_s = now_s + HEARTBEAT_EVERY_S
                yield from self.send_heartbeat()
            if now_s >= next_fence_s:
                next_fence_s = now_s + fence_check_every_s(self._slot_s())
                if (yield from claims.look()) is not None:
                    raise self._fenced()
            if now_s >= next_look_s:
                if (yield from self.look()):
                    next_look_s = yield Now()
                    continue
                asked_s = now_s
            # computed anew each time, as the measured time of a step may have changed
            known_s = None if self.trouble else self.found_s  # a missing version may be readable again at any time
            next_look_s = next_request_s(known_s, asked_s, self._slot_s())
            if self._learner.doing is LearnerState.DRAINING:
                next_look_s = min(next_look_s, asked_s + DRAINS_LOOK_S)
            low, high = SLEEP_BOUNDS_S
            yield Sleep(min(high, max(low, next_look_s - (yield Now()))))

    def _fenced(self) -> FencedError:
        mine = f"incarnation {number_of(self._learner.joined.incarnation)} of {self._learner.name}"
        return FencedError(f"a newer process has taken the place of {mine}")

    def _slot_s(self) -> float:
        """The expected time between two commits: as the log states it, limited by the learner's own measurement."""
        learner = self._learner
        own_s = learner.watch.expected_slot_s(learner.progress.round_steps, learner.run.num_fragments)
        return expected_slot_s(0.0 if self.state.window is None else self.state.window.slot_s, own_s)

    def send_heartbeat(self) -> Steps[None]:
        yield Put(heartbeat_key(self._learner.name), self.heartbeat_record())

    def heartbeat_record(self) -> bytes:
        learner = self._learner
        return sealed(
            learner.run.keyring, learner_signer(learner.name), heartbeat_key(learner.name), self.heartbeat()
        )  # fmt: skip

    def heartbeat(self) -> LearnerHeartbeat:
        learner, progress = self._learner, self._learner.progress
        uploading = learner.doing is LearnerState.TRAINING and progress.aim.delivery.waiting > 0
        facts: dict[str, Any] = {
            "state": "UPLOADING" if uploading else learner.doing, "incarnation": number_of(progress.incarnation),
            "n": self.state.n, "step": progress.steps, "position": progress.position, "behind": progress.behind(),
            "loss": learner.loss if learner.loss is not None and isfinite(learner.loss) else None,
            "note": learner.note, "tokens_per_s": 0.0, **self._heartbeat_facts(),
        }  # fmt: skip
        return LearnerHeartbeat(**facts)
