"""The only module that reads or copies the process environment."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHORTEST_SECRET = 8
ALLOW_HTTP_VARIABLE = "DILOCO_ALLOW_HTTP"  # a host that stores may be reached at by plain http
DEVICE_VARIABLE = "DILOCO_EVALUATOR_DEVICE"  # where a syncer's evaluator computes
_BRIEF = threading.Lock()
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|WEBHOOK|AUTH(?!OR)", re.IGNORECASE)


def environment_value(name: str) -> str | None:
    return os.environ.get(name) or None


def environment_with_prefix(prefix: str) -> dict[str, str]:
    """The variables whose names begin so, and that are not empty."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix) and value}


def environment_flag(name: str) -> bool:
    return (environment_value(name) or "").lower() in {"1", "true", "yes", "on"}


def environment_with(**values: str) -> dict[str, str]:
    """A copy of this process's environment with `values` added: for a child process."""
    with _BRIEF:
        return {**os.environ, **values}


def set_environment_default(name: str, value: str) -> None:
    os.environ.setdefault(name, value)


def set_environment(name: str, value: str) -> None:
    """For this process and those that it starts."""
    os.environ[name] = value


def drop_empty(prefix: str) -> None:
    """Of variables that a library would take for set."""
    with _BRIEF:
        for name in [name for name, value in os.environ.items() if name.startswith(prefix) and not value]:
            os.environ.pop(name, None)


@contextmanager
def environment_within(name: str, value: str) -> Iterator[None]:
    """For a library that reads it inside the block, and for no process that this one starts."""
    with _BRIEF:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def secret_values() -> list[str]:
    """The values of variables whose names speak of secrets, the longest first: they must not be told."""
    found = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= SHORTEST_SECRET}
    return sorted(found, key=len, reverse=True)
