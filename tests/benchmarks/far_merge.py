"""One merge of large deltas in a bucket that is far away: python -m tests.benchmarks.far_merge [--megabytes 40]

8 payloads go from the fake GCS, where each request takes 40 ms more, through the product's own functions to a version
in the bucket and a commit. Beside it, alternating in one run, what that must take at least: the same bytes read and
written by bare gcsfs, as many at a time; the merge alone, in memory; and the commit's round trip. CPU seconds are those
of this process with all its threads; the fake is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.digests import digest
from diloco_cli.protocol.actors.merging import load_delta, write_surely
from diloco_cli.protocol.actors.ports import Merged
from diloco_cli.protocol.log.keys import delta_key, state_key, weights_key
from diloco_cli.protocol.log.operations import Create, Steps
from diloco_cli.protocol.log.records import FragmentVersion, Offer
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.together import MAX_BYTES_AT_ONCE, together
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.runtime.processes import usable_cores
from diloco_cli.store.open import open_store
from diloco_cli.store.proof import checks_uploads
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.tensors.stripes import use_threads
from tests.benchmarks import durable
from tests.benchmarks.measure import interleaved, machine, ratios, row
from tests.contract.emulators import environment, server

LEARNERS, DELAY_MS = 8, 40
WIDTH = 2048  # of the fragment's matrices
GOAL_CPU_S = 0.7 * 2.07  # of 8 payloads of 40 MB; 2.07 s before their calls went together
CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)


def merged_from(state: RunState, arithmetic: TorchArithmetic, offers: list[Offer], name: str) -> Steps[list[str]]:
    """From payloads in the bucket to the commit, as the syncer does it; the keys of what was written."""
    run = arithmetic.run
    deltas = yield from together([load_delta(run, arithmetic, state, offer) for offer in offers])
    found = arithmetic.merge(0, [(delta, 1.0, 1.0) for delta in deltas])
    assert isinstance(found, Merged), found
    keys = [
        key(0, 1, 1, f"{name}-{digest(data)}") for key, data in ((state_key, found.state), (weights_key, found.weights))
    ]
    written = [write_surely(key, data) for key, data in zip(keys, (found.state, found.weights), strict=True)]
    yield from together(written, max(MAX_BYTES_AT_ONCE, 2 * (len(found.state) + len(found.weights))))
    yield Create(f"commit/{name}", b"{}")
    return [*keys, f"commit/{name}"]


def bare(url: str, payload: bytes, sizes: list[int]) -> Callable[[], object]:
    """As many bytes, read and written by gcsfs."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    from gcsfs.core import GCSFileSystem

    fs = GCSFileSystem(token="anon", endpoint_url=url, skip_instance_cache=True, use_listings_cache=False)
    for number in range(LEARNERS):
        fs.pipe_file(f"bucket/bare/{number}", payload)
    made = [bytes(size) for size in sizes]

    def transfers() -> None:
        with ThreadPoolExecutor(LEARNERS) as pool:
            assert all(pool.map(lambda number: fs.cat_file(f"bucket/bare/{number}"), range(LEARNERS)))
            list(pool.map(lambda number: fs.pipe_file(f"bucket/bare/v{number}", made[number]), range(len(made))))

    return transfers


def compared(url: str, size: int, rounds: int) -> list[str]:
    store = open_store("gs://bucket/runs")
    checked = checks_uploads(store, f"trial/{nonce()}")
    arithmetic, payloads = durable.prepared(size, LEARNERS)
    names = iter(range(10**6))
    offers = [replace(durable.offer(payload), learner=f"l{i}") for i, payload in enumerate(payloads)]
    for offer, payload in zip(offers, payloads, strict=True):
        store.create(delta_key(*offer.id, offer.payload_digest), payload)
    state = RunState(outputs=(FragmentVersion(0, 0, -1, 1, "first", "first"),))
    alone = durable.merged(arithmetic, payloads)

    written: list[str] = []

    def ours() -> None:
        written.extend(perform(merged_from(state, arithmetic, offers, f"{next(names)}"), store, CLOCK))

    def deletes() -> None:
        while written:
            store.delete(written.pop())

    works: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "deletes": deletes,
        "bare": bare(url, payloads[0], [len(alone.state), len(alone.weights)]),
        "merge": lambda: durable.merged(arithmetic, payloads),
    }
    spent: dict[str, list[float]] = {name: [] for name in works}
    took = interleaved({name: cpu_noted(work, spent[name]) for name, work in works.items()}, rounds, cpu=False)
    commit_s = DELAY_MS / 1000
    least = [transfers + merge + commit_s for transfers, merge in zip(took["bare"], took["merge"], strict=True)]
    how = "uploads are checked" if checked else "versions are read back"
    return [
        row(
            f"8 payloads of {len(payloads[0]) / 1e6:.0f} MB to the commit, s ({how})",
            took["ours"],
            "",
            None,
        ),
        row("  bare gcsfs, the same bytes, s", took["bare"], "", None),
        row("  the merge alone, in memory, s", took["merge"], "", None),
        row("  ours / the sum of both and the commit's 40 ms", ratios(took["ours"], least), "", None),
        row("CPU seconds: ours", spent["ours"][1:], f"<= {GOAL_CPU_S:.2f} s", median(spent["ours"][1:]) <= GOAL_CPU_S),
        row("  bare gcsfs", spent["bare"][1:], "", None),
        row("  the merge alone", spent["merge"][1:], "", None),
    ]


def cpu_noted(work: Callable[[], Any], spent: list[float]) -> Callable[[], None]:
    """The work, which adds the CPU seconds of this process to `spent`."""

    def noted() -> None:
        started_s = time.process_time()
        work()
        spent.append(time.process_time() - started_s)

    return noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=float, default=40.0, help="of a payload")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"# {machine()}; load {os.getloadavg()[0]:.1f}", flush=True)
    use_threads(usable_cores())
    size = round(arguments.megabytes * 1e6 / WIDTH**2) * WIDTH**2
    with ExitStack() as stack:
        url = stack.enter_context(server("fake_gcs", "bucket", "--delay-ms", str(DELAY_MS)))
        stack.enter_context(environment({"STORAGE_EMULATOR_HOST": url}))
        print("\n".join(compared(url, size, arguments.rounds)))


if __name__ == "__main__":
    main()
