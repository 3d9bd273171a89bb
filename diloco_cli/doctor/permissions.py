"""What the present credentials may do, and whose work that is enough for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from diloco_cli.doctor.place import Place
from diloco_cli.doctor.verdicts import Finding, passed, warned
from diloco_cli.store.port import Store, StoreForbiddenError, StoreUnavailableError

ALL = ("create", "read", "overwrite", "list", "delete")
NEEDS = {
    "learner": ("create", "read", "list"),
    "syncer": ("create", "read", "list", "delete"),
}
"""A learner lists to find the newest snapshot, and some stores say 403 for a missing key to who may not list. It is
better off if it may overwrite its own heartbeat, for `status`; it never deletes."""


def permissions(place: Place) -> Finding:
    """Tries each verb and sees which are forbidden."""
    return finding_of(tuple(verb for verb in ALL if _may(verb, place)))


def finding_of(allowed: Collection[str]) -> Finding:
    """By the verbs that are allowed: which role they fit."""
    may = ", ".join(verb for verb in ALL if verb in allowed) or "nothing"
    lacking = {role: [verb for verb in needs if verb not in allowed] for role, needs in NEEDS.items()}
    fits = [role for role, missing in lacking.items() if not missing]
    if len(fits) == len(NEEDS) and "overwrite" in allowed:
        return passed(f"{may}: enough for a learner and a syncer")
    notes = [f"a {role} also needs {' and '.join(missing)}" for role, missing in lacking.items() if missing]
    if "overwrite" not in allowed:
        notes.append("without overwrite no heartbeats: `status` cannot show this unit's state")
    fit = f"enough for a {' and a '.join(fits)}" if fits else "not enough for a run"
    return warned(f"{may}: {fit}", "; ".join(notes))


def _may(verb: str, place: Place) -> bool:
    store = place.store
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: store.create("may/created", b"x"),
        "read": lambda: store.get("may/created"),
        "overwrite": lambda: _overwrite(place.impatient_client()),
        "list": lambda: store.list("may/"),
        "delete": lambda: store.delete("may/created"),
    }
    try:
        calls[verb]()
    except StoreForbiddenError:
        return False
    return True


def _overwrite(store: Store) -> None:
    try:
        for data in (b"x", b"y"):
            store.put("may/put", data)
    except StoreUnavailableError:
        return  # some stores take one write a second to a name: that is no lack of permission
