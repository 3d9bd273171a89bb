"""Whether this machine may use what a run's format names beyond the run's own bucket: code, and stores elsewhere.

Who can write FORMAT.json must not choose what other machines import, or which paths and buckets they open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.config.settings import RunSettings

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
class FormatNames:
    """What the format with this digest names: code to import, and the URLs of stores."""

    digest: str
    code: tuple[Code, ...] = ()
    stores: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.code or self.stores)


@dataclass(frozen=True)
class Allowance:
    """What was named here. `words`: modules, entrypoints (module:function) and digests of formats; `code`: the
    entrypoints of a local run file; `stores`: URLs, each with all that lies below it."""

    words: tuple[str, ...] = ()
    code: tuple[Code, ...] = ()
    stores: tuple[str, ...] = ()

    def __or__(self, other: Allowance) -> Allowance:
        return Allowance(
            tuple(dict.fromkeys(self.words + other.words)),
            self.code + other.code,
            tuple(dict.fromkeys(self.stores + other.stores)),
        )

    def __bool__(self) -> bool:
        return bool(self.words or self.code or self.stores)


@dataclass(frozen=True)
class Consent:
    """The decision and its reason; `code` and `stores`: what was not consented to."""

    allowed: bool
    reason: str
    code: tuple[Code, ...] = ()
    stores: tuple[str, ...] = ()


def decide(named: FormatNames, allowance: Allowance) -> Consent:
    if not named:
        return Consent(True, "the format names neither code nor another store")
    if named.digest in allowance.words:
        return Consent(True, "the format has the digest that was given")
    code = tuple(code for code in named.code if not _allows(allowance, code))
    stores = tuple(url for url in named.stores if not _is_below(url, allowance.stores))
    if not (code or stores):
        return Consent(True, "everything that the format names was named here")
    what = [f"code: {', '.join(map(str, code))}"] if code else []
    what += [f"stores elsewhere: {', '.join(stores)}"] if stores else []
    return Consent(False, f"names {' and '.join(what)}; this machine has not consented to that", code, stores)


def to_remember(named: FormatNames, allowance: Allowance) -> Allowance:
    """What of an allowance is worth noting under the format's digest, which fixes all arguments: what it names."""
    whole = (named.digest,) if named.digest in allowance.words else ()
    words = tuple(code.name for code in named.code if _allows(allowance, code))
    return Allowance(words + whole, (), tuple(url for url in named.stores if _is_below(url, allowance.stores)))


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


def _allows(allowance: Allowance, code: Code) -> bool:
    """By its module, by its whole name (both with any arguments), or by a run file with the same arguments."""
    module = code.name.partition(":")[0]
    return module in allowance.words or code.name in allowance.words or code in allowance.code


def _is_below(url: str, stores: Sequence[str]) -> bool:
    return any(url == store or url.startswith(f"{store.rstrip('/')}/") for store in stores)
