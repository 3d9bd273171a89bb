"""What would stop a run is found before anything is written, by `plan`, `launch -n` and `launch` alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diloco_cli.cli import jobs, preflight
from diloco_cli.cli.preflight import Preflight, crowded_disk, planned_epochs, refuse_stores
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import (
    DataSettings,
    Inventory,
    ModelSettings,
    RegionSettings,
    RunSettings,
    StoreSettings,
)
from diloco_cli.corpus.indexing import index_shards
from diloco_cli.engines.port import JobSpec
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.launch.plan_files import read_plan
from diloco_cli.plan.flow import GB
from diloco_cli.plan.memory import model_facts
from diloco_cli.quantities import format_size
from diloco_cli.signing import Secret
from diloco_cli.store.open import open_store
from diloco_cli.store.port import StoreGoneError
from tests.cli.conftest import Diloco, called, copied, edit


@pytest.mark.parametrize("bucket", ["my-bucket-of-models", "my-bucket2", "my-buckets"])
def test_a_bucket_whose_name_begins_like_the_templates_is_ones_own(bucket: str) -> None:
    refuse_stores(Inventory(StoreSettings(f"gs://{bucket}/runs")), Path())
    with pytest.raises(UsageError, match="the template's"):
        refuse_stores(Inventory(StoreSettings("gs://my-bucket/runs")), Path())


def test_a_bucket_on_a_disk_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    project, disk = tmp_path / "project", tmp_path / "disk"
    for place in (project / "new/bucket", project / "bucket", tmp_path / "bucket"):
        refuse_stores(Inventory(StoreSettings(place.as_uri())), project)
    unmounted = Inventory(StoreSettings((disk / "runs").as_uri()))
    with pytest.raises(UsageError, match=f"{disk} does not exist") as refused:
        refuse_stores(unmounted, project)
    assert f"mkdir -p {disk}" in (refused.value.hint or "")
    region = Inventory(
        StoreSettings((project / "bucket").as_uri()), regions={"eu": RegionSettings(unmounted.store.url)}
    )
    with pytest.raises(UsageError, match=r"regions\.eu\.store: "):
        refuse_stores(region, project)
    disk.mkdir()
    refuse_stores(unmounted, project)


def test_a_run_that_will_fill_the_disk_of_its_store_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied("quickstart", tmp_path / "q")
    plan = read_plan(tmp_path / "q" / "run.yaml")
    needed = int(plan.money.storage_gb_at_end * GB)
    free = {"q": needed}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.name]))
    assert crowded_disk(plan) is None
    free["q"] = 10**6
    said = str(crowded_disk(plan))
    assert (
        f"up to {format_size(needed)}; 1 MB are free in {tmp_path / 'q'}" in said and "retention.rounds, now 64" in said
    )
    (tmp_path / "q" / "bucket" / "quickstart").mkdir(parents=True)  # what it holds already is not known
    assert crowded_disk(plan) is None
    bucket = replace(plan, inventory=replace(plan.inventory, store=StoreSettings("gs://bucket/runs")))
    assert crowded_disk(bucket) is None

    def refuse(place: Path) -> bool:
        raise PermissionError(place)

    monkeypatch.setattr(Path, "exists", refuse)  # it lies in another user's folder: the store says so
    assert crowded_disk(plan) is None


@pytest.mark.parametrize("vocabulary", [256, 1999, 2000])
def test_shards_fit_the_model_of_a_plan_or_are_refused(tmp_path: Path, vocabulary: int) -> None:
    """Of a preset, and of a Hugging Face config."""
    (tmp_path / "a.bin").write_bytes((np.arange(100_000) % 2000).astype("<u2").tobytes())
    index_shards(open_store(tmp_path.as_uri()))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    facts = model_facts(ModelSettings("gpt-pico"))
    for model in (
        ModelSettings("gpt-pico", vocabulary=vocabulary),
        ModelSettings(None, huggingface=str(tmp_path)),
    ):
        run = RunSettings("x", model=model, data=DataSettings(tokens=tmp_path.as_uri(), held_out=0.2))
        if vocabulary >= 2000:
            assert "100k tokens" in str(planned_epochs(run, facts, tmp_path))
            continue
        with pytest.raises(UsageError, match=f"vocabulary of {vocabulary} is too small: .* up to 1999"):
            planned_epochs(run, facts, tmp_path)


def test_a_plan_misses_shards_that_are_not_there(tmp_path: Path) -> None:
    facts = model_facts(ModelSettings("gpt-pico"))
    run = RunSettings("x", model=ModelSettings("gpt-pico"), data=DataSettings(tokens=tmp_path.as_uri()))
    with pytest.raises(NotFoundError, match=r"no index\.json"):
        planned_epochs(run, facts, tmp_path)
    gone = replace(run, data=DataSettings(tokens=f"{tmp_path.as_uri()}/gone"))
    with pytest.raises(StoreGoneError, match="no such directory") as raised:
        planned_epochs(gone, facts, tmp_path)
    assert "diloco data tokenize FILES -o" in str(raised.value.hint)
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 100)
    index_shards(open_store(tmp_path.as_uri()))
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataCheckError, match="is missing"):
        planned_epochs(run, facts, tmp_path)


def checks(change: Callable[[str], str] = lambda text: text, **given: Any) -> Callable[[Path], list[tuple[str, bool]]]:
    """What fails of the quickstart with this inventory, and whether only here."""

    def failing(folder: Path) -> list[tuple[str, bool]]:
        copied("quickstart", folder / "q")
        (folder / "q" / "inventory.yaml").write_text(change((folder / "q" / "inventory.yaml").read_text()))
        found = Preflight(read_plan(folder / "q" / "run.yaml"), folder / "q", **given)
        return [(str(error), here) for error, here in found.problems(lambda line: None)]

    return failing


def test_jobs_are_checked_as_they_will_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_slurm(text: str) -> str:
        return text.replace("accel", "infra: slurm/x\n    accel")

    asked: list[JobSpec] = []
    monkeypatch.setattr(jobs, "check_jobs", asked.extend)
    assert not checks(on_slurm, submits=False)(tmp_path / "edited") and not asked
    assert not checks(on_slurm, syncer_here=True)(tmp_path)
    assert asked and not [spec for spec in asked if spec.unit.startswith("syncer") or spec.key]
    monkeypatch.setattr(jobs, "signing_secret", lambda: Secret("o" * 32, "here"))
    assert not checks(on_slurm)(tmp_path / "signed") and asked[-1].key


def test_presets_and_large_models_are_not_tried() -> None:
    presets = RunSettings("x", model=ModelSettings("gpt-nano"), data=DataSettings("python-stdlib"))
    own = replace(presets, model=ModelSettings(None, entrypoint="model:build"))
    assert not presets.is_worth_a_try(1000)
    assert own.is_worth_a_try(1000) and not own.is_worth_a_try(10**9)


@pytest.mark.parametrize("device", ["A100-SXM-80GB", "RTX-4090:2"])
def test_a_device_that_torch_does_not_see_here_is_missed_before_any_learner_starts(tmp_path: Path, device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has such devices")
    failing = checks(lambda text: text.replace("cpu:1", device, 1))
    ((said, is_of_here),) = failing(tmp_path)
    assert "does not see on this machine" in said and "iowa" in said and is_of_here
    assert not checks(lambda text: text.replace("cpu:1", device, 1), starts=False)(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("url", "variable", "value", "said", "place"),
    [
        ("gs://bucket/runs", "GOOGLE_APPLICATION_CREDENTIALS", "nowhere.json", "No such file", "home"),
        ("gs://bucket/runs", "GOOGLE_APPLICATION_CREDENTIALS", __file__, "cannot be read", "region"),
        ("s3://bucket/runs", "AWS_PROFILE", "nobodys", "nobodys", "home"),
    ],
)
def test_credentials_that_are_named_and_cannot_be_read_are_refused_before_a_service_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, variable: str, value: str, said: str, place: str
) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)

    def at(text: str) -> str:
        if place == "home":
            return re.sub(r"url: [^,}\n]+", f"url: {url}", text, count=1)
        return re.sub(r"europe-west4: \{\}", f"europe-west4: {{store: {url}}}", text)

    ((told, is_of_here),) = checks(at)(tmp_path)
    assert said in told and variable in told and is_of_here


def test_a_hook_that_is_not_there_is_refused_and_a_silent_webhook_said(tmp_path: Path) -> None:
    ((told, is_of_here),) = checks(on_event="no-such-command --x")(tmp_path)
    assert "no command 'no-such-command' here" in told and is_of_here
    said: list[str] = []
    found = Preflight(read_plan(tmp_path / "q" / "run.yaml"), tmp_path, webhook="http://127.0.0.1:9/token-canary")
    assert not list(found.problems(said.append))
    assert said and "127.0.0.1 does not answer" in said[0] and "canary" not in said[0]


@pytest.mark.parametrize("words", [("plan", "-f", "own/run.yaml", "--fast"), ("launch", "own/run.yaml", "-n")])
def test_the_models_first_step_fails_in_a_plan_as_in_a_launch(
    diloco: Diloco, tmp_path: Path, words: tuple[str, ...]
) -> None:
    copied("own-model", tmp_path / "own")
    edit(tmp_path / "own" / "model.py", "targets.flatten())", 'targets.flatten(), reduction="none")')
    done = diloco(*words)
    assert done.returncode == 2 and "must return the mean loss" in done.stderr, done.stderr


class Odd(nn.Module):
    """A buffer that training changes, one that it does not, and one of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mask", torch.ones(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return nn.functional.cross_entropy(self.norm(self.table(tokens).flatten(0, 1)), targets.flatten())


