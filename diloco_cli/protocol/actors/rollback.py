"""Rollback: brings the parameters back to those after an earlier commit.

Nothing is taken out of the log. Every fragment's state and weights as of that commit are published again, as a version
whose number is that of the `rollback` commit; then the `rollback` commit is appended. From there on

    offers       whose base is older are refused (`before_rollback`): re-anchored, they would bring back undone merges
    learners     replace all their parameters at once, count from 0, and take their moments from before, or new ones
    tokens       those merged after the target no longer count, neither for the run's end nor for the learning rate
    data         is not read again: each learner's data position goes on
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_cli.digests import digest
from diloco_cli.errors import NotFoundError
from diloco_cli.layout import Layout
from diloco_cli.protocol.actors.merging import write_surely
from diloco_cli.protocol.log.commit_log import Pulse, no_pulse, state_after
from diloco_cli.protocol.log.commits import Rollback
from diloco_cli.protocol.log.keys import max_fragment_bytes, state_key, weights_key
from diloco_cli.protocol.log.operations import Get, List, Steps
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState


@dataclass(frozen=True)
class Return:
    """A rollback that can be made: the state `then`, after the target commit, and the state `now`."""

    then: RunState
    now: RunState

    def commit(self, outputs: tuple[FragmentVersion, ...]) -> Rollback:
        return back_to(self.then, outputs, f"{self.now.merges - self.then.merges} merges no longer count")

    def tokens_left(self, layout: Layout) -> int:
        """Merged tokens that will no longer count."""
        return self.now.tokens(layout) - self.then.tokens(layout)


def back_to(
    then: RunState, outputs: tuple[FragmentVersion, ...], reason: str, evaluated: int | None = None
) -> Rollback:
    """The rollback to the commit of `then`, which may be the newest one; `outputs`: its versions, published anew."""
    known = sorted(then.learners.items())
    shares = tuple((name, one.token_parameters) for name, one in known if one.token_parameters)
    return Rollback(to=then.n, outputs=outputs, shares=shares, reason=reason, evaluated=evaluated)


def return_to(
    run: RunFormat, state: RunState, to: int | None, pulse: Pulse = no_pulse
) -> Steps[Return | str]:  # fmt: skip
    """The rollback to commit `to` at this head, or the reason why there can be none."""
    if to is None or not state.gc_floor <= to < state.n:
        return f"only commits {state.gc_floor} to {state.n - 1} can be gone back to, not {to}"
    try:
        then = yield from state_after(run, to, state.revoked, pulse)
    except NotFoundError as error:
        return str(error)
    changed = [o.fragment for o, c in zip(then.outputs, state.outputs, strict=True) if o.state_digest != c.state_digest]
    if not changed:
        return f"every fragment is what it was after commit {to}"
    return Return(then, state)


def missing_objects(outputs: tuple[FragmentVersion, ...]) -> Steps[list[str]]:
    """Keys of these versions that a listing does not show: for people, before they decide."""
    missing = []
    for output in outputs:
        for key in keys_of(output):
            found: list[str] = yield List(key, limit=1)
            missing += [] if found else [key]
    return missing


def published_anew(
    run: RunFormat, outputs: tuple[FragmentVersion, ...], version: int, slot: int, epoch: int, pulse: Pulse
) -> Steps[tuple[FragmentVersion, ...] | str]:
    """Publish the same bytes as versions with number `version`, which age as if merged in `slot`; or say what cannot be
    read. `pulse` runs before each fragment: models are large, and a silent syncer would be taken for dead."""
    published = []
    for output in outputs:
        yield from pulse()
        anew = replace(output, version=version, slot=slot, epoch=epoch)
        named = (output.state_digest, output.weights_digest)
        for old_key, new_key, expected in zip(keys_of(output), keys_of(anew), named, strict=True):
            data = yield Get(old_key, max_fragment_bytes(run.layout, output.fragment))
            if data is None or digest(data) != expected:
                return f"{old_key} {'is missing' if data is None else 'has other bytes than the log says'}"
            yield from write_surely(new_key, data)
        published.append(anew)
    return tuple(published)


def keys_of(output: FragmentVersion) -> tuple[str, str]:
    """The keys of its state and of its weights."""
    names = (output.fragment, output.version, output.epoch)
    return state_key(*names, output.state_digest), weights_key(*names, output.weights_digest)
