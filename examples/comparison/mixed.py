"""Two speeds and a spare that comes and goes: python examples/comparison/mixed.py. See README.md beside this file.

How much of what each island could have trained alone a run merges: one island three times slower than the other, and a
third that joins for a third of the time. What is measured lies in mixed.jsonl; the table goes into README.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import STEP_S, Decoupled, Workload
from kept import HERE, complete, measured_on, publish
from paced import BATCH_TOKENS, Noise, Paced
from reader import FRAGMENTS

SLOWER = {"fast": 1.0, "slow": 3.0}
SPARE = "spare"  # as fast as the fast one
ALONE_STEPS = 100
PACED = Workload("paced", BATCH_TOKENS, {"lr": 1e-3}, {})


def alone_tokens_per_s() -> float:
    """Of the fast island, with no exchange."""
    torch.set_num_threads(1)
    model, data = Paced(STEP_S), Noise()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began_s = time.monotonic()
    for step in range(ALONE_STEPS):
        optimizer.zero_grad()
        model(*data.batch(0, 1, step * BATCH_TOKENS, BATCH_TOKENS)).backward()
        optimizer.step()
    return ALONE_STEPS * BATCH_TOKENS / (time.monotonic() - began_s)


def measured(seed: int, seconds: float) -> dict[str, Any]:
    """From the second round on. The spare counts from its first heartbeat to the signal that sends it away."""
    alone = alone_tokens_per_s()
    with tempfile.TemporaryDirectory(prefix="mixed-") as name:
        run = Decoupled(Path(name), seed, SLOWER, PACED)
        try:
            while run.marks() < 2 * FRAGMENTS + 2:
                time.sleep(0.2)
            began_s, before = time.monotonic(), run.tokens()
            time.sleep(seconds / 3)
            words = ["learner", "--run", run.url, "--name", SPARE, "--join", "--drain", "20s", "--allow-code", "paced"]
            spare = subprocess.Popen([sys.executable, "-m", "diloco_cli", *words], env=run.environment, cwd=name)
            while not run.store.list(f"heartbeat/{SPARE}"):
                if spare.poll() is not None:
                    raise SystemExit(f"the spare ended with {spare.returncode}")
                time.sleep(0.1)
            joined_s = time.monotonic()
            time.sleep(seconds / 3)
            spare.terminate()
            there_s = time.monotonic() - joined_s
            spare.wait()
            time.sleep(max(0.0, began_s + seconds - time.monotonic()))
            took_s = time.monotonic() - began_s
            merged = run.tokens() - before
        finally:
            run.close()
    possible = alone * (took_s * sum(1 / factor for factor in SLOWER.values()) + there_s)
    return {"merged": round(merged), "possible": round(possible), "alone_tokens_per_s": round(alone, 1)}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown."""
    shares = [100 * row["merged"] / row["possible"] for row in rows]
    yield (
        f"{statistics.median(shares):.1f} % of the tokens that the islands could have trained alone were merged"
        f" ({min(shares):.1f} to {max(shares):.1f}, n={len(rows)})."
    )
    yield measured_on(rows)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--output", type=Path, default=HERE / "mixed.jsonl")
    options = parser.parse_args(words)
    wanted, same = [{"seed": seed} for seed in range(options.repetitions)], {"seconds": options.seconds}
    rows = complete(options.output, wanted, same, lambda one: measured(one["seed"], options.seconds))
    publish("mixed", options.output, table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
