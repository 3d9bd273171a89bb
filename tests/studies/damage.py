"""Objects of a running run that are deleted, flipped, cut short: python -m tests.studies.damage [--newest 20]

`diloco launch` with two real learners and a syncer, on a folder and on a GCS emulator, unsigned and signed. For each
kind of damage the newest object is harmed, then the second newest, and so on; after each, a whole round of merges must
come within 60 s. In the end the log must be whole, with the bytes that it had, as living processes hold every commit,
and both learners must be merged on. What no process holds any more (payloads that are merged, older versions) may be
missing, and `verify` must name nothing else.

Ends with a row a run for the table in README.md, and with status 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from diloco_cli.observe.replay import verified
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.runtime.consent import signing_secret
from diloco_cli.runtime.daemon import perform
from diloco_cli.signing import KEY_FILE_VARIABLE
from diloco_cli.store.open import open_store
from tests.contract.fake_gcs import Blob, FakeGCS
from tests.histories.replayer import in_one
from tests.studies.launched import BATCH_TOKENS, CLOCK, INVENTORY, LOCAL_STEPS, NAME, ROOT, LaunchedRun, lived, toy_file

BUCKET = "runs"
FRAGMENTS, LEARNERS = 4, 2
ROUNDS = 100_000  # more than the study needs: it stops the run
STEP_S = 0.25  # slots of .5 s: in shorter ones than .16 s commits may go out of memory between two looks
SKIP_AFTER_S = 5.0  # not 60: rounds take two seconds, and what is repaired after some rounds takes as long again
MERGES_WITHIN_S, PUT_BACK_WITHIN_S, OVER_WITHIN_S = 60.0, 90.0, 300.0
HEADER = (
    "| store | keys | harmed | by kind of object | next round (median, worst) | not put back | told | violations |\n"
    "|---|---|---|---|---|---|---|---|"
)
KEPT = ("commit", "FORMAT.json")  # held by living processes
MERGED = ("delta", "state", "weights")


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "flipped": flipped,
    "cut short": lambda data: data[: len(data) // 2],
}


class Objects(Protocol):
    """A bucket as its owner sees it: names below the run's own folder."""

    def newest(self) -> list[str]:
        """All names, the newest first."""
        ...

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, data: bytes | None) -> None: ...


@dataclass
class InFolder:
    root: Path

    def newest(self) -> list[str]:
        ages: dict[str, int] = {}
        for path in self.root.rglob("*"):
            try:
                if path.is_file() and not path.name.startswith("."):
                    ages[path.relative_to(self.root).as_posix()] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        return sorted(ages, key=lambda name: -ages[name])

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes | None) -> None:
        if data is None:
            (self.root / name).unlink(missing_ok=True)
        else:
            (self.root / name).write_bytes(data)


@dataclass
class InEmulator:
    server: FakeGCS

    @property
    def _blobs(self) -> dict[str, Blob]:
        return self.server.objects[BUCKET]

    def newest(self) -> list[str]:
        found = sorted(self._blobs.copy().items(), key=lambda item: -item[1].generation)
        return [name.removeprefix(f"{NAME}/") for name, _ in found]

    def read(self, name: str) -> bytes | None:
        blob = self._blobs.get(f"{NAME}/{name}")
        return None if blob is None else blob.data

    def write(self, name: str, data: bytes | None) -> None:
        if data is None:
            self._blobs.pop(f"{NAME}/{name}", None)
        else:
            self._blobs[f"{NAME}/{name}"] = Blob(data, self._blobs[f"{NAME}/{name}"].generation)


