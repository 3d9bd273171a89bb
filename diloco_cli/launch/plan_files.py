"""Makes a plan from the files that a user names, and checks what this version can launch of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from diloco_cli.config.codec import replace
from diloco_cli.config.fields import Origins
from diloco_cli.config.huggingface import CONFIG, Config, check_weights, facts_of_config, read_config
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.models import (
    BYTE_VOCABULARY,
    MODEL_PRESETS,
    GPTShape,
    ModelFacts,
    facts_from_parameters,
    preset_shape,
)
from diloco_cli.config.run_file import inventory_path_of, load_run_with_origins, refuse_together
from diloco_cli.config.settings import Inventory, ModelSettings, RunSettings, StoreSettings
from diloco_cli.corpus.fit import refuse_misfit
from diloco_cli.corpus.index import check_sizes, read_index
from diloco_cli.corpus.sources import find_sources
from diloco_cli.errors import InfeasibleError, UsageError, suggestion
from diloco_cli.paths import templates_directory
from diloco_cli.plan.candidates import not_launched
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.plan import Goal, Plan, load_plan
from diloco_cli.plan.planner import make_plan
from diloco_cli.store.open import CONNECTIONS_VARIABLE, connections_here, open_store
from diloco_cli.store.port import MAX_CONNECTIONS, StoreGoneError
from diloco_cli.store.url import examples, parse_url
from diloco_cli.units import format_count, format_size


def planned_epochs(run: RunSettings, facts: ModelFacts, folder: Path) -> str | None:
    """One line; None for other data, and for shards in a bucket, which a plan does not ask. Raises NotFoundError for
    text or shards that are not there, UsageError for those that do not fit the model. `folder`: as in `facts_of`."""
    data, vocabulary = run.data, _vocabulary(run.model, folder)
    if data.text:
        sources = find_sources([data.text])
        size = sum(source.size for source in sources)
        found = f"data: {len(sources)} files, {format_size(size)} of text"
        if data.tokenizer:
            return f"{found}: tokenized at launch"
        tokens, symbols = size + len(sources), BYTE_VOCABULARY
    elif data.tokens and parse_url(data.tokens).scheme == "file":
        try:
            store = open_store(data.tokens)
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
    config = model.args or _config_of(model, folder)[0]
    found = config.get("text_config", config).get("vocab_size")
    return found if isinstance(found, int) else None


def _epochs(run: RunSettings, tokens: int) -> str:
    epochs = run.train.tokens / (tokens * (1 - run.data.held_out))
    return (
        f"{run.data.held_out:.0%} held out: the run's {format_count(run.train.tokens)} tokens are {epochs:.3g} epochs"
    )


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
    if file is None:
        file = templates_directory() / "run.yaml"
        tell(f"no run file given: planning for the template {file} (choose one with -f RUN)")
        if inventory is None:
            raise UsageError("no inventory given", hint="diloco plan INVENTORY, or first: diloco init")
    run, islands, facts, origins = _read(file, overrides, inventory, tell)
    epochs = planned_epochs(run, facts, file.parent)
    if epochs is not None:
        tell(epochs)
    return make_plan(run, islands, facts, goal, origins)


def read_plan(file: Path, overrides: list[str]) -> Plan:
    """For `launch`: the plan in a plan file, or the plan of a run file with its inventory and its settings."""
    return read_plan_with_origins(file, overrides)[0]


def read_plan_with_origins(file: Path, overrides: list[str]) -> tuple[Plan, Origins]:
    """The same, and where each setting of the run file comes from; a plan file has its origins in itself."""
    if not _is_plan(file):
        run, inventory, facts, origins = _read(file, overrides)
        return make_plan(run, inventory, facts), origins
    if overrides:
        raise UsageError("--set needs a run file; a plan is launched exactly as it is", hint="diloco plan --set ...")
    return load_plan(file), {}


def _read(
    file: Path,
    overrides: list[str],
    inventory_path: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[RunSettings, Inventory, ModelFacts, Origins]:
    run, origins = load_run_with_origins(file, overrides)
    inventory_path = inventory_path or inventory_path_of(run, file)
    if inventory_path is None:
        hint = "add the line `inventory: inventory.yaml`"
        raise UsageError("no inventory given: the run file names none", where=str(file), hint=hint)
    inventory, facts = load_inventory(inventory_path), facts_of(run, file.parent)
    inventory = replace(inventory, store=as_used_here(inventory.store, tell))
    refuse_together(run, origins, inventory, facts.num_tensors, str(file), facts.sequence)
    return run, inventory, facts, origins


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
        if url is not None and url.split("/")[2] == TEMPLATE_BUCKET:
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
    config, place = _config_of(model, folder)
    check_weights(model, place)
    return facts_of_config(config, str(place / CONFIG), model.sequence)


def _config_of(model: ModelSettings, folder: Path) -> tuple[Config, Path]:
    places = [folder.absolute(), Path.cwd(), *map(Path, sys.path)]
    return read_config(model.huggingface or "", places, model.revision)


def _sequence(run: RunSettings) -> int:
    """The sequence length: model.sequence, `sequence` in `args`, else that of preset data."""
    named = run.model.sequence or run.model.args.get("sequence", run.data.args.get("sequence"))
    if isinstance(named, int) and named > 0:
        return named
    return PRESET_SEQUENCE if run.data.preset or run.data.is_own else UNKNOWN_SEQUENCE
