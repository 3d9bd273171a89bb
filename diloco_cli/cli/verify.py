"""`diloco verify`: replays the log from the bucket and compares every digest; exit 11 if anything differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.consent import AllowStore, named_here
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument, foreground_store, head_of, open_run
from diloco_cli.errors import DataCheckError, StoreError, TryAgainError, UsageError

if TYPE_CHECKING:
    from diloco_cli.observe.mirror_check import MirrorCheck
    from diloco_cli.observe.replay import Replay

SHOWN = 5


def verify(
    run: str | None = RunArgument,
    mirrors: bool = typer.Option(False, "--mirrors", help="Compare the buckets of regions with the home bucket, too."),
    allow_store: list[str] = AllowStore,
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Replay the commit log from the bucket alone and compare every digest. A run without a commit: exit 75."""
    from diloco_cli.config.own_loops import MEANS, data_class_of
    from diloco_cli.runtime.consent import consented, trust_of

    if allow_store and not mirrors:
        raise UsageError("--allow-store is for the buckets of regions", hint="add --mirrors")
    opened = open_run(run)
    if mirrors:
        consented(opened.format, opened.url, named_here([], allow_store), opened.format.region_urls, code=False)
    found, islands = _verified(opened), head_of(opened).with_members(opened.format).all_islands
    loops = {island.name: data for island in islands if (data := data_class_of(island.infra)) is not None}
    if found.ok and not found.commits:
        hint = f"see whether its syncer works: diloco status {opened.name}"
        raise TryAgainError(f"nothing to verify: run {opened.name} has no commit yet", where=opened.url, hint=hint)
    warnings = unpinned(opened)
    regions = check_mirrors(opened) if mirrors else []
    broken = None if found.ok else disagreement(found, opened.url)
    error = broken or next((mirror_error(region) for region in regions if not region.ok), None)
    if as_json:
        facts = {"run": opened.name, **asdict(found), "missing": len(found.missing), "missing_keys": found.missing}
        facts |= {"own_loops": loops}
        facts |= {"mirrors": [asdict(region) | {"ok": region.ok} for region in regions]} if mirrors else {}
        print_json("verify", facts | {"ok": error is None}, warnings=warnings, error=error)
        if error is not None:
            raise typer.Exit(error.exit_status)
        return
    counted = f"{found.commits} commits, {found.merges} merges, {found.epochs} epochs, {found.tokens:,} tokens"
    print(f"run {opened.name}: {counted}, {found.offers_applied} offers applied, {found.offers_rejected} not used")
    if found.floor:
        print(f"commits 0 to {found.floor}: chain and rules; states and deltas of then may have been collected")
        later = f"{found.floor + 1} to {found.commits - 1}"
        print(f"commits {later}: replayed, from the versions as of commit {found.floor}")
    print(trust_of(opened.format))
    for data, meaning in MEANS.items():
        names = sorted(name for name, its in loops.items() if its == data)
        if names:
            print(f"own loops, {data} data: {', '.join(names)}: {meaning}")
    for region in regions:
        late = f", {region.behind} commits behind" if region.behind else ""
        print(f"region {region.region}: {region.commits} commits{late}, {region.objects} objects compared")
    for warning in warnings:
        talk(f"warning: {warning}")
    if error is not None:
        raise error
    print("ok: the replay gives bit-identical outer parameters; nothing missing, nothing applied twice")


def _verified(opened: OpenRun) -> Replay:
    from diloco_cli.observe.replay import verified

    with progress(f"replaying the log of {opened.name}") as shown:
        commits = head_of(opened).n + 1

        def watch(found: Replay) -> None:
            shown.share = lambda: min(1.0, found.commits / commits) if commits else None

        return verified(opened.store, opened.format, watch)


def unpinned(opened: OpenRun) -> list[str]:
    """A warning if it is only FORMAT.json that says whose signatures count."""
    from diloco_cli.runtime.consent import signing_secret
    from diloco_cli.signing import short_key

    signing = opened.format.signing
    if signing is None or signing_secret() is not None:
        return []
    named = short_key(signing.operator)
    return [f"signatures were checked with the operator's key {named} that FORMAT.json names; no key here confirms it"]


def check_mirrors(opened: OpenRun) -> list[MirrorCheck]:
    from diloco_cli.observe.mirror_check import MirrorCheck, check_mirror

    run, found = head_of(opened).with_members(opened.format), []
    for region in run.regions:
        try:
            there = foreground_store(region.url)
        except StoreError as error:
            found.append(MirrorCheck(region.name, region.url, unreachable=str(error)))
        else:
            found.append(check_mirror(run, region, opened.store, there))
    return found


def mirror_error(found: MirrorCheck) -> DataCheckError | StoreError:
    """Exit 11 for other bytes, 6 for a bucket that could not be read."""
    if found.unreachable:
        return StoreError(f"region {found.region} could not be compared: {found.unreachable}", where=found.url)
    return DataCheckError(
        f"region {found.region} does not follow the home bucket: {_first(found.mismatches)}",
        where=found.url,
        hint="find out who wrote them; then delete those objects in the region's bucket and start the syncer again",
    )


def _first(problems: Sequence[str]) -> str:
    return "; ".join(problems[:SHOWN]) + (f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else "")


def disagreement(found: Replay, url: str) -> DataCheckError:
    """The first few problems as one error (exit 11)."""
    problems = [*(f"missing: {key}" for key in found.missing), *found.mismatches]
    problems += [f"{found.duplicates} offers applied twice"] if found.duplicates else []
    return DataCheckError(
        f"the bucket does not agree with its log: {_first(problems)}",
        where=url,
        hint="see them all: diloco verify RUN --json",
    )
