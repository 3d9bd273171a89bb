"""What protocol code asks of the world. A generator yields one of these and is sent the answer.

| operation      | answer                                   |
|----------------|------------------------------------------|
| Get            | bytes, or None                           |
| Create         | Created or Exists (store/port.py)        |
| Put            | None                                     |
| Now            | seconds on the actor's own monotonic clock |
| Sleep          | None                                     |
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Get:
    key: str


@dataclass(frozen=True)
class Create:
    key: str
    data: bytes


@dataclass(frozen=True)
class Put:
    """For hints only."""

    key: str
    data: bytes


@dataclass(frozen=True)
class Now:
    pass


@dataclass(frozen=True)
class Sleep:
    seconds: float


Operation = Get | Create | Put | Now | Sleep
Steps = Generator[Operation, Any, Result]
