"""A whole run in one process: the product's learners and syncer in threads, meeting in a memory store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)  # fmt: skip
from diloco_cli.launch.new_run import layout_of
from diloco_cli.protocol.actors.learner import Learner, Observer
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, delta_key, state_key, weights_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Island,
    MergedOffer,
    ProcessClaim,
    RunFormat,
    decode,
    encode,
)
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import Lanes, SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import TorchArithmetic, load_versions, state_spec
from diloco_cli.tasks.build import Data, build_data, build_model
from diloco_cli.tensors.flat import flatten
from diloco_cli.tensors.payload import from_bytes
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire
from examples.quality.methods.streaming import StreamingLearner
from tests.numerics.tiny import ROWS

CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)


def make_run(
    learners: int, rounds: int, sync: SyncSettings, outer: OuterSettings, inner: InnerSettings,
    model: str = "regression", data: str = "stream", codec: str = "fp32",
) -> RunFormat:  # fmt: skip
    """Equal islands; the run ends after `rounds` rounds of everybody. `codec` is the uploads'; weights are exact."""
    settings = RunSettings(
        name="tiny",
        model=ModelSettings(entrypoint=f"tests.numerics.tiny:{model}"),
        data=DataSettings(entrypoint=f"tests.numerics.tiny:{data}"),
        train=TrainSettings(tokens=rounds * sync.every * learners * ROWS, batch_tokens=ROWS, inner=inner),
        sync=replace(sync, codec=codec, weights_codec="fp32", skip_after_s=600.0),  # type: ignore[arg-type]
        outer=outer,
    )
    islands = tuple(Island(f"l{i}", "here", ROWS, sync.every, 100.0, 1e-4) for i in range(learners))
    return RunFormat("id", "tiny", utc_now_text(), settings, islands, layout_of(settings), "test")


class Threads:
    """What goes on side by side in a test; what ends one of them is raised by who waits for all."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []

    def start(self, work: Callable[..., object], *arguments: object) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self, within_s: float = 60.0) -> None:
        for thread in self._threads:
            thread.join(within_s)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in self._threads), "the run did not end"


def run_to_end(run: RunFormat, store: Store | None = None) -> tuple[Store, dict[str, torch.Tensor]]:
    """Train until the run is finished; returns the store and the outer parameters by name. Unless `sync.overlap` is
    auto, each merge is adopted exactly so many slots after its own."""
    store, threads = store or MemoryStore(), Threads()
    learner = Learner if run.settings.sync.overlap == "auto" else StreamingLearner
    store.create(FORMAT_KEY, encode(run))
    threads.start(serve, run, store)
    for island in run.islands:
        threads.start(learn, run, store, island.name, learner)
    threads.join()
    return store, outer_parameters(run, store)


def claim() -> ProcessClaim:
    return ProcessClaim(0, nonce(), "test", 1, utc_now_text(), "test")


def serve(run: RunFormat, store: Store) -> None:
    syncer = Syncer(run, claim(), TorchArithmetic(run), NoEvaluator(), utc_now_text, nonce)
    perform(syncer.serve(), store, CLOCK)


def learn(run: RunFormat, store: Store, name: str, learner: type[Learner] = Learner) -> None:
    process_of(run, store, name, learner=learner).train()


@dataclass
class TrainingProcess:
    """One incarnation of the product's learner, wired as its daemon wires it."""

    learner: Learner
    training: DeviceTraining
    lanes: Lanes
    store: Store

    def train(self) -> None:
        """To its end. Raises what ended it or a thread beside it."""
        try:
            self.perform(self.learner.train())
        finally:
            self.learner.follower.leaves = True
            self.lanes.close(5.0)
        self.lanes.check()

    def perform(self, steps: Steps[None] | Steps[object]) -> None:
        perform(steps, self.store, SystemClock(monotonic_s, self.lanes.sleep_s, self.lanes.check))


def process_of(
    run: RunFormat, store: Store, name: str, leaves: Callable[[], bool] = lambda: False,
    may_drain: Callable[[], bool] = lambda: True, observer: Observer | None = None, data: Data | None = None,
    learner: type[Learner] = Learner,
) -> TrainingProcess:  # fmt: skip
    """A new incarnation, before it joins. It drains before it leaves, if it may.

    Only once version 0 is there: torch's random numbers belong to the whole process, and the syncer's thread draws the
    first parameters from them."""
    while store.get(commit_key(0)) is None:
        sleep_s(0.005)
    data, shard, island = data or build_data(run.settings), run.shard_of(name), run.island(name)
    micro = None if island is None else island.micro_batch_tokens
    replica = Replica(
        run.settings, build_model(run.settings), data, shard, run.num_shards, micro_batch_tokens=micro
    )  # fmt: skip
    training = DeviceTraining(run, replica)
    lanes = Lanes(store, CLOCK)
    made = learner(
        run, name, claim(), training, TensorWire(run), nonce, lanes.start, observer, leaves, may_drain,
        wakes=lanes.news.set,
    )  # fmt: skip
    return TrainingProcess(made, training, lanes, store)


def outer_parameters(run: RunFormat, store: Store) -> dict[str, torch.Tensor]:
    state = perform(read_log(run), store, CLOCK)
    tensors = {t.name: torch.empty(t.shape) for fragment in run.layout.fragments for t in fragment.tensors}
    load_versions(run, state.outputs, store, tensors)
    return tensors


def commits(store: Store) -> list[Commit]:
    """The whole log."""
    found: list[Commit] = []
    while (data := store.get(commit_key(len(found)))) is not None:
        found.append(decode(Commit, data, "log"))
    return found


def merges(store: Store) -> list[Commit]:
    return [commit for commit in commits(store) if commit.kind == "merge"]


def key_of_state(output: FragmentVersion) -> str:
    return state_key(output.fragment, output.version, output.epoch, output.state_digest)


def key_of_weights(output: FragmentVersion) -> str:
    return weights_key(output.fragment, output.version, output.epoch, output.weights_digest)


def key_of_delta(item: MergedOffer) -> str:
    return delta_key(item.learner, item.incarnation, item.seq, item.payload_digest)


def versions(run: RunFormat, store: Store, fragment: int) -> list[torch.Tensor]:
    """The outer parameters of one fragment after each of its merges, in order."""
    spec = state_spec(run.layout.fragments[fragment].num_parameters, run.settings.outer.name)
    outputs = [output for commit in merges(store) for output in commit.outputs if output.fragment == fragment]
    return [from_bytes(store.get(key_of_state(output)) or b"", spec)["parameters"] for output in outputs]


def copy_of(store: Store) -> MemoryStore:
    """One that a test may damage."""
    copy = MemoryStore()
    for key in store.list("", limit=100_000):
        copy.put(key, store.get(key) or b"")
    return copy


def flat(run: RunFormat, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([flatten(fragment, tensors) for fragment in run.layout.fragments])
