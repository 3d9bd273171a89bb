"""Names on the Hugging Face Hub, and where its downloads lie; nothing is fetched.

A name is OWNER/NAME or OWNER/NAME@REVISION, with hf:// before it or not. One without an owner needs that: a word alone
is a folder, which may be mistyped.
"""

from __future__ import annotations

import re
from pathlib import Path

from diloco_cli.environment import environment_value

_PART = r"[A-Za-z0-9_][\w.-]*"
HUB = "hf://"
_NAME = re.compile(rf"({HUB}({_PART}/)?|{_PART}/){_PART}(@{_PART}(/{_PART})*)?", re.ASCII)


def is_hub_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and ".." not in text


def parted(name: str) -> tuple[str, str | None]:
    """NAME@REVISION -> both, without hf://; a revision is a branch, a tag or a commit."""
    bare, _, revision = name.removeprefix(HUB).partition("@")
    return bare, revision or None


def is_known_to_lack(folder: Path, file: str) -> bool:
    """Whether the Hub has said before that the repository of this snapshot has no such file."""
    return (folder.parents[1] / ".no_exist" / folder.name / file).is_file()


def snapshot(name: str, revision: str | None, file: str) -> Path | None:
    """The folder of a model or tokenizer in the Hub's cache, if it has this file: of `revision`, or else the newest of
    main that was downloaded."""
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (cached / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision or ""
    found = cached / "snapshots" / commit
    return found if commit and (found / file).is_file() else None


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot in the Hub's cache; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def hub_cache() -> Path:
    """The folder of huggingface_hub's downloads."""
    if (cache := environment_value("HF_HUB_CACHE")) is not None:
        return Path(cache)
    home = environment_value("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
