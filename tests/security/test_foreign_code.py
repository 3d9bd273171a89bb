"""Who can write into the bucket chooses no code, path or store that other machines use.

The attack: FORMAT.json is sealed anew with an entrypoint that runs a command, which would leave a canary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import ModelSettings
from diloco_cli.launch.new_run import create_run
from diloco_cli.launch.plan_files import signed
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, heartbeat_key
from diloco_cli.protocol.log.records import RegionStore, RunFormat, encode
from diloco_cli.runtime.consent import format_digest
from diloco_cli.runtime.units import diloco_command
from diloco_cli.signing import Secret, learner_signer, public_key, syncer_signer
from diloco_cli.store.local import LocalStore
from tests.cli.bucket import NANO, make_bucket
from tests.forked import ROOT, run_diloco
from tests.numerics.bucket import begun_run
from tests.security.signed import private_key
from tests.waiting import wait_until

KEY = "a key of the whole run, of 32 letters or more"
SIGNERS = (learner_signer("iowa"), learner_signer("newcomer"), syncer_signer("syncer"))
UNITS_KEY = Secret(KEY, "TEST").certified(NANO.run_id, dict.fromkeys(SIGNERS, private_key("unit")))
Diloco = Callable[..., "subprocess.CompletedProcess[str]"]
EVERY_START = [
    ("learner", "--run", "URL", "--name", "iowa"),
    ("learner", "--run", "URL", "--name", "iowa", "--host-syncer"),
    ("learner", "--run", "URL", "--name", "newcomer", "--join"),
    ("syncer", "URL"),
    ("syncer", "URL", "--standby"),
    ("resume", "URL"),
    ("resume", "URL", "--detach"),
]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def diloco(tmp_path: Path) -> Diloco:
    """In a directory that holds modules of the attacker's."""
    (tmp_path / "here").mkdir()
    text = f"import os\n\ndef run():\n    os.system('touch {tmp_path}/canary')\n"
    (tmp_path / "here" / "mischief.py").write_text(text)
    return partial(run_diloco, folder=tmp_path / "here", DILOCO_HOME=str(tmp_path / "home"))


def commanding(run: RunFormat, canary: Path, entrypoint: str = "os:system") -> RunFormat:
    args = {"command": f"touch {canary}"} if entrypoint == "os:system" else {}
    model = ModelSettings(entrypoint=entrypoint, args=args)
    return replace(run, settings=replace(run.settings, model=model))


def placed(run: RunFormat, folder: Path, key: str | None) -> str:
    """The run's URL; with a key, as its operator seals it."""
    folder.mkdir(parents=True)
    secret = None if key is None else Secret(key, "TEST")
    create_run(LocalStore(folder), signed(run, secret), str(folder), secret)
    return folder.as_uri()


@pytest.mark.parametrize("words", EVERY_START, ids=" ".join)
def test_no_start_runs_what_a_format_names(
    tmp_path: Path, diloco: Diloco, canary: Path, words: tuple[str, ...]
) -> None:
    for key, entrypoint in ((None, "os:system"), (KEY, "mischief:run")):
        url = placed(commanding(NANO, canary, entrypoint), tmp_path / entrypoint.partition(":")[0] / "nano", key)
        environment = {} if key is None else {"DILOCO_SIGNING_KEY": key if words[0] == "resume" else UNITS_KEY}
        done = diloco(*(url if word == "URL" else word for word in words), **environment)
        assert done.returncode == 8, (done.stdout, done.stderr)
        assert f"names code: model.entrypoint {entrypoint}(" in done.stderr
        assert f"--allow-code {entrypoint};" in done.stderr and "Traceback" not in done.stderr
    assert not canary.exists()


def test_only_the_very_format_that_was_consented_to_runs(tmp_path: Path, diloco: Diloco, canary: Path) -> None:
    """Sealed anew after the consent, it is refused; only its own digest would consent to it."""
    honest, resealed = commanding(NANO, canary, "tests.numerics.tiny:regression"), commanding(NANO, canary)
    url = make_bucket(tmp_path / "bucket" / "nano", honest)
    words = ("learner", "--run", url, "--name", "iowa")
    agreed = diloco(*words, "--allow-code", format_digest(honest))
    assert agreed.returncode == 2 and "data: no preset None" in agreed.stderr, "it went on to the data, and ended there"
    assert "data: no preset None" in diloco(*words).stderr, "the consent is remembered"
    (tmp_path / "bucket" / "nano" / FORMAT_KEY).write_bytes(encode(resealed))
    for consent in ((), ("--allow-code", "tests.numerics.tiny"), ("--allow-code", format_digest(honest))):
        refused = diloco(*words, *consent)
        assert refused.returncode == 8 and "os:system(command=" in refused.stderr
    assert not canary.exists()


