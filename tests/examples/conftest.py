"""The examples' scripts as modules, with little to evaluate."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`load("quality")` gives examples/quality/run.py; its last losses are of 32 sequences."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "quality"))
    import experiment

    monkeypatch.setattr(experiment, "SEQUENCES", 32)

    def by_name(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_run", EXAMPLES / name / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return by_name
