"""What the exchange costs a learner, beside a plain loop without it: python -m tests.benchmarks.exchange

One learner on one core, the syncer on another; with `--device cuda` a model of 124 M parameters on the GPU, with all
cores for the rest. Goals: blocked at most 1 % of the time, at least 97 % of the tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.launch.new_run import create_run, make_format
from diloco_cli.protocol.log.records import Island
from diloco_cli.store.open import open_store
from tests.benchmarks.measure import ROOT, machine, quickstart_alone, spread

ROUNDS = 5
WARM_STEPS = 50  # that do not count
LIMIT_S = 300.0


@dataclass(frozen=True)
class Setup:
    """`overrides`: of the quickstart's run; `speed`: tokens/s, about; `pins`: a core for each process."""

    device: str
    tokens: int
    overrides: tuple[str, ...]
    speed: float
    pins: bool


SETUPS = {
    "cpu": Setup("cpu", 500_000, (), speed=23e3, pins=True),
    "cuda": Setup(
        "cuda",
        20_000_000,
        ("model.preset=gpt-small", "train.batch_tokens=32768", "evaluation.every=1000"),
        speed=4e5,
        pins=False,
    ),
}


def without_exchange(setup: Setup) -> float:
    """Tokens/s of plain training: the same model, data, optimizer and batch, on core 0."""
    code = f"""
import time, torch
from diloco_cli.config.run_file import load_run
from diloco_cli.training.inner import autocast, build_optimizer
from diloco_cli.tasks.build import build_data, build_model
torch.set_num_threads(1)
device = torch.device({setup.device!r})
run = load_run({str(ROOT / "examples" / "quickstart" / "run.yaml")!r}, {list(setup.overrides)!r})
model, data = build_model(run).to(device), build_data(run)
optimizer = build_optimizer(model, run.train.inner)
batch, times = run.train.batch_tokens, []
for step in range({setup.tokens} // batch):
    started = time.perf_counter()
    x, y = (part.to(device) for part in data.batch(0, 1, step * batch, batch))
    optimizer.zero_grad(set_to_none=True)
    with autocast(run.train.precision, device):
        loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.inner.clip_norm)
    optimizer.step()
    float(loss.detach())
    times.append(time.perf_counter() - started)
print(batch * len(times[{WARM_STEPS}:]) / sum(times[{WARM_STEPS}:]))
"""
    done = started(setup, [sys.executable, "-c", code], core=0)
    return float(done.communicate()[0])


def prepare(setup: Setup, folder: Path, url: str) -> int:
    """Create the run with its one island, which does not end by itself; its batch in tokens."""
    quickstart_alone(folder)
    run = load_run(folder / "run.yaml", [f"train.tokens={100 * setup.tokens}", *setup.overrides])
    batch, speed = run.train.batch_tokens, setup.speed
    alone = Island("alone", "here", batch, run.sync.every, speed, batch / speed, micro_batch_tokens=batch)
    created = make_format(run, load_inventory(folder / "inventory.yaml"), url, (alone,))
    create_run(open_store(url, create=True), created, url)
    return batch


def with_exchange(setup: Setup) -> tuple[float, float]:
    """(tokens/s, % of the time blocked) of a learner on core 0 with its syncer on core 1, from its own heartbeats: over
    as many tokens as without, after as many first steps; blocked in the last minute of that."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"file://{folder}/bucket/quickstart"
        batch = prepare(setup, folder, url)
        syncer = started(setup, [sys.executable, "-m", "diloco_cli", "syncer", "--run", url], core=1)
        words = ["learner", "--run", url, "--name", "alone", "--device", setup.device]
        learner = started(setup, [sys.executable, "-m", "diloco_cli", *words], core=0)
        try:
            heartbeat = folder / "bucket" / "quickstart" / "heartbeat" / "alone.json"
            first, last = Spent.after(WARM_STEPS * batch, heartbeat), Spent.after(setup.tokens, heartbeat)
        finally:
            for process in (learner, syncer):
                process.kill()
                process.communicate()
        seconds = last.seconds - first.seconds
        return (last.tokens - first.tokens) / seconds, last.blocked_percent


@dataclass(frozen=True)
class Spent:
    """By a learner since it began, and what blocked it lately."""

    tokens: int
    seconds: float
    blocked_percent: float

    @classmethod
    def after(cls, tokens: int, heartbeat: Path) -> Spent:
        """As of its first heartbeat with so many."""
        ends_s = time.monotonic() + LIMIT_S
        while time.monotonic() < ends_s:
            facts = json.loads(heartbeat.read_text()) if heartbeat.exists() else {"position": 0}
            if facts["position"] >= tokens:
                seconds = facts["position"] / facts["mean_tokens_per_s"]
                return cls(facts["position"], seconds, facts["blocked_percent"])
            time.sleep(0.2)
        raise SystemExit(f"the learner has not trained {tokens:,} tokens in {LIMIT_S:.0f} s")


def started(setup: Setup, words: list[str], core: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *words] if setup.pins else words,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SETUPS), default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    setup = SETUPS[options.device]
    alone, together, blocked = [], [], []
    for _ in range(options.rounds):
        alone.append(without_exchange(setup))
        speed, percent = with_exchange(setup)
        together.append(speed)
        blocked.append(percent)
        time.sleep(1)
    print(machine())
    print(f"without exchange {spread(alone, 0)} tokens/s")
    print(f"with exchange    {spread(together, 0)} tokens/s")
    ratios = [b / a for a, b in zip(alone, together, strict=True)]
    print(f"ratio            {spread(ratios)}")
    print(f"blocked          {spread(blocked)} % of the learner's time; median {median(blocked):.2f} %")


if __name__ == "__main__":
    main()
