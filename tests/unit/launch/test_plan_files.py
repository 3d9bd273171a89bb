"""What a plan reads beside the run file: this machine's environment, and a user's own data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, Inventory, ModelSettings, RunSettings, StoreSettings
from diloco_cli.corpus.indexing import index_shards
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.launch.plan_files import as_used_here, planned_epochs, read_plan, refuse_stores
from diloco_cli.plan.link import machine_of
from diloco_cli.plan.memory import model_facts
from diloco_cli.store.open import CONNECTIONS_VARIABLE, open_store
from diloco_cli.store.port import StoreGoneError

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


@pytest.mark.parametrize("bucket", ["my-bucket-of-models", "my-bucket2", "my-buckets"])
def test_a_bucket_whose_name_begins_like_the_templates_is_ones_own(bucket: str) -> None:
    refuse_stores(Inventory(StoreSettings(f"gs://{bucket}/runs")))
    with pytest.raises(UsageError, match="the template's"):
        refuse_stores(Inventory(StoreSettings("gs://my-bucket/runs")))


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
