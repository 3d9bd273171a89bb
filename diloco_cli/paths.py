"""The only module that knows local paths: what a run keeps on this machine beside the bucket.

    .diloco/<run>/run.json                 name and URL of the run
    .diloco/<run>/supervisor.json          identity of the supervising process
    .diloco/<run>/units/<unit>.json        identity of each living unit
    .diloco/<run>/supervised.json          what the supervisor last decided about each unit
    .diloco/<run>/hold/<unit>              present: the supervisor must not restart this unit
    .diloco/<run>/errors/<unit>.json       the last error of a unit's process
    .diloco/<run>/logs/<unit>.log          what a unit printed
    .diloco/<run>/wandb/                   what `diloco wandb` has sent, and W&B's own files
    .diloco/<run>/metrics.token            what a scrape of `diloco status --serve` must know
    .diloco/<run>/spool/                   deltas that a syncer has fetched and not merged yet, in files without names

All of it may be lost without harm to the run: the bucket alone is enough to go on.

    $DILOCO_HOME/.operators/<digest>.json  or ~/.local/state/diloco/operators/<digest>.json, for all directories: the
                                           operator's key that the run at an address was first seen with
    $DILOCO_HOME/.consent/<digest>.json    or ~/.local/state/diloco/consent/<digest>.json, for all directories: this
                                           machine's consent to what the run format with that digest names
    $DILOCO_HOME/.data/                    or ~/.cache/diloco/data/, for all directories: `text-<digest>/`, the token
                                           shards of text files; `blocks/`, what was read of a bucket's shards
"""

from __future__ import annotations

import shlex
import sys
from importlib import resources
from pathlib import Path

from diloco_cli.environment import environment_value

SOURCE = Path(__file__).resolve().parent.parent


def home_directory() -> Path:
    """`.diloco` of the current directory, or $DILOCO_HOME."""
    return Path(environment_value("DILOCO_HOME") or ".diloco").absolute()


def run_directory(run: str) -> Path:
    return home_directory() / run


def wandb_directory(run: str) -> Path:
    return run_directory(run) / "wandb"


def metrics_token_path(run: str) -> Path:
    return run_directory(run) / "metrics.token"


def user_state_directory(kind: str) -> Path:
    """Not in the current directory, which may be a stranger's: $DILOCO_HOME, else the user's own state."""
    return _users_directory(kind, "XDG_STATE_HOME", ".local/state")


def user_file() -> Path:
    """The user's own settings, for all runs: $XDG_CONFIG_HOME/diloco/config.yaml or ~/.config/diloco/config.yaml."""
    config = environment_value("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "diloco" / "config.yaml"


def user_cache_directory(kind: str) -> Path:
    """What may be deleted at any time: below $DILOCO_HOME, else in the user's cache."""
    return _users_directory(kind, "XDG_CACHE_HOME", ".cache")


def _users_directory(kind: str, variable: str, usual: str) -> Path:
    home = environment_value("DILOCO_HOME")
    if home is not None:
        return Path(home).absolute() / f".{kind}"
    place = environment_value(variable)
    return (Path(place) if place else Path.home() / usual) / "diloco" / kind


def templates_directory() -> Path:
    """templates/ of the wheel, or of the source tree in an editable install."""
    packaged = Path(str(resources.files("diloco_cli"))) / "templates"
    return packaged if packaged.is_dir() else SOURCE / "templates"


def install_hint(extra: str) -> str:
    """The command that installs an extra: of the source tree, if that is what runs here. For the Python that runs this:
    the shell's `pip` may be another's."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if (SOURCE / "pyproject.toml").is_file():
        return f"{pip} -e {shlex.quote(f'{SOURCE}[{extra}]')}"
    return f"{pip} 'diloco[{extra}]'"
