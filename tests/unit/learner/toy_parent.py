"""The parent of toy ranks, as a process: DOER DEED STEP LEAST_S NODES INDEX PORT."""

from __future__ import annotations

import sys
from typing import Any

from diloco_cli.cli.main import main
from diloco_cli.learner import parent
from diloco_cli.runtime.units import python_command
from tests.forked import ForkedChild


def run(doer: int, deed: str, at: int, least_s: float, nodes: int, index: int, port: int) -> int:
    parent.LEAST_S = least_s
    node = parent.IslandNode(2) if nodes == 1 else parent.IslandNode(1, nodes, index, f"127.0.0.1:{port}")
    command = python_command("tests.unit.learner.toy_rank", str(doer), deed, str(at))
    return parent.run_ranks(command, "file:///nowhere", "l0", node)


def run_forking(*words: Any) -> None:
    """Its ranks are forks of this process, which has loaded torch."""
    parent.subprocess.Popen = ForkedChild  # type: ignore[misc]
    sys.exit(run(*words))


if __name__ == "__main__":
    assert "torch" not in sys.modules and main is not None
    sys.exit(run(0, "done", 0, 60.0, 1, 0, 0))
