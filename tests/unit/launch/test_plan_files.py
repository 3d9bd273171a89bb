"""One plan of the files that a user names, kept beside them; and what it reads of this machine's environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.run_file import load_run_with_origins
from diloco_cli.config.settings import StoreSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.launch.plan_files import Resolved, as_used_here, keep, read_plan, resolve, settings_changes
from diloco_cli.plan.link import machine_of
from diloco_cli.plan.plan import Goal, save_plan
from diloco_cli.store.open import CONNECTIONS_VARIABLE
from tests.cli.conftest import edit
from tests.forked import ROOT

GS, S3, FOLDER = StoreSettings("gs://bucket"), StoreSettings("s3://bucket"), StoreSettings("file:///runs")


def test_without_variables_an_inventory_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONNECTIONS_VARIABLE, raising=False)
    told: list[str] = []
    assert [as_used_here(store, told.append) for store in (GS, S3, FOLDER)] == [GS, S3, FOLDER] and not told
    assert [machine_of(store).reads_back for store in (GS, S3, FOLDER)] == [False, True, False]


def test_a_plan_has_the_connections_of_this_machine_unless_its_inventory_states_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "2")
    told: list[str] = []
    assert machine_of(as_used_here(GS, told.append)).connections == 2 and f"{CONNECTIONS_VARIABLE}=2" in told[0]
    stated = StoreSettings("gs://bucket", connections=7)
    assert machine_of(as_used_here(stated)).connections == 7
    islands = 'islands: [{name: iowa, region: us, accelerators: "H100-SXM:8"}]'
    (tmp_path / "inventory.yaml").write_text(
        f"version: 1\nstore: {{url: gs://bucket}}\nregions: {{us: {{}}}}\n{islands}\n"
    )
    model = "model: {preset: gpt-nano}\ndata: {preset: python-stdlib}\ntrain: {tokens: 80M, batch_tokens: 1024}"
    (tmp_path / "run.yaml").write_text(f"version: 1\nname: few\ninventory: inventory.yaml\n{model}\n")
    assert read_plan(tmp_path / "run.yaml", []).inventory.store.connections == 2


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A run file of which everything is searched, on the first two kinds of machines; nothing of it is here."""
    machines, run = (ROOT / "examples" / "plan" / name for name in ("machines.yaml", "machines-run.yaml"))
    (tmp_path / machines.name).write_text("\n  - ".join(machines.read_text().split("\n  - ")[:3]))
    shutil.copy(run, tmp_path)
    return (tmp_path / "machines-run.yaml").rename(tmp_path / "run.yaml")


def kept(found: Resolved) -> list[str]:
    """What is said when it is kept."""
    told: list[str] = []
    assert keep(found, told.append) is not bool(told)
    return told


def test_settings_that_nobody_gave_are_searched_once_and_kept_beside_the_run(files: Path) -> None:
    made = resolve(files)
    assert made.how == "made now" and made.plan.run.sync.codec == "int8" and not kept(made)
    again = resolve(files)
    assert again.digest == made.digest and again.how.startswith("as planned ") and again.is_kept
    before = made.place.stat() if made.place else None
    assert not kept(again) and made.place and made.place.stat() == before, "a plan that is the same is not written"
    explicit = resolve(made.place)
    assert explicit.digest == made.digest and "as planned" in explicit.how and explicit.place is None


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("run.yaml", "500B", "400B", "settings"),
        ("run.yaml", "train:", "sync: {quorum: 1}\ntrain:", "settings"),  # as the search chose, but pinned
        ("machines.yaml", "region:", "region: ", ""),
        ("machines.yaml", "gs://my-bucket", "gs://other", "inventory"),
        ("run.yaml", "layers: 28", "layers: 30", "settings, model"),
    ],
)
def test_a_plan_of_other_inputs_is_made_anew_and_says_so(
    files: Path, file: str, old: str, new: str, changed: str
) -> None:
    before = resolve(files)
    kept(before)
    edit(files.with_name(file), old, new)
    after = resolve(files)
    assert after.is_kept is not bool(changed)
    assert (f"made now: {changed} changed since " in after.how) is bool(changed)
    assert (after.digest == before.digest) is not bool(changed)


def test_outer_settings_are_resolved_once_and_are_no_change(files: Path) -> None:
    edit(files, "train:", "outer: auto\ntrain:")
    made = resolve(files)
    assert (made.plan.run.outer.lr, made.plan.run.outer.momentum) == (0.4, 0.9) and not kept(made)
    again = resolve(files)
    assert again.is_kept and again.plan.run.outer == made.plan.run.outer
    run, origins = load_run_with_origins(files)
    assert run.outer.lr == "auto" and settings_changes(made.plan.run, run, origins) == []


