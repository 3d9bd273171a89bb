"""The parent of toy ranks, as a process: DOER DEED STEP LEAST_S NODES INDEX PORT."""

from __future__ import annotations

import sys

from diloco_cli.cli.main import main
from diloco_cli.learner import parent
from diloco_cli.runtime.units import python_command


def run(doer: str, deed: str, at: str, least_s: str, nodes: str, index: str, port: str) -> int:
    parent.LEAST_S = float(least_s)
    node = parent.IslandNode(2) if nodes == "1" else parent.IslandNode(1, int(nodes), int(index), f"127.0.0.1:{port}")
    command = python_command("tests.unit.learner.toy_rank", doer, deed, at)
    return parent.run_ranks(command, "file:///nowhere", "l0", node)


if __name__ == "__main__":
    assert "torch" not in sys.modules and main is not None
    sys.exit(run(*sys.argv[1:]))
