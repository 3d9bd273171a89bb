"""Decoupled DiLoCo: learners and a syncer that only meet in a bucket."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses an older one; a path or a copied environment does not
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(f"error: diloco needs Python 3.11 or newer, and this is {found}\nhint: python3.11 -m venv .venv")

__version__ = "0.4.0.dev0"
