"""Who uses which bucket, as FORMAT says it, and what is refused before a run with several comes into being."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.config.inventory_file import inventory_to_text, load_inventory
from diloco_cli.errors import UsageError
from diloco_cli.launch.new_run import create_in_region, differences, refuse_another_run
from diloco_cli.launch.plan_files import region_fields
from diloco_cli.learner.daemon import refuse_another_regions_bucket
from diloco_cli.protocol.log.commit_log import parse_format
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import Island, RegionStore, RunFormat, encode
from diloco_cli.runtime.units import units_here
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import RUN

TEXT = """version: 1
store: {url: "gs://home/runs", region: us}
regions:
  us: {egress: 0.12/GB}
  eu: {store: "s3://far/runs", egress: 0.09/GB}
  asia: {}
  sea: {store: "gs://home/runs"}
islands:
  - {name: iowa, region: us, accelerators: "cpu:1"}
  - {name: belgium, region: eu, accelerators: "cpu:1"}
"""
HOME, FAR = "gs://home/runs/nano", "s3://far/runs/nano"
IOWA, BELGIUM = (Island(n, r, 64, 4, 1.0, 1.0) for n, r in (("iowa", "us"), ("belgium", "eu")))


def regional() -> RunFormat:
    own = (RegionStore("eu", FAR, 0.09),)
    return replace(RUN, name="nano", islands=(BELGIUM, IOWA), home_region="us", regions=own, home_url=HOME)


def test_format_says_which_regions_have_a_bucket_and_what_leaving_costs(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(TEXT)
    inventory = load_inventory(path)
    assert region_fields(inventory, HOME, "nano") == {
        "regions": (RegionStore("eu", FAR, 0.09),),  # asia and sea use the home bucket
        "home_url": HOME,
        "home_egress_per_gb": 0.12,
    }
    again = tmp_path / "again.yaml"
    again.write_text(inventory_to_text(inventory, {}))
    assert load_inventory(again).regions == inventory.regions
    path.write_text(TEXT.replace('store: "s3://far/runs", ', ""))
    assert region_fields(load_inventory(path), HOME, "nano") == {}


def test_format_with_regions_survives_the_wire_and_another_bucket_is_another_run() -> None:
    run = regional()
    assert parse_format(encode(run), "here") == run
    moved = replace(run, regions=(RegionStore("eu", "s3://near/runs/nano", 0.09),))
    assert differences(run, moved) == [f"regions.eu ({FAR} there, s3://near/runs/nano here)"]
    assert differences(run, replace(run, regions=(RegionStore("eu", FAR, 0.5),))) == [], "prices may change"


def test_each_unit_is_started_with_its_own_bucket_wherever_the_run_was_found() -> None:
    for found_at in (HOME, FAR):
        units = {unit.name: unit.command for unit in units_here(regional(), found_at, None, str)}
        urls = {name: next(w for w in words if "://" in w).removeprefix("--run=") for name, words in units.items()}
        assert urls == {"iowa": HOME, "belgium": FAR, "syncer": HOME}


def test_a_learner_refuses_another_regions_bucket_and_takes_one_that_nobody_names() -> None:
    run = regional()
    refuse_another_regions_bucket(run, IOWA, HOME)
    refuse_another_regions_bucket(run, BELGIUM, FAR)
    refuse_another_regions_bucket(run, BELGIUM, "s3://the-same-by-another-name/nano")
    refuse_another_regions_bucket(replace(run, regions=(), home_url=None), BELGIUM, HOME)
    for island, wrong, right in ((BELGIUM, HOME, FAR), (IOWA, FAR, HOME)):
        with pytest.raises(UsageError, match="another bucket of this run") as refused:
            refuse_another_regions_bucket(run, island, wrong)
        assert refused.value.hint == f"diloco learner --run {right} --name {island.name}"


def test_a_region_gets_homes_format_and_never_in_place_of_anothers() -> None:
    run, home, there = regional(), MemoryStore(), MemoryStore()
    home.create(FORMAT_KEY, encode(run))
    refuse_another_run(home, there, run, run.regions[0])
    create_in_region(home, there, run, run.regions[0])
    create_in_region(home, there, run, run.regions[0])
    assert there.get(FORMAT_KEY) == encode(run)
    refuse_another_run(home, there, run, run.regions[0])
    fresh = MemoryStore()
    for step in (refuse_another_run, create_in_region):
        with pytest.raises(UsageError, match="another run named 'nano' lies in the bucket of region eu"):
            step(fresh, there, run, run.regions[0])
        fresh.create(FORMAT_KEY, encode(replace(run, run_id="other")))
