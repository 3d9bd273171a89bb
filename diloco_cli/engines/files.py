"""What would be submitted, as files that a person edits before (`launch --emit`, `--from`). Such a file fits as long as
it has every line that it was written with, but those that its engine lets change, and the plan's digest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from diloco_cli.engines.port import JobSpec
from diloco_cli.engines.sites import engine_of
from diloco_cli.engines.wheel import folder_of
from diloco_cli.errors import NotFoundError, RefusedError, UsageError
from diloco_cli.paths import make_directory, write_whole

MAX_BYTES = 1024 * 1024


def write_job_files(folder: Path, specs: Iterable[JobSpec], plan: str) -> list[Path]:
    """Raises RefusedError where such a file is already: it may have been edited."""
    texts = {_path(folder, spec): _stamped(spec, plan) for spec in specs}
    if there := [path for path in texts if path.exists()]:
        raise RefusedError(f"{there[0]} exists, and may have been edited", hint="name another folder, or remove it")
    try:
        make_directory(folder)
        for path, text in texts.items():
            write_whole(path, text.encode())
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(folder)) from None
    return list(texts)


def edited(folder: Path, spec: JobSpec, plan: str) -> JobSpec:
    """The same job, by its file in this folder. Raises RefusedError if that no longer fits the plan of the run."""
    path, hint = _path(folder, spec), f"write them anew: diloco launch --emit {folder}-2"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode()
    except FileNotFoundError:
        raise NotFoundError(f"{folder} has no file of {spec.unit}", where=str(path), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from None
    install = None if spec.site is None else spec.site.install
    if install is not None and folder_of(install) not in text:
        what = "it runs the diloco of the day on which it was written, and the site is brought the one that is here now"
        raise RefusedError(what, where=str(path), hint=hint)
    has, may_change = set(text.splitlines()), engine_of(spec.infra, spec.site).may_change
    lost = [line for line in _stamped(spec, plan).splitlines() if line not in has and not may_change.match(line)]
    if lost:
        raise RefusedError(f"it does not fit the run's plan: it lacks the line {lost[0]!r}", where=str(path), hint=hint)
    return replace(spec, text=text)


def _path(folder: Path, spec: JobSpec) -> Path:
    return folder / f"{spec.unit}.{spec.infra.partition('/')[0]}"


def _stamped(spec: JobSpec, plan: str) -> str:
    """Below the first line, which may name a shell."""
    first, newline, rest = engine_of(spec.infra, spec.site).render(spec).partition("\n")
    return f"{first}{newline}# of plan {plan}\n{rest}"
