"""python -m tests.histories --seed 1 --histories 500 --jobs 2

Seeded worst cases of the protocol's own code in virtual time, each checked after every step. A violation comes with the
shortest story that was found and with the command that repeats it; the exit status is 11 then.
"""

from __future__ import annotations

import argparse
import sys
import time

from diloco_cli.errors import DataCheckError
from tests.histories.campaign import campaign, work_of


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.histories", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first history's seed")
    parser.add_argument("--histories", type=int, help="so many seeds, one history each (with --sweep: one sweep)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--sweep", action="store_true", help="crash every process before and after each operation")
    given = parser.parse_args()
    began_s, wanted = time.monotonic(), given.histories or (1 if given.sweep else 100)
    totals = campaign(work_of(given.seed, wanted, given.sweep), given.jobs)
    for violation in totals.violations:
        print("\n".join([*violation.story, f"repeat it: {violation.command}", ""]))
    print(f"{totals}; {time.monotonic() - began_s:.1f} s")
    return DataCheckError.exit_status if totals.violations else 0


if __name__ == "__main__":
    sys.exit(main())
