"""The one plan of the files that a user names: `plan`, `simulate run` and `launch` of the same files have the same.

It is kept beside the run file (`plan.json`), with the digests of what it was made of, so that what was read is what is
launched; once one of these inputs has changed, a plan is made anew, and that is said.

What a plan makes of a run before anything is created, its islands and regions, is told here, too."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco_cli import __version__
from diloco_cli.clock import utc_now_text, wall_s
from diloco_cli.config.codec import changed_keys, replace, to_plain
from diloco_cli.config.fields import Origins
from diloco_cli.config.hardware import find_device, in_catalogue
from diloco_cli.config.huggingface import CONFIG, Config, check_weights, facts_of_config, read_config
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.models import ModelFacts, facts_from_parameters
from diloco_cli.config.run_file import inventory_path_of, load_run_with_origins, refuse_together
from diloco_cli.config.settings import Inventory, ModelSettings, RunSettings, StoreSettings
from diloco_cli.digests import short_digest
from diloco_cli.errors import InfeasibleError, NotFoundError, UsageError
from diloco_cli.layout import Layout
from diloco_cli.paths import templates_directory
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.plan import (
    Goal,
    Made,
    Plan,
    digest_of,
    made_of,
    plan_digest,
    plan_of_body,
    read_body,
    save_plan,
)
from diloco_cli.plan.planner import make_plan, pins_of
from diloco_cli.plan.search import SEARCHED
from diloco_cli.protocol.log.records import Island, RegionStore, RunFormat
from diloco_cli.quantities import parse_time
from diloco_cli.signing import Secret
from diloco_cli.store.open import CONNECTIONS_VARIABLE, connections_here
from diloco_cli.store.port import MAX_CONNECTIONS
from diloco_cli.store.url import join_url

UNKNOWN_SEQUENCE = 1  # so every batch is a whole number of sequences, and attention is counted as nearly free
RUN_NAME, PLAN_KEPT = "run.yaml", "plan.json"
PRESET_SEQUENCE = 128  # of preset data under a model of one's own
NOT_KEPT = ", so it is not kept"  # of a plan that -o may keep


@dataclass(frozen=True)
class Resolved:
    """The one plan of a run file, its inventory and its model, whichever command asks for it. `how`: from where it
    comes, for people. `origins`: where each setting comes from, none of an explicit plan file. `inputs`: the digests
    of what the plan was made of. `place`: the file that keeps it beside the run; None: nothing keeps it."""

    plan: Plan
    how: str
    origins: Origins = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    place: Path | None = None
    is_kept: bool = False

    @cached_property
    def digest(self) -> str:
        return plan_digest(self.plan)

    def told(self) -> str:
        """`plan 0123456789ab, as planned 10:41`, and its goal, if that is another than speed."""
        goal = self.plan.goal
        limits = any((goal.budget_per_h, goal.budget_total, goal.deadline_s))
        wanted = f", for {goal.objective}" + (" within limits" if limits else "") if goal != goal.fastest else ""
        return f"plan {short_digest(self.digest)}{wanted}, {self.how}"


def resolve(
    file: Path | None,
    overrides: Sequence[str] = (),
    inventory: Path | None = None,
    goal: Goal | None = None,
    anew: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Resolved:
    """The plan of a run file: the one that is kept beside it, if it was made of the same inputs, else (or `anew`) made
    now, with the settings searched that nobody gave. A plan file is taken as it is. `inventory` takes precedence over
    the run file's own; without a run file the template is planned. What `overrides` make is kept nowhere."""
    if file is not None and not anew and _is_plan(file):
        return _explicit(file, overrides, tell)
    beside = None
    if file is not None:  # plan.json of run.yaml, else NAME.plan.json of the file's whole name
        beside = file.with_name(PLAN_KEPT if file.name == RUN_NAME else f"{file.name}.{PLAN_KEPT}")
    found = read_inputs(file, overrides, inventory, tell)
    beside = beside if found.is_launched else None
    kept, made, how = _kept(beside)
    changed = [] if made is None else found.changed_since(made)
    is_ours = kept is not None and (kept.run.name, kept.run.inventory) == (found.run.name, found.run.inventory)
    if kept is not None and is_ours and not anew:
        goal = kept.goal
    if kept is not None and not changed and not anew:
        plan = kept
    else:
        plan = found.planned(goal, beside if is_ours and not anew else None)
    is_kept = made is not None and not changed and plan == kept
    if is_kept and made is not None:
        how = f"as planned {_moment(made)}"
    elif overrides:
        how, beside = f"made now with --set{NOT_KEPT}", None
    elif made is not None and changed:
        how = f"made now: {', '.join(changed)} changed since {_moment(made)}"
    return Resolved(plan, how, found.origins, found.digests, beside, is_kept)


