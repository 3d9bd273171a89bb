"""Options by which this machine consents to what a run's format names, as every command that needs it has them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diloco_cli.errors import UsageError

if TYPE_CHECKING:
    from diloco_cli.protocol.rules.consent import Allowance
    from diloco_cli.runtime.consent import NamedHere

CODE = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?")
AllowCode = typer.Option(
    [], "--allow-code", metavar="MODULE[:FUNCTION]|DIGEST",
    help="Let code run that the run's format names; or all that the format with this digest names.",
)  # fmt: skip
AllowStore = typer.Option([], "--allow-store", metavar="URL", help="Let a bucket be used that the run's format names.")


def named_here(codes: list[str], stores: list[str] | None = None, run_file: Path | None = None) -> NamedHere:
    """What was named on the command line, and in a run file of this machine with its inventory."""
    from diloco_cli.config.hub import HUB
    from diloco_cli.digests import is_digest
    from diloco_cli.protocol.rules.consent import Allowance
    from diloco_cli.runtime.consent import NamedHere
    from diloco_cli.store.url import real_url

    for code in codes:
        if not is_digest(code) and CODE.fullmatch(code) is None:
            raise UsageError(
                f"--allow-code {code!r}: must be a module, module:function, or the digest of a run's format",
                hint="--allow-code package.module:function",
            )
    allowance = Allowance(
        tuple(codes), (), tuple(store if store.startswith(HUB) else real_url(store) for store in stores or ())
    )
    command = shlex.join(["diloco", *sys.argv[1:]])
    if run_file is None:
        return NamedHere(allowance, None, command)
    return NamedHere(allowance | _named_by_file(run_file), run_file.parent, command)


def _named_by_file(path: Path) -> Allowance:
    from diloco_cli.config.inventory_file import load_inventory
    from diloco_cli.config.run_file import inventory_path_of, load_run
    from diloco_cli.runtime.consent import named_in_files

    run = load_run(path)
    inventory = inventory_path_of(run, path)
    return named_in_files(run, None if inventory is None else load_inventory(inventory))
