"""Which engine runs what `infra` names: `slurm/us` is partition us of Slurm, `ssh/box` a host,
`kubernetes/gke` a context of kubectl."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.config.settings import Site
from diloco_cli.engines.kubernetes import Kubernetes
from diloco_cli.engines.port import Engine
from diloco_cli.engines.slurm import Slurm
from diloco_cli.engines.ssh import Ssh
from diloco_cli.runtime.units import ENGINES


def _slurm(place: str, site: Site | None) -> Engine:
    if site is None:  # a partition of this machine's
        return Slurm()
    return Slurm(f"slurm/{place}", site.host, site.directory or "", site.setup or "", site.install)


def _ssh(place: str, site: Site | None) -> Engine:
    if site is None:
        return Ssh(f"ssh/{place}", place)
    return Ssh(f"ssh/{place}", site.host or place, site.setup or "", site.directory or ".", site.install)


def _kubernetes(place: str, site: Site | None) -> Engine:
    if site is None:  # a context
        return Kubernetes(f"kubernetes/{place}", place)
    return Kubernetes(f"kubernetes/{place}", site.context or place, site.image or "", site.options)


KINDS: dict[str, Callable[[str, Site | None], Engine]] = {  # by the kinds in ENGINES
    "slurm": _slurm,
    "ssh": _ssh,
    "kubernetes": _kubernetes,
}
assert set(KINDS) == ENGINES


def engine_of(infra: str, site: Site | None = None) -> Engine:
    """The one of a unit's `infra`, and the one of this name: those with one name are asked once. `site`: what the
    inventory says of it."""
    kind, _, place = infra.partition("/")
    return KINDS[kind](place, site)
