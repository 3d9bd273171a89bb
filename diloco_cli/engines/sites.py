"""Which engine runs what `infra` names: `slurm/us` is partition us of Slurm, `ssh/box` a host,
`kubernetes/gke` a context of kubectl."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.engines.kubernetes import Kubernetes
from diloco_cli.engines.port import Engine
from diloco_cli.engines.slurm import Slurm
from diloco_cli.engines.ssh import Ssh
from diloco_cli.runtime.units import ENGINES

KINDS: dict[str, Callable[[str], Engine]] = {  # by the kinds in ENGINES
    "slurm": lambda place: Slurm(),
    "ssh": lambda place: Ssh(f"ssh/{place}", place),
    "kubernetes": lambda place: Kubernetes(f"kubernetes/{place}", place),
}
assert set(KINDS) == ENGINES


def engine_of(infra: str) -> Engine:
    """The one of a unit's `infra`, and the one of this name: those with one name are asked once."""
    kind, _, place = infra.partition("/")
    return KINDS[kind](place)
