"""How long the exchange holds up an island of four ranks: python -m tests.benchmarks.rank_blocking

25 M parameters in float32, sharded over real ranks (gloo, on the CPU), with H = P = 24, the run's defaults, and a batch
of 4,096 tokens. Rank 0 sends and adopts every fragment once, through the product's own code, as it does between H
steps; encoding has a thread of its own, as in a learner, and there is no store. Once more with a stand-in for a device
whose copies from and to the host do not end before all that is done. Beside it, what the ranks' bare sends of as many
values and one copy take; and what saving the moments takes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from math import ceil
from os import getloadavg
from pathlib import Path
from queue import SimpleQueue
from statistics import median

import torch
from torch import distributed, nn

from diloco_cli.clock import utc_now_text
from diloco_cli.config.models import GPTShape
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.environment import environment_with
from diloco_cli.launch.new_run import layout_of
from diloco_cli.learner.group import join_group
from diloco_cli.learner.parent import RankPlace, own_beats, place_here
from diloco_cli.protocol.actors.learner import Fragments, Progression, Values
from diloco_cli.protocol.log.records import FragmentVersion, Island, RunFormat
from diloco_cli.tasks import models
from diloco_cli.tasks.build import build_data
from diloco_cli.tensors.codecs import codec
from diloco_cli.training.devices import CudaWire
from diloco_cli.training.ranks import RankedTraining, build_rank, follow
from diloco_cli.training.replica import CPU
from diloco_cli.training.wire import TensorWire
from tests.benchmarks.measure import ROOT, machine, row
from tests.unit.training.slow_device import SlowDevice

MODULE = "tests.benchmarks.rank_blocking"
SEQUENCE, PASSES, SEQUENCES = 128, 2, 4  # of a rank's micro-batch
SHAPES = {
    "wide": GPTShape(layers=8, width=512, heads=8, sequence=SEQUENCE),
    "small": GPTShape(layers=24, width=128, heads=4, sequence=SEQUENCE),
}
EVERY, STEPS, ROUNDS = 24, 5, 5
BLOCKED_PERCENT, PER_FRAGMENT = 1.0, 2.0
AT = Progression(0.5, 1, False)
Seconds = dict[str, list[float]]


class RandomRows:
    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(position)
        tokens = torch.randint(0, 256, (batch_tokens // SEQUENCE, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def held_out(self, num_sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []


def wide() -> nn.Module:
    return models.build(SHAPES["wide"])


def small() -> nn.Module:
    return models.build(SHAPES["small"])


def run_of(shape: str, ranks: int, fragments: int) -> RunFormat:
    batch_tokens = PASSES * ranks * SEQUENCES * SEQUENCE
    settings = RunSettings(
        name="blocking",
        model=ModelSettings(entrypoint=f"{MODULE}:{shape}", sequence=SEQUENCE),
        data=DataSettings(entrypoint=f"{MODULE}:RandomRows"),
        train=TrainSettings(batch_tokens=batch_tokens, precision="fp32", inner=InnerSettings(warmup_steps=0)),
        sync=SyncSettings(fragments=fragments, codec="int4"),
    )
    micro = SEQUENCES * SEQUENCE
    island = Island("l0", "here", batch_tokens, fragments, 1.0, 1.0, micro_batch_tokens=micro, sharding="fsdp")
    return RunFormat("id", "blocking", utc_now_text(), settings, (island,), layout_of(settings), "test")


def bare_s(sizes: list[int]) -> list[float]:
    """Of each fragment: every other rank sends its part to rank 0, which copies it."""
    rank, ranks, found = distributed.get_rank(), distributed.get_world_size(), []
    for size in sizes:
        part = torch.randn(ceil(size / ranks))
        rooms = {} if rank else {r: torch.empty_like(part) for r in range(1, ranks)}
        whole = torch.empty(ranks * len(part))
        started_s = time.perf_counter()
        way = distributed.isend if rank else distributed.irecv
        pairs = rooms or {0: part}
        works = distributed.batch_isend_irecv([distributed.P2POp(way, room, peer) for peer, room in pairs.items()])
        for work in works:
            work.wait()
        if not rank:
            torch.cat([part, *rooms.values()], out=whole)
        found.append(time.perf_counter() - started_s)
    return found


def rank(shape: str, ranks: int, fragments: int, folder: str) -> None:
    """One of the ranks, in a process of its own."""
    place, run = place_here(), run_of(shape, ranks, fragments)
    assert place is not None
    join_group(place, CPU)
    built = build_rank(run, run.islands[0], build_data(run.settings), CPU, own_beats(place))
    sizes = [fragment.num_parameters for fragment in run.layout.fragments]
    bare = [seconds for _ in range(1 + ROUNDS) for seconds in bare_s(sizes)][len(sizes) :]
    if not place.commands:
        follow(built)
        return
    found: Seconds = {"bare": bare}
    for slow in (None, SlowDevice()):
        training = RankedTraining(run, built, accelerator=slow)
        found |= exchanged(training, TensorWire(run) if slow is None else CudaWire(run, CPU, slow), slow)
    torch.save(found, Path(folder) / "seconds.pt")
    training.close(0)


def exchanged(training: RankedTraining, wire: TensorWire, slow: SlowDevice | None) -> Seconds:
    """`slow`: copies from and to it last until all fragments were sent and adopted."""
    steps, exchange, reads, saves, waits = [], [], [], [], 0
    run, fragments = training.run, Fragments(training, wire)
    count, batch_tokens = len(run.layout.fragments), run.islands[0].batch_tokens
    for fragment in range(count):
        fragments.begin(fragment, version(run, wire, fragment))
    training.train(0, batch_tokens, AT)
    for number in range(STEPS):
        steps.append(timed(training.train, number * batch_tokens, batch_tokens, AT))
    for number in range(ROUNDS):
        reads += [timed(training.read, fragment) for fragment in range(count)]
        if slow is not None:
            slow.copies_end.clear()
        lane = Lane(wire)
        seconds = 0.0
        for fragment in range(count):
            merged = version(run, wire, fragment)
            seconds += timed(lane.send, fragment, number, fragments)
            seconds += timed(fragments.adopt, fragment, merged, "rebase", number)
        exchange.append(seconds)
        if slow is not None:
            waits += slow.waited.count(threading.get_ident())
            slow.copies_end.set()
        lane.ends()
        saves.append(timed(training.save))
        if slow is not None:
            slow.waited.clear()  # saving waits for copies
    if slow is not None:
        return {"slow exchange": exchange, "waits": [float(waits)]}
    return {"step": steps, "exchange": exchange, "read": reads, "save": saves}


class Lane:
    """Encodes what was sent, beside the thread that trains, as a learner's upload lane does."""

    def __init__(self, wire: TensorWire) -> None:
        self._wire, self._sent = wire, SimpleQueue[Callable[[], bytes] | None]()
        self._thread = threading.Thread(target=self._encode, daemon=True)
        self._thread.start()

    def send(self, fragment: int, seq: int, fragments: Fragments) -> None:
        base, values = fragments.bases[fragment], fragments.send(fragment, seq, keep=True)
        self._sent.put(lambda: self._wire.encode(fragment, seq, None, base, values))

    def ends(self) -> None:
        self._sent.put(None)
        self._thread.join()

    def _encode(self) -> None:
        for encode in iter(self._sent.get, None):
            encode()