class Detached(Odd):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets).detach()


class Elsewhere(Odd):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such device")


class Absent:
    """Its files are on the islands' machines."""

    def batch(self, *at: int) -> Any:
        raise FileNotFoundError("/scratch/tokens.bin")

    held_out = batch


class Here(Absent):
    def batch(self, *at: int) -> Any:
        return torch.ones(4, 8).long(), torch.ones(4, 8).long()

    def held_out(self, num_sequences: int) -> Any:
        yield self.batch()


class Unread:
    """All that islands of own loops need of the run's data."""

    def held_out(self, num_sequences: int) -> Any:
        yield Here().batch()


def odd(folder: Path, infra: str, model: str = "Odd", data: str = "Here", **settings: Any) -> Preflight:
    """The quickstart with a model of its own, on such machines."""
    plan = read_plan(copied("quickstart", folder / "q") / "run.yaml")
    islands = tuple(replace(island, infra=infra) for island in plan.inventory.islands)
    named = {"model": ModelSettings(None, entrypoint=f"{__name__}:{model}", **settings)}
    run = replace(plan.run, **named, data=DataSettings(entrypoint=f"{__name__}:{data}"))
    return Preflight(replace(plan, run=run, inventory=replace(plan.inventory, islands=islands)), folder)


@pytest.mark.parametrize("infra", ["local", "ssh"])
def test_a_model_is_tried_where_its_code_is_whatever_machines_train_it(tmp_path: Path, infra: str) -> None:
    said, checks = list[str](), odd(tmp_path, infra)
    checks.pass_or_raise(said.append)
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert checks.tried[0].buffers == {"seen", *statistics}
    assert ", 4 buffers (such as norm.num_batches_tracked); " in said[-1] and said[-1].endswith(" 1 buffers")
    with pytest.raises(UsageError, match="the loss has no gradient"):
        odd(tmp_path / "b", infra, model="Detached").pass_or_raise(said.append)


