"""`diloco key` and `diloco bucket-policy`, and what a signed run means to commands with its key, another's, or none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from diloco_cli.launch.new_run import create_run, signed
from diloco_cli.signing import Secret
from diloco_cli.store.local import LocalStore
from tests.cli.bucket import NANO, make_bucket
from tests.cli.conftest import Diloco

FILE = "DILOCO_SIGNING_KEY_FILE"


def test_a_key_is_written_once_and_never_shown(diloco: Diloco, tmp_path: Path) -> None:
    made = diloco("key", "new", "run.key")
    secret = (tmp_path / "run.key").read_text().strip()
    assert (made.returncode, made.stdout, len(secret)) == (0, "run.key\n", 64)
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
    again = diloco("key", "new", "run.key")
    assert again.returncode == 2 and secret not in made.stderr + again.stderr
    assert (tmp_path / "run.key").read_text().strip() == secret


def test_a_learners_key_is_made_from_the_operators_secret_and_commands_need_the_key_that_fits(
    diloco: Diloco, tmp_path: Path
) -> None:
    diloco("key", "new", "run.key")
    diloco("key", "new", "other.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    url = make_bucket(tmp_path / "nano", signed(NANO, secret))
    made = diloco("key", "learner", url, "iowa", "iowa.key", **{FILE: "run.key"})
    assert (made.returncode, made.stdout) == (0, "iowa.key\n"), made.stderr
    assert (tmp_path / "iowa.key").read_text().strip() == secret.certified("id", ["learner/iowa"])

    for key, status in (("run.key", 0), ("iowa.key", 0), ("", 0), ("other.key", 2)):
        read = diloco("status", url, "--json", **{FILE: key})
        assert read.returncode == status, (key, read.stdout)
    for key, reason in (
        ("", "no key to sign as operator"),
        ("iowa.key", "no key to sign as operator"),
        ("other.key", "not the one"),
    ):
        stopped = diloco("stop", url, "--timeout", "0", **{FILE: key})
        assert stopped.returncode in (2, 8) and reason in stopped.stderr
    assert not (tmp_path / "nano" / "request").exists()
    diloco("stop", url, "--timeout", "0", **{FILE: "run.key"})
    request = json.loads((tmp_path / "nano" / "request" / "0000000000.json").read_text())
    assert request["signature"].startswith("operator:")


def test_going_on_with_a_run_needs_a_key_exactly_if_it_is_signed(diloco: Diloco, tmp_path: Path) -> None:
    diloco("key", "new", "run.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    plain, protected = make_bucket(tmp_path / "plain"), make_bucket(tmp_path / "nano", signed(NANO, secret))
    keyless = diloco("resume", protected, **{FILE: ""})
    switched_off = diloco("resume", plain, **{FILE: "run.key"})
    assert (keyless.returncode, switched_off.returncode) == (2, 2)
    assert "is signed, and this process has no key" in keyless.stderr
    assert "this run is not signed" in switched_off.stderr
    fresh = signed(replace(NANO, run_id="another"), secret)
    there, how = create_run(LocalStore(tmp_path / "nano"), fresh, protected, secret)
    assert how == "existed" and there.keyring.holds("operator")


def test_access_prints_a_policy_for_the_clouds_own_tools(diloco: Diloco) -> None:
    printed = diloco("bucket-policy", "s3://bucket/runs/nano", "learner", "--name", "iowa")
    assert "arn:aws:s3:::bucket/runs/nano/offer/iowa/*" in json.dumps(json.loads(printed.stdout))
    refused = diloco("bucket-policy", "s3://bucket/runs/nano", "boss")
    assert refused.returncode == 2 and "learner, syncer, operator, reader" in refused.stderr
