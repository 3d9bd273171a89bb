"""Where things are on this machine, and what is installed from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli import paths
from diloco_cli.config.huggingface import hub_cache
from diloco_cli.errors import UsageError


@pytest.mark.parametrize(("is_source", "hint"), [(False, "'diloco[report]'"), (True, "-e '{}[report]'")])
def test_an_extra_is_installed_from_where_diloco_comes(
    is_source: bool, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SOURCE", tmp_path)
    if is_source:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    assert paths.install_hint("report") == f"/venv/bin/python -m pip install {hint.format(tmp_path)}"


def test_a_user_without_a_home_has_diloco_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_entry)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    places = [paths.user_file(), paths.user_state_directory("runs"), paths.user_cache_directory("data"), hub_cache()]
    assert all(place.is_relative_to(tmp_path) for place in places)
    monkeypatch.delenv("DILOCO_HOME")
    for place in (paths.user_file, hub_cache):
        with pytest.raises(UsageError, match="no home") as refused:
            place()
        assert "DILOCO_HOME" in (refused.value.hint or "")