def test_what_looks_at_a_run_or_repairs_it_needs_no_code(tmp_path: Path, diloco: Diloco, canary: Path) -> None:
    run, store, _ = begun_run(tmp_path / "bucket" / "tiny", "tests.numerics.tiny:regression")
    store.put(FORMAT_KEY, encode(commanding(run, canary)))
    url = (tmp_path / "bucket" / "tiny").as_uri()
    for words in (("status",), ("verify",), ("export", "-o", "m.safetensors")):
        done = diloco(words[0], url, *words[1:])
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    for words in (
        ("generate",),
        ("evaluate",),
        ("export", "--to", "torch", "-o", "t.st"),
    ):
        refused = diloco(words[0], url, *words[1:])
        assert refused.returncode == 8 and "--allow-code os:system" in refused.stderr, (words, refused.stderr)
    assert "nothing to collect" in diloco("gc", url).stderr
    assert "only commits 0 to -1 can be gone back to" in diloco("rollback", url, "--to", "0", "--yes").stderr
    assert not canary.exists()


def test_the_evaluators_process_asks_for_consent_itself(tmp_path: Path, canary: Path) -> None:
    url = make_bucket(tmp_path / "bucket" / "nano", commanding(NANO, canary))
    words, environment = diloco_command("evaluator", "--run", url), {**os.environ, "DILOCO_HOME": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, cwd=tmp_path, stdin=pipe, stderr=pipe, text=True) as child:
        assert child.wait() == 8 and child.stderr is not None and "os:system(" in child.stderr.read()
    assert not canary.exists()


def test_a_syncer_serves_without_the_models_code_and_says_once_that_it_evaluates_nothing(
    tmp_path: Path, canary: Path
) -> None:
    run, store, _ = begun_run(tmp_path / "bucket", "tests.numerics.tiny:regression")
    store.put(FORMAT_KEY, encode(commanding(run, canary)))
    words = diloco_command("syncer", (tmp_path / "bucket").as_uri())
    environment = {**os.environ, "DILOCO_HOME": str(tmp_path / "home")}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as syncer:
        wait_until(lambda: b"SERVING" in (store.get(heartbeat_key(SYNCER)) or b""))
        syncer.terminate()
        said, _ = syncer.communicate()
    assert syncer.returncode == 143 and said.count("no evaluations here") == 1 and "os:system" in said
    assert not canary.exists()


def test_a_syncer_opens_no_store_that_only_the_format_names(tmp_path: Path, diloco: Diloco) -> None:
    there = tmp_path / "somebodys"
    there.mkdir()
    regional = replace(NANO, home_url="file:///nowhere/nano", regions=(RegionStore("eu", there.as_uri()),))
    url = make_bucket(tmp_path / "bucket" / "nano", regional)
    hosting = ("learner", "--run", url, "--name", "iowa", "--host-syncer")
    for words in (("syncer", url), ("syncer", url, "--standby"), ("resume", url), hosting):
        done = diloco(*words)
        assert done.returncode == 8 and f"--allow-store {there.as_uri()}" in done.stderr, (words, done.stderr)
    assert not list(there.iterdir())


@pytest.fixture
def regional(tmp_path: Path) -> tuple[str, Path]:
    """URL of a run that has begun, and another folder, which its format names as that of a region and which has that
    format, too."""
    there = tmp_path / "somebodys"
    there.mkdir()
    run, store, _ = begun_run(tmp_path / "bucket" / "tiny", "tests.numerics.tiny:regression")
    url = (tmp_path / "bucket" / "tiny").as_uri()
    named = encode(replace(run, home_url=url, regions=(RegionStore("eu", there.as_uri()),)))
    store.put(FORMAT_KEY, named)
    LocalStore(there).create(FORMAT_KEY, named)
    return url, there


