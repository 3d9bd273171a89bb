"""Everything `diloco inventory probe` measures, one thing after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.config.devices import CPU
from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.probe.contention import Crowding, Load, measure_alone, measure_crowding, model_name
from diloco_cli.probe.entry import Measurements
from diloco_cli.probe.machine import MachineFacts, machine_facts, matrix_tflops, training_types
from diloco_cli.probe.spread import Spread
from diloco_cli.probe.store_speed import StoreSpeed, measure_store


@dataclass(frozen=True)
class Probe:
    """What to measure. `run`: its model is trained, with modules of `folder`; `inventory`: on the accelerators of its
    islands that start here; without one, on the best accelerators there are. `seconds`: of each measurement."""

    seconds: float
    say: Callable[[str], None]
    run: RunSettings | None = None
    folder: Path = Path()
    inventory: Inventory | None = None
    store_url: str | None = None

    def measure(self) -> Measurements:
        """Takes about seconds x (1 for each type and direction, 3 for each number of processes)."""
        machine = machine_facts()
        return Measurements(
            machine=machine,
            matrix=self._matrix(machine),
            trained=self._trained(),
            crowding=self._crowding(machine),
            alone=self._alone(machine),
            store=self._store(),
        )

    def _matrix(self, machine: MachineFacts) -> dict[str, Spread]:
        found = {}
        for kind in training_types(machine.torch_device):
            self.say(f"matrix product in {kind} on {machine.torch_device}, {self.seconds:g} s")
            rate = matrix_tflops(kind, machine.torch_device, self.seconds)
            if rate is not None:
                found[kind] = rate
        return found

    def _trained(self) -> str:
        if self.run is None:
            return ""
        threads, each = self.run.train.threads, self.run.train.batch_tokens
        return f"{model_name(self.run)}, steps of {each} tokens, {threads} thread{'s' if threads > 1 else ''}"

    def _crowding(self, machine: MachineFacts) -> Crowding | None:
        if self.run is None or not self._has_local(CPU, machine):
            return None
        load = Load(self.run, self.folder, self.run.train.batch_tokens, self.run.train.threads)
        return measure_crowding(load, machine.cores, self.seconds, self.say)

    def _alone(self, machine: MachineFacts) -> Spread | None:
        name = machine.accelerators.name
        if self.run is None or name == CPU or not self._has_local(name, machine):
            return None
        load = Load(self.run, self.folder, self.run.train.batch_tokens, self.run.train.threads, machine.torch_device)
        return measure_alone(load, self.seconds, self.say)

    def _has_local(self, name: str, machine: MachineFacts) -> bool:
        """Whether an island starts here on these accelerators; without an inventory, on the best ones."""
        if self.inventory is None:
            return machine.accelerators.name == name
        islands = self.inventory.islands
        return any(island.infra == "local" and island.accelerators.name == name for island in islands)

    def _store(self) -> StoreSpeed | None:
        if self.store_url is None:
            return None
        from diloco_cli.store.open import open_store

        self.say(f"store {self.store_url}: up and down, {self.seconds:g} s each")
        return measure_store(open_store(self.store_url, create=True), self.seconds)
