"""`diloco key` and `diloco bucket-policy`, and what a signed run means to commands with its key, another's, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, SyncerSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.new_run import create_run
from diloco_cli.launch.plan_files import signed
from diloco_cli.protocol.log.commit_log import append, read_format
from diloco_cli.protocol.log.commits import EpochStart
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import LOG, Secret, short_key
from diloco_cli.store.local import LocalStore
from tests.cli.bucket import NANO, make_bucket
from tests.cli.conftest import Diloco
from tests.numerics.bucket import begun_run

FILE = "DILOCO_SIGNING_KEY_FILE"
CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)


def test_a_key_is_written_once_and_never_shown(diloco: Diloco, tmp_path: Path) -> None:
    made = diloco("key", "new", "run.key")
    secret = (tmp_path / "run.key").read_text().strip()
    assert (made.returncode, made.stdout, len(secret)) == (0, "run.key\n", 64)
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
    again = diloco("key", "new", "run.key")
    assert again.returncode == 2 and secret not in made.stderr + again.stderr
    assert (tmp_path / "run.key").read_text().strip() == secret


@pytest.mark.parametrize("shards", [2, 3])
def test_three_commands_certify_a_key_that_another_machine_made(diloco: Diloco, tmp_path: Path, shards: int) -> None:
    """Each prints the next one. The private key never leaves its file, nor the operator's secret."""
    diloco("key", "new", "run.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    run = replace(NANO, settings=replace(NANO.settings, data=DataSettings(shards=shards)))
    url = make_bucket(tmp_path / "nano", signed(run, secret))
    asked = diloco("key", "request", url, "learner", "home", "home.key", **{FILE: ""})
    assert asked.returncode == 0, asked.stderr
    public, own = asked.stdout.strip(), (tmp_path / "home.key").read_text().strip()
    assert (tmp_path / "home.key").stat().st_mode & 0o777 == 0o600
    assert own.startswith(f"machine:{secret.operator},") and short_key(secret.operator) in asked.stderr
    certify = next(line for line in asked.stderr.splitlines() if "diloco key certify" in line).partition("diloco ")[2]
    assert certify == f"key certify {url} learner home {public}"

    early = diloco("stop", url, "--timeout", "0", **{FILE: "home.key"})
    assert early.returncode in (2, 8) and "no key to sign as operator" in early.stderr
    assert diloco("learner", "--run", url, "--name", "home", "--join", **{FILE: "home.key"}).returncode == 2
    certified = diloco(*certify.split(), **{FILE: "run.key"})
    assert certified.returncode == 0, certified.stderr
    next_words = {
        2: "but home cannot join: the run's 2 data shards are taken",
        3: f"diloco learner --run {url} --name home --join",
    }
    assert [shown for shown in next_words if next_words[shown] in certified.stderr] == [shards]
    assert diloco(*certify.split(), **{FILE: "home.key"}).returncode == 2, "only the operator certifies"

    run = opened_with(tmp_path / "nano", own)
    assert run.keyring.holds("learner/home") and not run.keyring.holds(LOG)
    private = own.split(",")[1]
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != "home.key"):
        assert private not in path.read_text(errors="replace"), path
    assert private not in asked.stdout + asked.stderr


def opened_with(bucket: Path, key: str) -> RunFormat:
    return perform(read_format("u", Secret(key, "TEST")), LocalStore(bucket), CLOCK)


