"""Consent to what a format names, and trust in an operator's key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings
from diloco_cli.digests import digest
from diloco_cli.errors import RefusedError
from diloco_cli.launch.plan_files import signed
from diloco_cli.protocol.log.records import RegionStore, RunFormat, not_consented
from diloco_cli.runtime.consent import (
    Allowance,
    Code,
    NamedByFormat,
    NamedHere,
    check_operator,
    code_of,
    consented,
    format_digest,
    named_in_files,
    refused_stores,
    remembered,
    stores_of,
)
from diloco_cli.signing import Secret, short_key
from tests.cli.bucket import NANO, RHINE
from tests.simulation.toy import make_run

URL = "gs://home/runs/nano"
FAR = "s3://far/runs/nano"
OWN = replace(NANO.settings, model=ModelSettings(entrypoint="own:model", args={"width": 3}))
FOREIGN = not_consented(replace(NANO, settings=OWN))
NOTHING = NamedHere()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path / "home"
    sys.path[:] = before


def named(*words: str, stores: tuple[str, ...] = ()) -> NamedHere:
    return NamedHere(Allowance(words, (), stores), command="diloco learner --run URL")


def test_a_preset_needs_no_consent_and_notes_nothing(home: Path) -> None:
    run = consented(not_consented(NANO), URL, NOTHING, stores_of(NANO))
    assert run.settings.consented and not home.exists()


def test_a_refusal_says_what_would_run_and_the_commands_that_consent() -> None:
    with pytest.raises(RefusedError, match=r"names code: model.entrypoint own:model\(width=3\)") as caught:
        consented(FOREIGN, URL, named("other"))
    assert caught.value.exit_status == 8 and caught.value.where == URL
    hint = caught.value.hint or ""
    assert "diloco learner --run URL --allow-code own:model;" in hint
    assert f"--allow-code {format_digest(FOREIGN)};" in hint and "diloco resume RUN.yaml" in hint


@pytest.mark.parametrize("word", ["own", "own:model", format_digest(FOREIGN)])
def test_a_consent_is_remembered_for_this_format_alone(home: Path, word: str) -> None:
    assert consented(FOREIGN, URL, named(word)).settings.consented
    assert consented(FOREIGN, "gs://moved/nano", NOTHING).settings.consented
    [note] = (home / "consent").iterdir()
    assert note.stat().st_mode & 0o777 == 0o600 and note.parent.stat().st_mode & 0o777 == 0o700
    other = replace(FOREIGN, settings=replace(FOREIGN.settings, model=ModelSettings(entrypoint="own:model")))
    with pytest.raises(RefusedError):
        consented(other, URL, NOTHING)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.chmod(0o620),
        lambda path: path.write_text("torn"),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"words": "own"})),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"digest": "another"})),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2})),
    ],
)
def test_a_note_that_is_damaged_or_that_others_may_write_counts_for_nothing(home: Path, damage) -> None:
    consented(FOREIGN, URL, named("own"))
    [note] = (home / "consent").iterdir()
    damage(note)
    assert remembered(format_digest(FOREIGN)) == (Allowance(), None)
    with pytest.raises(RefusedError):
        consented(FOREIGN, URL, NOTHING)


def regional(*regions: RegionStore) -> RunFormat:
    return not_consented(replace(NANO, islands=(RHINE,), regions=regions, home_url=URL))


def test_a_store_elsewhere_needs_consent_and_one_in_the_same_bucket_does_not() -> None:
    beside = regional(RegionStore("eu", "gs://home/eu/nano"))
    assert consented(beside, URL, NOTHING, stores_of(beside)).settings.consented
    far = regional(RegionStore("eu", FAR))
    with pytest.raises(RefusedError, match=f"names stores elsewhere: {FAR}") as caught:
        consented(far, URL, NOTHING, stores_of(far))
    assert f"--allow-store {FAR};" in (caught.value.hint or "")
    consented(far, URL, named(stores=("s3://far",)), stores_of(far))
    consented(far, URL, NOTHING, stores_of(far))


def test_what_was_named_counts_from_each_bucket_of_the_run_and_what_is_no_url_is_elsewhere() -> None:
    run = regional(RegionStore("eu", FAR))
    stores = [URL, "gs://home/eu/nano", FAR, "http://x/y", ""]
    assert refused_stores(run, URL, stores) == (FAR, "http://x/y", "")
    consented(run, URL, named(stores=(URL, FAR)), stores_of(run))
    assert refused_stores(run, FAR, [URL]) == refused_stores(run, URL, [FAR]) == ()


@pytest.mark.parametrize("url", ["file:///home/user/.ssh", "file:///bucket-eu/nano", "file:///bucket/../etc/nano"])
def test_a_local_path_beside_the_runs_own_folder_needs_consent(url: str) -> None:
    run = replace(regional(RegionStore("eu", url)), home_url="file:///bucket/nano")
    with pytest.raises(RefusedError, match="stores elsewhere"):
        consented(run, "file:///bucket/nano", NOTHING, stores_of(run))


def test_consent_to_code_is_none_to_stores_and_the_other_way_round() -> None:
    run = replace(regional(RegionStore("eu", FAR)), settings=FOREIGN.settings)
    consented(run, URL, named("own"))
    with pytest.raises(RefusedError, match=f"stores elsewhere: {FAR}; this machine"):
        consented(run, URL, NOTHING, stores_of(run))
    other = replace(run, name="nano-2")
    read = consented(other, URL, named(stores=(FAR,)), stores_of(other), code=False)
    assert not read.settings.consented, "a syncer merges without the code"
    with pytest.raises(RefusedError, match="names code"):
        consented(other, URL, NOTHING)


def test_modules_are_looked_for_last_in_the_folder_that_was_named_with_the_consent(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    consented(FOREIGN, URL, NamedHere(Allowance(("own",)), folder))
    assert sys.path[-1] == str(folder) and str(tmp_path) not in sys.path
    sys.path.remove(str(folder))
    consented(FOREIGN, URL, NOTHING)
    assert sys.path[-1] == str(folder)


def reading(**data: str) -> RunFormat:
    """A run out of a bucket whose format names these data."""
    return not_consented(replace(NANO, settings=replace(NANO.settings, data=DataSettings(**data))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"tokens": "s3://far/tokens"}, "s3://far/tokens"),
        ({"tokens": "file:///etc"}, "file:///etc"),
        ({"text": "/home/them/**/*.txt"}, "file:///home/them"),
    ],
)
def test_data_that_a_bucket_names_are_read_only_where_this_machine_named_them(data: dict[str, str], place: str) -> None:
    run = reading(**data)
    with pytest.raises(RefusedError, match=f"names stores elsewhere: {place}") as caught:
        consented(run, URL, NOTHING)
    assert f"--allow-store {place}" in (caught.value.hint or "")
    assert consented(run, URL, named(stores=(place,))).settings.consented
    assert consented(run, URL, NOTHING).settings.consented, "it is remembered"


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"text": "{}/shared/../secret/*.txt"}, "secret"),
        ({"text": "{}/shared/link/*.txt"}, "secret"),
        ({"text": "{}/shared/corpus/*.txt"}, "shared/corpus"),
        ({"text": "{}/shared/run/*.txt", "tokenizer": "{}/shared/tokenizer"}, "shared/tokenizer"),
        ({"tokens": "file://{}/shared/link"}, "secret"),
        ({"tokens": "file://{}/shared/../secret"}, "secret"),
        ({"tokens": "file://{}/shared/.ssh"}, "shared/.ssh"),
    ],
)
def test_text_of_a_run_beside_it_and_what_leads_elsewhere_need_consent(
    tmp_path: Path, data: dict[str, str], place: str
) -> None:
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    secret.mkdir()
    shared.mkdir()
    (shared / "link").symlink_to(secret)
    run, url = reading(**{key: value.format(tmp_path) for key, value in data.items()}), (shared / "run").as_uri()
    with pytest.raises(RefusedError, match=f"names stores elsewhere: .*{(tmp_path / place).as_uri()}"):
        consented(run, url, NOTHING)
    if place == "secret":
        with pytest.raises(RefusedError):
            consented(run, url, named(stores=(shared.as_uri(),)))
    assert consented(run, url, NamedHere(named_in_files(run.settings, None))).settings.consented


def test_tokens_beside_the_run_need_nothing_unless_the_users_home_lies_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, own = (reading(tokens=f"file://{tmp_path}/{place}") for place in ("tokens", "run/tokens"))
    url = f"file://{tmp_path}/run"
    assert consented(beside, url, NOTHING).settings.consented
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    with pytest.raises(RefusedError):
        consented(beside, url, NOTHING)
    assert consented(own, url, NOTHING).settings.consented


def test_a_command_that_never_reads_data_asks_for_no_consent_to_them_and_notes_none() -> None:
    run = reading(tokens="s3://far/tokens")
    assert consented(run, URL, NOTHING, data=False).settings.consented
    with pytest.raises(RefusedError, match="s3://far/tokens"):
        consented(run, URL, NOTHING)
    with_code = replace(run, settings=replace(run.settings, model=FOREIGN.settings.model))
    with pytest.raises(RefusedError, match=r"names code: [^;]*width=3\); this machine"):
        consented(with_code, URL, NOTHING, data=False)


def test_a_tokenizer_of_the_hub_is_consented_to_by_its_name() -> None:
    run = reading(text="/data/a.txt", tokenizer="maker/words@v2")
    with pytest.raises(RefusedError, match="hf://maker/words@v2"):
        consented(run, URL, named(stores=("file:///data",)))
    assert consented(run, URL, named(stores=("file:///data", "hf://maker/words@v2"))).settings.consented


DIGEST = digest(b"format")
MODEL = Code("model.entrypoint", "pkg.own:model", {"width": 32})
DATA = Code("data.entrypoint", "pkg.data:data", {"path": "/shards"})
BOTH = NamedByFormat(DIGEST, (MODEL, DATA))
ELSEWHERE = NamedByFormat(DIGEST, (), ("gs://far/runs/nano",))


@pytest.mark.parametrize(
    ("named", "allowance"),
    [
        (BOTH, Allowance((DIGEST,))),
        (ELSEWHERE, Allowance((DIGEST,))),
        (BOTH, Allowance(("pkg.own", "pkg.data"))),
        (BOTH, Allowance(("pkg.own:model", "pkg.data"))),
        (BOTH, Allowance((), (DATA, MODEL))),
        (ELSEWHERE, Allowance((), (), ("gs://far",))),
        (ELSEWHERE, Allowance((), (), ("gs://far/runs/nano",))),
    ],
)
def test_each_way_to_consent_is_enough(named: NamedByFormat, allowance: Allowance) -> None:
    assert not named.beyond(allowance)


@pytest.mark.parametrize(
    ("allowance", "refused"),
    [
        (Allowance(), (MODEL, DATA)),
        (Allowance(("pkg.own",)), (DATA,)),
        (Allowance(("pkg", "pkg.own:mod", "own:model", "model")), (MODEL, DATA)),
        (Allowance((digest(b"another format"),)), (MODEL, DATA)),
        (Allowance((), (MODEL, Code("data.entrypoint", "pkg.data:data", {"path": "/etc"}))), (DATA,)),
        (Allowance((), (MODEL, Code("model.entrypoint", "pkg.data:data", {"path": "/shards"}))), (DATA,)),
        (Allowance((), (), ("gs://far",)), (MODEL, DATA)),
    ],
)
def test_what_was_not_named_is_refused_by_name(allowance: Allowance, refused: tuple[Code, ...]) -> None:
    assert BOTH.beyond(allowance).code == refused


@pytest.mark.parametrize("store", ["gs://fa", "s3://far/runs", "gs://far/runs/na", "file:///far"])
def test_a_store_that_only_looks_alike_is_another(store: str) -> None:
    assert ELSEWHERE.beyond(Allowance((), (), (store,))).stores == ELSEWHERE.stores


def test_a_refusal_shows_the_arguments_and_no_more_than_a_line_of_them() -> None:
    said = str(Code("model.entrypoint", "os:system", {"command": "touch /tmp/x" + "y" * 1000}))
    assert "os:system(command='touch /tmp/x" in said and len(said) < 300


@pytest.mark.parametrize(
    ("model", "data", "names"),
    [
        (ModelSettings(preset="gpt-nano"), DataSettings(preset="python-stdlib"), []),
        (ModelSettings(huggingface="tiny", args={"model_type": "gpt2"}), DataSettings(preset="python-stdlib"), []),
        (ModelSettings(huggingface="/etc"), DataSettings(preset="python-stdlib"), ["/etc"]),
        (ModelSettings(preset="gpt-nano"), DataSettings(entrypoint="a:b"), ["a:b"]),
        (
            ModelSettings(entrypoint="os:system", huggingface="x"),
            DataSettings(entrypoint="a:b"),
            ["os:system", "x", "a:b"],
        ),
    ],
)
def test_code_is_what_a_machine_would_import_or_look_for(
    model: ModelSettings, data: DataSettings, names: list[str]
) -> None:
    assert [code.name for code in code_of(RunSettings("x", model=model, data=data))] == names


OURS, THEIRS = Secret("our operator's secret, 32 letters", "TEST"), Secret("a stranger's secret of 32 letters", "TEST")
UNSIGNED_RUN = make_run()
RUN, FORGED = signed(UNSIGNED_RUN, OURS), signed(UNSIGNED_RUN, THEIRS)
OPERATOR_URL = "gs://bucket/runs/toy"


def told(run: RunFormat, secret: Secret | None = None, url: str = OPERATOR_URL) -> list[str]:
    said: list[str] = []
    check_operator(run, url, secret, said.append)
    return said


def test_the_first_key_is_believed_aloud_and_remembered_for_its_owner_alone(home: Path) -> None:
    (said,) = told(RUN)
    assert short_key(OURS.operator) in said and "first time" in said
    (file,) = (home / "operators").iterdir()
    assert (file.stat().st_mode & 0o777, (home / "operators").stat().st_mode & 0o777) == (0o600, 0o700)
    assert told(RUN) == [] == told(RUN, url=OPERATOR_URL + "/")
    assert len(told(RUN, url="gs://bucket/runs/another")) == 1, "an address is known by itself"


@pytest.mark.parametrize("replaced", [FORGED, UNSIGNED_RUN, replace(FORGED, run_id="another")])
def test_from_then_on_no_other_operator_is_believed_nor_a_run_that_is_not_signed(replaced: RunFormat) -> None:
    told(RUN)
    with pytest.raises(RefusedError, match=short_key(OURS.operator)) as refused:
        told(replaced)
    assert "rm " in (refused.value.hint or "")
    assert told(RUN) == [], "and the key that was seen first stays"


def test_a_key_file_says_whose_run_it_is_and_that_is_remembered(home: Path) -> None:
    told(FORGED)
    assert told(RUN, OURS) == []
    with pytest.raises(RefusedError):
        told(FORGED)


def test_nothing_is_remembered_of_runs_that_are_not_signed(home: Path) -> None:
    assert told(UNSIGNED_RUN) == [] and not (home / "operators").exists()
    assert len(told(RUN)) == 1


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"operator":"x"}', b'{"operator":7}'])
def test_a_torn_or_foreign_file_says_nothing(home: Path, junk: bytes) -> None:
    told(RUN)
    (file,) = (home / "operators").iterdir()
    file.write_bytes(junk)
    assert len(told(RUN)) == 1
