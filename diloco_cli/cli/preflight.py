"""What would stop a run, found before anything of it is written: `plan`, `launch -n` and `launch` have the same checks.

`launch` ends with the first one that fails. `plan` does so for what no machine could train; what only this machine
lacks (a device, credentials, a bucket's answer) is a warning there, because the run may be launched from another."""

from __future__ import annotations

import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from diloco_cli.cli.arguments import LOOK_S, foreground_store
from diloco_cli.cli.hooks import hooks_of
from diloco_cli.config.hardware import CPU, data_class_of, find_device
from diloco_cli.config.models import BYTE_VOCABULARY, MODEL_PRESETS, GPTShape, ModelFacts, preset_shape
from diloco_cli.config.settings import Inventory, IslandSettings, ModelSettings, RunSettings
from diloco_cli.corpus.fit import refuse_misfit
from diloco_cli.corpus.index import check_sizes, read_index
from diloco_cli.corpus.sources import find_sources
from diloco_cli.errors import DilocoError, InfeasibleError, StoreError, UsageError, suggestion
from diloco_cli.launch.plan_files import config_of, device_name
from diloco_cli.plan.candidates import not_launched
from diloco_cli.plan.flow import GB
from diloco_cli.plan.plan import Plan
from diloco_cli.quantities import format_count, format_size, some_of
from diloco_cli.runtime.consent import search_last
from diloco_cli.runtime.units import is_submitted
from diloco_cli.store.open import check_credentials
from diloco_cli.store.port import StoreGoneError
from diloco_cli.store.url import examples, parse_url
from diloco_cli.store.wrappers import Deadline

if TYPE_CHECKING:
    from diloco_cli.tasks.weights import Values

TEMPLATE_BUCKET = "my-bucket"
WEBHOOK_S = 3.0


@dataclass(frozen=True)
class Tried:
    """What the first step finds of the model: the buffers that are exchanged, and the values that the run brings."""

    buffers: frozenset[str]
    values: Values | None


@dataclass(frozen=True)
class Preflight:
    """What is to be launched. `folder`: of its run file. `starts`: whether its units are to start here; `submits`:
    whether its jobs are submitted as they are planned. `prepare`: makes its data ready, which takes time and space;
    None: that is not wanted. `loads`: whether code is loaded that planning does without. `tried`: holds what the first
    step finds, if it was made."""

    plan: Plan
    folder: Path
    region: str | None = None
    starts: bool = True
    on_event: str | None = None
    webhook: str | None = None
    prepare: Callable[[], None] | None = None
    loads: bool = True
    tried: list[Tried] = field(default_factory=list)
    syncer_here: bool = False
    submits: bool = True

    @property
    def here(self) -> list[IslandSettings]:
        """The islands whose learners would start on this machine."""
        planned = {island.name for island in self.plan.islands if self.region in (None, island.region)}
        return [i for i in self.plan.inventory.islands if i.name in planned and i.infra == "local" and self.starts]

    @property
    def has_jobs(self) -> bool:
        """Whether jobs would be submitted."""
        return self.starts and self.submits and any(is_submitted(one.starts_by) for one in self.plan.inventory.islands)

    def problems(self, tell: Callable[[str], None]) -> Iterator[tuple[DilocoError, bool]]:
        """What fails, and whether it may be otherwise on another machine. `tell` takes what is worth a line."""
        for check, is_of_here in CHECKS:
            try:
                said = check(self)
            except DilocoError as error:
                yield error, is_of_here or (isinstance(error, StoreError) and not isinstance(error, StoreGoneError))
            else:
                if said is not None:
                    tell(said)

    def pass_or_raise(self, tell: Callable[[str], None]) -> None:
        for error, _ in self.problems(tell):
            raise error


def _hooks(it: Preflight) -> str | None:
    """A command that is not there is refused; an address that does not answer now may do so when it is needed."""
    hooks = hooks_of(it.on_event, it.webhook)
    words = shlex.split(hooks.on_event)
    if words and shutil.which(words[0]) is None:
        hint = "name it by its path, or none: --on-event ''"
        raise UsageError(f"on_event: there is no command {words[0]!r} here", hint=hint)
    parts = urlsplit(hooks.webhook)
    try:
        if parts.hostname:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with closing(socket.create_connection((parts.hostname, port), WEBHOOK_S)):
                pass
    except (OSError, ValueError) as error:
        return f"warning: the webhook at {parts.hostname} does not answer: {error}"
    return None


def _credentials(it: Preflight) -> None:
    regions = [region.store for region in it.plan.inventory.regions.values()]
    for url in (it.plan.inventory.store.url, *regions, it.plan.run.data.tokens):
        if url is not None:
            check_credentials(url)


