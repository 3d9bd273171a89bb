"""Feeds Weights & Biases from a run's bucket: one W&B run across restarts, whose id is that of the run, and whose step
is the commit's number. Nothing of this machine is sent: no code, no git state, no system figures, no console."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from diloco_cli.config.codec import to_plain
from diloco_cli.errors import UsageError
from diloco_cli.metrics.points import CommitPoints
from diloco_cli.paths import install_hint
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.states import RunPhase
from diloco_cli.runtime.files import UnreadableError, read_json, write_json

BATCH = 100  # commits between two notes of the position


class Tracker(Protocol):
    """A W&B run, as far as it is used here."""

    def log(self, data: dict[str, Any], step: int) -> Any: ...


class Feed:
    """`position`: a file with the next commit to send; `first`: the same as W&B itself knows it, which counts more. A
    commit that is sent again after a crash has the same figures."""

    def __init__(self, tracker: Tracker, points: CommitPoints, position: Path, first: int | None) -> None:
        self._tracker, self._points, self._position = tracker, points, position
        self.next = _noted(position) if first is None else first

    def send(self) -> bool:
        """What is new; returns whether the run is over."""
        self._send(self._points.new())
        self._note()
        return self._points.state.phase != RunPhase.RUNNING

    def _send(self, points: Iterable[tuple[int, dict[str, float]]]) -> None:
        for n, figures in points:
            if n >= self.next:
                self._tracker.log(figures, step=n)
                self.next = n + 1
                if self.next % BATCH == 0:
                    self._note()

    def _note(self) -> None:
        write_json(self._position, {"next": self.next})


def _noted(position: Path) -> int:
    try:
        noted = (read_json(position) or {}).get("next")
    except UnreadableError:
        noted = None
    return noted if isinstance(noted, int) else 0


def start_wandb(run: RunFormat, project: str, entity: str | None, offline: bool, folder: Path) -> Any:
    """The W&B run. Raises UsageError without the package, or where W&B refuses."""
    try:
        import wandb
    except ImportError:
        raise UsageError("the package wandb is not installed", hint=install_hint("wandb")) from None
    settings = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True,
        x_disable_machine_info=True, save_code=False,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    try:
        started = wandb.init(
            project=project, entity=entity, id=run.run_id, name=run.name, resume="allow", dir=str(folder),
            mode="offline" if offline else "online", config=to_plain(run.settings), settings=settings,
        )  # fmt: skip
    except (wandb.Error, TimeoutError) as error:
        raise UsageError(f"W&B refuses: {error}", hint="wandb login; or keep it here: --offline") from error
    for name in ("loss", "tokens_per_s", "participants"):
        started.define_metric(name, step_metric="tokens")
    return started
