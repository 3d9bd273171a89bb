"""Ranks as real processes that train cases, and the same cases on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco_cli.clock import utc_now_text
from diloco_cli.config.models import GPTShape, MoEShape
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.launch.new_run import layout_of
from diloco_cli.learner.group import join_group
from diloco_cli.learner.parent import RankPlace, own_beats, place_here
from diloco_cli.protocol.actors.learner import Progression
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.tasks import huggingface, models
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors import flat
from diloco_cli.tensors.flat import flatten
from diloco_cli.tensors.merge import delta_formats
from diloco_cli.training.ranks import Rank, RankedTraining, build_rank, follow
from diloco_cli.training.replica import CPU, DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire
from tests.forked import ForkedProcess

SEQUENCE = 12
SIDES = ("left", "right")
LR = {"adamw": 3e-3, "sgd": 0.1, "muon": 3e-4}  # of Muon the default: its products are of bf16, and round
NUMBERS = Progression(0.5, inf, False)  # any place in a run with a constant learning rate


CARRIED_HERE = (*flat.CARRIED, torch.float64)
"""The sums of a mixture are compared in float64, which the product refuses to exchange."""


@dataclass(frozen=True)
class RankedCase:
    """`rows`: examples of a batch; `at_once`: of one rank's micro-batch, None: all of its own. `events`: between two
    rounds of `steps` each (EVENTS). `codec`: what each round's deltas are sent in, with error feedback."""

    name: str
    model: str = "gpt"
    sharding: str = "fsdp"
    steps: int = 10
    rows: int = 8
    at_once: int | None = None
    fragments: int = 3
    precision: str = "fp32"
    optimizer: str = "adamw"
    events: tuple[str, ...] = ()
    codec: str = "fp32"

    @property
    def tokens(self) -> int:
        return self.rows * SEQUENCE

    def run(self) -> RunFormat:
        settings = RunSettings(
            name="ranked",
            model=ModelSettings(entrypoint=f"tests.numerics.ranked:{self.model}", sequence=SEQUENCE),
            data=DataSettings(entrypoint="tests.numerics.ranked:text"),
            train=TrainSettings(
                batch_tokens=self.tokens,
                precision=self.precision,  # type: ignore[arg-type]
                inner=InnerSettings(
                    name=self.optimizer,  # type: ignore[arg-type]
                    lr=LR[self.optimizer],
                    schedule="constant",
                    warmup_steps=0,
                    clip_norm=1.0,
                ),
            ),
            sync=SyncSettings(
                fragments=self.fragments,
                codec=self.codec,  # type: ignore[arg-type]
                error_feedback=self.codec != "fp32",
            ),
        )
        micro = None if self.at_once is None else self.at_once * SEQUENCE
        island = Island(
            "l0", "here", self.tokens, 4, 1.0, 1.0, micro_batch_tokens=micro, sharding=self.sharding  # type: ignore[arg-type]
        )  # fmt: skip
        return RunFormat("id", "ranked", utc_now_text(), settings, (island,), layout_of(settings), "test")


@dataclass
class Trained:
    """After the steps: every fragment, the losses, and the moments as they would be saved (none of SGD). `payloads`:
    what was sent; `of_whole`: the same, encoded from the whole tensors as torch gathers them."""

    fragments: list[Tensor]
    losses: list[float]
    moments: bytes | None
    payloads: list[bytes] = field(default_factory=list)
    of_whole: list[bytes] = field(default_factory=list)


def one_rank(case: RankedCase, moments: bytes | None = None) -> Trained:
    run = case.run()
    replica = Replica(
        run.settings, build_model(run.settings), build_data(run.settings), 0, 1,
        micro_batch_tokens=run.islands[0].micro_batch_tokens,
    )  # fmt: skip
    return _trained(case, run, DeviceTraining(run, replica), moments)


