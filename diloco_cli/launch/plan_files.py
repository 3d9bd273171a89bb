"""Makes a plan from the files that a user names, and checks what this version can launch of it.

The files are noted beside the plan, so that `launch` can tell that they have changed; they are no part of it: the same
hardware and run give the same plan, wherever they lie.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import from_plain, replace, to_plain
from diloco_cli.config.fields import Origins
from diloco_cli.config.huggingface import CONFIG, check_weights, facts_of_config, read_config
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.models import ModelFacts, facts_from_parameters
from diloco_cli.config.run_file import inventory_path_of, load_run, load_run_with_origins, refuse_together
from diloco_cli.config.settings import Inventory, ModelSettings, RunSettings, StoreSettings
from diloco_cli.corpus.index import read_index
from diloco_cli.corpus.sources import find_sources
from diloco_cli.digests import digest
from diloco_cli.errors import DilocoError, InfeasibleError, UsageError, suggestion
from diloco_cli.paths import templates_directory
from diloco_cli.plan.candidates import not_launched
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.plan import Goal, Plan, load_plan, sources_in
from diloco_cli.plan.planner import make_plan
from diloco_cli.store.open import CONNECTIONS_VARIABLE, connections_here, open_store
from diloco_cli.store.port import MAX_CONNECTIONS
from diloco_cli.store.url import examples, parse_url
from diloco_cli.units import format_count, format_size


def planned_epochs(run: RunSettings) -> str | None:
    """One line; None for other data, and for shards in a bucket, which a plan does not ask. Raises NotFoundError for
    text or shards that are not there."""
    data = run.data
    if data.text:
        sources = find_sources([data.text])
        size = sum(source.size for source in sources)
        found = f"data: {len(sources)} files, {format_size(size)} of text"
        return f"{found}: tokenized at launch" if data.tokenizer else f"{found}, {_epochs(run, size)}"
    if not data.tokens or parse_url(data.tokens).scheme != "file":
        return None
    index = read_index(open_store(data.tokens))
    return (
        f"data: {format_count(index.num_tokens)} tokens in {Path(data.tokens).name}, {_epochs(run, index.num_tokens)}"
    )


def _epochs(run: RunSettings, tokens: int) -> str:
    epochs = run.train.tokens / (tokens * (1 - run.data.held_out))
    return (
        f"{run.data.held_out:.0%} held out: the run's {format_count(run.train.tokens)} tokens are {epochs:.3g} epochs"
    )


@dataclass(frozen=True)
class PlanSources:
    """Paths are relative to the plan's folder; digests are of what the files say, without comments or --set."""

    inventory: str
    inventory_digest: str
    run: str
    run_digest: str
    overrides: tuple[str, ...] = ()


def sources_of(inventory: Path | None, file: Path | None, overrides: list[str], plan: Path) -> PlanSources | None:
    """None for a plan of the template run, which has no file of the user."""
    if file is None:
        return None
    found = inventory or inventory_path_of(load_run(file, overrides), file)
    if found is None:
        return None
    there, run = (os.path.relpath(path, plan.parent) for path in (found, file))
    return PlanSources(there, _inventory_digest(found), run, _run_digest(file), tuple(overrides))


def refuse_changed_sources(noted: Any, plan: Path) -> None:
    """Raises UsageError if a file that the plan was made from is there and says something else now."""
    try:
        sources = from_plain(PlanSources, noted)
    except UsageError:
        return  # a plan of an earlier version, or of the template run
    inventory, run = (Path(os.path.normpath(plan.parent / path)) for path in (sources.inventory, sources.run))
    changed = [
        str(path)
        for path, was, now in (
            (inventory, sources.inventory_digest, _inventory_digest),
            (run, sources.run_digest, _run_digest),
        )
        if path.is_file() and _differs(was, now, path)
    ]
    if changed:
        words = [
            "diloco",
            "plan",
            str(inventory),
            "-f",
            str(run),
            *(f"--set={o}" for o in sources.overrides),
            "-o",
            str(plan),
        ]
        have = "have" if len(changed) > 1 else "has"
        raise UsageError(
            f"{' and '.join(changed)} {have} changed since this plan was made",
            where=str(plan),
            hint=f"make it again: {shlex.join(words)}",
        )


def _differs(was: str, digest_of: Any, path: Path) -> bool:
    try:
        return bool(digest_of(path) != was)
    except DilocoError:  # not readable any more is changed
        return True


def _inventory_digest(path: Path) -> str:
    return _digest(load_inventory(path))


def _run_digest(path: Path) -> str:
    return _digest(load_run_with_origins(path, only_file=True)[0])


def _digest(settings: Any) -> str:
    return digest(json.dumps(to_plain(settings), sort_keys=True, allow_nan=False).encode())


TEMPLATE_BUCKET = "my-bucket"
UNKNOWN_SEQUENCE = 1  # so every batch is a whole number of sequences, and attention is counted as nearly free
PRESET_SEQUENCE = 128  # of preset data under a model of one's own


