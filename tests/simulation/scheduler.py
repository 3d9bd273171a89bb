"""The virtual world of these tests is the product's own."""

from __future__ import annotations

from diloco_cli.simulate.world import LATENCY_S, Actor, Fault, World

__all__ = ["LATENCY_S", "Actor", "Fault", "World"]