def several_ranks(
    cases: Iterable[RankedCase], ranks: int, folder: Path, moments: bytes | None = None
) -> dict[str, Trained]:
    """`moments`: of an earlier incarnation."""
    cases = list(cases)
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    if moments is not None:
        (folder / "moments").write_bytes(moments)
    places = [RankPlace(rank, ranks, rank, ranks, f"file://{folder}/meet") for rank in range(ranks)]
    children = [ForkedProcess(main, str(folder), GLOO_SOCKET_IFNAME="lo", **place.environment()) for place in places]
    try:
        codes = [child.wait(600) for child in children]
    finally:
        for child in children:
            child.kill()
    assert codes == [0] * ranks
    return {case.name: torch.load(folder / f"{case.name}.pt", weights_only=False) for case in cases}


def _trained(
    case: RankedCase, run: RunFormat, training: DeviceTraining, moments: bytes | None = None,
    whole: Callable[[], dict[str, Tensor]] | None = None,
) -> Trained:  # fmt: skip
    """`whole`: the island's tensors, whichever rank has them."""
    start = dict(build_model(run.settings).named_parameters())
    bases = [flatten(fragment, start) for fragment in run.layout.fragments]
    for index, values in enumerate(bases):
        training.write(index, values)
    if moments is not None:
        assert training.restore(moments)
    found, wire, witness = Trained([], [], None), TensorWire(run), TensorWire(run)
    kept, at = None, 0
    for number, event in enumerate(("", *case.events)):
        kept = EVENTS[event](training, kept) if event in EVENTS else kept
        if event == "sent":
            tensors = None if whole is None else whole()
            for index, fragment in enumerate(run.layout.fragments):
                applied = number - 1 if number > 1 else None
                payload = wire.encode(index, number, applied, bases[index], training.read(index))
                found.payloads.append(payload)
                if tensors is not None:
                    found.of_whole.append(
                        witness.encode(index, number, applied, bases[index], flatten(fragment, tensors))
                    )
                bases[index] = bases[index] - _decoded(run, index, payload)  # as the only learner's, outer rate 1
                training.write(index, bases[index])
        for _ in range(case.steps):
            found.losses.append(training.train(at * case.tokens, case.tokens, NUMBERS).loss or 0.0)
            at += 1
    saved = training.save()
    found.fragments = [training.read(fragment) for fragment in range(run.num_fragments)]
    found.moments = None if saved is None else saved.encode()
    return found


def _decoded(run: RunFormat, fragment: int, payload: bytes) -> Tensor:
    form = delta_formats(run.layout, run.settings.sync)[fragment]
    return form.open(payload)[0](0, torch.empty(form.cut.size))


Kept = tuple[list[Tensor], bytes]  # every fragment, and the moments


def _keep(training: DeviceTraining, _: Kept | None) -> Kept:
    saved = training.save()
    assert saved is not None
    return [training.read(fragment) for fragment in range(training.run.num_fragments)], saved.encode()


def _roll_back(training: DeviceTraining, kept: Kept | None, with_moments: bool) -> Kept:
    """As a learner does it: all fragments arrive anew, moments are the saved ones, or fresh ones."""
    assert kept is not None
    assert training.restore(kept[1]) if with_moments else training.reset()
    for fragment, values in enumerate(kept[0]):
        training.write(fragment, values)
    return kept


def _adopt(training: DeviceTraining, kept: Kept | None) -> Kept | None:
    """By halves, of values that no rank has."""
    for fragment in range(training.run.num_fragments):
        own = training.read(fragment)
        training.write(fragment, torch.lerp(own, torch.linspace(-0.1, 0.1, len(own)), 0.5))
    return kept


EVENTS: dict[str, Callable[[DeviceTraining, Kept | None], Kept | None]] = {
    "kept": _keep,
    "adopted": _adopt,
    "rolled back": lambda training, kept: _roll_back(training, kept, True),
    "rolled back to fresh moments": lambda training, kept: _roll_back(training, kept, False),
}


def choosing() -> nn.Module:
    return Choosing()


