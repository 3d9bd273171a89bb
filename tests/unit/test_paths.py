"""Where things are on this machine, and what is installed from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli import paths


@pytest.mark.parametrize(("is_source", "hint"), [(False, "'diloco[report]'"), (True, "-e '{}[report]'")])
def test_an_extra_is_installed_from_where_diloco_comes(
    is_source: bool, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SOURCE", tmp_path)
    if is_source:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    assert paths.install_hint("report") == f"/venv/bin/python -m pip install {hint.format(tmp_path)}"
