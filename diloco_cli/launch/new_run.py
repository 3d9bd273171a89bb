"""Creates a run: its format is created once, in the home bucket and in those of regions, and never changes."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch.nn import Module

from diloco_cli import __version__
from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import changed_keys, replace, to_plain
from diloco_cli.config.run_file import overlap_problem
from diloco_cli.config.settings import Inventory, LocalMachine, RunSettings
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.launch.plan_files import region_fields
from diloco_cli.layout import Layout, ParameterFact, make_layout, with_buffers
from diloco_cli.methods import hidden_matrices
from diloco_cli.plan.candidates import busy_cores, share_of_cores
from diloco_cli.plan.plan import Plan, plan_to_json
from diloco_cli.protocol.log.commit_log import parse_format, with_keys
from diloco_cli.protocol.log.keys import FORMAT_KEY, PLAN_KEY
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, Island, RecordError, RegionStore, RunFormat, encode
from diloco_cli.randomness import nonce
from diloco_cli.runtime.processes import usable_cores
from diloco_cli.signing import OPERATOR, Checksummed, Secret
from diloco_cli.store.port import Created, Store, StoreForbiddenError
from diloco_cli.tasks.build import build_model_on_meta
from diloco_cli.tasks.weights import Values, carried, facts_of_values
from diloco_cli.tensors.flat import buffer_facts, parameter_facts, running_statistics

SIGNED_THERE = "signing (it is signed, and here is no key)"
COMPARED = ("region", "accelerator", "num_accelerators", "infra", "slowdown", "link", "batch_tokens", "nodes", "ranks")


def shares_here(plan: Plan, region: str | None) -> tuple[dict[str, float], str | None]:
    """Each island's share of its planned speed, as islands on this machine share its cores; a warning if they do."""
    cores, busy = usable_cores(), busy_cores(plan.inventory.islands, region)
    shares = share_of_cores(plan.inventory.islands, region, LocalMachine(cores))
    if plan.inventory.local is not None:  # then the plan's speeds are those of processes that share it
        return dict.fromkeys(shares, 1.0), None
    if busy <= cores:
        return shares, None
    here = [shares[island.name] for island in plan.islands]
    spread = " to ".join(dict.fromkeys(f"{share:.2f}" for share in (min(here), max(here))))
    return shares, f"this machine has {cores} cores for {busy:g} busy ones: planned speeds x {spread}"


def layout_of(settings: RunSettings, values: Values | None = None) -> Layout:
    """The fragments of the run's model; nothing is allocated. `values`: those of its file, where nothing builds it."""
    known = settings.model.is_built or values is None
    facts = parameter_facts(build_model_on_meta(settings)) if known else facts_of_values(values or {})
    if known:
        hidden_matrices(settings.train.inner.name, facts)
    return make_layout(facts, settings.sync)


def with_buffers_of(run: RunFormat, values: Values | None, changed: Collection[str] = ()) -> RunFormat:
    """With the buffers that are part of its model."""
    if not run.settings.model.is_built:
        return run
    ranked = [island.name for island in run.islands if island.ranks > 1]
    facts = exchanged_buffers(run.settings, build_model_on_meta(run.settings), ranked, values, changed)
    return replace(run, layout=with_buffers(run.layout, facts))


def exchanged_buffers(
    settings: RunSettings, model: Module, ranked: Sequence[str], values: Values | None, changed: Collection[str]
) -> list[ParameterFact]:
    """Those that are exchanged: what a trial saw `changed`, running statistics in any case, and what the run's first
    `values` bring. Raises UsageError if there are any and islands are `ranked`: each rank would have its own."""
    brought = values or {} if settings.model.brought else {}
    facts = buffer_facts(model, {*changed, *running_statistics(model), *brought})
    if facts and ranked:
        raise UsageError(
            f"the buffer {facts[0].name} is part of the model, and each rank of {ranked[0]} would have its own",
            where="model",
            hint="use LayerNorm, GroupNorm or track_running_stats=False; or ranks: 1 in inventory.yaml",
        )
    return facts


def make_format(
    settings: RunSettings,
    inventory: Inventory,
    url: str,
    islands: tuple[Island, ...],
    values: Values | None = None,
    plan: str = "",
) -> RunFormat:
    """FORMAT.json of a new run at `url`. `values`: with which it begins, where they are brought; `plan`: its digest."""
    settings = carried(settings, values)
    layout = layout_of(settings, values)
    if "auto" in (settings.outer.lr, settings.outer.momentum):
        raise UsageError("outer: auto was not planned", hint="diloco plan -f RUN says what it is in this run")
    overlap, every, fragments = settings.sync.overlap, settings.sync.every, len(layout.fragments)
    problem = None if overlap == "auto" else overlap_problem(overlap, every, fragments)
    if problem is not None:  # a plan file was written by hand, or the model has changed since
        raise UsageError(f"sync.overlap: {problem}", hint="plan again with --set sync.overlap=auto")
    run_id = nonce()
    return RunFormat(
        run_id=run_id,
        name=settings.name,
        created_at=utc_now_text(),
        settings=settings,
        islands=islands,
        layout=layout,
        software=__version__,
        home_region=inventory.store.region,
        checksums=True,
        plan=plan,
        keyring=Checksummed(run_id),
        **region_fields(inventory, url, settings.name),
    )


