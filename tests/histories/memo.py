"""The changes of a simulation to the protocol's modules during one history, and why they are fair.

Many simulated processes read one log. Results of the product's own code for the same bytes are remembered:

    encode   a record is frozen, so it gives the same bytes each time
    decode   the same bytes, signed or not, as the same kind of record, up to the same schema, give an equal record;
             those that were encoded here, the original
    fold     a pure function of (state, bytes): the second process to fold the same bytes onto the same state object
             gets the object that the first one got; a state of another origin is folded anew
    verify   a signature that was made here, or found good or bad before, on the same text with the same key
    digest, check_key, read_..._key   of the same bytes or text

Repeated histories remember nothing, and must end with the same log (campaign.py).

Snapshots are written more often, a quarantine may come sooner, and syncers poll less often, so that short histories
reach the situations of long runs, and do not spend their time on requests in vain.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

from diloco_cli import digests, signing
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log import keys, records
from diloco_cli.protocol.log.records import SCHEMA, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import body_of
from diloco_cli.store.port import check_key

EMPTY = RunState()
PROTOCOL = "diloco_cli.protocol."
USERS = (PROTOCOL, "tests.histories.", "diloco_cli.signing")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Without Python's cyclic garbage collection until the context ends."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def remembered() -> Iterator[None]:
    """For the length of one history. Not for threads: a simulation has only one."""
    encode, decode = _remembered_codec()
    sign, verify = _remembered_signatures()
    with ExitStack() as changes:
        changes.enter_context(_everywhere("encode", records.encode, encode))
        changes.enter_context(_everywhere("decode", records.decode, decode))
        changes.enter_context(_everywhere("fold", log.fold, _remembered_fold()))
        for pure in (
            digests.digest,
            keys.read_offer_key,
            keys.read_snapshot_key,
            check_key,
        ):
            changes.enter_context(_everywhere(pure.__name__, pure, cache(pure)))
        changes.enter_context(_everywhere("signature", signing.signature, sign))
        changes.enter_context(_everywhere("is_signature", signing.is_signature, verify))
        yield


def _remembered_fold() -> Callable[[RunFormat, RunState, bytes], RunState]:
    fold = log.fold
    known: dict[tuple[int, bytes], tuple[RunState, RunState]] = {}

    def remembered_fold(run: RunFormat, state: RunState, data: bytes) -> RunState:
        if state.n < 0 and state == EMPTY:
            state = EMPTY
        found = known.get((id(state), data))
        if found is None:  # the state is held, so that its id stays its own
            found = known[id(state), data] = (state, fold(run, state, data))
        return found[1]

    return remembered_fold


def _remembered_codec() -> tuple[Callable[..., bytes], Callable[..., Any]]:
    encode, decode = records.encode, records.decode
    written: dict[int, tuple[object, bytes]] = {}
    known: dict[tuple[type[Any], bytes, int | None], Any] = {}

    def remembered_encode(record: object, **limits: int) -> bytes:
        if isinstance(record, dict):
            return encode(record, **limits)
        found = written.get(id(record))
        if found is None:  # the record is held, so that its id stays its own
            found = written[id(record)] = (record, encode(record, **limits))
            for kind, schema in product(_kinds_of(record), _readable_with(record)):
                known[kind, found[1], schema] = record
        return found[1]

    def remembered_decode(kind: type[Any], data: bytes, where: str, schema: int | None = None, **limits: int) -> Any:
        found = known.get((kind, data, schema))
        if found is None:
            body = body_of(data)  # readers ignore a record's signature here
            found = known.get((kind, body, schema)) or decode(kind, data, where, schema, **limits)
            known[kind, data, schema] = found
        return found

    return remembered_encode, remembered_decode


def _remembered_signatures() -> tuple[Callable[[str, bytes], str], Callable[[str, str, bytes], bool]]:
    sign, verify = signing.signature, signing.is_signature
    known: dict[tuple[str, str, bytes], bool] = {}

    def remembered_signature(private: str, text: bytes) -> str:
        code = sign(private, text)
        known[signing.public_key(private), code, text] = True
        return code

    def remembered_is_signature(public: str, code: str, text: bytes) -> bool:
        found = known.get((public, code, text))
        if found is None:
            found = known[public, code, text] = verify(public, code, text)
        return found

    return remembered_signature, remembered_is_signature


def _kinds_of(record: object) -> list[type[Any]]:
    """The kinds as which readers ask for this record: a commit as its own kind, or as any commit."""
    return [kind for kind in type(record).__mro__ if kind.__module__.startswith(PROTOCOL)]


def _readable_with(record: object) -> tuple[int | None, ...]:
    """The schemas that readers pass to `decode` and that do not refuse this record as a newer one."""
    return (None, SCHEMA) if getattr(record, "schema", SCHEMA) <= SCHEMA else (None,)


@contextmanager
def _everywhere(name: str, usual: object, instead: object) -> Iterator[None]:
    """Replace an object in every module that has it under this name."""
    users = [module for module in _modules(USERS, len(sys.modules)) if getattr(module, name, None) is usual]
    for module in users:
        setattr(module, name, instead)
    try:
        yield
    finally:
        for module in users:
            setattr(module, name, usual)


@contextmanager
def tuned(**constants: object) -> Iterator[None]:
    """With these values of the protocol's constants, in every module that has them. Raises AttributeError if no module
    has one of them, because a renamed constant would otherwise silently keep its usual value."""
    known = _knowing(tuple(constants), len(sys.modules))
    if unknown := constants.keys() - {name for _, name in known}:
        raise AttributeError(f"no module of the protocol has the constant {', '.join(sorted(unknown))}")
    before = [(module, name, getattr(module, name)) for module, name in known]
    for module, name in known:
        setattr(module, name, constants[name])
    try:
        yield
    finally:
        for module, name, usual in before:
            setattr(module, name, usual)


@cache
def _knowing(names: tuple[str, ...], imported: int) -> list[tuple[ModuleType, str]]:
    """The (module, name) pairs of the protocol's modules that have one of these names."""
    modules = _modules((PROTOCOL, "diloco_cli.signing"), imported)
    return [(module, name) for module in modules for name in names if hasattr(module, name)]


@cache
def _modules(prefixes: tuple[str, ...], imported: int) -> list[ModuleType]:
    """The loaded modules with these prefixes; looked up again when more have been `imported`."""
    return [module for name, module in sys.modules.items() if name.startswith(prefixes)]
