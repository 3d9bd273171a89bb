"""The units of a run that start on this machine, with their commands, devices, threads and keys; and what a person has
to start on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from diloco_cli.config.hardware import data_class_of
from diloco_cli.environment import environment_value
from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.commit_log import require_keys
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.rules.consent import code_of
from diloco_cli.randomness import new_private_key
from diloco_cli.runtime.consent import data_elsewhere, format_digest, signing_secret
from diloco_cli.runtime.units import UnitSpec, diloco_command, learner_unit, syncer_units
from diloco_cli.signing import KEY_FILE_VARIABLE, KEY_VARIABLE, LOG, Secret, learner_signer, syncer_signer


def units_here(
    run: RunFormat, url: str, region: str | None, warn: Callable[[str], None]
) -> list[UnitSpec]:  # fmt: skip
    """The learners of `region` (or of all regions) whose islands are local, and the syncers in the home region."""
    regions = sorted({island.region for island in run.islands} | {syncer_region(run)})
    if region is not None and region not in regions:
        raise UsageError(f"run {run.name} has no region {region!r}; it has: {', '.join(regions)}")
    islands = [i for i in run.islands if i.infra == "local" and region in (None, i.region)]
    home = run.home_of(url)
    secret = signing_secret()
    serves = region in (None, syncer_region(run))
    learners = [learner_signer(island.name) for island in islands]
    given = secret is None or not secret.is_operators
    require_keys(run, secret, (*learners, *([LOG] if serves else [])) if given else (), url)
    units = []
    for island, device in zip(islands, devices_of(islands, warn), strict=True):
        threads = threads_of(island, run.settings.train.threads)
        unit = learner_unit(island.name, run.url_for(island.region, home), threads=threads)
        own = {**device, **keys_of(run, signers_on(run, island.name), secret)}
        units.append(replace(unit, environment={**unit.environment, **own}))
    if serves:
        for unit in syncer_units(home, run.settings.syncer, threads=1):
            own = keys_of(run, (syncer_signer(unit.name),), secret)
            units.append(replace(unit, environment={**unit.environment, **own}))
    if not units:
        raise UsageError(f"no island of region {region} runs on this machine (infra: local)")
    return units


def starts_elsewhere(run: RunFormat, url: str, region: str | None) -> Iterator[str]:
    """What a person has to start on other machines, with its command: one line each."""
    home = run.home_of(url)
    for island in run.islands:
        if island.infra != "local" and region in (None, island.region):
            yield from _begins(run, island, run.url_for(island.region, home))
    syncers = None if run.settings.syncer.on_learners else syncer_region(run)
    regions = {island.region for island in run.islands} | ({syncers} if syncers else set())
    for other in sorted(regions - {region}) if region is not None else ():
        serves = other == syncers
        there = run.url_for(other, home)
        words = f"{there} --region {other}{_consent(run, there, stores=serves)}"
        yield f"region {other}{', with the syncer' if serves else ''}: unless it runs already: diloco resume {words}"


def starts_everywhere(run: RunFormat, url: str) -> Iterator[str]:
    """The same of a run of which nothing runs yet: its syncer, unless learners host it, and all its islands."""
    home = run.home_of(url)
    if not run.settings.syncer.on_learners:
        words = _consent(run, home, stores=True)
        yield f"the syncer, anywhere: diloco syncer --run {home}{words if run.regions else ''}"
        if words and not run.regions and run.settings.model.is_built:
            yield f"  with{words} where the model's code and its data are: then it has evaluations"
        yield from _key_of(run, home, "syncer", "NAME")
    for island in run.islands:
        yield from _begins(run, island, run.url_for(island.region, home))


def _begins(run: RunFormat, island: Island, url: str) -> Iterator[str]:
    yield from _started(run, island, url)
    yield from _key_of(run, url, "learner", island.name)


def _key_of(run: RunFormat, url: str, role: str, name: str) -> Iterator[str]:
    if run.signing is not None:
        yield f"  with a key of its own, made there: diloco key request {url} {role} {name} FILE"


def _started(run: RunFormat, island: Island, url: str) -> Iterator[str]:
    if data_class_of(island.infra) is not None:
        yield f'{island.name} ({island.infra}): in its own script: join("{url}", name="{island.name}", ...)'
        return
    words = f"--run {url} --name {island.name}"
    words += _consent(run, url, stores=run.settings.syncer.on_learners)
    yield f"{island.name} ({island.infra}): start it there: diloco learner {words}"
    if island.nodes > 1:
        yield (
            f"  on each of its {island.nodes} nodes, with --nodes {island.nodes} --node-rank 0 (1, ...) and"
            " --rendezvous HOST:PORT of node 0 in its private network; or by"
            " torchrun ... -m -- diloco_cli learner ..."
        )


def _consent(run: RunFormat, url: str, *, stores: bool) -> str:
    """The words by which another machine consents to what the run's format names, if the process there needs any."""
    needed = code_of(run.settings) or data_elsewhere(run, url) or (stores and run.regions)
    return f" --allow-code {format_digest(run)}" if needed else ""


