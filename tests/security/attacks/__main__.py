"""Every attack against real processes, one after the other: python -m tests.security.attacks [NAME ...]

A line an attack: whether the defence holds, and what was seen. Ends with status 1 if one does not hold.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.security.attacks.catalogue import ATTACKS, performed


def main() -> None:
    chosen = sys.argv[1:] or list(ATTACKS)
    if unknown := [name for name in chosen if name not in ATTACKS]:
        sys.exit(f"no attack {unknown[0]!r}; there are: {', '.join(ATTACKS)}")
    broken = 0
    for name in chosen:
        directory, started_s = Path(tempfile.mkdtemp(prefix="attack-")), time.monotonic()
        try:
            verdict = performed(name, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        broken += not verdict.holds
        print(
            f"{'holds ' if verdict.holds else 'BROKEN'} {name} ({time.monotonic() - started_s:.0f} s): {verdict.seen}",
            flush=True,
        )
    print(f"{len(chosen)} attacks, {broken} succeed")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
