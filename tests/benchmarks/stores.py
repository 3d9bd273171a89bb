"""Our store port beside the bare client: python -m tests.benchmarks.stores [--rounds 9] [--megabytes 100]

One fragment goes up and comes down through the port, its digest included (computed before an upload, compared after a
download), and through the client that the port stands on, without one: gcsfs on the fake GCS, obstore on the S3
emulator; for a directory, a plain copy of a file to it and back, with fsync on both sides, for which the port's
bytes come from a file and go to one as well. All alternate within one run; the servers are processes of their own on
this machine. Goal: at least 0.9 of the bare client's speed. At the end, the digests themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.randomness import nonce
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Created, Store
from diloco_cli.store.transfers import crc32c
from tests.benchmarks.measure import interleaved, machine, ratios, row
from tests.contract.emulators import S3_ENVIRONMENT, environment, s3_emulator, server

GOAL = 0.9


class Rival:
    """One client: `put(name, data)`, `get(name)`, `delete(name)`."""

    def __init__(self, put: Callable[[str, bytes], object], get: Callable[[str], Any], delete: Callable[[str], object]):
        self.put, self.get, self.delete = put, get, delete


def ours(store: Store) -> Rival:
    """As a learner and a syncer use the port."""
    digests: dict[str, str] = {}

    def put(name: str, data: bytes) -> None:
        digests[name] = digest(data)
        assert store.create(name, data) == Created()

    def get(name: str) -> bytes:
        data = store.get(name)
        assert data is not None and digest(data) == digests[name]
        return data

    return Rival(put, get, store.delete)


def plain_copies(directory: Path, here: Path) -> Rival:
    """A file copied to the directory and back, durable on both sides."""

    def put(name: str, data: bytes) -> None:
        _write_durably(directory / name, (here / "fragment").read_bytes())

    def get(name: str) -> bytes:
        data = (directory / name).read_bytes()
        _write_durably(here / name, data)
        return data

    return Rival(put, get, lambda name: [path.unlink() for path in (directory / name, here / name)])


def our_copies(store: Store, here: Path) -> Rival:
    """The same through the port."""
    rival = ours(store)

    def get(name: str) -> bytes:
        data: bytes = rival.get(name)
        _write_durably(here / name, data)
        return data

    def delete(name: str) -> None:
        rival.delete(name)
        (here / name).unlink()

    return Rival(lambda name, data: rival.put(name, (here / "fragment").read_bytes()), get, delete)


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    _sync(path.parent)


def bare_gcsfs(url: str) -> Rival:
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    from gcsfs.core import GCSFileSystem

    fs = GCSFileSystem(token="anon", endpoint_url=url, skip_instance_cache=True, use_listings_cache=False)
    return _bare_fsspec(fs)


def _bare_fsspec(fs: Any) -> Rival:
    return Rival(
        lambda name, data: fs.pipe_file(f"bucket/bare/{name}", data),
        lambda name: fs.cat_file(f"bucket/bare/{name}"),
        lambda name: fs.rm_file(f"bucket/bare/{name}"),
    )


def bare_obstore(client: Any) -> Rival:
    import obstore

    return Rival(
        lambda name, data: obstore.put(client, name, data, mode="create", use_multipart=False),
        lambda name: bytes(obstore.get(client, name).bytes()),
        lambda name: obstore.delete(client, name),
    )


def compare(label: str, rivals: dict[str, Rival], data: bytes, rounds: int) -> list[str]:
    """Rows for upload and download: the bare client's seconds over ours, round by round."""
    found: dict[str, list[float]] = {f"{verb} {name}": [] for name in rivals for verb in ("up", "down")}
    for turn in range(rounds + 1):  # one round more comes first and does not count
        order = list(rivals.items())
        for name, rival in order if turn % 2 else reversed(order):
            key = nonce()
            for verb, work in (("up", lambda: rival.put(key, data)), ("down", lambda: rival.get(key))):  # noqa: B023
                started = time.perf_counter()
                got = work()
                taken_s = time.perf_counter() - started
                assert verb == "up" or got == data
                if turn:
                    found[f"{verb} {name}"].append(taken_s)
            rival.delete(key)
    rows = []
    for verb, word in (("up", "upload"), ("down", "download")):
        bare, own = found[f"{verb} bare"], found[f"{verb} ours"]
        speed = ratios(bare, own)
        rates = [len(data) / 1e6 / seconds for seconds in own]
        rows.append(row(f"{label}: {word}, ours / bare", speed, f">= {GOAL}", sorted(speed)[len(speed) // 2] >= GOAL))
        rows.append(row(f"{label}: {word}, MB/s", rates, "", None, digits=0))
    return rows


def on_files(data: bytes, rounds: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        bare, here = Path(name, "bare"), Path(name, "here")
        bare.mkdir()
        here.mkdir()
        (here / "fragment").write_bytes(data)
        store = open_store(str(Path(name, "ours")), create=True)
        yield from compare("file", {"bare": plain_copies(bare, here), "ours": our_copies(store, here)}, data, rounds)


def on_gcs(data: bytes, rounds: int) -> Iterator[str]:
    with server("fake_gcs") as url, environment({"STORAGE_EMULATOR_HOST": url}):
        rivals = {"bare": bare_gcsfs(url), "ours": ours(open_store("gs://bucket/runs"))}
        yield from compare("gs, gcsfs", rivals, data, rounds)


def on_s3(data: bytes, rounds: int) -> Iterator[str]:
    with s3_emulator("bucket") as url, environment({"AWS_ENDPOINT_URL": url, **S3_ENVIRONMENT}):
        from obstore.store import S3Store

        client = S3Store("bucket", prefix="bare", config={"endpoint": url}, client_options=_HTTP)
        rivals = {"bare": bare_obstore(client), "ours": ours(open_store("s3://bucket/runs"))}
        yield from compare("s3, obstore", rivals, data, rounds)


def digests(data: bytes, rounds: int) -> Iterator[str]:
    """GB/s of each digest, one thread; crc32c is what the stores check beside it."""
    works: dict[str, Callable[[], object]] = {
        "blake3 (the run's digest)": lambda: digest(data),
        "sha256": lambda: hashlib.sha256(data).digest(),
        "crc32c": lambda: crc32c(data),
    }
    for name, seconds in interleaved(works, rounds).items():
        yield row(f"digest: {name}, GB/s", [len(data) / 1e9 / value for value in seconds], "", None)


_HTTP: Any = {"allow_http": True, "timeout": "10 minutes"}


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


SUBJECTS = {"file": on_files, "gs": on_gcs, "s3": on_s3, "digests": digests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--only", choices=SUBJECTS, action="append")
    arguments = parser.parse_args()
    print(machine())
    data = os.urandom(arguments.megabytes * 1_000_000)
    for name in arguments.only or SUBJECTS:
        for line in SUBJECTS[name](data, arguments.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
