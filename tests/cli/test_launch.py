"""What `launch` refuses, warns of and starts where; with a model of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, ModelSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.local_units import devices_of, starts_elsewhere, starts_everywhere, threads_of, units_here
from diloco_cli.protocol.log.records import RegionStore
from diloco_cli.signing import Signing
from tests.cli.bucket import IOWA, NANO, RHINE
from tests.cli.conftest import Diloco, copied, edit

# -- units ------------------------------------------------------------------------------------------------------------


def names_here(region: str | None, **changes) -> list[str]:
    return [unit.name for unit in units_here(replace(NANO, **changes), "file:///b", region, str)]


def test_the_syncer_starts_in_the_home_region_also_where_no_island_lies() -> None:
    assert names_here(None) == ["iowa", "rhine", "syncer"]
    assert names_here("us", home_region="us") == ["iowa", "syncer"]
    assert names_here("eu", home_region="us") == ["rhine"]
    assert names_here("asia", home_region="asia") == ["syncer"]
    assert names_here("eu") == ["rhine", "syncer"], "with no home region, the first one"
    with pytest.raises(UsageError, match="no region 'mars'; it has: asia, eu, us"):
        names_here("mars", home_region="asia")


def test_a_region_without_the_syncer_says_where_it_is_expected() -> None:
    run = replace(NANO, home_region="us", islands=(IOWA, replace(RHINE, infra="ssh")))
    talk = "\n".join(starts_elsewhere(run, "gs://b/nano", "eu"))
    assert "rhine (ssh)" in talk and "diloco learner --run gs://b/nano --name rhine" in talk
    assert "region us, with the syncer: unless it runs already: diloco resume gs://b/nano --region us" in talk
    (other,) = starts_elsewhere(replace(NANO, home_region="us"), "gs://b/nano", "us")
    assert other == "region eu: unless it runs already: diloco resume gs://b/nano --region eu"
    assert not [*starts_elsewhere(NANO, "gs://b/nano", None)]


@pytest.mark.parametrize(("tokens", "consents"), [("gs://home/tokens", False), ("gs://far/tokens", True)])
def test_another_machine_is_told_to_consent_to_data_that_are_not_beside_the_run(tokens: str, consents: bool) -> None:
    settings = replace(NANO.settings, data=DataSettings(tokens=tokens))
    (other,) = starts_elsewhere(replace(NANO, settings=settings, home_region="us"), "gs://home/nano", "us")
    assert ("--allow-code blake3-" in other) == consents


def test_an_island_with_a_loop_of_its_owners_is_joined_in_a_script() -> None:
    run = replace(NANO, islands=(IOWA, replace(RHINE, infra="loop/addressed")))
    assert names_here(None, islands=run.islands) == ["iowa", "syncer"]
    (said,) = starts_elsewhere(run, "gs://b/nano", None)
    assert said == 'rhine (loop/addressed): in its own script: join("gs://b/nano", name="rhine", ...)'


def test_of_a_run_that_was_created_alone_everything_has_to_be_started() -> None:
    url, islands = "gs://b/nano", (IOWA, replace(RHINE, infra="loop/addressed"))
    assert [*starts_everywhere(replace(NANO, islands=islands), url)] == [
        f"the syncer, anywhere: diloco syncer --run {url}",
        f"iowa (local): start it there: diloco learner --run {url} --name iowa",
        f'rhine (loop/addressed): in its own script: join("{url}", name="rhine", ...)',
    ]


def test_what_is_started_elsewhere_has_its_regions_store_its_consent_and_its_key() -> None:
    data, model = DataSettings(tokens="gs://far/tokens"), ModelSettings(preset="gpt-pico")
    run = replace(NANO, settings=replace(NANO.settings, data=data, model=model))
    syncer, evaluates, *learners = starts_everywhere(run, "gs://b/nano")
    assert syncer.endswith("diloco syncer --run gs://b/nano") and "--allow-code blake3-" in evaluates
    assert len(learners) == 2 and all("--allow-code blake3-" in line for line in learners)
    regions = (RegionStore("eu", "s3://eu/nano"),)
    signed = replace(NANO, regions=regions, home_url="gs://b/nano", home_region="us", signing=Signing("0" * 64))
    said = "\n".join(starts_everywhere(signed, "gs://b/nano"))
    assert "diloco syncer --run gs://b/nano --allow-code blake3-" in said
    assert "diloco learner --run s3://eu/nano --name rhine" in said
    assert "diloco key request gs://b/nano syncer NAME FILE" in said
    assert "diloco key request s3://eu/nano learner rhine FILE" in said
    hosted = replace(NANO, settings=replace(NANO.settings, syncer=replace(NANO.settings.syncer, on_learners=True)))
    assert not [line for line in starts_everywhere(hosted, "gs://b/nano") if "diloco syncer" in line]


def test_cores_of_a_cpu_island_are_threads() -> None:
    assert threads_of(replace(IOWA, num_accelerators=4), 1) == 4
    assert threads_of(replace(IOWA, num_accelerators=2), 3) == 3
    assert threads_of(replace(IOWA, accelerator="H100-SXM", num_accelerators=8), 1) == 1
    four = replace(NANO, islands=(replace(IOWA, num_accelerators=4),))
    assert units_here(four, "file:///b", None, str)[0].environment["OMP_NUM_THREADS"] == "4"


def test_several_local_cuda_islands_get_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    a, b = (replace(IOWA, name=name, accelerator="H100-SXM") for name in ("a", "b"))
    warned: list[str] = []
    assert devices_of([a, IOWA, b], warned.append) == [{"CUDA_VISIBLE_DEVICES": "0"}, {}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert devices_of([a, IOWA], warned.append) == [{}, {}], "one alone sees what there is"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [found["CUDA_VISIBLE_DEVICES"] for found in devices_of([a, b], warned.append)] == ["5", "7"]
    assert not warned
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    devices_of([a, b], warned.append)
    assert warned == ["2 islands share 1 visible devices"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_region_may_have_a_bucket_of_its_own_where_learners_can_meet(diloco: Diloco, quickstart: Path) -> None:
    edit(quickstart / "inventory.yaml", "europe-west4: {}", "europe-west4: {store: memory://eu}")
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode == 2 and "regions.europe-west4.store: memory://eu lives in one process" in done.stderr
    edit(quickstart / "inventory.yaml", "memory://eu", "gs://eu/runs")
    assert diloco("launch", "q/run.yaml", "--dry-run").returncode == 0


def test_an_islands_ranks_are_told_before_they_start(diloco: Diloco, quickstart: Path) -> None:
    edit(quickstart / "inventory.yaml", "accelerators: cpu:1", "accelerators: cpu:4\n    ranks: 2", 3)
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode == 0 and done.stdout.count("2 ranks (ddp)") == 3, done.stdout + done.stderr


def test_what_no_learner_trains_on_is_refused_before_anything_starts(diloco: Diloco, quickstart: Path) -> None:
    edit(quickstart / "inventory.yaml", "accelerators: cpu:1", "accelerators: TPU-v5p:8", 3)
    done = diloco("launch", "q/run.yaml", "--dry-run")
    assert done.returncode != 0 and "learners do not train on torch's xla devices" in done.stderr, done.stderr


def test_micro_batches_are_told_where_a_batch_is_divided(diloco: Diloco, quickstart: Path) -> None:
    assert "at once" not in diloco("launch", "q/run.yaml", "--dry-run").stdout
    divided = diloco("launch", "q/run.yaml", "--dry-run", "--set", "train.micro_batch_tokens=256").stdout
    assert divided.count("local steps of 1,024 tokens, 256 at once") == 3
    wrong = diloco("launch", "q/run.yaml", "--dry-run", "--set", "train.micro_batch_tokens=200")
    assert wrong.returncode == 2 and "no whole number of sequences of 128" in wrong.stderr


def test_what_is_wrong_with_a_model_of_ones_own_is_told_as_the_users_error(diloco: Diloco, tmp_path: Path) -> None:
    folder = copied("own-model", tmp_path / "own")
    for line, says in (
        ("model:build_modle", "no attribute 'build_modle'"),
        ("modle:build_model", "No module named 'modle'"),
        ("model:VOCABULARY", "'int' object is not callable"),
        ("model:build_data", "unexpected keyword argument 'width'"),
    ):
        done = diloco("launch", "own/run.yaml", "--dry-run", "--set", f"model.entrypoint='{line}'")
        assert done.returncode == 2 and says in done.stderr, done.stderr
    edit(folder / "model.py", "def build_model", "1 / 0\n\n\ndef build_model")
    done = diloco("launch", "own/run.yaml", "--dry-run")
    assert done.returncode == 2 and "ZeroDivisionError" in done.stderr and "a bug" not in done.stderr


def test_a_model_that_cannot_be_built_without_memory_is_built_with_it(diloco: Diloco, tmp_path: Path) -> None:
    folder = copied("own-model", tmp_path / "own")
    edit(folder / "model.py", "        self.out =", "        float(self.embedding.weight.sum())\n        self.out =")
    done = diloco("launch", "own/run.yaml", "--dry-run")
    assert done.returncode == 0 and "learner iowa" in done.stdout, done.stderr


def test_a_model_of_ones_own_trains_from_another_directory(diloco: Diloco, tmp_path: Path) -> None:
    """As the README says it: an entrypoint for the model, one for the data; nothing installed, nothing exported."""
    copied("own-model", tmp_path / "own")
    done = diloco("launch", "own/run.yaml", "--json", "--set", "train.tokens=40k", DILOCO_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["state"] == "FINISHED" and data["tokens"] >= 40_000 and data["loss"] < 3.4
    again = diloco("resume", "own-model", DILOCO_HOME=str(tmp_path / "home"))
    assert again.returncode == 0 and "diloco launch RUN.yaml --set name=own-model-2" in again.stderr
