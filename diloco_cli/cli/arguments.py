"""What commands share: the RUN argument, options that several have, consent to what a run's format names, and the words
that the shell completes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from diloco_cli.cli.output import talk
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.digests import is_digest
from diloco_cli.errors import DilocoError, NotFoundError, RefusedError, UsageError
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreGoneError
from diloco_cli.store.url import examples, join_url, normalise_store_url, parse_url, real_url
from diloco_cli.store.wrappers import Deadline, TimeBoxedStore

if TYPE_CHECKING:
    from diloco_cli.events.bucket import EventReader
    from diloco_cli.observe.facts import Local, RunFacts, StoreClock
    from diloco_cli.protocol.log.records import RunFormat
    from diloco_cli.protocol.log.state import RunState
    from diloco_cli.runtime.consent import Allowance, NamedHere
    from diloco_cli.runtime.daemon import SystemClock
    from diloco_cli.runtime.registry import KnownRun
    from diloco_cli.syncer.operator import Operator

RUN_FILE = Path("run.yaml")
DEVICES = ("cpu", "cuda", "cuda:0", "mps")


def complete_runs(incomplete: str) -> list[str]:
    """Those that this machine knows, this folder's first."""
    from diloco_cli.runtime.registry import known_runs

    return _beginning(incomplete, (run.name for run in known_runs()))


def complete_units(ctx: Any, incomplete: str) -> list[str]:
    """Of the run that was named, or else of this folder's."""
    from diloco_cli.runtime.registry import SUPERVISOR, list_units, noted_at

    try:
        run = find_run(ctx.params.get("run"), say=lambda line: None)
    except DilocoError:
        return []
    return _beginning(incomplete, [*(unit.name for unit in list_units(noted_at(run.url))), SUPERVISOR])


def complete_devices(incomplete: str) -> list[str]:
    return _beginning(incomplete, DEVICES)


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


FOREGROUND_DEADLINE_S = 10.0
LOOK_S = 8.0
"""For a whole look at a run (`status`), with any number of requests, also if the store hangs: with the start of the
command it takes about ten seconds at most."""
RUN_HELP = "A run's URL, its run file, or its name. Default: the run of this folder."
Result = TypeVar("Result")
RunArgument = typer.Argument(None, metavar="RUN", help=RUN_HELP, autocompletion=complete_runs)
RunOption = typer.Option(None, "--run", help=RUN_HELP, autocompletion=complete_runs)
TimeoutOption = typer.Option(
    None,
    "--timeout",
    metavar="S",
    help="Seconds of the syncer's silence before this command answers.  [default: 10, more with large fragments, or "
    "twice its longest so far]",
)
YesOption = typer.Option(False, "-y", "--yes", help="Do not ask.")
DryRunOption = typer.Option(False, "-n", "--dry-run", help="Only say what would be done.")
JsonOption = typer.Option(False, "--json", help="One JSON object.")
EndJsonOption = typer.Option(False, "--json", help="One JSON object at the end.")
RegionOption = typer.Option(None, "--region", help="Start only this region's islands.")
SyncerOption = typer.Option(
    None, "--syncer", metavar="here", help="Start the syncer on this machine, also where islands are jobs of a cluster."
)
DetachOption = typer.Option(False, "--detach", help="Supervise in the background.")
OnEvent = typer.Option(
    None, "--on-event", metavar="CMD", help="Run this when the run stalls, fails or finishes: JSON on stdin."
)
Webhook = typer.Option(None, "--webhook", metavar="URL", help="POST the event there as JSON.")


@dataclass(frozen=True)
class OpenRun:
    """A run that exists: where it lives, its store (retrying, within a deadline), its format; `events` reads each batch
    of them once; `store_clock` learns from each look."""

    name: str
    url: str
    store: Store
    format: RunFormat
    clock: SystemClock
    events: EventReader | None = None
    store_clock: StoreClock | None = None

    def perform(self, steps: Steps[Result]) -> Result:
        """Run a protocol generator to its end on the run's store."""
        from diloco_cli.runtime.daemon import perform

        return perform(steps, self.store, self.clock)

    def facts(self, known: RunState | None = None, most_batches: int | None = None) -> RunFacts:
        """What the bucket says of the run now; what `known` holds of its log is not read again, and of events not more
        than `most_batches`."""
        from diloco_cli.observe.facts import read_facts

        return read_facts(
            self.url, self.format, self.store, self.clock, known, self.events, most_batches, self.store_clock
        )

    @property
    def word(self) -> str:
        """The RUN of a command for this run that is typed in this folder."""
        return word_for(self.url)

    def local(self) -> Local:
        """What this machine knows of the run's units that live here."""
        from diloco_cli.observe.facts import read_local

        return read_local(self.url, self.format)


def is_here(syncer: str | None) -> bool:
    """Of `--syncer`."""
    if syncer not in (None, "here"):
        raise UsageError(f"--syncer {syncer}: must be here", hint="without it, jobs of a cluster have syncers there")
    return syncer is not None


