"""`diloco launch`: plans (or takes a plan), creates the run in its bucket, starts what runs here, and watches."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.arguments import (
    RUN_FILE,
    DetachOption,
    EndJsonOption,
    OnEvent,
    OpenRun,
    RegionOption,
    SyncerOption,
    Webhook,
    foreground_store,
    is_here,
    open_known_run,
)
from diloco_cli.cli.output import ProgressLine, progress, talk
from diloco_cli.cli.plan import print_plan
from diloco_cli.clock import utc_now_text
from diloco_cli.config.hardware import data_class_of
from diloco_cli.corpus.index import Shard
from diloco_cli.digests import short_digest
from diloco_cli.errors import UsageError
from diloco_cli.layout import layout_warning
from diloco_cli.paths import refuse_unwritable, user_state_directory
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.randomness import nonce
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.url import join_url
from diloco_cli.store.wrappers import Deadline

if TYPE_CHECKING:
    from diloco_cli.cli.preflight import Tried
    from diloco_cli.config.settings import DataSettings, RunSettings
    from diloco_cli.engines.port import JobSpec
    from diloco_cli.launch.plan_files import Resolved
    from diloco_cli.plan.plan import Plan
    from diloco_cli.protocol.log.records import RunFormat
    from diloco_cli.runtime.consent import NamedHere
    from diloco_cli.runtime.registry import KnownRun
    from diloco_cli.tasks.weights import Values


CreateOption = typer.Option(
    False,
    "--create-only",
    help="Create the run and its first commit; start nothing: no syncer needs the model's code.",
)
EmitOption = typer.Option(
    None, "--emit", metavar="DIR", help="Create the run, and write its jobs there, to be edited; submit none."
)
FilesOption = typer.Option(None, "--from", metavar="DIR", help="Submit jobs as they are written there.")
ANSWERS_WITHIN_S = 20.0
"""A store that takes longer for a run's format and a few races is no store to begin with."""


def launch(
    file: Path | None = typer.Argument(
        None, metavar="RUN|PLAN", help="A run file (default: this folder's run.yaml), or a plan from `diloco plan -o`."
    ),
    region: str | None = RegionOption,
    syncer: str | None = SyncerOption,
    detach: bool = DetachOption,
    create_only: bool = CreateOption,
    dry_run: bool = typer.Option(False, "-n", "--dry-run", help="Say what would start; change nothing."),
    emit: Path | None = EmitOption,
    files: Path | None = FilesOption,
    overrides: list[str] = typer.Option([], "--set", metavar="A.B=VALUE", help="Override a key of the run file."),
    on_event: str | None = OnEvent,
    webhook: str | None = Webhook,
    as_json: bool = EndJsonOption,
) -> None:
    """Start a run: learners of every region and the syncer, here or as jobs, as the inventory's `infra` says; watch,
    restart what dies. Ctrl-C stops the run if all of it is here; else it ends what runs here, and the run goes on."""
    if file is None and not RUN_FILE.is_file():
        raise UsageError("this folder has no run.yaml", hint="diloco init writes one; or name a run file")
    if sum((dry_run, create_only, emit is not None, files is not None)) > 1:
        raise UsageError("-n, --create-only, --emit and --from are four ways", hint="use one of them")
    file = file or RUN_FILE
    syncer_here = is_here(syncer)
    from diloco_cli.cli.preflight import Preflight

    found = _resolved(file, overrides)
    plan = found.plan
    checks = Preflight(plan, file.parent, region, not create_only, on_event, webhook, syncer_here=syncer_here)
    checks = replace(checks, submits=emit is None and files is None)
    if dry_run:
        checks.pass_or_raise(talk)
        _say_plan(found, region, as_json, file.parent, syncer_here)
        return
    from diloco_cli.cli.hooks import hooks_of
    from diloco_cli.cli.supervision import go_on, refuse_unless_free
    from diloco_cli.runtime.consent import NamedHere, consented, named_in_files, search_last, stores_of

    hooks, folder = hooks_of(on_event, webhook), file.parent
    search_last(folder)
    named = NamedHere(named_in_files(plan.run, plan.inventory), folder)
    with progress("trying the model, its data and this machine") as shown:
        refuse_unless_free(join_url(plan.inventory.store.url, plan.run.name))
        replace(checks, prepare=lambda: _prepare(plan.run.data, shown)).pass_or_raise(talk)
        shown.text = "reading the model"
        values = _values_of(plan, create_only, checks.tried)
        known, is_new = _created(found, region, values, checks.tried, named, shown)
        opened = open_known_run(known)
        if values is not None:
            _begin(opened, plan.run, bool(checks.tried), values, shown)
    consented(opened.format, opened.url, named, stores_of(opened.format), code=False)
    if create_only:
        _say_created(opened, is_new, as_json)
        return
    if emit is not None:
        _emit(opened, region, syncer_here, folder, emit)
        return
    sys.exit(go_on(opened, region, detach, as_json, "launch", named, hooks, syncer_here, files, region is not None))