@dataclass
class Harmed:
    """What one run came to."""

    kinds: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    told: int = 0  # by verify
    violations: list[str] = field(default_factory=list)

    def row(self, store: str, keys: str) -> str:
        median_s = sorted(self.took_s)[len(self.took_s) // 2] if self.took_s else 0.0
        kinds, lost = (
            ", ".join(f"{count} {kind}" for kind, count in sorted(each.items())) for each in (self.kinds, self.lost)
        )
        cells = (
            store, keys, str(self.kinds.total()), kinds, f"{median_s:.1f} s, {max(self.took_s, default=0.0):.1f} s",
            lost or "nothing", str(self.told), str(len(self.violations)),
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def run_file(rounds: int) -> str:
    model, data = ("model", {"elements": 16}), ("slow_data", {"step_s": STEP_S})
    tokens = 2 * rounds * LOCAL_STEPS * BATCH_TOKENS
    return toy_file(
        model,
        data,
        tokens,
        {"every": LOCAL_STEPS, "fragments": FRAGMENTS, "quorum": LEARNERS, "skip_after": f"{SKIP_AFTER_S:g} s"},
    )


def head_of(objects: Objects) -> str:
    return max((name for name in objects.newest() if name.startswith("commit/")), default="")


def number_of(commit: str) -> int:
    return int(Path(commit).stem or -1)


def merged(objects: Objects, head: int) -> list[set[str]]:
    """Whose offers the merges after this commit hold. A commit that is damaged itself is none."""
    found = []
    for n in range(head + 1, number_of(head_of(objects)) + 1):
        with suppress(ValueError):
            found.append(
                {offer["learner"] for offer in in_one(objects.read(f"commit/{n:012d}.json") or b"").get("inputs", ())}
            )
    return [names for names in found if names]


def wait_for(launched: LaunchedRun, reached: Callable[[], bool], within_s: float) -> float:
    """Seconds. Raises RuntimeError if the launch ends before, or it takes longer."""
    assert launched.supervisor is not None
    since_s = time.monotonic()
    while not reached():
        if (end := launched.supervisor.poll()) is not None or time.monotonic() - since_s > within_s:
            raise RuntimeError(f"launch ended with {end}" if end is not None else f"not within {within_s:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - since_s


def harm(launched: LaunchedRun, objects: Objects, url: str, newest: int) -> Harmed:
    found, before, how = Harmed(), dict[str, bytes](), dict[str, str]()
    wait_for(launched, lambda: number_of(head_of(objects)) > 2 * FRAGMENTS, OVER_WITHIN_S)
    for what, damage in DAMAGE.items():
        for place in range(newest):
            name = objects.newest()[place]
            data, head = objects.read(name), number_of(head_of(objects))
            if not data:
                continue  # it has been collected
            before.setdefault(name, data)
            objects.write(name, damage(data))
            found.kinds[kind_of(name)] += 1
            how[name] = f"{what} with commit {head} as the newest"
            try:
                round_on = partial(lambda head: len(merged(objects, head)) >= FRAGMENTS, head)
                found.took_s.append(wait_for(launched, round_on, MERGES_WITHIN_S))
            except RuntimeError as error:
                found.violations.append(f"{name} {what}: {error}")
                return found

    def changed() -> set[str]:
        return {name for name, data in before.items() if objects.read(name) != data}

    with suppress(RuntimeError):
        wait_for(launched, lambda: not any(kind_of(name) in KEPT for name in changed()), PUT_BACK_WITHIN_S)
    head = number_of(head_of(objects))
    try:
        wait_for(launched, lambda: len(set().union(*merged(objects, head))) == LEARNERS, OVER_WITHIN_S)
    except RuntimeError as error:
        found.violations.append(f"a learner is merged no more: {error}")
    words = [sys.executable, "-m", "diloco_cli", "stop", url]
    subprocess.run(words, cwd=launched.directory, env=launched.environment, check=True, capture_output=True)
    assert launched.supervisor is not None
    launched.supervisor.wait(OVER_WITHIN_S)
    found.violations += [f"{name} was not put back: {how[name]}" for name in sorted(changed()) if kind_of(name) in KEPT]
    found.lost.update(kind_of(name) for name in changed() if kind_of(name) not in (*KEPT, "heartbeat"))
    store = open_store(url)
    replay = verified(store, perform(read_format(url, signing_secret()), store, CLOCK))
    told = [*replay.missing, *replay.mismatches]
    found.violations += [text for text in told if not is_explained(text, objects, set(before))]
    found.told = len(told)
    return found


def is_explained(text: str, objects: Objects, harmed: set[str]) -> bool:
    """Whether verify's words are about an object that was harmed, or about a commit that names one, or whose version
    rests on one that does."""
    key = text.partition(":")[0]
    if any(name in text for name in harmed) or not key.startswith("commit/"):
        return any(name in text for name in harmed)
    numbers = range(max(0, number_of(key) - 2 * FRAGMENTS), number_of(key) + 1)
    named = b"".join(objects.read(f"commit/{number:012d}.json") or b"" for number in numbers)
    return any(name.rpartition("-")[2].encode() in named for name in harmed if kind_of(name) in MERGED)


def kind_of(name: str) -> str:
    return name.partition("/")[0]


@contextmanager
def stored(store: str, keys: str, rounds: int) -> Iterator[tuple[LaunchedRun, Objects, str]]:
    """A run that is started; `store`: folder or gcs; `keys`: unsigned or signed."""
    os.environ.pop(KEY_FILE_VARIABLE, None)
    directory, variables = Path(tempfile.mkdtemp(prefix="harmed-run-")), dict[str, str]()
    if keys == "signed":
        variables[KEY_FILE_VARIABLE] = str(directory / "operator.key")
        words = [sys.executable, "-m", "diloco_cli", "key", "new", variables[KEY_FILE_VARIABLE]]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    if store == "folder":
        os.environ |= variables
        with lived(LaunchedRun(directory, run_file(rounds))) as launched:
            yield launched, InFolder(launched.bucket), launched.bucket.as_uri()
        return
    with FakeGCS(BUCKET) as server:
        os.environ |= variables | {"STORAGE_EMULATOR_HOST": server.url}
        objects = InEmulator(server)
        inventory = INVENTORY.replace("url: bucket", f"url: gs://{BUCKET}")
        with lived(RemoteRun(directory, run_file(rounds), inventory)) as launched:
            yield launched, objects, f"gs://{BUCKET}/{NAME}"


class RemoteRun(LaunchedRun):
    """Whose bucket is no folder here."""

    def _wait_for_it(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--newest", type=int, default=20, help="objects, of each kind of damage")
    parser.add_argument("--store", choices=("folder", "gcs"), action="append")
    parser.add_argument("--keys", choices=("unsigned", "signed"), action="append")
    asked = parser.parse_args()
    violations = 0
    print(HEADER, flush=True)
    for store in asked.store or ("folder", "gcs"):
        for keys in asked.keys or ("unsigned", "signed"):
            with stored(store, keys, ROUNDS) as (launched, objects, url):
                found = harm(launched, objects, url, asked.newest)
            violations += len(found.violations)
            print(found.row(store, keys), *found.violations, sep="\n", flush=True)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
