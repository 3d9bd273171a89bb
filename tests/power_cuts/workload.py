"""What is being done when the power goes: a run of the protocol with toy learners, and bare calls of the store's verbs.

Everything that a caller was told is noted beside the ops of the disk, so that a state can be held against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Created, Exists, Store
from diloco_cli.store.wrappers import StoreWrapper
from tests.faulty_world import FaultyWorld
from tests.power_cuts.disk import Op
from tests.power_cuts.recorder import KilledError, RecordingOs, recorded
from tests.simulation.toy import ToyFleet, make_run

FOLDER = "disk/runs/toy"  # below the base; made by the product, as everything in it
RUN = make_run(merges=4)
HINTS = ("hint/", "heartbeat/")


@dataclass
class Told:
    """One call: from op `start` on it may have changed the key to `value` (None: deleted); at op `done` it had
    returned (None: it never did), and so the change must survive."""

    value: bytes | None
    start: int
    done: int | None = None


@dataclass
class WorkloadHistory:
    """The ops, which of their nodes are directories, and the calls by their keys."""

    ops: list[Op] = field(default_factory=list)
    directories: list[int] = field(default_factory=list)
    calls: dict[str, list[Told]] = field(default_factory=lambda: defaultdict(list))

    def allowed(self, key: str, at: int) -> list[bytes | None]:
        """What may be found under the key after a cut before op `at`."""
        calls = [call for call in self.calls.get(key, []) if call.start < at or call.done is not None]
        told = [number for number, call in enumerate(calls) if call.done is not None and call.done <= at]
        if told:
            return [call.value for call in calls[told[-1] :] if call.start < at or call is calls[told[-1]]]
        return [None, *(call.value for call in calls if call.start < at)]

    def commits_told(self, at: int) -> int:
        """How many commits had been acknowledged before op `at`."""
        keys = [key for key in self.calls if key.startswith("commit/")]
        return sum(any(call.done is not None and call.done <= at for call in self.calls[key]) for key in keys)


class WitnessedStore(StoreWrapper):
    """The store under study; notes when each call began and what it answered."""

    def __init__(self, store: Store, recorder: RecordingOs, history: WorkloadHistory) -> None:
        super().__init__(store)
        self._recorder, self._history = recorder, history

    def _call(self, key: str, value: bytes | None) -> Told:
        told = Told(value, len(self._recorder.ops))
        self._history.calls[key].append(told)
        return told

    def _answered(self, told: Told) -> None:
        told.done = len(self._recorder.ops)

    def create(self, key: str, data: bytes) -> Created | Exists:
        told = self._call(key, data)
        answer = self._store.create(key, data)
        if isinstance(answer, Exists):
            told.value = answer.data
        self._answered(told)
        return answer

    def put(self, key: str, data: bytes) -> None:
        told = self._call(key, data)
        self._store.put(key, data)
        self._answered(told)

    def delete(self, key: str) -> None:
        told = self._call(key, None)
        self._store.delete(key)
        self._answered(told)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        """Others build on what they have read: it is told, unless it may be overwritten at any time."""
        data = self._store.get(key, max_bytes)
        if data is not None and not key.startswith(HINTS):
            self._answered(self._call(key, data))
        return data


class Generation(ToyFleet):
    """A fleet whose nonces no earlier one has drawn."""

    def __init__(self, run: RunFormat, store: Store, generation: int) -> None:
        self._generation, self._drawn = generation, 0
        super().__init__(run, FaultyWorld(store=store))

    def nonce(self) -> str:
        self._drawn += 1
        return f"{self._generation:016x}{self._drawn:016x}"


def run_to_the_end(store: Store, generation: int) -> None:
    fleet = Generation(RUN, store, generation)
    fleet.start().finish()
    assert fleet.errors() == []


def bare_calls(store: Store, generation: int) -> None:
    """Everything that is there is read; then keys of several depths, values overwritten, deleted and written again."""
    for key in store.list(""):
        store.get(key)
    for number in range(4):
        store.create(f"a/{number}/object", b"first %d" % number)
        store.put("hint/head", b"head %d, somewhat longer than before" % number)
        store.create(f"a/{number}/object", b"second")
    store.delete("a/1/object")
    store.create("a/1/object", b"again")
    store.put("a/2/object", b"overwritten")
    store.delete("a/3/object")
    store.delete("hint/head")


Work = Callable[[Store, int], None]


def record(base: Path, work: Work, *, without: str = "", dies_at: Iterable[int] = ()) -> WorkloadHistory:
    """Do the work in a new folder below `base`. At each of `dies_at`, counted in ops, every process is killed (what it
    wrote stays in the kernel's memory), and the next generation goes on."""
    base.mkdir()
    deaths = list(dies_at)
    recorder, history = RecordingOs(base, without=without, dies_at=deaths.pop(0) if deaths else None), WorkloadHistory()
    with recorded(recorder):
        for generation in range(len(deaths) + 2):
            try:
                store = open_store((base / FOLDER).as_uri(), create=True)
                work(WitnessedStore(store, recorder, history), generation)
                break
            except KilledError:
                recorder.revive(deaths.pop(0) if deaths else None)
    history.ops, history.directories = recorder.ops, recorder.directories
    return history
