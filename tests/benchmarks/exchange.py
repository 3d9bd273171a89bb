"""What the exchange costs a learner, beside the same loop without it: python -m tests.benchmarks.exchange

One learner on one core, the syncer on another. Goals: blocked at most 1 % of the time, at least 97 % of the tokens/s.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.launch.new_run import IslandPace, create_run, make_format
from diloco_cli.store.open import open_store
from tests.benchmarks.measure import machine, spread

ROUNDS = 5
TOKENS = 500_000
ROOT = Path(__file__).resolve().parents[2]
INVENTORY = "version: 1\nstore: {url: bucket}\nislands:\n  - {name: alone, region: here, accelerators: 'cpu:1'}\n"


def without_exchange() -> float:
    """Tokens/s of plain training: the same model, data, optimizer and batch, on core 0."""
    code = f"""
import time, torch
from diloco_cli.config.run_file import load_run
from diloco_cli.learner.inner import build_optimizer
from diloco_cli.tasks.build import build_data, build_model
torch.set_num_threads(1)
run = load_run({str(ROOT / "examples" / "quickstart" / "run.yaml")!r})
model, data = build_model(run), build_data(run)
optimizer = build_optimizer(model, run.train.inner)
batch, times = run.train.batch_tokens, []
for step in range({TOKENS} // batch):
    started = time.perf_counter()
    x, y = data.batch(0, 1, step * batch, batch)
    optimizer.zero_grad(set_to_none=True)
    loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.inner.clip_norm)
    optimizer.step()
    float(loss.detach())
    times.append(time.perf_counter() - started)
print(batch * len(times[50:]) / sum(times[50:]))
"""
    done = pinned([sys.executable, "-c", code], core=0)
    return float(done.communicate()[0])


def prepare(folder: Path, url: str) -> None:
    """Create the run with its one island."""
    shutil.copy(ROOT / "examples" / "quickstart" / "run.yaml", folder)
    (folder / "inventory.yaml").write_text(INVENTORY)
    run = load_run(folder / "run.yaml", [f"train.tokens={TOKENS}"])
    pace = IslandPace(run.train.batch_tokens, run.sync.every, 23e3, run.train.batch_tokens / 23e3)
    created = make_format(run, load_inventory(folder / "inventory.yaml"), url, {"alone": pace})
    create_run(open_store(url, create=True), created, url)


def with_exchange() -> tuple[float, float]:
    """(tokens/s, % of the time blocked) of a learner on core 0 with its syncer on core 1, from its own log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"file://{folder}/bucket/quickstart"
        prepare(folder, url)
        syncer = pinned([sys.executable, "-m", "diloco_cli", "syncer", "--run", url], core=1)
        learner = pinned([sys.executable, "-m", "diloco_cli", "learner", "--run", url, "--name", "alone"], core=0)
        learner.communicate()
        syncer.communicate()
        beat = json.loads((folder / "bucket" / "quickstart" / "beat" / "alone.json").read_text())
        return beat["mean_tokens_per_s"], beat["blocked_percent"]


def pinned(words: list[str], core: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def main() -> None:
    alone, together, blocked = [], [], []
    for _ in range(ROUNDS):
        alone.append(without_exchange())
        speed, percent = with_exchange()
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