def version(run: RunFormat, wire: TensorWire, fragment: int) -> Values:
    """Merged values, as they arrive."""
    values = 0.02 * torch.randn(run.layout.fragments[fragment].num_parameters)
    data = codec(run.settings.sync.weights_codec).to_bytes(values)
    return wire.decode(FragmentVersion(fragment, 1, 0, 1, "", ""), data)


def timed(work: Callable[..., object], *given: object) -> float:
    started_s = time.perf_counter()
    work(*given)
    return time.perf_counter() - started_s


def measured(shape: str = "wide", ranks: int = 4, fragments: int = 24) -> Seconds:
    """In processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from {MODULE} import rank; rank({shape!r}, {ranks}, {fragments}, {folder!r})"
        variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        children = []
        for number in range(ranks):
            place = RankPlace(number, ranks, number, ranks, f"file://{folder}/meet")
            environment = environment_with(**variables, **place.environment())
            children.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment))
        try:
            codes = [child.wait(600) for child in children]
        finally:
            for child in children:
                child.kill()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        found: Seconds = torch.load(Path(folder) / "seconds.pt")
        return found


def percent(found: Seconds, name: str) -> list[float]:
    """Of the time of H steps and one exchange of all fragments."""
    step_s = median(found["step"])
    return [100 * seconds / (EVERY * step_s + seconds) for seconds in found[name]]


def main() -> int:
    print(machine(), f"load {getloadavg()[0]:.1f}")
    found = measured()
    step_s = median(found["step"])
    blocked, slow = percent(found, "exchange"), percent(found, "slow exchange")
    over = [a / b for a, b in zip(found["read"], found["bare"], strict=True)]
    goals = [max(blocked) <= BLOCKED_PERCENT, max(slow) <= BLOCKED_PERCENT, median(over) <= PER_FRAGMENT]
    print(row("seconds of a step", found["step"], "", None))
    print(row("all fragments sent and adopted, % of the time", blocked, f"<= {BLOCKED_PERCENT:g} %", goals[0]))
    print(row("the same while no copy from or to a device ends", slow, f"<= {BLOCKED_PERCENT:g} %", goals[1]))
    print(row("waits for such a copy", found["waits"], "", None, 0))
    print(row("a fragment's read / bare sends and a copy", over, f"<= {PER_FRAGMENT:g} (median)", goals[2]))
    print(row("saving the moments / a step", [seconds / step_s for seconds in found["save"]], "", None))
    return 0 if all(goals) else 1


if __name__ == "__main__":
    sys.exit(main())
