"""What no learner can train on, and what this version's `launch` cannot run although a plan may predict it."""

from __future__ import annotations

from diloco_cli.config.devices import BACKENDS, find_device
from diloco_cli.config.settings import Inventory, IslandSettings
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Excluded


def obstacle(island: IslandSettings, batch_tokens: int, inventory: Inventory, model: ModelFacts) -> Excluded | None:
    """Why this island cannot train whatever its memory is, and what would let it; None if it can."""
    ranks, sequences = island.num_ranks, batch_tokens // model.sequence
    backend = find_device(island.accelerators.name, inventory.devices).backend
    if ranks > 1 and backend == "mps":
        reason = f"{ranks} ranks cannot work together on {island.accelerators.name}"
        return Excluded(island.name, reason, (f"an island for each: accelerators: {island.accelerators.name}:1",))
    if sequences < ranks:
        reason = f"a batch of {sequences} sequences cannot be divided over {ranks} ranks"
        return Excluded(island.name, reason, (f"batch_tokens: {ranks * model.sequence} or more", "fewer ranks"))
    return None


def not_launched(island: IslandSettings, inventory: Inventory) -> tuple[str, str] | None:
    """(why `launch` cannot run this island, what would help); None if it can."""
    backend = find_device(island.accelerators.name, inventory.devices).backend
    if backend is None:
        described = f"devices: {{{island.accelerators.name}: {{backend: cuda}}}}"
        return "what torch calls this device is not known", f"{described}, if it is one that torch drives as CUDA"
    if backend not in BACKENDS:
        return f"learners do not train on torch's {backend} devices, only on {', '.join(BACKENDS)}", "leave it out"
    if island.infra == "local" and island.nodes > 1:
        return f"infra: local is one machine, not {island.nodes} nodes", "infra: ssh with hosts, or nodes: 1"
    return None
