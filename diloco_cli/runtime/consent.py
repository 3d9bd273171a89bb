"""What a process of this machine trusts: its own signing key, the operator's key that a run was first seen with, and
this machine's consent to what a run's format names.

Trust on first use: a key file names its operator, so a process with a key asks nobody. One without a key believes
FORMAT.json once, says whose key that is, and from then on accepts no other, nor a missing signature.

Consent: code, data and stores that a format names are used only after this machine's user has agreed; the decision is
protocol/rules/consent.py's, and it is remembered. Presets and Hugging Face configs, which a format carries whole, need
none.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.corpus.sources import data_places
from diloco_cli.digests import digest
from diloco_cli.environment import environment_value
from diloco_cli.errors import RefusedError, UsageError
from diloco_cli.paths import user_state_directory
from diloco_cli.protocol.log.records import RunFormat, encode
from diloco_cli.protocol.rules.consent import Allowance, Consent, FormatNames, code_of, decide, to_remember
from diloco_cli.runtime.files import read_json, write_json
from diloco_cli.signing import KEY_FILE_VARIABLE, KEY_VARIABLE, MAX_SECRET, Secret, is_public_key, short_key
from diloco_cli.store.url import is_beside, real_url


def signing_secret() -> Secret | None:
    """The key in DILOCO_SIGNING_KEY, else in the file named in DILOCO_SIGNING_KEY_FILE; None if neither is set. Raises
    UsageError, which never quotes the key."""
    text = environment_value(KEY_VARIABLE)
    if text is not None:
        return Secret(text, KEY_VARIABLE)
    path = environment_value(KEY_FILE_VARIABLE)
    return None if path is None else Secret(_read(Path(path)), path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET + 2)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=f"{KEY_FILE_VARIABLE}={path}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError("others than its owner may read this key", where=str(path), hint=f"chmod 600 {path}")
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise UsageError("a signing key is text", where=str(path)) from None


def write_key(path: Path, text: str) -> None:
    """A new file that only its owner may read. Raises UsageError if there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{text}\n")
    except FileExistsError:
        raise UsageError("there is a file already; nothing was written", where=str(path)) from None
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from None


MAX_BYTES = 4096


def trust_of(run: RunFormat) -> str:
    """Whom a run trusts, for people."""
    if run.signing is None:
        return "not signed: whoever may write into the bucket is trusted"
    return f"signed: whom the operator's key {short_key(run.signing.operator)} has certified is trusted, as that alone"


def check_operator(run: RunFormat, url: str, secret: Secret | None, tell: Callable[[str], None]) -> None:
    """Raises RefusedError if this address was seen with another operator's key before; `tell` names a new key."""
    path = _path_of(url)
    known, named = _known(path), None if run.signing is None else run.signing.operator
    if secret is not None or known == named:
        if named is not None and known != named:
            _remember(path, url, named)  # the key in use says so
        return
    if known is not None:
        now = "is not signed" if named is None else f"names the operator's key {short_key(named)}"
        raise RefusedError(
            f"run {run.name} {now}, and was seen here with the operator's key {short_key(known)}",
            where=url,
            hint=f"somebody may have replaced FORMAT.json; if a new run is meant to be there: rm {path}",
        )
    assert named is not None
    tell(f"run {run.name} names the operator's key {short_key(named)}: believed, as it is seen here for the first time")
    _remember(path, url, named)


def _path_of(url: str) -> Path:
    return user_state_directory("operators") / f"{digest(url.rstrip('/').encode())}.json"


def _known(path: Path) -> str | None:
    """A file that is absent, torn or foreign says nothing."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    operator = said.get("operator") if isinstance(said, dict) else None
    return operator if isinstance(operator, str) and is_public_key(operator) else None


def _remember(path: Path, url: str, operator: str) -> None:
    """Where this cannot be written, the next process believes FORMAT.json for the first time again."""
    new = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": url, "operator": operator}, file)
        new.replace(path)


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
    return replace(run, settings=run.settings.with_consent(True))


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
