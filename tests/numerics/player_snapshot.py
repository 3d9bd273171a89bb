"""A player's whole state in one safetensors file, at any time of a replay; a player resumed from it gives the same.

It holds outer parameters and momentum; every learner's parameters, optimizer, random numbers and place on its track;
and the deltas in flight. (The consistent snapshot of arXiv 2604.21428, for a replayed run.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diloco_cli.errors import UsageError
from diloco_cli.protocol.log.tape import Tape
from diloco_cli.tapes.files import tape_digest
from diloco_cli.tapes.performer import Performer, Sent
from diloco_cli.tapes.player import Player
from diloco_cli.tasks.build import Data
from diloco_cli.training.replica import CPU

NUMBERS = ("cursor", "position", "steps", "local_steps", "merges", "steps_since_merge", "fraction", "base_versions")
Tensors = dict[str, torch.Tensor]


def save_snapshot(player: Player, path: Path) -> None:
    """Write the file atomically."""
    tensors, world, versions = Tensors(), player.world, player.world.versions
    for fragment, state in enumerate(player.states):
        tensors[f"state/{fragment}"] = _as_tensor(state)
    for (fragment, version), weights in versions.encoded.items():
        tensors[f"weights/{fragment}/{version}"] = _as_tensor(weights)
    for index, sent in enumerate(world.sent.values()):
        tensors[f"sent/{index}"] = _as_tensor(sent.payload)
    for index, moments in enumerate(world.saved.values()):
        tensors[f"saved/{index}"] = _as_tensor(moments)
    for index, performer in enumerate(player.performers.values()):
        tensors |= {f"learner/{index}/{name}": tensor for name, tensor in _tensors_of(performer)}
    facts = {
        "tape": tape_digest(player.tape), "played": player.played, "current": player.current,
        "uses": [[*version, count] for version, count in versions.uses.items() if count],
        "saves": [[*save, count] for save, count in world.needs.saves.items()],
        "sent": [[*offer, sent.fragment, sent.slot, sent.base, sent.loss] for offer, sent in world.sent.items()],
        "saved": [list(save) for save in world.saved],
        "learners": [
            [*number, None if p.loss != p.loss else p.loss, {name: getattr(p, name) for name in NUMBERS}]
            for number, p in player.performers.items()
        ],
    }  # fmt: skip
    temporary = path.with_name(f".{path.name}.partial")
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_file(copies, temporary, metadata={"player": json.dumps(facts)})
    temporary.replace(path)


def resume(tape: Tape, path: Path, *, device: torch.device = CPU, data: Data | None = None) -> Player:
    """The player as of the snapshot, which must be of this tape."""
    facts, tensors = _read(path)
    if facts.get("tape") != tape_digest(tape):
        raise UsageError("this is a snapshot of another tape's replay", where=str(path))
    player = Player(tape, device=device, data=data)
    world, versions = player.world, player.world.versions
    player.played, player.current = facts["played"], facts["current"]
    for fragment in range(player.run.num_fragments):
        player.restore(fragment, _as_bytes(tensors[f"state/{fragment}"]))
    versions.uses = Counter({(f, v): count for f, v, count in facts["uses"]})
    weights = [name.split("/") for name in tensors if name.startswith("weights/")]
    versions.encoded = {(int(f), int(v)): _as_bytes(tensors[f"weights/{f}/{v}"]) for _, f, v in weights}
    world.needs.saves = Counter({(name, i, step): count for name, i, step, count in facts["saves"]})
    for index, (name, incarnation, seq, fragment, slot, base, loss) in enumerate(facts["sent"]):
        payload = _as_bytes(tensors[f"sent/{index}"])
        world.sent[name, incarnation, seq] = Sent(fragment, slot, base, payload, loss)
    for index, (name, incarnation, step) in enumerate(facts["saved"]):
        world.saved[name, incarnation, step] = _as_bytes(tensors[f"saved/{index}"])
    for index, (name, incarnation, loss, numbers) in enumerate(facts["learners"]):
        performer = Performer(world, player.tracks[name, incarnation], player.replica_of(name), begin=False)
        performer.loss = nan if loss is None else loss
        for key, value in numbers.items():
            setattr(performer, key, value)
        _load(performer, _under(tensors, f"learner/{index}/"))
        player.performers[name, incarnation] = performer
    return player


def _tensors_of(performer: Performer) -> Iterator[tuple[str, torch.Tensor]]:
    yield "random", performer.random_state
    yield from ((f"model/{name}", tensor) for name, tensor in performer.replica.model.state_dict().items())
    for index, entry in performer.replica.optimizer.state_dict()["state"].items():
        yield from ((f"optimizer/{index}/{name}", value) for name, value in entry.items() if value is not None)
    yield from ((f"base/{fragment}", base) for fragment, base in performer.fragments.bases.items())
    for what, held in (("values", performer.fragments.sent), ("left", performer.wire.residuals.left)):
        for fragment, by_seq in held.items():
            yield from ((f"{what}/{fragment}/{seq}", tensor) for seq, tensor in by_seq.items())


def _load(performer: Performer, tensors: Tensors) -> None:
    performer.random_state = tensors["random"]
    replica = performer.replica
    replica.model.load_state_dict(_under(tensors, "model/"))
    state: dict[int, Tensors] = {}
    for name, tensor in _under(tensors, "optimizer/").items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = tensor
    replica.optimizer.load_state_dict({**replica.optimizer.state_dict(), "state": state})
    fragments = range(performer.run.num_fragments)
    performer.fragments.bases = {fragment: tensors[f"base/{fragment}"] for fragment in fragments}
    performer.fragments.sent = {fragment: {} for fragment in fragments}
    for what, held in (("values/", performer.fragments.sent), ("left/", performer.wire.residuals.left)):
        for name, tensor in _under(tensors, what).items():
            fragment, seq = map(int, name.split("/"))
            held.setdefault(fragment, {})[seq] = tensor


def _read(path: Path) -> tuple[dict[str, Any], Tensors]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("player", "{}"))
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"not a snapshot of a replay: {error}", where=str(path)) from error


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.numpy().tobytes()
    return raw