def test_a_command_in_place_of_a_syncer_writes_to_no_bucket_that_only_the_format_names(
    diloco: Diloco, regional: tuple[str, Path]
) -> None:
    url, there = regional
    done = diloco("stop", url, "--timeout", "0")
    assert done.returncode == 0, done.stderr
    assert f"region eu: left out, as this machine has not consented to {there.as_uri()}" in done.stderr
    assert "the next syncer of the run completes it" in done.stderr
    assert [path.name for path in there.iterdir()] == [FORMAT_KEY]
    assert json.loads(diloco("status", url, "--json").stdout)["data"]["state"] == "STOPPED"


def test_mirrors_are_compared_only_with_consent_which_then_counts_for_later_commands(
    diloco: Diloco, regional: tuple[str, Path]
) -> None:
    url, there = regional
    refused = diloco("verify", url, "--mirrors")
    assert refused.returncode == 8, refused.stderr
    assert f"diloco verify {url} --mirrors --allow-store {there.as_uri()}; or" in refused.stderr
    assert "--allow-code" not in refused.stderr, "no code is needed"
    for consent in (("--allow-store", there.as_uri()), ()):
        done = diloco("verify", url, "--mirrors", *consent)
        assert done.returncode == 0 and "region eu: 0 commits, 1 commits behind" in done.stdout, done.stderr
    done = diloco("stop", url, "--timeout", "0")
    assert done.returncode == 0 and "left out" not in done.stderr
    assert len(list((there / "commit").iterdir())) == 3


@pytest.mark.parametrize(
    "words", [("status", "URL", "--json"), ("verify", "URL"), ("export", "URL"), ("stop", "URL"), ("gc", "-y", "URL")]
)
def test_a_regions_bucket_leads_to_no_home_that_only_it_names(
    tmp_path: Path, diloco: Diloco, words: tuple[str, ...]
) -> None:
    home, here = (tmp_path / "somebodys" / "nano").as_uri(), tmp_path / "bucket" / "nano"
    url = make_bucket(here, replace(NANO, home_url=home, regions=(RegionStore("eu", here.as_uri()),)))
    done = diloco(*(url if word == "URL" else word for word in words))
    said, instead = done.stdout + done.stderr, " ".join(home if word == "URL" else word for word in words)
    assert done.returncode == 8 and f"name it: diloco {instead}" in said, said


def test_certificates_are_written_to_no_bucket_that_only_the_format_names(tmp_path: Path, diloco: Diloco) -> None:
    there, home = tmp_path / "somebodys", tmp_path / "bucket" / "nano"
    there.mkdir()
    regions = (RegionStore("eu", there.as_uri()),)
    url = placed(replace(NANO, home_url=home.as_uri(), regions=regions), home, KEY)
    words = ("key", "certify", url, "learner", "iowa", public_key(private_key("unit")))
    refused = diloco(*words, DILOCO_SIGNING_KEY=KEY)
    assert refused.returncode == 8 and f"--allow-store {there.as_uri()}" in refused.stderr, refused.stderr
    assert not list(there.iterdir()) and not (home / "certificate").exists()
    done = diloco(*words, "--allow-store", there.as_uri(), DILOCO_SIGNING_KEY=KEY)
    assert done.returncode == 0 and (there / "certificate").exists(), done.stderr


def test_a_folder_that_only_the_format_names_is_not_read(tmp_path: Path, diloco: Diloco) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    foreign = replace(NANO, settings=replace(NANO.settings, model=ModelSettings(huggingface=str(tmp_path))))
    url = make_bucket(tmp_path / "bucket" / "nano", foreign)
    done = diloco("learner", "--run", url, "--name", "iowa")
    assert done.returncode == 8 and f"model.huggingface {tmp_path}" in done.stderr, done.stderr


@pytest.mark.parametrize("command", [[sys.executable, "-m", "diloco_cli", "runs"], [*diloco_command("runs")]])
def test_modules_in_the_working_directory_are_not_imported(
    tmp_path: Path, diloco: Diloco, canary: Path, command: list[str]
) -> None:
    folder = tmp_path / "here"
    (folder / "typer.py").write_text(f"import os\nos.system('touch {canary}')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()