def test_where_learners_host_standbys_a_learners_key_is_certified_for_the_log_too_and_that_is_said(
    diloco: Diloco, tmp_path: Path
) -> None:
    diloco("key", "new", "run.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    hosting = replace(NANO, settings=replace(NANO.settings, syncer=SyncerSettings(on_learners=True)))
    url = make_bucket(tmp_path / "nano", signed(hosting, secret))
    public = diloco("key", "request", url, "learner", "iowa", "iowa.key").stdout.strip()
    said = diloco("key", "certify", url, "learner", "iowa", public, **{FILE: "run.key"})
    assert "its owner is trusted with the log" in said.stderr
    ring = opened_with(tmp_path / "nano", (tmp_path / "iowa.key").read_text().strip()).keyring
    assert ring.holds("learner/iowa") and ring.holds(LOG)


def test_a_key_whose_fingerprint_another_one_of_its_name_has_is_not_certified(diloco: Diloco, tmp_path: Path) -> None:
    """Both would write below the same prefix, and nobody could tell whose the records there are."""
    diloco("key", "new", "run.key")
    url = make_bucket(tmp_path / "nano", signed(NANO, Secret((tmp_path / "run.key").read_text().strip(), "TEST")))
    first, twin = "a1b2c3d4" + 56 * "0", "a1b2c3d4" + 56 * "1"
    assert diloco("key", "certify", url, "learner", "iowa", first, **{FILE: "run.key"}).returncode == 0
    assert diloco("key", "certify", url, "learner", "iowa", first, **{FILE: "run.key"}).returncode == 0, "once more"
    refused = diloco("key", "certify", url, "learner", "iowa", twin, **{FILE: "run.key"})
    assert refused.returncode == 8 and "a1b2c3d4" in refused.stderr and "diloco key request" in refused.stderr
    certificates = list((tmp_path / "nano" / "certificate" / "learner" / "iowa").iterdir())
    assert [path.stem for path in certificates] == [first]


def test_commands_need_the_key_that_fits(diloco: Diloco, tmp_path: Path) -> None:
    diloco("key", "new", "run.key")
    diloco("key", "new", "other.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    url = make_bucket(tmp_path / "nano", signed(NANO, secret))
    diloco("key", "request", url, "learner", "iowa", "iowa.key")
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


def test_a_revoked_key_counts_from_the_commit_on_that_a_command_makes_where_no_syncer_answers(
    diloco: Diloco, tmp_path: Path
) -> None:
    diloco("key", "new", "run.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    operators = signed(NANO, secret)
    url, operator = make_bucket(tmp_path / "nano", operators), {FILE: "run.key"}
    public = diloco("key", "request", url, "learner", "iowa", "iowa.key").stdout.strip()
    diloco("key", "certify", url, "learner", "iowa", public, **operator)
    begin(LocalStore(tmp_path / "nano"), operators, secret)

    junk = tmp_path / "nano" / "certificate"  # by a stranger: no key, and one that nobody certified for iowa
    (junk / "junk").write_text("junk")
    (junk / "learner" / "iowa" / f"{'b2' * 32}.json").write_bytes(
        next((junk / "learner" / "iowa").iterdir()).read_bytes()
    )
    done = diloco("key", "revoke", url, "iowa", "--timeout", "0", **operator)
    assert done.returncode == 0 and public in done.stdout, done.stderr
    log = [json.loads(path.read_text()) for path in sorted((tmp_path / "nano" / "commit").iterdir())]
    assert [record["kind"] for record in log] == ["epoch_start", "epoch_start", "revoke"]
    assert (log[-1]["key"], log[-1]["signature"].partition(":")[0]) == (public, "operator")
    again = diloco("key", "revoke", url, "iowa", "--timeout", "0", **operator)
    assert again.returncode == 2 and "no certified key" in again.stderr
    for key in ("", "iowa.key"):
        assert diloco("key", "revoke", url, public, "--timeout", "0", **{FILE: key}).returncode in (2, 8)


def begin(store: LocalStore, run: RunFormat, secret: Secret) -> None:
    """Commit 0, as a syncer with a key of its own would make it."""
    text = secret.certified(run.run_id, {"syncer/host": "a1" * 32})
    own = replace(run, keyring=Secret(text, "TEST").keyring(run.run_id))
    output = FragmentVersion(0, 0, -1, 1, "blake3-" + "0" * 64, "blake3-" + "1" * 64)
    perform(append(own, RunState(), EpochStart(epoch=1, outputs=(output,))), store, CLOCK)


def test_without_a_key_the_operator_seen_first_is_believed_aloud_and_no_other_later(
    diloco: Diloco, tmp_path: Path
) -> None:
    diloco("key", "new", "run.key")
    secret = Secret((tmp_path / "run.key").read_text().strip(), "TEST")
    url, home = make_bucket(tmp_path / "nano", signed(NANO, secret)), {"DILOCO_HOME": str(tmp_path / "home")}
    first, second = (diloco("status", url, **home) for _ in range(2))
    assert short_key(secret.operator) in first.stderr and "first time" in first.stderr and "first" not in second.stderr
    assert f"signed: whom the operator's key {short_key(secret.operator)} has certified" in second.stdout
    (tmp_path / "nano" / "FORMAT.json").unlink()
    create_run(LocalStore(tmp_path / "nano"), signed(NANO, Secret("x" * 40, "TEST")), "u")
    forged = diloco("status", url, **home)
    assert forged.returncode == 8 and short_key(secret.operator) in forged.stderr and "rm " in forged.stderr


def test_a_run_that_is_not_signed_says_whom_it_trusts(diloco: Diloco, tmp_path: Path) -> None:
    begun_run(tmp_path / "tiny", "tests.numerics.tiny:regression")
    url = (tmp_path / "tiny").as_uri()
    for command in ("status", "verify"):
        assert "not signed: whoever may write into the bucket is trusted" in diloco(command, url).stdout


def test_who_launches_a_signed_run_without_a_key_is_told_how_to_get_one(tmp_path: Path) -> None:
    """The hint was to begin another run."""
    (tmp_path / "nano").mkdir()
    store = LocalStore(tmp_path / "nano")
    create_run(store, signed(NANO, Secret("x" * 40, "TEST")), "s3://b/nano")
    with pytest.raises(UsageError, match="it is signed, and here is no key") as raised:
        create_run(store, NANO, "s3://b/nano")
    hint = raised.value.hint or ""
    assert "diloco key request s3://b/nano" in hint and "--set" not in hint
    with pytest.raises(UsageError) as raised:
        create_run(store, replace(NANO, islands=NANO.islands[:1]), "s3://b/nano")
    assert "--set name=nano-2" in (raised.value.hint or ""), "it is another run in more than that"