def find_run(text: str | None, acts: bool = False, say: Callable[[str], None] | None = None) -> KnownRun:
    """The run that `text` means: a URL or a folder that holds a run; a run file; a name, which is that of the run file
    in this folder or of the only such run of this machine. Without a text: the run of this folder's run.yaml, else the
    one that was last launched from here. `acts`: the command changes the run, so that no other one will do."""
    from diloco_cli.config.run_file import load_run
    from diloco_cli.runtime.registry import known_at, run_of_name

    if text is None:
        return _run_of_this_folder(acts, say or talk)
    unmounted = os.sep in text and not os.path.isdir(Path(text).parent)  # the store says so, with what to do
    if "://" in text or _holds_a_run(text) or unmounted:
        url = normalise_store_url(text, Path())
        if not parse_url(url).kind.is_shared:
            raise UsageError(f"{url} lives in one process: no command can see a run there", hint=examples())
        return known_at(url)
    if is_run_file(text):
        return _run_of_file(Path(text))
    if os.sep in text:
        hint = "list the runs of this machine: diloco runs"
        raise NotFoundError("no run is there: it holds no FORMAT.json", where=str(Path(text).absolute()), hint=hint)
    if RUN_FILE.is_file():
        with _in_mid_edit(RUN_FILE):
            is_its_run = load_run(RUN_FILE).name == text
        if is_its_run:
            return _run_of_file(RUN_FILE)  # or its error: never another folder's run of this name
    return run_of_name(text)


def word_for(url: str) -> str:
    """How a command that is typed in this folder names the run: by its name where that means it, else by its URL."""
    from diloco_cli.runtime.registry import run_name

    name = run_name(url)
    with suppress(DilocoError):
        if find_run(name).url == url:
            return name
    return url


def _holds_a_run(text: str) -> bool:
    try:
        return (Path(text) / "FORMAT.json").is_file()
    except PermissionError:
        return True  # the store says whose it is
    except (OSError, ValueError):  # too long for a path, or none
        return False


def _run_of_this_folder(acts: bool, say: Callable[[str], None]) -> KnownRun:
    from diloco_cli.runtime.registry import LAUNCH_HINT, known_runs, this_folder

    runs = known_runs()
    launched = [run for run in runs if run.is_of_this_folder]
    if RUN_FILE.is_file():
        run = _run_of_file(RUN_FILE)
        newer = [other for other in launched[:1] if other.url != run.url]
        said = "".join(f"; last launched from this folder: {other.name}" for other in newer)
        say(f"run {run.name} ({run.url}), of {RUN_FILE}{said}")
        return run
    if launched:
        say(f"run {launched[0].name} ({launched[0].url}), the last one that was launched from this folder")
        return launched[0]
    if len(runs) == 1 and not acts:
        say(f"run {runs[0].name} ({runs[0].url}), the only one of this machine")
        return runs[0]
    if not runs:
        raise NotFoundError("no run is known to this machine", hint=LAUNCH_HINT)
    raise NotFoundError(
        f"this folder has no run; runs of this machine: {', '.join(run.url for run in runs[:5])}",
        where=this_folder(),
        hint="name the run, or list them all: diloco runs",
    )


def is_run_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) and Path(text).is_file()


def open_run(text: str | None, box: Deadline | None = None, at_home: bool = True, acts: bool = False) -> OpenRun:
    """Raises NotFoundError (exit 4) if there is no such run, StoreError (exit 6) if its bucket cannot be read. With a
    box, all calls of the run's store together end when it is over. `at_home`: a region's bucket, which only follows
    the home bucket's log, is left for that. Raises RefusedError (exit 8) if only the region's bucket names it."""
    opened = open_known_run(find_run(text, acts), box)
    home = opened.format.home_of(opened.url)
    if not at_home or home == opened.url:
        return opened
    from diloco_cli.runtime.consent import refused_stores
    from diloco_cli.runtime.registry import known_at

    if refused_stores(opened.format, opened.url, (home,)):
        raise RefusedError(
            f"this bucket follows a home bucket that only its FORMAT.json names: {home}",
            where=opened.url,
            hint=f"if that is where the run lives, name it: {_command_for(home, text)}",
        )
    talk(f"{opened.url} follows the home bucket: reading {home}")
    return open_known_run(known_at(home), box)


def _command_for(url: str, text: str | None) -> str:
    """The command that was typed, with this URL in the place of the RUN."""
    words = [url if word == text else word for word in sys.argv[1:]]
    return shlex.join(["diloco", *words, *([] if text in sys.argv else [url])])


def open_known_run(known: KnownRun, box: Deadline | None = None) -> OpenRun:
    from diloco_cli.events.bucket import EventReader
    from diloco_cli.observe.facts import StoreClock
    from diloco_cli.protocol.log.commit_log import read_format
    from diloco_cli.runtime.consent import check_operator, signing_secret
    from diloco_cli.runtime.daemon import SystemClock, perform

    clock = SystemClock(monotonic_s, sleep_s, lambda: None)
    secret = signing_secret()
    try:
        store = foreground_store(known.url, box)
        run = perform(read_format(known.url, secret), store, clock)
    except StoreGoneError as error:
        raise _gone(known, error) from None
    check_operator(run, known.url, secret, talk)
    return OpenRun(run.name, known.url, store, run, clock, EventReader(), StoreClock())


