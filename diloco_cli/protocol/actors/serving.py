"""A syncer that was fenced: by another syncer, which has its place, or by an operator's command, which leaves again."""

from __future__ import annotations

from diloco_cli.errors import FencedError, TryAgainError
from diloco_cli.protocol.actors.decisions import may_serve_again
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.state import RunState


class DisplacedError(FencedError):
    """A command took this syncer for dead and served in its place; the run has no syncer until one begins again."""

    code = "displaced"
    exit_status = TryAgainError.exit_status


def serving(syncer: Syncer) -> Steps[RunState]:
    """Serve until the run is over. Raises FencedError if another syncer has taken over, DisplacedError if a command
    has, which leaves again."""
    try:
        return (yield from syncer.serve())
    except FencedError as error:
        state = yield from read_log(syncer.run, syncer.state)
        if not may_serve_again(state, syncer.epoch):
            raise
        raise DisplacedError(
            f"a command claimed epoch {state.epoch} while this syncer was silent; nothing was lost",
            hint="start it again: the run has no syncer",
        ) from error
