"""The assumptions of a prediction, each marked guessed, catalogue or measured."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.config.settings import Inventory, IslandSettings, RunSettings
from diloco_cli.plan.candidates import Candidate, leaves_its_region
from diloco_cli.plan.flow import PER_DOUBLING
from diloco_cli.plan.goodput import GUESSED_RESTART_S
from diloco_cli.plan.link import CLIENT_BPS, guessed_rtt_s
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.money import CLASS_A_PRICE, CLASS_B_PRICE, STORAGE_PRICE
from diloco_cli.plan.plan import Assumption, Mark
from diloco_cli.plan.speed import shares_cores
from diloco_cli.plan.syncer_pace import MERGE_PARAMETERS_PER_S, SYNCER_BPS, machine_of
from diloco_cli.units import format_bandwidth, format_count, format_duration

MAX_NAMES = 6


def assumptions(
    run: RunSettings, kept: Sequence[Candidate], model: ModelFacts, inventory: Inventory, searched: bool
) -> tuple[Assumption, ...]:
    """Speeds first, then values that the inventory does not give, then assumptions of every plan."""
    islands = [candidate.island for candidate in kept]
    guesses = [*_of_the_inventory(kept, inventory), *_of_the_model(run, model)]
    guesses.append("memory: float32 weights, gradients and AdamW; a micro-batch a device at a time")
    guesses.append("islands fail independently of each other")
    if searched:
        guesses.append(f"the search takes a doubling of H beyond 50 to cost {100 * PER_DOUBLING:.0f} % of the tokens")
    guesses += _of_the_syncer(inventory)
    if any(island.price_per_h or island.egress_per_gb for island in islands):
        guesses.append(
            f"requests {1e6 * CLASS_A_PRICE:g} a million writes, {1e6 * CLASS_B_PRICE:g} a million reads;"
            f" storage {30 * STORAGE_PRICE:g} per GB and month"
        )
        abroad = [island for island in islands if leaves_its_region(island, inventory)]
        uncharged = "downloads out of the store's region are not charged here"
        guesses += _about((f"{uncharged}; the store's provider may (0.02 to 0.12 per GB)", abroad))
    merging = f"the syncer merges {format_count(MERGE_PARAMETERS_PER_S)} parameters of one learner a second"
    measured = Assumption(f"{merging} (diloco's merge benchmark: int8, one core of an AMD EPYC)", "measured")
    guessed = (Assumption(text, "guessed") for text in guesses)
    return (*_speeds(kept), *_sharing(kept, inventory), measured, *guessed)


def _speeds(kept: Sequence[Candidate]) -> list[Assumption]:
    """One line per island; islands with the same source share a line."""
    if len(kept) <= MAX_NAMES:
        return [candidate.assumption for candidate in kept]
    by_source: dict[tuple[str, str], list[str]] = {}
    for candidate in kept:
        name, assumption = candidate.island.name, candidate.assumption
        text = assumption.text.removeprefix(f"{name}: ")
        by_source.setdefault((text, assumption.mark), []).append(name)
    return [Assumption(f"{_names(names)}: {text}", mark) for (text, mark), names in by_source.items()]  # type: ignore[arg-type]


def _sharing(kept: Sequence[Candidate], inventory: Inventory) -> list[Assumption]:
    local = [candidate.island.name for candidate in kept if shares_cores(candidate.island, None)]
    if inventory.local is None and len(local) > 1:
        text = "planned as if each had cores of its own; measure this machine: diloco inventory probe -f RUN"
        return [Assumption(f"{_names(local)}: {text}", "guessed")]
    if inventory.local is None:
        return []
    by_share: dict[str, list[str]] = {}
    for candidate in kept:
        if candidate.share < 1:
            by_share.setdefault(f"{candidate.share:.2f}", []).append(candidate.island.name)
    mark: Mark = "measured" if inventory.local.crowding else "guessed"
    cores = f"share {inventory.local.cores} cores"
    return [Assumption(f"{_names(names)}: {cores}, speeds x {share}", mark) for share, names in by_share.items()]


def _of_the_inventory(kept: Sequence[Candidate], inventory: Inventory) -> list[str]:
    """Values that the inventory does not give. A missing price is named if other islands have one."""
    islands = [candidate.island for candidate in kept]
    priced = any(island.price_per_h for island in inventory.islands)
    rtt, restart = format_duration(guessed_rtt_s(inventory.store.url)), format_duration(GUESSED_RESTART_S)
    failing = [i for i in islands if i.mtbf_s is not None]
    return _about(
        (
            f"a process moves {format_bandwidth(CLIENT_BPS)} to a bucket at most, less than the link",
            [c.island for c in kept if c.link_is_faster],
        ),
        ("no link given, taken as fast enough", [i for i in islands if not (i.link.up_bps and i.link.down_bps)]),
        (f"no rtt given, taken as {rtt}", [i for i in islands if i.link.rtt_s is None]),
        ("no mtbf given, taken as never failing", [i for i in islands if i.mtbf_s is None]),
        (f"no restart given, taken as {restart}", [i for i in failing if i.restart_s is None]),
        ("no price given, taken as free", [i for i in islands if priced and not i.price_per_h]),
    )


def _of_the_syncer(inventory: Inventory) -> list[str]:
    """Of its machine's link to the bucket, `store.link`, what is not given, or more than its process moves."""
    link, machine = inventory.store.link, machine_of(inventory.store)
    guesses = [] if link.rtt_s is not None else [f"takes {format_duration(machine.call_s)} for a call to the store"]
    ways = (("reads", link.down_bps, machine.down_bps), ("writes", link.up_bps, machine.up_bps))
    unknown = [(verb, used or SYNCER_BPS) for verb, given, used in ways if given is None]
    guesses += [f"{' and '.join(verb for verb, _ in unknown)} {format_bandwidth(unknown[0][1])}"] if unknown else []
    told = [f"the syncer's machine {' and '.join(guesses)} (store.link in the inventory)"] if guesses else []
    if any(given is not None and given != used for _, given, used in ways):
        told.append(f"the syncer moves {format_bandwidth(CLIENT_BPS)} to a bucket at most, less than its link")
    if machine.reads_back:
        told.append("the syncer reads versions back: this store is not known to check uploads")
    return told


def _of_the_model(run: RunSettings, model: ModelFacts) -> list[str]:
    guesses = []
    if run.model.preset is None:
        guesses.append(f"model: {format_count(model.embedding_parameters)} of the parameters are its embedding")
    if run.model.entrypoint and not run.model.parameters:
        guesses.append(
            f"model: {format_count(model.parameters)} parameters, as {run.model.entrypoint} builds them; from their"
            f" names and shapes {model.layers} layers of width {model.width}; sequences of {model.sequence} tokens"
        )
    return guesses


def _about(*guesses: tuple[str, Sequence[IslandSettings]]) -> list[str]:
    """One line for each that is about any island."""
    return [f"{_names([island.name for island in islands])}: {text}" for text, islands in guesses if islands]


def _names(names: Sequence[str]) -> str:
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"
