"""The daemons, each of which runs alone on any machine: `diloco learner`, `diloco syncer`, and the syncer's child
`diloco evaluator`, which is not for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from diloco_cli.cli.arguments import AllowCode, AllowStore, complete_devices, find_run, named_here, open_run
from diloco_cli.cli.output import talk
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.hardware import expand_hostlist
from diloco_cli.environment import DEVICE_VARIABLE, environment_value, set_environment
from diloco_cli.errors import FencedError, TakenError, UsageError
from diloco_cli.events.bucket import EVALUATOR
from diloco_cli.learner.parent import (
    IslandNode,
    RankPlace,
    die_with_parent,
    node_here,
    place_here,
    run_ranks,
    started_as_rank,
)
from diloco_cli.paths import checked_name
from diloco_cli.protocol.actors.joining import refuse_beside_living
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.quantities import parse_count, parse_duration
from diloco_cli.runtime.consent import NamedHere, consented, signing_secret
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.runtime.registry import telling_why
from diloco_cli.runtime.units import diloco_command
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore
from diloco_cli.syncer.standby import run_standby

TASK_VARIABLES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # of Slurm, of Kubernetes


def learner(
    run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix."),
    name: str | None = typer.Option(None, "--name", help="Which island this is."),
    name_from: str | None = typer.Option(
        None,
        "--name-from",
        metavar="NAMES",
        help="With --join: the first free one, as of spot-[0-15]; a task of an array begins with its index.",
    ),
    chosen: str | None = typer.Option(None, "--chosen", hidden=True, help="Of --name-from: this one was free."),
    device: str | None = typer.Option(
        None, "--device", help="cpu, cuda, cuda:N or mps; default: the island's.", autocompletion=complete_devices
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
    if not join and (region is not None or batch_tokens is not None):
        raise UsageError("--region and --batch-tokens describe an island that joins", hint="add --join")
    batch = None if batch_tokens is None else parse_count(batch_tokens)
    _check_names(name, name_from, join, nodes is None and node_rank == 0 and rendezvous is None)
    die_with_parent()
    if name_from is not None and chosen is None:
        _become_first_free(run, name_from)
    name = name or chosen
    assert name is not None
    here, drain_s, run = named_here(allow_code, allow_store), parse_duration(drain), find_run(run).url
    with _or_another(run, name, name_from), telling_why(run, name):
        place = place_here()
        node = _node(run, name, place, ranks, nodes, node_rank, rendezvous)
        if node is not None and node.is_parent:
            sys.exit(run_ranks(diloco_command(*sys.argv[1:]), run, name, node, drain_s))
        from diloco_cli.learner.daemon import Newcomer, run_learner
        from diloco_cli.learner.group import run_rank

        if place is not None and not place.commands:
            sys.exit(run_rank(place, run, name, device, here))
        newcomer = Newcomer(region, batch, 1 if place is None else place.world_size) if join else None
        sys.exit(run_learner(run, name, device, drain_s, newcomer, host_syncer, here, place))


def _check_names(name: str | None, name_from: str | None, join: bool, alone: bool) -> None:
    """Raises UsageError unless it is clear which island this is. `alone`: no other machine of it is spoken of."""
    if (name is None) == (name_from is None) or (name_from is not None and not join):
        raise UsageError(
            "which island is this? give its --name, or --join with --name-from", hint="--join --name-from 'spot-[0-15]'"
        )
    if name_from is not None and not alone:
        raise UsageError(
            "--name-from chooses for one machine; with --nodes, --node-rank or --rendezvous each would choose another",
            hint="give all machines of the island the same --name",
        )


@contextmanager
def _or_another(run: str, name: str, names: str | None) -> Iterator[None]:
    """Of processes that found one name free at the same moment one keeps it: the others take the next one."""
    if names is None or started_as_rank():  # its parent does
        yield
        return
    joined = open_run(run, at_home=False).format.run_id
    try:
        yield
    except (FencedError, TakenError, SystemExit) as ended:
        lost = not isinstance(ended, SystemExit) or ended.code == FencedError.exit_status
        if not lost or open_run(run, at_home=False).format.run_id != joined:  # another run is here
            raise
    else:
        return
    talk(f"another process has taken {name}")
    _become_first_free(run, names, name)


def _become_first_free(run: str, names: str, lost: str | None = None) -> NoReturn:
    """Start again as the island of the first of these names that no living learner has. A task of an array begins with
    the name of its own number, so that those that start together do not choose the same; those that have `lost` one
    go on behind it, each at a place of its own."""
    opened, chosen = open_run(run, at_home=False), list(expand_hostlist(names))
    own = next(filter(None, map(environment_value, TASK_VARIABLES)), "0")
    first = int(own) if own.isdecimal() else 0
    first = (first if lost is None else chosen.index(lost) + 1 + os.getpid() % max(1, len(chosen) - 1)) % len(chosen)
    for name in chosen[first:] + chosen[:first]:
        try:
            opened.perform(refuse_beside_living(opened.format, name))
        except TakenError:
            continue
        talk(f"{name} is free")
        words = (word for word in sys.argv[1:] if not word.startswith("--chosen="))
        os.execv(sys.executable, diloco_command(*words, f"--chosen={name}"))
    raise TakenError(f"all of {names} take part already", where=run, hint="more names, or fewer tasks")


def _node(
    run: str,
    name: str,
    place: RankPlace | None,
    ranks: int | None,
    nodes: int | None,
    index: int,
    rendezvous: str | None,
) -> IslandNode | None:
    """What this process starts; None: it is one of the ranks. Raises UsageError if it is, and is told what to start."""
    if not started_as_rank():
        return node_here(run, name, ranks, nodes, index, rendezvous)
    if not (place and place.has_parent) and (ranks or nodes or rendezvous):
        raise UsageError(
            "--ranks, --nodes and --rendezvous say what a process starts; this one was started as a rank",
            hint="leave them out, or unset RANK and WORLD_SIZE",
        )
    return None


def syncer(
    url: str | None = typer.Argument(None, metavar="URL", help="URL of the run's bucket and prefix; or --run URL."),
    run: str | None = typer.Option(None, "--run", help="The same."),
    standby: bool = typer.Option(False, "--standby", help="Wait, and take over once no syncer serves the run."),
    name: str | None = typer.Option(None, "--name", help="With --standby: its name in `status`; default: standby."),
    instead_of: int | None = typer.Option(None, "--instead-of", hidden=True, help="Pid of its dead predecessor here."),
    alike: bool = typer.Option(False, "--alike", hidden=True, help="Serve if no syncer does: all units are standbys."),
    hosted: bool = typer.Option(False, "--hosted", hidden=True, help="Leave when stdin closes, work at low priority."),
    evaluator_device: str | None = typer.Option(
        None,
        "--evaluator-device",
        metavar="DEVICE",
        help="Where the held-out loss is computed. Default: DILOCO_EVALUATOR_DEVICE, or cpu.",
        autocompletion=complete_devices,
    ),
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Run the syncer: merges offers and writes the commit log of the run at URL."""
    if (url is None) == (run is None):
        raise UsageError("which run? give its URL once", hint="diloco syncer gs://my-bucket/runs/my-run")
    place, here = find_run(url or run).url, named_here(allow_code, allow_store)
    if evaluator_device is not None:
        set_environment(DEVICE_VARIABLE, evaluator_device)

    if not hosted:  # a host's child leaves in order, once its stdin closes
        die_with_parent()
    if not standby:
        if name is not None or hosted or alike or instead_of is not None:
            raise UsageError("--name, --hosted, --alike and --instead-of belong to a standby", hint="add --standby")
        from diloco_cli.syncer.daemon import run_syncer

        with telling_why(place, SYNCER):
            sys.exit(run_syncer(place, _rebuilt, here))

    called = checked_name(name or "standby", "name of a standby")
    with telling_why(place, called):
        sys.exit(run_standby(place, called, instead_of, hosted, _rebuilt, here, alike))


def _rebuilt(run: RunFormat, store: Store, version: FragmentVersion) -> bytes | None:
    from diloco_cli.observe.replay import lost, rebuilt_state  # torch: only where a state is lost

    state = rebuilt_state(run, store, version)
    if state is None:
        raise lost(store.url, version)
    return state


REGISTRATION = {"evaluator": {"hidden": True}}


def evaluator(
    run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix."),
    device: str | None = typer.Option(None, "--device", help="Where. Default: DILOCO_EVALUATOR_DEVICE, cpu."),
) -> None:
    """Started by the syncer: evaluates committed versions."""
    from diloco_cli.syncer.evaluation import requests_until_the_syncer_ends, serve_evaluations, take_stdout
    from diloco_cli.training.devices import choose_device

    answers, requests = take_stdout(), requests_until_the_syncer_ends(sys.stdin)
    with telling_why(run, EVALUATOR):
        where = choose_device(device or environment_value(DEVICE_VARIABLE) or "cpu")
        store = RetryingStore(open_store(run))
        read = perform(read_format(run, signing_secret()), store, SystemClock(monotonic_s, sleep_s, lambda: None))
        run_format = consented(read, run, NamedHere())
        serve_evaluations(run_format, store, requests, answers, where)