def _gone(known: KnownRun, error: StoreGoneError) -> StoreGoneError:
    """A run that was launched or resumed here had a bucket, so a hint how to make one would mislead."""
    if not known.launched_s:
        return error
    hint = f"bring it back or mount it, and the run goes on; `diloco stop {word_for(known.url)}` ends what runs here"
    return StoreGoneError(f"the bucket of run {known.name} is gone: {error.message}", where=error.where, hint=hint)


def foreground_store(url: str, box: Deadline | None = None, quiet: bool = False) -> Store:
    """The store at `url` for a command that a person waits for: calls with transient errors are repeated until a
    deadline, and unless `quiet` the errors are reported on stderr."""
    from diloco_cli.store.retry import RetryingStore, RetryNews

    store, news = open_store(url), RetryNews((lambda line: None) if quiet else talk)
    bounded, left_s = (store, lambda: inf) if box is None else (TimeBoxedStore(store, box), box.left_s)
    return RetryingStore(bounded, FOREGROUND_DEADLINE_S, left_s=left_s, on_retry=news.failing, on_answer=news.answered)


def boxed(opened: OpenRun, box: Deadline) -> OpenRun:
    """The same run with a store whose calls end at the deadline, and that says nothing."""
    return replace(opened, store=foreground_store(opened.url, box, quiet=True))


def head_of(opened: OpenRun, known: RunState | None = None) -> RunState:
    """The log, read to its end; what `known` holds is not read again."""
    from diloco_cli.protocol.log.commit_log import read_log

    return opened.perform(read_log(opened.format, known))


@contextmanager
def _in_mid_edit(path: Path) -> Iterator[None]:
    """A run file or inventory that cannot be read keeps nobody from its run: the hint says how to name it."""
    from diloco_cli.runtime.registry import known_runs

    try:
        yield
    except UsageError as error:
        launched = [known.url for known in known_runs() if known.folder == str(path.parent.resolve())]
        its_url = launched[0] if len(launched) == 1 else "see diloco runs"
        error.hint = f"{error.hint or 'correct the file'}; or name the run by its URL: {its_url}"
        raise


def _run_of_file(path: Path) -> KnownRun:
    """In the bucket that the file's inventory names; without an inventory, the run of this name that was launched from
    this folder or the file's. Raises NotFoundError if it was never launched, UsageError where a file is in mid-edit."""
    from diloco_cli.config.inventory_file import load_inventory
    from diloco_cli.config.run_file import inventory_path_of, load_run
    from diloco_cli.runtime.registry import known_at, known_runs, read_run, this_folder

    with _in_mid_edit(path):
        run = load_run(path)
        inventory_path = inventory_path_of(run, path)
        inventory = None if inventory_path is None else load_inventory(inventory_path)
    if inventory is None:
        folders = {this_folder(), str(path.parent.resolve())}
        launched = [known for known in known_runs() if known.name == run.name and known.folder in folders]
        if launched:
            return launched[0]
        message = f"the run file names no inventory, and no run {run.name!r} was launched from its folder"
        raise NotFoundError(message, where=str(path), hint="name the run by its URL; or list all: diloco runs")
    url = join_url(inventory.store.url, run.name)
    place = parse_url(url)
    if place.scheme == "file" and not Path(place.place).is_dir() and read_run(url) is None:
        hint = f"diloco launch {shlex.quote(str(path))}"
        raise NotFoundError(f"run {run.name!r} was not launched yet", where=url, hint=hint)
    return known_at(url)


CODE = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?")
AllowCode = typer.Option(
    [],
    "--allow-code",
    metavar="MODULE[:FUNCTION]|DIGEST",
    help="Let code run that the run's format names; or all that the format with this digest names.",
)
AllowStore = typer.Option([], "--allow-store", metavar="URL", help="Let a bucket be used that the run's format names.")


def named_here(codes: list[str], stores: list[str] | None = None, run_file: Path | None = None) -> NamedHere:
    """What was named on the command line, and in a run file of this machine with its inventory."""
    from diloco_cli.config.huggingface import HUB
    from diloco_cli.runtime.consent import Allowance, NamedHere

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


def operator_of(opened: OpenRun, timeout_s: float | None = None) -> Operator:
    """Puts requests to the run's syncer."""
    from diloco_cli.runtime.consent import refused_stores
    from diloco_cli.syncer.operator import Operator

    regions = opened.format.region_urls
    refused = refused_stores(opened.format, opened.url, regions)
    may_write = tuple(url for url in regions if url not in refused)
    return Operator(opened.format, opened.store, opened.clock, talk, timeout_s, may_write)
