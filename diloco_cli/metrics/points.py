"""The figures of each commit, in order: what a tracker of experiments wants to know of a run."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_cli.observe.status import merged_rate
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.commits import Commit, Evaluation, Merge, Rollback
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode
from diloco_cli.runtime.daemon import CommitsAhead
from diloco_cli.store.port import Store


class CommitPoints:
    """Reads the log from commit 0 on. Each call of `new` goes on where the one before ended."""

    def __init__(self, run: RunFormat, store: Store) -> None:
        self.run, self.store, self.state = run, store, RunState()

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(commit, figures), of commits that have some."""
        with CommitsAhead(self.store) as ahead:
            while (data := ahead.get(key := commit_key(self.state.n + 1), MAX_RECORD_BYTES)) is not None:
                self.state = fold(self.run, self.state, data)
                figures = figures_of(decode(Commit, data, key), self.state, self.run)
                if figures:
                    yield self.state.n, figures


def figures_of(commit: Commit, state: RunState, run: RunFormat) -> dict[str, float]:
    """`state`: after the commit."""
    match commit:
        case Merge():
            rate = merged_rate(state)
            figures = {
                "tokens": state.tokens(run.layout), "participants": len(commit.inputs), "alive": commit.alive,
                "grace_used_s": commit.grace_used_s,
            }  # fmt: skip
            return figures if rate is None else figures | {"tokens_per_s": rate}
        case Evaluation() if commit.loss is not None:
            return {"tokens": commit.tokens, "loss": commit.loss}
        case Rollback():
            return {"tokens": state.tokens(run.layout), "rolled_back_to": commit.to}
    return {}