def create_run(
    store: Store, fresh: RunFormat, where: str, secret: Secret | None = None, searched: frozenset[str] = frozenset()
) -> tuple[RunFormat, Literal["created", "existed"]]:
    """Create the run, or find the same run there already: `searched` settings are those that it was created with.
    Raises UsageError if other settings hold the name, or if there are commits of a run without its FORMAT.json."""
    if store.list("commit/", limit=1) and store.get(FORMAT_KEY, MAX_RECORD_BYTES) is None:
        raise UsageError(
            "there are commits of a run whose FORMAT.json is gone",
            where=where,
            hint=f"put that object back, or start under another name: --set name={fresh.name}-2",
        )
    data = fresh.keyring.sign(OPERATOR, FORMAT_KEY, encode(fresh))
    answer = store.create(FORMAT_KEY, data)
    if isinstance(answer, Created):
        fresh.keep(FORMAT_KEY, data)
        return fresh, "created"
    there = with_keys(parse_format(answer.data, where), secret, where)
    there.keep(FORMAT_KEY, answer.data)
    different = differences(there, fresh, searched)
    if different:
        url = shlex.quote(where)
        hint = f"go on with it: diloco resume {url}; or start another: --set name={fresh.name}-2"
        if different == [SIGNED_THERE]:
            hint = (
                f"a key of this machine's own: diloco key request {url} learner NAME FILE; with it: diloco resume {url}"
            )
        raise UsageError(
            f"a run named {fresh.name!r} exists already with other settings: {', '.join(different)}",
            where=where,
            hint=hint,
        )
    return there, "existed"


def keep_plan(store: Store, plan: Plan, origins: Mapping[str, str]) -> None:
    """What was planned, beside the run's format, for reports; of the user's files their names alone. A run does without
    it: an operator may not be allowed to write it."""
    named = {
        key: place.rpartition("/")[2] if not place.startswith("--set") else "--set" for key, place in origins.items()
    }
    with suppress(RecordError, StoreForbiddenError):
        store.create(PLAN_KEY, encode(plan_to_json(plan) | {"origins": named}))


def refuse_another_run(home: Store, there: Store, run: RunFormat, region: RegionStore) -> None:
    """Before a run is created: raises UsageError if a region's bucket holds one of its name that home does not."""
    ours, theirs = (store.get(FORMAT_KEY, MAX_RECORD_BYTES) for store in (home, there))
    for data, url in ((ours, home.url), (theirs, there.url)):
        if data is not None:
            parse_format(data, url)
    if theirs is not None and theirs != ours:
        raise _another_run(run, region)


def create_in_region(home: Store, there: Store, run: RunFormat, region: RegionStore) -> None:
    """The run's format, as it lies at home, in a region's bucket: its learners can start before the syncer does."""
    data = home.get(FORMAT_KEY, MAX_RECORD_BYTES)
    if data is None:
        raise NotFoundError(f"no run at {home.url}")
    parse_format(data, home.url)  # damaged bytes must not be written: the object is never replaced
    answer = there.create(FORMAT_KEY, data)
    if not isinstance(answer, Created) and answer.data != data:
        raise _another_run(run, region)


def _another_run(run: RunFormat, region: RegionStore) -> UsageError:
    return UsageError(
        f"another run named {run.name!r} lies in the bucket of region {region.name}",
        where=region.url,
        hint=f"clear that prefix, or start under another name: --set name={run.name}-2",
    )


def differences(there: RunFormat, fresh: RunFormat, searched: frozenset[str] = frozenset()) -> list[str]:
    """Names of the settings in which two formats differ, if the difference matters to the run. Planned speeds do not
    matter: they depend on the machine that planned; nor do settings that a plan `searched` because nobody gave them."""
    settings = fresh.settings
    for section, _, key in (name.partition(".") for name in searched):
        kept = {key: getattr(getattr(there.settings, section), key)}
        settings = replace(settings, **{section: replace(getattr(settings, section), **kept)})
    fresh = replace(fresh, settings=settings)
    old, new = to_plain(there), to_plain(fresh)
    found = _changed(old["settings"], new["settings"], "")
    old_islands, new_islands = ({i["name"]: i for i in plain["islands"]} for plain in (old, new))
    if set(old_islands) != set(new_islands):
        found.append(f"islands ({', '.join(old_islands)} there, {', '.join(new_islands)} here)")
    for name in sorted(old_islands.keys() & new_islands.keys()):
        before, after = ({key: plain[name][key] for key in COMPARED} for plain in (old_islands, new_islands))
        found += _changed(before, after, f"islands.{name}.")
    if (there.signing is None) != (fresh.signing is None):
        found.append(SIGNED_THERE if fresh.signing is None else "signing (it is not signed, and here is a key)")
    urls_there, urls_here = ({region.name: region.url for region in run.regions} for run in (there, fresh))
    found += _changed(dict(urls_there), dict(urls_here), "regions.")
    is_alike = "sync.fragments" in searched and _tensors(there.layout) == _tensors(fresh.layout)
    if there.layout.digest != fresh.layout.digest and not is_alike:
        found.append("model layout")
    return found


def _tensors(layout: Layout) -> set[tuple[str, tuple[int, ...], str]]:
    return {(slot.name, slot.shape, slot.dtype) for fragment in layout.fragments for slot in fragment.tensors}


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str) -> list[str]:
    found = changed_keys(old, new, prefix)
    return [f"{key} ({before} there, {after} here)" for key, before, after in found if key != "inventory"]