def _emit(opened: OpenRun, region: str | None, syncer_here: bool, folder: Path, to: Path) -> None:
    from diloco_cli.cli.jobs import specs_of
    from diloco_cli.engines.files import write_job_files
    from diloco_cli.runtime.units import units_of

    units = units_of(opened.format, opened.url, region, syncer_here)
    specs = specs_of(opened, [unit for unit in units if unit.is_submitted], folder)
    if not specs:
        raise UsageError(f"run {opened.name} has no jobs", hint="an island with infra: slurm/PARTITION is one")
    for path in write_job_files(to, specs.values(), opened.format.plan):
        print(path)
    talk(f"run {opened.name} is created; once these are edited: diloco launch --from {to}, with the words of this one")


def _resolved(file: Path, overrides: list[str]) -> Resolved:
    """The plan; where it comes from and its warnings are said."""
    from diloco_cli.launch.plan_files import resolve

    with progress("planning"):
        found = resolve(file, overrides, tell=talk)
    talk(found.told())
    for warning in found.plan.warnings:
        talk(f"warning: {warning}")
    return found


def _values_of(plan: Plan, begins: bool, tried: list[Tried]) -> Values | None:
    """Those with which the run begins, where they are brought, or where this command `begins` the run anyway."""
    from diloco_cli.config.huggingface import check_weights
    from diloco_cli.tasks.huggingface import folder_of
    from diloco_cli.tasks.weights import brought_values, seeded_values

    model = plan.run.model
    folder = folder_of(model) if model.huggingface else None
    if folder is not None:
        check_weights(model, folder)
    if model.huggingface and model.brought is None:
        talk(f"{model.huggingface}: its architecture, with random weights")
    values = tried[0].values if tried else brought_values(plan.run)
    return seeded_values(plan.run) if values is None and begins else values


def _begin(opened: OpenRun, run: RunSettings, is_tried: bool, values: Values, shown: ProgressLine) -> None:
    """The run's first commit, unless it has one; and the loss of its values, where the model is small enough to try."""
    from diloco_cli.runtime.daemon import own_claim
    from diloco_cli.syncer.daemon import MAX_EVALUATED, begin, first_loss, first_versions

    def loss() -> float | None:
        small = opened.format.layout.num_parameters <= MAX_EVALUATED and is_tried
        if opened.format.signing is not None or not small:
            return None  # the syncer's evaluator makes it: under the operator's key no evaluation counts
        shown.text = "evaluating what the run begins with"
        return first_loss(run, values)

    shown.text = "writing the first version of every fragment"
    versions = first_versions(opened.format, values)
    opened.perform(begin(opened.format, versions, own_claim(), utc_now_text, nonce, loss))


def _say_created(opened: OpenRun, is_new: bool, as_json: bool) -> None:
    from diloco_cli.cli.supervision import print_summary
    from diloco_cli.runtime.units import starts_everywhere

    if as_json:
        print_summary(opened, "launch", as_json)
        return
    print(f"run {opened.name} {'is created' if is_new else 'exists already'}, and has its first commit: {opened.url}")
    for line in starts_everywhere(opened.format, opened.url):
        print(line)


def _prepare(data: DataSettings, shown: ProgressLine) -> None:
    """Before anything is written to the bucket: the place for this machine's notes, and the run's text as tokens."""
    refuse_unwritable(user_state_directory("runs"))
    if data.text:
        from diloco_cli.corpus.sources import markup_warning
        from diloco_cli.corpus.tokenizing import Tokenized, shards_of_text

        if (warning := markup_warning([data.text])) is not None:
            talk(warning)

        def on_shard(shard: Shard, made: Tokenized) -> None:
            shown.text = f"tokenizing: {len(made.shards)} shards"

        shards_of_text(data.text, data.tokenizer, on_shard)


