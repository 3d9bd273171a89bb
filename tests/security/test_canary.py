"""Secrets of a real run's environment: looked for in everything that it writes, says and shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from diloco_cli.signing import Secret
from tests.end_to_end.conftest import Playground

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-secret-4711",
    "AWS_SESSION_TOKEN": "canary-aws-session-4712",
    "HF_TOKEN": "hf_canary4713",
    "DILOCO_SIGNING_KEY": "canary-signing-key-4716-of-enough-letters",
    "DILOCO_KEYS": "canary-keys-4717",
}
CREDENTIALS = '{"type": "service_account", "private_key": "canary-private-key-4714"}'
CANARIES = [*SECRETS.values(), "canary-private-key-4714", "canary-password"]
ONE_ISLAND = """version: 1
store: {url: bucket, region: here}
islands: [{name: iowa, region: here, accelerators: "cpu:1"}]
"""
SHORT = ["--set", "train.tokens=6000", "--set", "train.batch_tokens=256", "--set", "sync.every=8"]


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    place = Playground(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    credentials = tmp_path / "elsewhere" / "key.json"
    credentials.write_text(CREDENTIALS)
    place.environment |= SECRETS | {"GOOGLE_APPLICATION_CREDENTIALS": str(credentials)}
    yield place
    for pid in place.pids().values():
        if psutil.pid_exists(pid):
            os.kill(pid, 9)


def leaks(text: str | bytes, secrets: list[str]) -> list[str]:
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    return [secret for secret in secrets if secret.encode() in raw]


@dataclass
class SeenWords:
    """While a run went on: the words its processes were started with, the ports they listened on, the secrets by which
    its supervisor tells its units from strangers."""

    argv: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    units_keys: set[str] = field(default_factory=set)


def private_keys(run_format: Path, handed: set[str]) -> list[str]:
    """The run is signed, because a key is in the environment; what its units were given is secret too."""
    run = json.loads(run_format.read_bytes())
    assert run["signing"]["algorithm"] == "ed25519"
    rings = [Secret(text, "TEST").keyring(run["run_id"]) for text in (SECRETS["DILOCO_SIGNING_KEY"], *handed)]
    assert {signer for ring in rings for signer in ring.grants} == {"operator", "learner/iowa", "syncer/syncer"}
    return [grant.private for ring in rings for grant in ring.grants.values()]


def watch(launch: subprocess.Popen[str], home: Path) -> SeenWords:
    """Until the launch ends."""
    seen = SeenWords()
    while launch.poll() is None:
        with suppress(psutil.Error, FileNotFoundError, KeyError):  # of one that has just ended nothing is left
            for process in [psutil.Process(launch.pid), *psutil.Process(launch.pid).children(recursive=True)]:
                seen.argv.update(process.cmdline())
                if {"learner", "syncer"} & set(process.cmdline()):
                    seen.units_keys.add(process.environ()["DILOCO_SIGNING_KEY"])
                seen.listening.update(str(c.laddr) for c in process.net_connections() if c.status == psutil.CONN_LISTEN)
            for path in home.rglob("units/*.json"):
                assert path.stat().st_mode & 0o777 == 0o600
                seen.tokens.add(json.loads(path.read_text())["identity"]["token"])
        with suppress(subprocess.TimeoutExpired):
            launch.wait(0.2)
    return seen


def test_no_secret_is_ever_written_said_or_shown_and_no_port_is_open(playground: Playground) -> None:
    """Row 9: secrets never in logs, errors, status, argv, bucket. Row 16: no listening port. Row 1: the bucket holds
    JSON and safetensors, nothing else."""
    (playground.directory / "quickstart" / "inventory.yaml").write_text(ONE_ISLAND)
    launch = subprocess.Popen(  # a program: of a fork of this process, arguments and environment are this one's
        [sys.executable, "-m", "diloco_cli", "launch", "quickstart/run.yaml", *SHORT],
        cwd=playground.directory, env=playground.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    seen = watch(launch, playground.directory / ".diloco")
    said = "".join(launch.communicate())
    assert launch.returncode == 0, said
    run_format = playground.directory / "quickstart" / "bucket" / "quickstart" / "FORMAT.json"
    canaries = [*CANARIES, *private_keys(run_format, seen.units_keys)]
    assert any("learner" in word for word in seen.argv), "the run's processes were seen"
    assert seen.listening == set()
    assert {key.partition(":")[0] for key in seen.units_keys} == {"certified"}, "never the operator's secret"

    for words in (
        ["status", "quickstart", "--json"],
        ["verify", "quickstart"],
        ["config", "show", "-f", "quickstart/run.yaml", "--origin"],
        ["logs", "quickstart"],
        ["status", "s3://canary-bucket/run", "--debug"],
        ["status", "gs://somebody:canary-password-4719@bucket/run"],
    ):
        playground.environment["AWS_ENDPOINT_URL"] = "http://somebody:canary-password-4718@example.com"  # refused
        done = playground.run(*words)
        assert leaks(done.stdout + done.stderr, canaries) == [], words
        assert words[0] != "verify" or (done.returncode, done.stderr) == (0, "")
    assert leaks(said, canaries) == []
    assert leaks("\0".join(seen.argv), canaries) == []

    assert len(seen.tokens) >= 2 and all(len(token) == 32 for token in seen.tokens)
    bucket = playground.directory / "quickstart" / "bucket"
    for path in (path for path in playground.directory.rglob("*") if path.is_file() and path.name != "key.json"):
        data = path.read_bytes()
        assert leaks(data, canaries) == [], path
        if path.parent.name != "units" and path.name != "supervisor.json":
            assert leaks(data, list(seen.tokens)) == [], path
        if bucket in path.parents:
            json_or_safetensors = data[:1] == b"{" or data[8:9] == b"{"
            assert json_or_safetensors, path