def _devices(it: Preflight) -> None:
    for island in it.here:
        name = island.accelerators.name
        if find_device(name, it.plan.inventory.devices).backend == CPU:
            continue  # torch is asked for accelerators alone: its import takes seconds
        from diloco_cli.training.devices import choose_device, refuse_few

        try:
            if choose_device(device_name(name, it.plan.inventory)).type == "cuda":
                refuse_few(island.num_ranks)
        except UsageError as error:
            hint = "launch on the machine that has it; for islands of other machines: `infra: ssh` and `hosts:`"
            raise UsageError(f"{island.name}: {error.message}", where=f"islands.{island.name}", hint=hint) from None


def _jobs(it: Preflight) -> None:
    """Whether the cluster would take them, before anything is created."""
    if it.has_jobs:
        from diloco_cli.cli.jobs import check_jobs, planned_jobs

        check_jobs(planned_jobs(it.plan, it.region, it.folder, it.syncer_here))


def _sites(it: Preflight) -> None:
    """Where jobs want to have diloco brought, it is, before anything of the run is created."""
    if it.has_jobs and it.prepare is not None:
        from diloco_cli.cli.jobs import make_ready, planned_jobs

        make_ready(planned_jobs(it.plan, it.region, it.folder, it.syncer_here))


def _first_step(it: Preflight) -> str | None:
    """Of a learner, on this machine's processor; nothing is said of presets, which are known to work."""
    run, facts = it.plan.run, it.plan.model
    loads = it.loads or run.model.entrypoint
    if not (loads and run.is_worth_a_try(facts.parameters)) or (run.data.text and it.prepare is None):
        return None
    from diloco_cli.training.trial import check_evaluated, check_task

    search_last(it.folder)
    islands, evaluated = it.plan.inventory.islands, False
    own_loops = all(data_class_of(island.infra) is not None for island in islands)
    try:
        if own_loops:  # which may train it in another way than a learner does
            check_evaluated(run)
            evaluated = True
        changed = check_task(run, min(island.batch_tokens for island in it.plan.islands), own_loops)
    except DilocoError as error:
        of_the_model = error.where == "model" and error.__cause__ is None  # else its code, data or packages failed
        if not evaluated and (of_the_model or all(island.infra == "local" for island in islands)):
            raise
        what = "of its buffers only the running statistics of torch's own modules are exchanged"
        if error.where == "model" and not evaluated:
            what += ", and where it fails for the evaluator, too, the run has no held-out loss"
        tried = "a step of the model" if evaluated else "the model"
        return f"warning: {tried} cannot be tried on this machine: {error.message}; so {what}"
    return _carried(it, changed)


def _carried(it: Preflight, changed: frozenset[str]) -> str:
    from diloco_cli.launch.new_run import exchanged_buffers
    from diloco_cli.tasks.build import build_model_on_meta
    from diloco_cli.tasks.weights import brought_values
    from diloco_cli.training.replica import carried_text

    run, values = it.plan.run, brought_values(it.plan.run)
    ranked, model = [island.name for island in it.plan.islands if island.ranks > 1], build_model_on_meta(run)
    it.tried.append(
        Tried(frozenset(fact.name for fact in exchanged_buffers(run, model, ranked, values, changed)), values)
    )
    return carried_text(model, it.tried[-1].buffers)


CHECKS: tuple[tuple[Callable[[Preflight], str | None], bool], ...] = (
    (lambda it: refuse_region(it.plan, it.region), False),
    (lambda it: refuse_unfit(it.plan), True),
    (lambda it: refuse_without_a_model(it.plan) if it.starts else None, True),
    (lambda it: refuse_stores(it.plan.inventory, it.folder), True),
    (lambda it: crowded_disk(it.plan), True),
    (_credentials, True),
    (_hooks, True),
    (lambda it: planned_epochs(it.plan.run, it.plan.model, it.folder), False),
    (_devices, True),
    (_jobs, True),
    (lambda it: None if it.prepare is None else it.prepare(), False),
    (_first_step, False),
    (_sites, True),
)
"""(the check, whether what it finds is of this machine alone)"""


def planned_epochs(run: RunSettings, facts: ModelFacts, folder: Path) -> str | None:
    """One line; None for other data. Raises NotFoundError for text or shards that are not there, UsageError for those
    that do not fit the model, StoreError for a bucket that does not answer. `folder`: as in `facts_of`."""
    data, vocabulary = run.data, _vocabulary(run.model, folder)
    if data.text:
        sources = find_sources([data.text])
        size = sum(source.size for source in sources)
        found = f"data: {len(sources)} files, {format_size(size)} of text"
        if data.tokenizer:
            return f"{found}: tokenized at launch"
        tokens, symbols = size + len(sources), BYTE_VOCABULARY
    elif data.tokens:
        try:
            store = foreground_store(data.tokens, Deadline(LOOK_S))
        except StoreGoneError as error:
            error.hint = f"make them: diloco data tokenize FILES -o {data.tokens}"
            raise
        index = read_index(store)
        check_sizes(store, index)
        tokens, symbols = index.num_tokens, index.vocabulary
        found = f"data: {format_count(tokens)} tokens in {Path(data.tokens).name}"
    else:
        return None
    if vocabulary is not None:
        refuse_misfit(run, tokens, symbols, facts.sequence, vocabulary)
    return f"{found}, {_epochs(run, tokens)}"