def gpt() -> nn.Module:
    """Rows and widths that neither 2 nor 4 ranks divide alike, norms of 18."""
    return models.build(GPTShape(layers=2, width=18, heads=2, sequence=SEQUENCE, vocabulary=259))


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleDict({s: nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 10)) for s in SIDES})

    def forward(self, hidden: Tensor, side: str) -> Tensor:
        found: Tensor = self.sides[side](hidden)
        return found


class Choosing(nn.Module):
    """Each pass uses one of two equal parts, by what it reads: ranks use unlike parameters in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 10)
        self.layers = nn.ModuleList(OneOfTwo() for _ in range(2))
        self.heads = nn.ModuleDict({side: nn.Linear(10, 257) for side in SIDES})

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        side = SIDES[int(tokens[0, 0]) % 2]
        hidden = self.embedding(tokens)
        for layer in self.layers:
            found = layer(hidden, side)
            found += hidden  # in place: what ranks do with a part's result must allow it
            hidden = found
        return nn.functional.cross_entropy(self.heads[side](hidden).flatten(0, 1), targets.flatten())


class TwoNames(nn.Module):
    """The head's weight is the embedding's, by another name, as in transformers; one tensor is frozen, and one a buffer
    that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 10)) for _ in range(3))
        self.head = nn.Linear(10, 257, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 10), requires_grad=False)
        self.register_buffer("angles", torch.arange(10).float().cos(), persistent=False)
        self.plain = torch.arange(10).float().sin()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.frozen + self.angles + self.plain
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def moe() -> nn.Module:
    return models.build(
        MoEShape(layers=2, width=16, heads=2, sequence=SEQUENCE, vocabulary=259, experts=4, expert_width=18)
    )


def moe64() -> nn.Module:
    return moe().double()


def llama() -> nn.Module:
    """Of transformers, with rotary positions: buffers that its constructor computes and no version holds."""
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 48, "tie_word_embeddings": True}
    return huggingface.build(ModelSettings(huggingface="llama", args={**config, **sizes, "num_key_value_heads": 2}))


class CountingText:
    """Any rows, addressed by position: number `position / SEQUENCE` and those after it."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        first = position // SEQUENCE
        rows = [self._row(1000 * shard + first + row) for row in range(batch_tokens // SEQUENCE)]
        tokens = torch.stack(rows)
        return tokens[:, :-1], tokens[:, 1:]

    def held_out(self, num_sequences: int) -> Iterable[tuple[Tensor, Tensor]]:
        return iter([self.batch(7, 8, 0, num_sequences * SEQUENCE)])

    @staticmethod
    def _row(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        start, stride = torch.randint(0, 250, (2,), generator=generator).tolist()
        return (start + (1 + stride % 3) * torch.arange(SEQUENCE + 1)) % 250


two_names, text = TwoNames, CountingText


def main(name: str) -> None:
    flat.CARRIED = CARRIED_HERE
    folder = Path(name)
    place = place_here()
    assert place is not None
    torch.set_num_threads(1)
    join_group(place, CPU)
    moments = (folder / "moments").read_bytes() if (folder / "moments").exists() else None
    for case in [RankedCase(**fields) for fields in json.loads((folder / "cases.json").read_text())]:
        run = case.run()
        rank = build_rank(run, run.islands[0], build_data(run.settings), CPU, own_beats(place))
        if not place.commands:
            for _ in range(case.events.count("sent")):
                follow(rank)
                whole_tensors(rank)
            follow(rank)
            continue
        training = RankedTraining(run, rank)

        def whole(training: RankedTraining = training, rank: Rank = rank) -> dict[str, Tensor]:
            training.close(0)  # the others gather, too, and follow again
            return whole_tensors(rank)

        torch.save(_trained(case, run, training, moments, whole), folder / f"{case.name}.pt")
        training.close(0)


def whole_tensors(rank: Rank) -> dict[str, Tensor]:
    """By torch's own gathering. All ranks call it at once."""
    tensors = rank.replica.tensors
    return {n: t.detach().full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in tensors.items()}