def test_what_this_machine_says_of_connections_belongs_to_a_plan(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(resolve(files))
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "2")
    assert "inventory changed since" in resolve(files).how


def test_goals_last_until_plan_says_others(files: Path) -> None:
    cheap = Goal(deadline_s=5e7, objective="cost")
    kept(resolve(files, goal=cheap, anew=True))
    edit(files, "500B", "400B")
    assert resolve(files).plan.goal == cheap and ", for cost within limits, made now" in resolve(files).told()
    edit(files, "name: ", "name: other-")
    assert resolve(files).plan.goal == Goal(), "another project's goal is not this one's"
    edit(files, "name: other-", "name: ")
    edit(files, "400B", "900T")
    with pytest.raises(InfeasibleError, match=r"the goal is that of .*plan\.json") as caught:
        resolve(files)
    assert caught.value.hint and f"diloco plan -f {files} forgets that goal" in caught.value.hint
    edit(files, "900T", "400B")
    assert resolve(files, anew=True).plan.goal == Goal()


@pytest.mark.parametrize("text", ['{"terraform": 1}', "[" * 1000, "notes"])
def test_a_file_of_somebody_elses_stays(files: Path, text: str) -> None:
    there = files.with_name("plan.json")
    there.write_text(text)
    assert "the plan is not kept in" in kept(resolve(files))[0]
    assert there.read_text() == text


def test_a_plan_that_was_saved_there_stays_too_and_one_that_was_changed_is_made_anew(files: Path) -> None:
    there, found = files.with_name("plan.json"), resolve(files)
    save_plan(found.plan, there)
    assert "another file has this name" in kept(found)[0] and not resolve(files).is_kept
    there.unlink()
    kept(found)
    edit(there, '"int8"', '"int4"')
    assert "was changed after it was made" in resolve(files).how
    assert not kept(resolve(files)) and resolve(files).is_kept


def test_a_folder_that_cannot_be_written_to_does_no_harm(files: Path) -> None:
    found = replace(resolve(files), place=files.parent / "gone" / "plan.json")
    assert "the next command makes it again" in kept(found)[0]


def test_a_plan_with_another_inventory_is_not_the_runs(files: Path) -> None:
    shutil.copy(files.with_name("machines.yaml"), files.with_name("b.yaml"))
    assert resolve(files, inventory=files.with_name("b.yaml")).place is None
    assert resolve(files, inventory=files.with_name("machines.yaml")).place == files.with_name("plan.json")
    other = files.rename(files.with_name("other.yaml"))
    assert resolve(other).place == files.with_name("other.yaml.plan.json")


def test_two_run_files_of_one_stem_have_a_plan_each(files: Path) -> None:
    other = files.with_name("run.yml")
    shutil.copy(files, other)
    edit(other, "500B", "400B")
    kept(resolve(files))
    kept(resolve(other))
    assert resolve(files).is_kept and resolve(other).is_kept


@pytest.mark.parametrize("name", ["run.yaml", "a.yaml", "run.yml"])
def test_a_kept_plan_is_launched_only_while_its_run_file_says_the_same(files: Path, name: str) -> None:
    file = files.rename(files.with_name(name))
    edit(file, "train:", "sync: {every: 40}\ntrain:")
    made = resolve(file)
    kept(made)
    assert made.place and resolve(made.place).digest == made.digest
    edit(file, "train:", "# a line above\ntrain:")
    assert resolve(made.place).digest == made.digest
    edit(file, "every: 40", "every: 80")
    with pytest.raises(UsageError, match=r"settings changed since .*: sync.every 40 -> 80$") as e:
        resolve(made.place)
    assert e.value.hint and e.value.hint.startswith(f"diloco launch -n {file}")
    edit(file, "every: 80", "every: 40")
    edit(files.with_name("machines.yaml"), "gs://my-bucket", "gs://other")
    with pytest.raises(UsageError, match=r"beside it now: inventory changed since [\d:]+$"):
        resolve(made.place)
    with pytest.raises(UsageError, match="launched exactly as it is"):
        resolve(made.place, ["train.tokens=1"])
    file.unlink()
    assert resolve(made.place).digest == made.digest, "what a plan was made of need not be there"


def test_what_set_made_is_kept_nowhere(files: Path) -> None:
    mine = resolve(files, goal=Goal("cost"), anew=True)
    kept(mine)
    for anew in (True, False):
        other = resolve(files, ["train.tokens=400B"], goal=Goal(), anew=anew)
        assert other.digest != mine.digest and "made now with --set, so it is not kept" in other.told()
        assert keep(other, print) is False
    assert resolve(files).digest == mine.digest
