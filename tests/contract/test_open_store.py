"""From URLs to stores: what is allowed, what is refused, and that opening is cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.errors import StoreError, UsageError
from diloco_cli.store.local import LocalStore
from diloco_cli.store.open import join_url, open_store, parse_url, split_url
from diloco_cli.store.port import Created
from diloco_cli.store.wrapper import PrefixedStore


def test_a_path_and_a_file_url_open_the_same_directory(tmp_path: Path) -> None:
    open_store(str(tmp_path)).create("k", b"x")
    assert open_store(tmp_path.as_uri()).get("k") == b"x"


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("some/where", create=True).create("k", b"x")
    assert (tmp_path / "some/where/k").read_bytes() == b"x"


def test_a_directory_with_spaces_survives_the_way_through_its_url(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "a b%20ü"), create=True)
    store.create("k", b"x")
    assert open_store(store.url).get("k") == b"x"


def test_a_missing_directory_is_an_error_unless_it_may_be_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as missing:
        open_store(str(tmp_path / "none"))
    assert missing.value.exit_status == 6
    assert "mkdir" in (missing.value.hint or "")
    assert not (tmp_path / "none").exists()
    assert isinstance(open_store(str(tmp_path / "none"), create=True), LocalStore)
    assert (tmp_path / "none").stat().st_mode & 0o777 == 0o700


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


@pytest.mark.parametrize(
    "url",
    ["", "http://169.254.169.254/x", "https://x/y", "ftp://x", "simplecache::gs://b/x", "memory://a::gs://bucket/x",
     "gs://", "gs:///x", "gs://UPPER/x", "gs://bucket/../x", "gs://bucket/a b", "gs://bucket/a?x=1", "gs://u:p@bucket/x",
     "file://host/dir", "file://", "gs://buc\nket/x", "memory://", "gs://bucket/x#frag", "zip://a", "github://a:b@/",
     "gs://user:secret@bucket/x", "gs://bucket/x?token=secret", "gs://b/../../x", "gs://[::1", "s3://B A/x", "a\x00b",
     "~nobody-here/x"],
)  # fmt: skip
def test_other_urls_are_refused_with_what_is_allowed(url: str) -> None:
    """Row 22 of tests/security: URL schemes allow-listed."""
    with pytest.raises(UsageError) as refused:
        open_store(url)
    assert refused.value.hint


def test_a_run_lives_below_its_store(tmp_path: Path) -> None:
    outer = open_store(str(tmp_path))
    assert PrefixedStore(outer, "run-1").create("k", b"x") == Created()
    assert outer.list("") == ["run-1/k"]
    assert open_store(join_url(str(tmp_path), "run-1")).get("k") == b"x"


@pytest.mark.parametrize(
    ("url", "joined"),
    [("gs://bucket", "gs://bucket/run"), ("gs://bucket/a/b/", "gs://bucket/a/b/run"), ("memory://m", "memory://m/run"),
     ("s3://bucket/x", "s3://bucket/x/run"), ("/data/store/", "file:///data/store/run"),
     ("file:///data/a%20b", "file:///data/a%20b/run")],
)  # fmt: skip
def test_join_and_split_are_inverse(url: str, joined: str) -> None:
    assert join_url(url, "run") == joined
    outer, name = split_url(joined)
    assert (parse_url(outer), name) == (parse_url(url), "run")


@pytest.mark.parametrize(
    ("url", "client", "package"),
    [("s3://bucket/x", "default", "s3fs"), ("gs://bucket/x", "default", "gcsfs"), ("/tmp", "obstore", "obstore"),
     ("s3://bucket/x", "obstore", "obstore"), ("gs://bucket/x", "obstore", "obstore")],
)  # fmt: skip
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, client: str, package: str
) -> None:
    monkeypatch.setenv("DILOCO_STORE_CLIENT", client)
    monkeypatch.setattr("diloco_cli.store.open.find_spec", lambda name: None)
    with pytest.raises(StoreError, match=package) as refused:
        open_store(url)
    assert "pip install" in (refused.value.hint or "")


def test_an_unknown_client_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DILOCO_STORE_CLIENT", "boto")
    with pytest.raises(UsageError, match="boto") as refused:
        open_store(str(tmp_path))
    assert "obstore" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("url", "client"),
    [("gs://bucket/x", "default"), ("gs://bucket/x", "obstore"), ("s3://bucket/x", "default"),
     ("s3://bucket/x", "obstore"), (".", "default")],
)  # fmt: skip
def test_opening_a_store_makes_no_request_and_imports_no_client_and_no_torch(
    url: str, client: str, tmp_path: Path
) -> None:
    program = (
        "import sys; from diloco_cli.store.open import open_store; store = open_store(sys.argv[1]); "
        "sys.argv[1] == '.' and store.list(''); heavy = ('torch', 'fsspec', 'gcsfs', 's3fs', 'botocore', 'obstore', "
        "'aiohttp', 'numpy') + ('asyncio',) * (sys.argv[1] == '.'); print([m for m in heavy if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, url],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "DILOCO_STORE_CLIENT": client},
    )
    assert ran.stdout.strip() == "[]"