def background_command(url: str, region: str | None) -> tuple[str, ...]:
    """The process that supervises these units in the background."""
    chosen = () if region is None else (f"--region={region}",)
    return diloco_command("resume", url, *chosen)


def syncer_may_start(run: RunFormat, units: list[UnitSpec]) -> bool:
    """Whether one of these units serves the run, now or after a takeover."""
    return run.settings.syncer.on_learners or any(unit.kind == "syncer" for unit in units)


def syncer_region(run: RunFormat) -> str:
    """Where `--region` starts the syncer: the home region, or the first one if none is named."""
    return run.home_region or min(island.region for island in run.islands)


def threads_of(island: Island, at_least: int) -> int:
    """The number of threads of each rank of an island: cpu:4 means four cores for all of them."""
    if island.accelerator.lower() != "cpu":
        return at_least
    return max(1, max(at_least, island.num_accelerators) // island.ranks)


def devices_of(islands: list[Island], warn: Callable[[str], None]) -> list[dict[str, str]]:
    """Environments that give each of several CUDA islands devices of its own, one a rank, in order. Raises UsageError
    if an island's ranks outnumber the visible devices: ranks cannot share one."""
    cuda = [island for island in islands if not island.accelerator.lower().startswith(("cpu", "mps", "apple"))]
    wanted, given = sum(island.ranks for island in cuda), environment_value("CUDA_VISIBLE_DEVICES")
    if len(cuda) < 2 and (given is None or wanted < 2):
        return [{} for _ in islands]
    visible = (given or ",".join(map(str, range(wanted)))).split(",")
    if len(visible) < wanted:
        _refuse_shared(cuda, len(visible))
        warn(f"{len(cuda)} islands share {len(visible)} visible devices")
    environments, first = {}, 0
    for island in cuda:
        own = [visible[(first + rank) % len(visible)] for rank in range(island.ranks)]
        environments[island.name], first = {"CUDA_VISIBLE_DEVICES": ",".join(own)}, first + island.ranks
    return [environments.get(island.name, {}) for island in islands]


def _refuse_shared(cuda: list[Island], num_visible: int) -> None:
    several = [island for island in cuda if island.ranks > 1]
    if several:
        wanted = ", ".join(f"{island.name} {island.ranks}" for island in cuda)
        raise UsageError(
            f"more devices are asked for than the {num_visible} in CUDA_VISIBLE_DEVICES: {wanted}",
            hint="each rank needs one: list fewer accelerators, or put an island elsewhere (infra: ssh)",
        )


def keys_of(run: RunFormat, signers: tuple[str, ...], secret: Secret | None) -> dict[str, str]:
    """A unit of a signed run, started on the operator's machine, gets a new key in place of the operator's secret."""
    if run.signing is None or secret is None or not secret.is_operators:
        return {}
    own = new_private_key()
    return {KEY_VARIABLE: secret.certified(run.run_id, dict.fromkeys(signers, own)), KEY_FILE_VARIABLE: ""}


def signers_on(run: RunFormat, learner: str) -> tuple[str, ...]:
    """As whom the machine of a learner signs: as the learner, and as a syncer if it hosts one."""
    return (learner_signer(learner), *([syncer_signer(learner)] if run.settings.syncer.on_learners else []))
