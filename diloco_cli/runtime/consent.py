"""This machine's consent to what a run's format names: asked for before anything of it is used, and remembered.

Presets, and Hugging Face configs, which a format carries whole, need none. The decision is protocol/rules/consent.py's.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.corpus.sources import data_places
from diloco_cli.digests import digest
from diloco_cli.errors import RefusedError, UsageError
from diloco_cli.paths import user_state_directory
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.wire import encode
from diloco_cli.protocol.rules.consent import Allowance, Consent, FormatNames, code_of, decide, to_remember
from diloco_cli.runtime.files import read_json, write_json
from diloco_cli.store.open import is_beside, real_url

FORMAT = 1


@dataclass(frozen=True)
class NamedHere:
    """What the user of this machine named. `folder`: where modules are looked for that are not installed, that of the
    run file or else the working directory; `command`: what was typed, for hints."""

    allowance: Allowance = field(default_factory=Allowance)
    folder: Path | None = None
    command: str = "diloco resume URL"


def format_digest(run: RunFormat) -> str:
    """The digest of FORMAT.json, without its signature or checksum."""
    return digest(encode(replace(run, members=())))


def stores_of(run: RunFormat) -> tuple[str, ...]:
    """The URLs of every store that the format names."""
    home = (run.home_url,) if run.home_url is not None else ()
    return (*home, *run.region_urls)


def named_in_files(run: RunSettings, inventory: Inventory | None) -> Allowance:
    """What a run file of this machine and its inventory name."""
    urls = [] if inventory is None else [inventory.store.url, *(region.store for region in inventory.regions.values())]
    stores = (*(real_url(url) for url in urls if url is not None), *data_places(run.data))
    return Allowance((), code_of(run), stores)


def consented(
    run: RunFormat, url: str, here: NamedHere, stores: Iterable[str] = (), *, code: bool = True, data: bool = True
) -> RunFormat:  # fmt: skip
    """The run, whose code may run and whose data may be read from now on, and whose `stores` may be opened. `code`:
    whether this process needs code and data; if not, they may still be used if this machine has consented. `data`:
    whether it ever reads data; if not, no consent to them is asked for. What was named here is remembered. Raises
    RefusedError."""
    stores, places = tuple(stores), data_places(run.settings.data) if data else ()
    elsewhere, data_there = _elsewhere(stores, url), data_elsewhere(run, url) if data else ()
    named = FormatNames(format_digest(run), code_of(run.settings), (*elsewhere, *data_there))
    if not named:
        return _allowed(run)
    known, folder = remembered(named.digest)
    allowance = known | here.allowance
    runs = decide(replace(named, stores=data_there), allowance).allowed
    needed = named if code else replace(named, code=(), stores=elsewhere)
    decision = decide(needed, allowance)
    if not decision.allowed:
        raise refusal(run, url, decision, named.digest, here.command)
    # what is beside one store is not beside each
    noted = to_remember(replace(named, stores=(*map(_real, stores), *places)), here.allowance)
    if noted:
        folder = here.folder or Path.cwd()
        remember(named.digest, run.name, known | noted, folder)
    if runs and named.code and folder is not None:
        search_last(folder)
    return _allowed(run) if runs else run


def refused_stores(run: RunFormat, url: str, stores: Iterable[str]) -> tuple[str, ...]:
    """Those of the `stores` that this machine has not consented to open."""
    given_digest = format_digest(run)
    allowance = remembered(given_digest)[0]
    named = {store: FormatNames(given_digest, stores=_elsewhere([store], url)) for store in stores}
    return tuple(store for store in named if not decide(named[store], allowance).allowed)


def data_elsewhere(run: RunFormat, url: str) -> tuple[str, ...]:
    """Where own data lie that are not beside the run at this URL. Text and a tokenizer never are: what a bucket names
    lies among this machine's files."""
    data = run.settings.data
    return _elsewhere(data_places(data), url) if data.tokens else data_places(data)


def _elsewhere(stores: Iterable[str], url: str) -> tuple[str, ...]:
    return tuple(_real(store) for store in stores if not _is_beside(store, url))


def _real(store: str) -> str:
    """Where it leads: a link or `..` below a store that was named may lead out of it."""
    try:
        return real_url(store)
    except UsageError:  # it is no URL of a store
        return store


def _is_beside(store: str, url: str) -> bool:
    try:
        return is_beside(store, url)
    except UsageError:
        return False


def _allowed(run: RunFormat) -> RunFormat:
    return replace(run, settings=replace(run.settings, consented=True))


def refusal(run: RunFormat, url: str, refused: Consent, given_digest: str, command: str) -> RefusedError:
    """What would be used, whose word that is, and the ways to consent; to all of it only where code is needed."""
    flags = [word for code in refused.code for word in ("--allow-code", code.name)]
    flags += [word for store in refused.stores for word in ("--allow-store", store)]
    whole = f"all of this format, if its operator gave you this digest: {command} --allow-code {given_digest}; or, "
    return RefusedError(
        f"the format of run {run.name} {refused.reason}",
        where=url,
        hint=f"if you trust what it names: {command} {shlex.join(flags)}; or{f' {whole}' if refused.code else ', '}"
        "with the run file that names it: diloco resume RUN.yaml",
    )


def remember(named_digest: str, run_name: str, allowance: Allowance, folder: Path) -> None:
    """Note that this machine consents to so much of the format with this digest; its modules are looked for in `folder`
    last. Raises UsageError where nothing can be noted."""
    path = _path(named_digest)
    body = {"words": list(allowance.words), "stores": list(allowance.stores), "folder": str(folder.absolute())}
    try:
        write_json(path, {"format": FORMAT, "digest": named_digest, "run": run_name, **body})
    except OSError as error:
        hint = "set DILOCO_HOME to a folder of yours"
        raise UsageError(f"the consent cannot be noted: {error.strerror}", where=str(path), hint=hint) from error


def remembered(named_digest: str) -> tuple[Allowance, Path | None]:
    """What was noted for this format, and the folder of its modules. A file that others could have written counts for
    nothing."""
    try:
        path = _path(named_digest)
        found = path.stat()
        body = read_json(path) if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077 else None
    except (OSError, ValueError, UsageError):
        body = None
    if body is None or body.get("digest") != named_digest or body.get("format") != FORMAT:
        return Allowance(), None
    words, stores, folder = (body.get(name) for name in ("words", "stores", "folder"))
    if not (_are_texts(words) and _are_texts(stores) and isinstance(folder, str)):
        return Allowance(), None
    return Allowance(tuple(words), (), tuple(stores)), Path(folder)


def _are_texts(found: object) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(item, str) for item in found)


def _path(named_digest: str) -> Path:
    try:
        return user_state_directory("consent") / f"{named_digest}.json"
    except RuntimeError as error:  # a user without a home
        raise UsageError("this user has no home directory", hint="set DILOCO_HOME to a folder of yours") from error


def search_last(folder: Path) -> None:
    """From now on modules that are not installed are looked for in this folder, after all other places."""
    place = str(folder.absolute())
    if place not in sys.path:
        sys.path.append(place)
