"""Feeds Weights & Biases from a run's bucket: one W&B run across restarts, whose id is that of the run, and whose step
is the commit's number. Nothing of this machine is sent: no code, no git state, no system figures, no console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco_cli.config.codec import to_plain
from diloco_cli.errors import UsageError
from diloco_cli.observe.status import merged_rate
from diloco_cli.paths import install_hint
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.commits import Commit, Evaluation, Merge, Rollback
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import RunFormat, decode
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.runtime.daemon import commits_ahead
from diloco_cli.store.port import Store


def figures_of(commit: Commit, state: RunState, run: RunFormat) -> dict[str, float]:
    """`state`: after the commit."""
    match commit:
        case Merge():
            rate = merged_rate(state)
            figures = {
                "tokens": state.tokens(run.layout),
                "participants": len(commit.inputs),
                "alive": commit.alive,
                "grace_used_s": commit.grace_used_s,
            }
            return figures if rate is None else figures | {"tokens_per_s": rate}
        case Evaluation() if commit.loss is not None:
            return {"tokens": commit.tokens, "loss": commit.loss}
        case Rollback():
            return {"tokens": state.tokens(run.layout), "rolled_back_to": commit.to}
    return {}


class Feed:
    """Sends each commit's figures, in order. `tracker`: the W&B run; `next`: the first commit that it does not know.
    Offline it knows none, and each session writes all of them: a commit that comes again has the same figures, and W&B
    keeps one."""

    def __init__(self, tracker: Any, run: RunFormat, store: Store, first: int) -> None:
        self._tracker, self._run, self._store, self.next = tracker, run, store, first
        self._state = RunState()

    def send(self) -> bool:
        """What is new; returns whether the run is over."""
        for data in commits_ahead(self._store, self._state.n + 1):
            self._state = state = fold(self._run, self._state, data)
            figures = figures_of(decode(Commit, data, commit_key(state.n)), state, self._run)
            if figures and state.n >= self.next:
                self._tracker.log(figures, step=state.n)
                self.next = state.n + 1
        return self._state.phase != RunPhase.RUNNING


def start_wandb(run: RunFormat, project: str, entity: str | None, offline: bool, folder: Path) -> Any:
    """The W&B run. Raises UsageError without the package, or where W&B refuses."""
    try:
        import wandb
    except ImportError:
        raise UsageError("the package wandb is not installed", hint=install_hint("wandb")) from None
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        save_code=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        started = wandb.init(
            project=project,
            entity=entity,
            id=run.run_id,
            name=run.name,
            resume="allow",
            dir=str(folder),
            mode="offline" if offline else "online",
            config=to_plain(run.settings),
            settings=settings,
        )
    except (wandb.Error, TimeoutError) as error:
        raise UsageError(f"W&B refuses: {error}", hint="wandb login; or keep it here: --offline") from error
    for name in ("loss", "tokens_per_s", "participants"):
        started.define_metric(name, step_metric="tokens")
    return started