def _created(
    found: Resolved,
    region: str | None,
    values: Values | None,
    tried: list[Tried],
    named: NamedHere,
    shown: ProgressLine,
) -> tuple[KnownRun, bool]:
    """The run in its bucket, and whether it is new."""
    from diloco_cli.launch.new_run import (
        create_in_region,
        create_run,
        make_format,
        refuse_another_run,
        shares_here,
        with_buffers_of,
    )
    from diloco_cli.launch.plan_files import islands_of, signed
    from diloco_cli.runtime.consent import consented, signing_secret, stores_of
    from diloco_cli.runtime.registry import note_sites, remember_run, sites_of

    plan = found.plan
    url = join_url(plan.inventory.store.url, plan.run.name)
    shares, slower = shares_here(plan, region)
    if slower is not None:
        talk(slower)
    secret = signing_secret()
    islands = islands_of(plan, shares)
    fresh = signed(make_format(plan.run, plan.inventory, url, islands, values, found.digest), secret)
    if fresh.signing is not None and fresh.settings.syncer.on_learners:
        talk("every learner hosts a standby syncer, so the owner of each learner's machine is trusted with the log")
    fewer = layout_warning(fresh.layout, plan.run.sync)
    if fewer is not None and len(fresh.layout.fragments) != plan.schedule.fragments:  # otherwise the plan has said it
        talk(f"warning: {fewer}")
    fresh = with_buffers_of(fresh, values, tried[0].buffers if tried else ())
    _check_streams(fresh)
    shown.text = f"proving that the bucket is fit: {url}"
    home = _trusted_store(url)
    theirs = [(store, _trusted_store(store.url)) for store in fresh.regions]
    for store, there in theirs:
        refuse_another_run(home, there, fresh, store)
    shown.text = f"creating the run: {url}"
    consented(fresh, url, named, stores_of(fresh), code=False)  # first: who is killed behind it can be resumed
    searched = frozenset(setting.name for setting in plan.settings if not setting.pinned)
    run, how = create_run(home, fresh, url, secret, searched)
    for store, there in theirs:
        create_in_region(home, there, run, store)
    if how == "created":
        _keep(home, found)
    known = remember_run(url, run.region_urls)
    infras = [island.infra for island in islands if region in (None, island.region)]
    note_sites(url, {**sites_of(url), **dict.fromkeys(infras), **plan.inventory.sites_by_infra})
    if how == "existed":
        other = f", as launched by plan {short_digest(run.plan)}" if run.plan not in ("", found.digest) else ""
        talk(f"run {run.name} exists already at {url}: going on with it{other}")
    return known, how == "created"


def _keep(home: Store, found: Resolved) -> None:
    """The plan of a new run: in its bucket, for reports, and beside its run file, for the next command."""
    from diloco_cli.launch.new_run import keep_plan
    from diloco_cli.launch.plan_files import keep

    keep_plan(home, found.plan, found.origins)
    keep(found, talk)


def _check_streams(fresh: RunFormat) -> None:
    """Whether a run's own tokens are enough for all its learners."""
    from diloco_cli.tasks.build import check_own_data

    batches = [island.batch_tokens for island in fresh.islands if data_class_of(island.infra) is None]
    about = check_own_data(fresh.settings, fresh.num_shards, max(batches)) if batches else None
    if about is not None:
        talk(about)


def _trusted_store(url: str) -> Store:
    """The run's store. Before a new run is created there, a few quick races prove that it does not lose exclusive
    creates, on which every guarantee rests; each launch of a new run asks anew, for a bucket may have changed its
    proxy or its server since. Raises StoreError (exit 6)."""
    from diloco_cli.doctor.examine import prove_exclusive_create
    from diloco_cli.protocol.log.records import MAX_RECORD_BYTES

    open_store(url, create=True)  # a directory is made
    store = foreground_store(url, Deadline(ANSWERS_WITHIN_S))
    if store.get(FORMAT_KEY, MAX_RECORD_BYTES) is None:
        prove_exclusive_create(url)
    return store


def _say_plan(found: Resolved, region: str | None, as_json: bool, folder: Path, syncer_here: bool) -> None:
    plan = found.plan
    if as_json:
        print_plan(found, {})
        return
    print(f"run {plan.run.name}: {plan.verdict}: {plan.why}")
    for island in plan.islands:
        if region in (None, island.region):
            where = f"{island.region}, {island.accelerators}"
            work = f"{island.local_steps} local steps of {island.batch_tokens:,} tokens"
            micro = island.micro_batch_tokens
            work += f", {micro:,} at once" if micro and micro < island.batch_tokens else ""
            work += f", {island.ranks} ranks ({island.sharding})" if island.ranks > 1 else ""
            print(f"  learner {island.name} ({where}): {island.tokens_per_s:,.0f} tokens/s, {work}")
    syncer, specs = plan.run.syncer, _specs(plan, region, folder, syncer_here)
    jobs = [spec.unit for spec in specs if spec.unit not in {island.name for island in plan.islands}]
    words = [] if syncer.on_learners or jobs else ["syncer"]
    words += [f"{syncer.standbys} standby{'s' if syncer.standbys > 1 else ''}"] if syncer.standbys and not jobs else []
    words += [f"the jobs {' and '.join(jobs)}"] if jobs else []
    words += ["a standby in every learner's process"] if syncer.on_learners else []
    print(f"  {', '.join(words)}; bucket {plan.inventory.store.url}/{plan.run.name}")
    for spec in specs:
        from diloco_cli.engines.sites import engine_of

        print(f"\n{engine_of(spec.infra, spec.site).render(spec)}", end="")


def _specs(plan: Plan, region: str | None, folder: Path, syncer_here: bool) -> list[JobSpec]:
    """Of the jobs that would be submitted."""
    from diloco_cli.runtime.units import is_submitted

    if not any(is_submitted(island.starts_by) for island in plan.inventory.islands):
        return []
    from diloco_cli.cli.jobs import planned_jobs

    return planned_jobs(plan, region, folder, syncer_here)
