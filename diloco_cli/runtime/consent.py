"""What a process of this machine trusts: its own signing key, the operator's key that a run was first seen with, and
this machine's consent to what a run's format names.

Trust on first use: a key file names its operator, so a process with a key asks nobody. One without a key believes
FORMAT.json once, says whose key that is, and from then on accepts no other, nor a missing signature.

Consent: who can write FORMAT.json must not choose what other machines import, or which paths and buckets they open.
Code, data and stores that a format names are used only after this machine's user has named them, or the format's
digest, or a run file that names the same; that is remembered for this format. Presets and Hugging Face configs, which a
format carries whole, and what lies in the run's own bucket, need none.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import from_plain
from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.corpus.sources import data_places
from diloco_cli.digests import digest
from diloco_cli.environment import environment_value
from diloco_cli.errors import NoSpaceError, RefusedError, UsageError
from diloco_cli.paths import UnreadableError, read_json, user_state_directory, write_json
from diloco_cli.protocol.log.records import RunFormat, encode
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


def trust_of(run: RunFormat) -> str:
    """Whom a run trusts, for people."""
    if run.signing is None:
        return "not signed: whoever may write into the bucket is trusted"
    return f"signed: whom the operator's key {short_key(run.signing.operator)} has certified is trusted, as that alone"


def check_operator(run: RunFormat, url: str, secret: Secret | None, tell: Callable[[str], None]) -> None:
    """Raises RefusedError if this address was seen with another operator's key before; `tell` names a new key."""
    path = user_state_directory("operators") / f"{digest(url.rstrip('/').encode())}.json"
    known, named = _known_operator(path), None if run.signing is None else run.signing.operator
    if known == named:
        return
    if secret is None and known is not None:
        now = "is not signed" if named is None else f"names the operator's key {short_key(named)}"
        raise RefusedError(
            f"run {run.name} {now}, and was seen here with the operator's key {short_key(known)}",
            where=url,
            hint=f"somebody may have replaced FORMAT.json; if a new run is meant to be there: rm {path}",
        )
    if named is None:
        return
    if secret is None:  # else the key in use says so
        key = short_key(named)
        tell(f"run {run.name} names the operator's key {key}: believed, as it is seen here for the first time")
    with suppress(OSError, UsageError, NoSpaceError):  # then the next process believes FORMAT.json again
        write_json(path, {"url": url, "operator": named})


def _known_operator(path: Path) -> str | None:
    """A file that is absent, torn or foreign says nothing."""
    try:
        operator = (read_json(path) or {}).get("operator")
    except UnreadableError:
        return None
    return operator if isinstance(operator, str) and is_public_key(operator) else None


FORMAT = 1
SHOWN = 200  # characters of an entrypoint's arguments


@dataclass(frozen=True)
class Code:
    """An entrypoint that a format names at `place`, with its arguments."""

    place: str
    name: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"{self.place} {self.name}({given if len(given) <= SHOWN else given[:SHOWN] + '...'})"


@dataclass(frozen=True)
class Allowance:
    """What was named here. `words`: modules, entrypoints (module:function, both with any arguments) and digests of
    formats; `code`: the entrypoints of a local run file; `stores`: URLs, each with all that lies below it."""

    words: tuple[str, ...] = ()
    code: tuple[Code, ...] = ()
    stores: tuple[str, ...] = ()

    def __or__(self, other: Allowance) -> Allowance:
        return Allowance(
            tuple(dict.fromkeys(self.words + other.words)),
            self.code + other.code,
            tuple(dict.fromkeys(self.stores + other.stores)),
        )

    def allows(self, code: Code) -> bool:
        return code.name.partition(":")[0] in self.words or code.name in self.words or code in self.code

    def opens(self, url: str) -> bool:
        return any(url == store or url.startswith(f"{store.rstrip('/')}/") for store in self.stores)


@dataclass(frozen=True)
class NamedByFormat:
    """What the format with this digest names: code to import, and the URLs of stores that are not the run's own."""

    digest: str
    code: tuple[Code, ...] = ()
    stores: tuple[str, ...] = ()

    def beyond(self, allowance: Allowance) -> NamedByFormat:
        """What of it was not consented to."""
        if self.digest in allowance.words:
            return NamedByFormat(self.digest)
        code = tuple(code for code in self.code if not allowance.allows(code))
        return NamedByFormat(self.digest, code, tuple(url for url in self.stores if not allowance.opens(url)))

    def __bool__(self) -> bool:
        return bool(self.code or self.stores)


@dataclass(frozen=True)
class NamedHere:
    """What the user of this machine named. `folder`: where modules are looked for that are not installed, that of the
    run file or else the working directory; `command`: what was typed, for hints."""

    allowance: Allowance = field(default_factory=Allowance)
    folder: Path | None = None
    command: str = "diloco resume URL"


def code_of(settings: RunSettings) -> tuple[Code, ...]:
    """Every entrypoint of a run's settings; and a Hugging Face folder or name, if its config does not come with it."""
    model, data, found = settings.model, settings.data, []
    if model.entrypoint:
        found.append(Code("model.entrypoint", model.entrypoint, model.args))
    if model.huggingface and not model.args:
        found.append(Code("model.huggingface", model.huggingface))
    if data.entrypoint:
        found.append(Code("data.entrypoint", data.entrypoint, data.args))
    return tuple(found)


