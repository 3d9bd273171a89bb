"""How long planning takes: python -m tests.benchmarks.plan

The function alone for 4, 1,000 and 10,000 islands and for 10,000 raw machines, settings pinned and searched; and the
whole command, with its start and without the simulation, on the templates and on 10,000 machines listed one by one.
Goals: 1,000 islands or 10,000 machines in less than 2 s, the templates in less than 0.5 s.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    Link,
    MachineSettings,
    ModelSettings,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.planner import make_plan
from tests.benchmarks.measure import ROOT, machine, spread

ROUNDS = 5
DEVICES = ("H100-SXM", "A100-80GB-SXM", "A100-40GB", "TPU-v5e", "RTX-4090", "V100-SXM2-32GB", "L40S")
RUN = RunSettings(
    "bench", model=ModelSettings(preset="gpt-small"), train=TrainSettings(10**12), sync=SyncSettings(every=240)
)


def islands(count: int) -> Inventory:
    """Seven kinds, sizes 4 to 16, links from 50 Mbit/s to 5 Gbit/s, some of them failing."""
    made = tuple(
        IslandSettings(
            name=f"i{n}",
            region=f"r{n % 5}",
            accelerators=Accelerators(DEVICES[n % len(DEVICES)], 4 + 4 * (n % 4)),
            link=Link(5e7 * (1 + n % 100), 5e7 * (1 + n % 100), 0.02),
            mtbf_s=3600.0 * (1 + n % 50) if n % 3 else None,
            price_per_h=1.0 + n % 30,
        )
        for n in range(count)
    )
    return Inventory(StoreSettings("gs://bucket"), made)


def machines(count: int) -> Inventory:
    """Fabrics of 16 machines of 8 accelerators."""
    made = tuple(
        MachineSettings(
            region=f"r{n % 5}",
            accelerators=Accelerators(DEVICES[n % len(DEVICES)], 8),
            name=f"m{n}",
            nodes=16,
            fabric=f"pod-{n}",
            link=Link(5e7 * (1 + n % 100), 5e7 * (1 + n % 100), 0.02),
        )
        for n in range(count // 16)
    )
    return replace(islands(0), machines=made)


def seconds(inventory: Inventory, searched: bool) -> float:
    started = time.perf_counter()
    make_plan(RUN, inventory, model_facts(RUN.model), origins={} if searched else None)
    return time.perf_counter() - started


def of_templates() -> float:
    return of_command(ROOT / "templates" / "inventory.yaml")


def of_command(inventory: Path) -> float:
    """The whole command, for the template run."""
    started = time.perf_counter()
    words = [str(Path(sys.executable).with_name("diloco")), "plan", str(inventory), "--fast"]
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def write_hosts(path: Path, count: int) -> Path:
    """An inventory that lists every machine by itself, sixteen to a fabric: reading it takes longer than planning."""
    link = "{up: 2 Gbps, down: 2 Gbps, rtt: 5 ms}"
    entries = [
        f"  - {{host: m{n}, region: r{n // 16 % 5}, infra: ssh, fabric: pod-{n // 16},"
        f' accelerators: "H100-SXM:8", link: {link}}}\n'
        for n in range(count)
    ]
    path.write_text("version: 1\nstore: {url: gs://bucket/runs}\nmachines:\n" + "".join(entries), encoding="utf-8")
    return path


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure_all(Path(folder))


def measure_all(folder: Path) -> None:
    print(machine())
    cases: dict[str, Callable[[], float]] = {"templates, the whole command": of_templates}
    fleets = {
        "4 islands": islands(4),
        "1,000 islands": islands(1000),
        "10,000 islands": islands(10_000),
        "10,000 machines": machines(10_000),
    }
    hosts = write_hosts(folder / "hosts.yaml", 10_000)
    cases["10,000 hosts, the whole command"] = lambda: of_command(hosts)
    for label, inventory in fleets.items():
        for searched in (False, True):
            name = f"{label}, {'searched' if searched else 'pinned'}"
            cases[name] = lambda inventory=inventory, searched=searched: seconds(inventory, searched)  # type: ignore[misc]
    times: dict[str, list[float]] = {label: [] for label in cases}
    for _ in range(ROUNDS):
        for label, measure in cases.items():
            times[label].append(measure())
    for label, values in times.items():
        print(f"{label:<32} {spread(values)} s")


if __name__ == "__main__":
    main()
