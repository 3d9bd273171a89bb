"""`diloco status --serve` and `--textfile`: metrics of a run from its bucket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from diloco_cli.cli.status import with_interval
from tests.cli.bucket import make_bucket
from tests.cli.conftest import Diloco

SAMPLE = 'diloco_tokens_merged_total{run="nano"} 0.0\n'


def test_the_endpoint_says_where_it_is_and_serves_until_ctrl_c(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "diloco_cli", "status", make_bucket(tmp_path / "nano"), "--serve", "0"]
    environment = os.environ | {"DILOCO_HOME": str(tmp_path / "home")}
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stderr is not None
    found = re.search(r"(http://127\.0\.0\.1:\d+/metrics), with the bearer token in (.+)\n", child.stderr.readline())
    assert found is not None
    token = Path(found[2]).read_text()
    with urlopen(Request(found[1], headers={"Authorization": f"Bearer {token}"}), timeout=30) as answer:
        assert SAMPLE in answer.read().decode()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130


def test_a_textfile_is_written_whole_and_nothing_else_is(diloco: Diloco, tmp_path: Path) -> None:
    url = make_bucket(tmp_path / "nano")
    (tmp_path / "out").mkdir()
    done = diloco("status", url, "--textfile", str(tmp_path / "out" / "diloco.prom"))
    assert (done.returncode, done.stdout) == (0, "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diloco.prom"]
    text = (tmp_path / "out" / "diloco.prom").read_text()
    assert SAMPLE in text and text.endswith("# EOF\n")
    nowhere = diloco("status", url, "--textfile", str(tmp_path / "none" / "diloco.prom"))
    assert nowhere.returncode == 2 and "cannot write" in nowhere.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--serve"], ["--serve", "127.0.0.1:9464"]),
        (["--serve", "run"], ["--serve", "127.0.0.1:9464", "run"]),
        (["--serve", "gs://b/run"], ["--serve", "127.0.0.1:9464", "gs://b/run"]),
        (["run", "--serve", "0.0.0.0:80"], ["run", "--serve", "0.0.0.0:80"]),
        (["--serve", "[::1]:80", "run"], ["--serve", "[::1]:80", "run"]),
        (["--serve", "80"], ["--serve", "80"]),
    ],
)
def test_serve_may_stand_without_its_address(words: list[str], meant: list[str]) -> None:
    assert with_interval(words) == meant
