"""What this machine's environment says of a syncer, for a plan whose inventory does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.settings import Inventory, StoreSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.plan_files import as_used_here, read_plan, refuse_stores
from diloco_cli.plan.link import machine_of
from diloco_cli.store.open import CONNECTIONS_VARIABLE

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
