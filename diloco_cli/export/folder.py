"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote

from diloco_cli.errors import UsageError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
WRITTEN = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")


def refuse_folder(folder: Path, overwrite: bool) -> None:
    """Before the work begins: raises UsageError unless the folder is new or empty, or an earlier export that may be
    overwritten. A folder with other files in it is never replaced."""
    if not folder.parent.is_dir():
        raise UsageError(f"no directory {folder.parent}", hint=f"mkdir -p {quote(str(folder.parent))}")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="give another folder: -o FOLDER")
    found = sorted(folder.iterdir())
    foreign = [path.name for path in found if not path.is_file() or not _is_ours(path.name)]
    if foreign:
        raise UsageError(
            f"{folder} holds what no export has written: {foreign[0]}", hint="give another folder: -o FOLDER"
        )
    if found and not overwrite:
        raise UsageError(f"{folder} exists already", hint="give another folder, or -y to overwrite it")


def _is_ours(name: str) -> bool:
    return name in TOKENIZER_FILES or any(fnmatch(name, pattern) for pattern in WRITTEN)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the name when the block ends. What stood under the name goes only then; what a
    killed export left beside it goes at once."""
    folder = folder.resolve()
    begun, earlier = (folder.with_name(f".{folder.name}.{what}") for what in ("partial", "earlier"))
    for left in (begun, earlier):
        shutil.rmtree(left, ignore_errors=True)
    begun.mkdir()
    try:
        yield begun
        if folder.exists():
            folder.rename(earlier)
        begun.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def copy_tokenizer(source: Path, into: Path) -> list[str]:
    """The names of the tokenizer's files that were copied."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, into / name)
    return found
