"""Decoupled DiLoCo: learners and a syncer that only meet in a bucket."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_cli.loop.island import join as join

if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses an older one; a path or a copied environment does not
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(f"error: diloco needs Python 3.11 or newer, and this is {found}\nhint: python3.11 -m venv .venv")

__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    """`join` brings torch along, so it is imported when it is asked for."""
    if name == "join":
        from diloco_cli.loop.island import join

        return join
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
