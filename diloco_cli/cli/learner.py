"""`diloco learner`: the daemon of one island."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli import complete
from diloco_cli.cli.consent import AllowCode, AllowStore, named_here
from diloco_cli.errors import UsageError
from diloco_cli.runtime.units import diloco_command
from diloco_cli.units import parse_count, parse_duration

if TYPE_CHECKING:
    from diloco_cli.learner.parent import IslandNode
    from diloco_cli.learner.place import RankPlace


def learner(
    run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix."),
    name: str = typer.Option(..., "--name", help="Which island this is."),
    device: str | None = typer.Option(
        None, "--device", help="cpu, cuda, cuda:N or mps; default: the island's.", autocompletion=complete.devices
    ),
    drain: str = typer.Option("0 s", "--drain", help="After SIGTERM: at most so long to have the last offers merged."),
    join: bool = typer.Option(False, "--join", help="Ask the run to admit this island, if it does not know it yet."),
    region: str | None = typer.Option(None, "--region", help="With --join: its region; default: the run's home."),
    batch_tokens: str | None = typer.Option(None, "--batch-tokens", help="With --join: default: train.batch_tokens."),
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Processes of this machine that train together; default: as the run says."
    ),
    nodes: int | None = typer.Option(None, "--nodes", min=1, help="Machines of the island; default: as the run says."),
    node_rank: int = typer.Option(0, "--node-rank", min=0, help="Which of its machines this is; 0 commands."),
    rendezvous: str | None = typer.Option(
        None,
        "--rendezvous",
        metavar="HOST:PORT",
        help="Of several machines: the private address on which machine 0 listens.",
    ),
    host_syncer: bool = typer.Option(False, "--host-syncer", help="Keep a standby syncer beside it, as a child."),
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Run one island's learner: joins the run at URL, trains until it is over."""
    from diloco_cli.learner.parent import run_ranks
    from diloco_cli.learner.place import die_with_parent, place_here
    from diloco_cli.runtime.restart import telling_why

    if not join and (region is not None or batch_tokens is not None):
        raise UsageError("--region and --batch-tokens describe an island that joins", hint="add --join")
    batch = None if batch_tokens is None else parse_count(batch_tokens)
    here, drain_s = named_here(allow_code, allow_store), parse_duration(drain)
    with telling_why(run, name):
        place = place_here()
        node = _node(run, name, place, ranks, nodes, node_rank, rendezvous)
        if node is not None and node.is_parent:
            sys.exit(run_ranks(diloco_command(*sys.argv[1:]), run, name, node, drain_s))
        from diloco_cli.learner.daemon import Newcomer, run_learner
        from diloco_cli.learner.rank import run_rank

        if place is not None and place.has_parent:
            die_with_parent()
        if place is not None and not place.commands:
            sys.exit(run_rank(place, run, name, device, here))
        newcomer = Newcomer(region, batch, 1 if place is None else place.world_size) if join else None
        sys.exit(run_learner(run, name, device, drain_s, newcomer, host_syncer, here, place))


def _node(
    run: str, name: str, place: RankPlace | None, ranks: int | None, nodes: int | None, index: int,
    rendezvous: str | None,
) -> IslandNode | None:  # fmt: skip
    """What this process starts; None: it is one of the ranks. Raises UsageError if it is, and is told what to start."""
    from diloco_cli.learner.parent import node_here
    from diloco_cli.learner.place import started_as_rank

    if not started_as_rank():
        return node_here(run, name, ranks, nodes, index, rendezvous)
    if not (place and place.has_parent) and (ranks or nodes or rendezvous):
        raise UsageError(
            "--ranks, --nodes and --rendezvous say what a process starts; this one was started as a rank",
            hint="leave them out, or unset RANK and WORLD_SIZE",
        )
    return None