def read_inputs(
    file: Path | None,
    overrides: Sequence[str],
    inventory: Path | None,
    tell: Callable[[str], None],
    needs_hardware: bool = True,
) -> Inputs:
    """What a plan is made of; without a run file, with the template's."""
    if file is None:
        file = templates_directory() / "run.yaml"
        tell(f"no run file given: planning for the template {file} (choose one with -f RUN)")
        if inventory is None:
            raise UsageError("no inventory given", hint="diloco plan INVENTORY, or first: diloco init")
    return _read(file, overrides, inventory, tell, needs_hardware)


def _explicit(file: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> Resolved:
    """Raises UsageError for a plan that was kept beside a run file which has other inputs now."""
    if overrides:
        raise UsageError("--set needs a run file; a plan is launched exactly as it is", hint="diloco plan --set ...")
    body = read_body(file)
    plan, made = plan_of_body(body, str(file)), made_of(body)
    beside = file.with_name(RUN_NAME if file.name == PLAN_KEPT else file.name.removesuffix(f".{PLAN_KEPT}"))
    if made is not None and beside != file and beside.is_file():
        today = _read(beside, (), None, tell)
        changed = today.changed_since(made)
        if changed:
            details = settings_changes(plan.run, today.run, today.origins)
            named = f"{', '.join(changed)} changed since {_moment(made)}" + (
                f": {', '.join(details)}" if details else ""
            )
            raise UsageError(
                f"this plan was not made of what lies beside it now: {named}",
                where=str(file),
                hint=f"diloco launch -n {shlex.quote(str(beside))} plans anew for the same goal; -o FILE of diloco plan"
                " keeps a plan for later",
            )
    return Resolved(plan, f"of {file}{f', as planned {_moment(made)}' if made else ''}")


def settings_changes(began: RunSettings, now: RunSettings, origins: Origins) -> list[str]:
    """`sync.every 40 -> 80`: what a run file says `now`, of settings that were planned or launched. What it leaves open
    was filled in there: searched, or read of the model and its data."""
    free = {"inventory", "model.revision"} | {f"sync.{key}" for key in SEARCHED} - origins.keys()
    free |= {f"outer.{key}" for key in now.outer.AUTO if getattr(now.outer, key) == "auto"}
    found = changed_keys(to_plain(began), to_plain(now))
    return [f"{key} {before} -> {after}" for key, before, after in found if key not in free and after is not None]


def _kept(place: Path | None) -> tuple[Plan | None, Made | None, str]:
    """The plan beside a run, and when it was made; else what is said of one that is made now."""
    try:
        body = {} if place is None else read_body(place)
        made = made_of(body)
        return (None, None, "made now") if made is None else (plan_of_body(body, str(place)), made, "made now")
    except NotFoundError:
        return None, None, "made now"
    except UsageError as error:
        return None, None, f"made now ({error})"


def keep(resolved: Resolved, tell: Callable[[str], None]) -> bool:
    """Write it beside the run, for the next command. Where that cannot be, it is said, and does no harm; a file that is
    no such plan, or was saved there by `-o`, stays. Returns whether it is there."""
    place = resolved.place
    if place is None or resolved.is_kept:
        return place is not None
    try:
        if place.exists() and made_of(read_body(place)) is None:
            raise UsageError("another file has this name")
        save_plan(resolved.plan, place, Made(utc_now_text(), resolved.inputs))
    except (UsageError, NotFoundError, OSError) as error:
        reason = getattr(error, "message", "") or str(error)
        tell(f"the plan is not kept in {place}: {reason}; the next command makes it again")
        return False
    return True


def _moment(made: Made) -> str:
    """`10:41`, here; with the day, if that is another."""
    seconds = parse_time(made.at)
    if seconds is None:
        return "before"
    there, now = (datetime.fromtimestamp(s) for s in (seconds, wall_s()))
    return there.strftime("%H:%M" if there.date() == now.date() else "%Y-%m-%d %H:%M")


def read_plan(file: Path, overrides: Sequence[str] = ()) -> Plan:
    return resolve(file, overrides).plan


@dataclass(frozen=True)
class Inputs:
    """What a plan is made of. `is_launched`: whether `launch` would read this inventory."""

    file: Path
    run: RunSettings
    inventory: Inventory
    facts: ModelFacts
    origins: Origins
    is_launched: bool

    @cached_property
    def digests(self) -> dict[str, str]:
        return {
            "settings": digest_of([self.run, sorted(pins_of(self.origins))]),
            "inventory": digest_of(self.inventory),
            "model": digest_of(self.facts),
            "diloco": __version__,
        }

    def changed_since(self, made: Made) -> list[str]:
        return [name for name, value in self.digests.items() if made.inputs.get(name) != value]

    def planned(self, goal: Goal | None, kept_in: Path | None) -> Plan:
        """`kept_in`: the file that the goal was read from."""
        try:
            return make_plan(self.run, self.inventory, self.facts, goal, self.origins)
        except (InfeasibleError, UsageError) as error:
            if kept_in is not None and goal not in (None, Goal()):
                error.message += f" (the goal is that of {kept_in}, as planned before)"
                error.hint = f"diloco plan -f {shlex.quote(str(self.file))} forgets that goal; or with another one"
            raise


def _read(
    file: Path,
    overrides: Sequence[str],
    given: Path | None,
    tell: Callable[[str], None],
    needs_hardware: bool = True,
) -> Inputs:
    run, origins = load_run_with_origins(file, overrides)
    own = inventory_path_of(run, file)
    inventory_path = given or own
    if inventory_path is None:
        hint = "add the line `inventory: inventory.yaml`"
        raise UsageError("no inventory given: the run file names none", where=str(file), hint=hint)
    inventory, facts = load_inventory(inventory_path, needs_hardware), facts_of(run, file.parent)
    inventory = replace(inventory, store=as_used_here(inventory.store, tell))
    refuse_together(run, origins, inventory, facts.num_tensors, str(file), facts.sequence)
    is_launched = own is not None and (given is None or given.resolve() == own.resolve())
    return Inputs(file, run, inventory, facts, origins, is_launched)


def as_used_here(store: StoreSettings, tell: Callable[[str], None] = lambda line: None) -> StoreSettings:
    """With what this machine's environment says of connections and client, where the inventory does not: the syncer is
    taken to have the same."""
    connections = connections_here()
    if store.connections is None and connections < MAX_CONNECTIONS:
        tell(f"planning for a syncer with {CONNECTIONS_VARIABLE}={connections}, as here (store.connections)")
        store = replace(store, connections=connections)
    return store


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
    config, place = config_of(model, folder)
    check_weights(model, place)
    return facts_of_config(config, str(place / CONFIG), model.sequence)


def config_of(model: ModelSettings, folder: Path) -> tuple[Config, Path]:
    places = [folder.absolute(), Path.cwd(), *map(Path, sys.path)]
    return read_config(model.huggingface or "", places, model.revision)


def _sequence(run: RunSettings) -> int:
    """The sequence length: model.sequence, `sequence` in `args`, else that of preset data."""
    named = run.model.sequence or run.model.args.get("sequence", run.data.args.get("sequence"))
    if isinstance(named, int) and named > 0:
        return named
    return PRESET_SEQUENCE if run.data.preset or run.data.is_own else UNKNOWN_SEQUENCE


def islands_of(plan: Plan, shares: Mapping[str, float]) -> tuple[Island, ...]:
    """The islands that were planned, by name; `shares`: how much of its planned speed each has."""
    listed = {island.name: island for island in plan.inventory.islands}
    return tuple(
        Island(
            name=planned.name,
            region=planned.region,
            batch_tokens=planned.batch_tokens,
            local_steps=planned.local_steps,
            tokens_per_s=planned.tokens_per_s * shares[planned.name],
            step_s=planned.step_s / shares[planned.name],
            accelerator=device_name(listed[planned.name].accelerators.name, plan.inventory),
            num_accelerators=planned.devices,
            infra=listed[planned.name].starts_by,
            slowdown=listed[planned.name].slowdown,
            link=listed[planned.name].link,
            micro_batch_tokens=planned.micro_batch_tokens,
            nodes=planned.nodes,
            ranks=planned.ranks,
            sharding=planned.sharding,
        )
        for planned in sorted(plan.islands, key=lambda planned: planned.name)
    )


def device_name(name: str, inventory: Inventory) -> str:
    """As every learner knows the device: it does not have the inventory, which may describe devices of its own."""
    if in_catalogue(name) is not None:
        return name
    return find_device(name, inventory.devices).backend or name


def region_fields(inventory: Inventory, url: str, name: str) -> dict[str, Any]:
    """The fields of a run's FORMAT at `url` about regions; none if no region has a bucket of its own."""
    home = inventory.store
    own = {region: given for region, given in inventory.regions.items() if given.store not in (None, home.url)}
    if not own:
        return {}
    of_home = inventory.regions.get(home.region or "")
    stores = [RegionStore(n, join_url(given.store or "", name), given.egress_per_gb or 0.0) for n, given in own.items()]
    return {
        "regions": tuple(sorted(stores, key=lambda store: store.name)),
        "home_url": url,
        "home_egress_per_gb": (of_home and of_home.egress_per_gb) or 0.0,
    }


def planned_format(plan: Plan, url: str) -> RunFormat:
    """As far as what it consists of can be said of it; it has no model yet, and no id."""
    islands = islands_of(plan, {island.name: 1.0 for island in plan.islands})
    regions = region_fields(plan.inventory, url, plan.run.name)
    home = plan.inventory.store.region
    return RunFormat("", plan.run.name, "", plan.run, islands, Layout((), ""), "", home_region=home, **regions)


def signed(fresh: RunFormat, secret: Secret | None) -> RunFormat:
    """A new run that will be signed, if there is a key. Raises UsageError for a key that was handed over."""
    if secret is None:
        return fresh
    signing, keyring = secret.signing(), secret.keyring(fresh.run_id)
    return replace(fresh, checksums=False, signing=signing, keyring=keyring)