def _vocabulary(model: ModelSettings, folder: Path) -> int | None:
    """None if only the model's own code knows it."""
    if model.preset in MODEL_PRESETS:
        shape = preset_shape(model.preset, model.vocabulary)
        return shape.vocabulary if isinstance(shape, GPTShape) else None
    if not model.huggingface or model.parameters:
        return None
    config = model.args or config_of(model, folder)[0]
    found = config.get("text_config", config).get("vocab_size")
    return found if isinstance(found, int) else None


def _epochs(run: RunSettings, tokens: int) -> str:
    epochs = run.train.tokens / (tokens * (1 - run.data.held_out))
    return (
        f"{run.data.held_out:.0%} held out: the run's {format_count(run.train.tokens)} tokens are {epochs:.3g} epochs"
    )


def refuse_region(plan: Plan, region: str | None) -> None:
    """Raises UsageError for a region that the plan does not know; nothing is created for it."""
    home = plan.inventory.store.region
    known = sorted({island.region for island in plan.islands} | ({home} if home else set()))
    if region is not None and region not in known:
        raise UsageError(
            f"run {plan.run.name} has no region {region!r}{suggestion(region, known)}; it has: {', '.join(known)}",
            hint=f"--region {known[0]}, or none for all regions; nothing was created",
        )


def refuse_unfit(plan: Plan) -> None:
    """Raises InfeasibleError for islands that no learner could train; nothing is created for them."""
    planned = {island.name for island in plan.islands}
    for island in plan.inventory.islands:
        unfit = not_launched(island, plan.inventory) if island.name in planned else None
        if unfit is not None:
            why, way = unfit
            raise InfeasibleError(f"{island.name} ({island.accelerators.name}) cannot be launched: {why}", hint=way)


def refuse_without_a_model(plan: Plan) -> None:
    """Raises UsageError if islands are to be started here, and nothing builds their model."""
    here = [i.name for i in plan.inventory.islands if i.infra == "local" or is_submitted(i.starts_by)]
    if here and not plan.run.model.is_built:
        raise UsageError(
            f"nothing says how to build what {some_of(here)} would train",
            where="model",
            hint="give a preset, an entrypoint or huggingface; or, for loops of your own elsewhere: --create-only",
        )


def refuse_stores(inventory: Inventory, project: Path) -> None:
    """Raises UsageError for buckets that this version cannot launch on, for the one that templates name, and for a
    folder outside of the `project` that would be made with what it lies in: a disk that is not mounted, for example."""
    stores = {f"regions.{name}.store: ": region.store for name, region in inventory.regions.items()}
    for place, url in {"": inventory.store.url, **stores}.items():
        if url is not None and url.split("/")[2] == TEMPLATE_BUCKET:
            raise UsageError(
                f"{place}{url} is the template's: write your own bucket into the inventory",
                hint=f"then prove it: diloco doctor {url.replace(TEMPLATE_BUCKET, 'YOUR-BUCKET', 1)}",
            )
        if url is not None and not parse_url(url).kind.is_shared:
            raise UsageError(f"{place}{url} lives in one process; learners could not meet there", hint=examples())
        there = Path(parse_url(url).place).parent.resolve() if url is not None and url.startswith("file:") else project
        if not there.exists() and not there.is_relative_to(project.resolve()):
            raise UsageError(
                f"{place}{url}: {there} does not exist, perhaps because a disk or share is not mounted",
                hint=f"mount it; or, if it is to be a folder of this machine: mkdir -p {there}",
            )


def crowded_disk(plan: Plan) -> str | None:
    """Of a store that is a folder, for a run that begins: one that fills its disk stands still until somebody comes."""
    url, kept_bytes = plan.inventory.store.url, int(plan.money.storage_gb_at_end * GB)
    if not url.startswith("file:"):
        return None
    place = Path(parse_url(url).place)
    try:
        if (place / plan.run.name).exists():
            return None
        disk = place if place.exists() else place.parent
        free_bytes = shutil.disk_usage(disk).free
    except OSError:
        return None  # absent, or another user's: what opens the store says so
    if free_bytes >= kept_bytes:
        return None
    room = f"the store's folder will hold up to {format_size(kept_bytes)}; {format_size(free_bytes)} are free in {disk}"
    return f"warning: {room}: make room, or keep less (retention.rounds, now {plan.run.retention.rounds})"