def format_digest(run: RunFormat) -> str:
    """The digest of FORMAT.json, without its signature or checksum."""
    return digest(encode(replace(run, members=())))


def stores_of(run: RunFormat) -> tuple[str, ...]:
    """The URLs of every store that the format names."""
    return (*([run.home_url] if run.home_url is not None else []), *run.region_urls)


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
    elsewhere, there = _elsewhere(stores, url), data_elsewhere(run, url) if data else ()
    named = NamedByFormat(format_digest(run), code_of(run.settings), (*elsewhere, *there))
    if not named:
        return _allowed(run)
    known, folder = remembered(named.digest)
    allowance = known | here.allowance
    refused = (named if code else replace(named, code=(), stores=elsewhere)).beyond(allowance)
    if refused:
        raise _refusal(run, url, refused, here.command)
    names = tuple(code.name for code in named.code if here.allowance.allows(code))
    given = Allowance(here.allowance.words + names, (), here.allowance.stores)
    if given != Allowance():
        folder = here.folder or Path.cwd()
        remember(named.digest, run.name, known | given, folder)
    if replace(named, stores=there).beyond(allowance):
        return run
    if named.code and folder is not None:
        search_last(folder)
    return _allowed(run)


def refused_stores(run: RunFormat, url: str, stores: Iterable[str]) -> tuple[str, ...]:
    """Those of the `stores` that this machine has not consented to open."""
    named_digest = format_digest(run)
    allowance = remembered(named_digest)[0]
    return tuple(
        store for store in stores if NamedByFormat(named_digest, stores=_elsewhere([store], url)).beyond(allowance)
    )  # fmt: skip


def data_elsewhere(run: RunFormat, url: str) -> tuple[str, ...]:
    """Where own data lie that are not beside the run at this URL. Text and a tokenizer never are: what a bucket names
    lies among this machine's files."""
    data = run.settings.data
    return _elsewhere(data_places(data), url) if data.tokens else data_places(data)


def _elsewhere(stores: Iterable[str], url: str) -> tuple[str, ...]:
    """Where they lead, of those that are not beside the run: a link or `..` below a store that was named may lead out
    of it. What is no URL of a store is elsewhere."""
    found = []
    for store in stores:
        try:
            if not is_beside(store, url):
                found.append(real_url(store))
        except UsageError:
            found.append(store)
    return tuple(found)


def _allowed(run: RunFormat) -> RunFormat:
    return replace(run, settings=run.settings.with_consent(True))


def _refusal(run: RunFormat, url: str, refused: NamedByFormat, command: str) -> RefusedError:
    """What would be used, whose word that is, and the ways to consent; to all of it only where code is needed."""
    what = [f"code: {', '.join(map(str, refused.code))}"] if refused.code else []
    what += [f"stores elsewhere: {', '.join(refused.stores)}"] if refused.stores else []
    flags = [word for code in refused.code for word in ("--allow-code", code.name)]
    flags += [word for store in refused.stores for word in ("--allow-store", store)]
    whole = f"all of this format, if its operator gave you this digest: {command} --allow-code {refused.digest}; or, "
    return RefusedError(
        f"the format of run {run.name} names {' and '.join(what)}; this machine has not consented to that",
        where=url,
        hint=f"if you trust what it names: {command} {shlex.join(flags)}; or{f' {whole}' if refused.code else ', '}"
        "with the run file that names it: diloco resume RUN.yaml",
    )


@dataclass(frozen=True)
class ConsentNote:
    """This machine's consent to the format with this digest; its modules are looked for in `folder` last."""

    format: int
    digest: str
    run: str
    words: Sequence[str]
    stores: Sequence[str]
    folder: str


def remember(named_digest: str, run_name: str, allowance: Allowance, folder: Path) -> None:
    """Raises UsageError where nothing can be noted."""
    path, words, stores = _path(named_digest), list(allowance.words), list(allowance.stores)
    body = {"format": FORMAT, "digest": named_digest, "run": run_name, "words": words, "stores": stores}
    try:
        write_json(path, {**body, "folder": str(folder.absolute())})
    except OSError as error:
        hint = "set DILOCO_HOME to a folder of yours"
        raise UsageError(f"the consent cannot be noted: {error.strerror}", where=str(path), hint=hint) from error


def remembered(named_digest: str) -> tuple[Allowance, Path | None]:
    """What was noted for this format, and the folder of its modules. A file that others could have written counts for
    nothing."""
    try:
        path = _path(named_digest)
        found = path.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return Allowance(), None
        note = from_plain(ConsentNote, read_json(path))
    except (OSError, UnreadableError, UsageError):
        return Allowance(), None
    if (note.format, note.digest) != (FORMAT, named_digest):
        return Allowance(), None
    return Allowance(tuple(note.words), (), tuple(note.stores)), Path(note.folder)


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