def test_a_model_that_own_loops_train_is_tried_on_what_the_evaluator_reads(tmp_path: Path) -> None:
    said, checks = list[str](), odd(tmp_path, "loop/addressed", data="Unread")
    checks.pass_or_raise(said.append)
    assert "seen" in checks.tried[0].buffers and "cannot be tried" not in said[-1]
    odd(tmp_path / "b", "loop/addressed", model="Elsewhere", data="Unread").pass_or_raise(said.append)
    assert said[-1].endswith("where it fails for the evaluator, too, the run has no held-out loss")


def test_own_loops_may_train_a_model_in_another_way_than_a_learner_does(tmp_path: Path) -> None:
    said, checks = list[str](), odd(tmp_path, "loop/addressed", model="Detached", data="Unread")
    checks.pass_or_raise(said.append)
    assert said[-1].startswith("warning: a step of the model cannot be tried on this machine: the loss has no gradient")
    assert "only the running statistics" in said[-1] and "held-out loss" not in said[-1]


def test_what_only_other_machines_have_is_no_error_of_theirs(tmp_path: Path) -> None:
    said, checks = list[str](), odd(tmp_path, "ssh", data="Absent")
    checks.pass_or_raise(said.append)
    assert re.match("warning: the model cannot be tried on this machine: .*/scratch/tokens.bin; so of its", said[-1])
    assert not checks.tried
    with pytest.raises(UsageError, match="/scratch/tokens"):
        odd(tmp_path / "b", "local", data="Absent").pass_or_raise(said.append)


@pytest.mark.parametrize(("mask", "carried"), [(1.0, 4), (2.0, 5)])
def test_what_is_said_to_be_carried_counts_what_weights_bring(tmp_path: Path, mask: float, carried: int) -> None:
    said, state = list[str](), Odd().state_dict() | {"mask": torch.full((2,), mask)}
    save_file(state, tmp_path / "a.safetensors")
    odd(tmp_path, "local", initial=str(tmp_path / "a.safetensors")).pass_or_raise(said.append)
    assert f", {carried} buffers (such as " in said[-1]


def test_shards_in_a_bucket_that_does_not_answer_are_a_warning_of_plan_and_an_error_of_launch(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(quickstart / "run.yaml", "data: {preset: python-stdlib}", "data: {tokens: s3://shards/a}")
    away = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "x", "DILOCO_HOME": str(quickstart.parent / "home"),
    }  # fmt: skip
    for name, value in away.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(quickstart)
    monkeypatch.setattr(preflight, "LOOK_S", 0.2)
    assert called(monkeypatch, "plan", "-f", "run.yaml", "--fast") == 0
    assert "warning: launch would end here: " in capsys.readouterr().err
    assert called(monkeypatch, "launch", "run.yaml", "-n") == 6
    assert "s3://shards/a" in capsys.readouterr().err