def plan_of_files(
    inventory: Path | None,
    file: Path | None,
    overrides: list[str],
    goal: Goal | None = None,
    tell: Callable[[str], None] = print,
) -> Plan:
    """For `plan`: the plan of an inventory and a run file. `inventory` takes precedence over the run file's own;
    without a run file the template is planned. Settings that the run file does not give are searched."""
    run_path = file or templates_directory() / "run.yaml"
    run, origins = load_run_with_origins(run_path, overrides)
    inventory_path = inventory or (inventory_path_of(run, file) if file else None)
    if inventory_path is None:
        where = None if file is None else str(file)
        raise UsageError("no inventory given", where=where, hint="diloco plan INVENTORY, or first: diloco init")
    islands, facts = _inventory_as_used_here(inventory_path, tell), facts_of(run, run_path.parent)
    if file is None:
        tell(f"no run file given: planning for the template {run_path} (choose one with -f RUN)")
    refuse_together(run, origins, islands, facts.fragments(run.sync.fragments).count, str(run_path), facts.sequence)
    epochs = planned_epochs(run)
    if epochs is not None:
        tell(epochs)
    return make_plan(run, islands, facts, goal, origins)


def read_plan(file: Path, overrides: list[str]) -> Plan:
    """For `launch`: the plan in a plan file, or the plan of a run file with its inventory and its settings."""
    return read_plan_with_origins(file, overrides)[0]


def read_plan_with_origins(file: Path, overrides: list[str]) -> tuple[Plan, Origins]:
    """The same, and where each setting of the run file comes from; a plan file has its origins in itself."""
    if _is_plan(file):
        if overrides:
            raise UsageError(
                "--set needs a run file; a plan is launched exactly as it is", hint="diloco plan --set ..."
            )
        plan = load_plan(file)
        refuse_changed_sources(sources_in(file), file)
        return plan, {}
    run, origins = load_run_with_origins(file, overrides)
    inventory_path = inventory_path_of(run, file)
    if inventory_path is None:
        raise UsageError(
            "the run file names no inventory", where=str(file), hint="add the line `inventory: inventory.yaml`"
        )
    inventory, facts = _inventory_as_used_here(inventory_path), facts_of(run, file.parent)
    refuse_together(run, origins, inventory, facts.fragments(run.sync.fragments).count, str(file), facts.sequence)
    return make_plan(run, inventory, facts), origins


def _inventory_as_used_here(path: Path, tell: Callable[[str], None] = lambda line: None) -> Inventory:
    inventory = load_inventory(path)
    return replace(inventory, store=as_used_here(inventory.store, tell))


def as_used_here(store: StoreSettings, tell: Callable[[str], None] = lambda line: None) -> StoreSettings:
    """With what this machine's environment says of connections and client, where the inventory does not: the syncer is
    taken to have the same."""
    connections = connections_here()
    if store.connections is None and connections < MAX_CONNECTIONS:
        tell(f"planning for a syncer with {CONNECTIONS_VARIABLE}={connections}, as here (store.connections)")
        store = replace(store, connections=connections)
    return store


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
    here = [island.name for island in plan.inventory.islands if island.infra == "local"]
    if here and not plan.run.model.is_built:
        raise UsageError(
            f"model: nothing says how to build what {', '.join(here)} would train",
            where="model",
            hint="give a preset, an entrypoint or huggingface; or, for loops of your own elsewhere: --create-only",
        )


def refuse_stores(inventory: Inventory) -> None:
    """Raises UsageError for buckets that this version cannot launch on, and for the one that templates name."""
    stores = {f"regions.{name}.store: ": region.store for name, region in inventory.regions.items()}
    for place, url in {"": inventory.store.url, **stores}.items():
        if url is not None and url.split("/")[2].startswith(TEMPLATE_BUCKET):
            raise UsageError(
                f"{place}{url} is the template's: write your own bucket into the inventory",
                hint=f"then prove it: diloco doctor {url.replace(TEMPLATE_BUCKET, 'YOUR-BUCKET', 1)}",
            )
        if url is not None and not parse_url(url).kind.is_shared:
            raise UsageError(f"{place}{url} lives in one process; learners could not meet there", hint=examples())


def _is_plan(file: Path) -> bool:
    """Plans are JSON objects, which begin with a brace; run files are YAML, which in practice does not."""
    try:
        with file.open("rb") as stream:
            return stream.read(1) == b"{"
    except OSError:
        return False  # the reader of run files reports the error


def facts_of(run: RunSettings, folder: Path) -> ModelFacts:
    """The facts of a run's model, built once and counted, without memory where it allows that, if it is a user's own;
    `folder` is where modules that the run file names are looked for last."""
    if run.model.huggingface and not run.model.parameters:
        return _facts_of_huggingface(run.model, folder)
    if not run.model.entrypoint or run.model.parameters:
        return model_facts(run.model)
    from diloco_cli.runtime.consent import search_last
    from diloco_cli.tasks.build import build_model_on_meta
    from diloco_cli.tasks.models import check_blocks, divides
    from diloco_cli.tensors.flat import parameter_facts

    search_last(folder)
    model = build_model_on_meta(run)
    check_blocks(model, run.train)
    return facts_from_parameters(parameter_facts(model), _sequence(run), divides(model))


def _facts_of_huggingface(model: ModelSettings, folder: Path) -> ModelFacts:
    """The facts from config.json alone, found in the same places as the processes will search."""
    places = [folder.absolute(), Path.cwd(), *map(Path, sys.path)]
    config, place = read_config(model.huggingface or "", places, model.revision)
    check_weights(model, place)
    return facts_of_config(config, str(place / CONFIG), model.sequence)


def _sequence(run: RunSettings) -> int:
    """The sequence length: model.sequence, `sequence` in `args`, else that of preset data."""
    named = run.model.sequence or run.model.args.get("sequence", run.data.args.get("sequence"))
    if isinstance(named, int) and named > 0:
        return named
    return PRESET_SEQUENCE if run.data.preset or run.data.is_own else UNKNOWN_SEQUENCE
