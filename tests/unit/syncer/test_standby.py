"""What a standby has in memory while it waits."""

from __future__ import annotations

import subprocess
import sys

import pytest

WAITS = """
import sys
from diloco_cli.syncer import standby
standby._wait = lambda *given: sys.exit(f"torch is loaded: {'torch' in sys.modules}")
standby.run_standby("file:///nowhere", "syncer-0", None, False, None, alike=bool(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["alike"], []])
def test_only_a_standby_that_is_a_job_has_loaded_what_it_needs_to_serve(words: list[str]) -> None:
    """Loading takes seconds, for which the run would wait; beside a learner it would take its memory."""
    done = subprocess.run([sys.executable, "-c", WAITS, *words], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == f"torch is loaded: {bool(words)}"
