"""From URLs to stores: what is allowed, what is refused, and that opening is cheap."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco_cli.errors import StoreError, UsageError
from diloco_cli.store.local import LocalStore
from diloco_cli.store.open import CONNECTIONS_VARIABLE, FAULT_VARIABLE, answers, connections_here, open_store
from diloco_cli.store.port import MAX_CONNECTIONS
from diloco_cli.store.wrappers import DisturbedStore


def test_a_path_and_a_file_url_open_the_same_directory(tmp_path: Path) -> None:
    open_store(str(tmp_path)).create("k", b"x")
    assert open_store(tmp_path.as_uri()).get("k") == b"x"


def test_only_a_units_process_has_a_store_that_faults_may_disturb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    monkeypatch.setenv(FAULT_VARIABLE, str(tmp_path / "iowa.json"))
    assert isinstance(open_store(str(tmp_path)), DisturbedStore)


def test_a_directory_with_spaces_survives_the_way_through_its_url(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "a b%20ü"), create=True)
    store.create("k", b"x")
    assert open_store(store.url).get("k") == b"x"


def test_a_missing_directory_is_an_error_unless_it_may_be_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as missing:
        open_store(str(tmp_path / "none"))
    assert missing.value.exit_status == 6
    assert "mount" in (missing.value.hint or "") and "mkdir" not in (missing.value.hint or "")
    assert not (tmp_path / "none").exists()
    assert isinstance(open_store(str(tmp_path / "none"), create=True), LocalStore)


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for create in (False, True):
        with pytest.raises(StoreError):
            open_store(str(tmp_path / "file"), create=create)
        with pytest.raises(StoreError):
            open_store(str(tmp_path / "file" / "below"), create=create)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_an_error_for_who_wants_to_create(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError):
        open_store(str(tmp_path), create=True)
    open_store(str(tmp_path))
    tmp_path.chmod(0o700)


def test_memory_stores_are_shared_by_name() -> None:
    open_store("memory://one").create("run/k", b"x")
    assert open_store("memory://one").get("run/k") == b"x"
    assert open_store("memory://one/run").get("k") == b"x"
    assert open_store("memory://two").get("run/k") is None


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://bucket/x", "az://bucket/x", "."])
def test_opening_a_store_makes_no_request_and_imports_no_client_and_no_torch(url: str, tmp_path: Path) -> None:
    program = (
        "import sys; from diloco_cli.store.open import open_store; store = open_store(sys.argv[1]); "
        "sys.argv[1] == '.' and store.list(''); heavy = ('torch', 'fsspec', 'gcsfs', 'obstore', "
        "'aiohttp', 'numpy') + ('asyncio',) * (sys.argv[1] == '.'); print([m for m in heavy if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, url],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert ran.stdout.strip() == "[]"


def test_a_machine_may_have_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections_here() == MAX_CONNECTIONS
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "1")
    gate = threading.Lock()

    def alone(item: int) -> int:
        with_nobody = gate.acquire(blocking=False)
        assert with_nobody
        gate.release()
        return item

    assert list(answers(alone, range(20))) == list(range(20))


@pytest.mark.parametrize("setting", ["0", "49", "many", "-1"])
def test_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, setting)
    with pytest.raises(UsageError, match="not a number of connections"):
        connections_here()
