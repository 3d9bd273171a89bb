"""Commands and the buckets of regions: what a command commits itself reaches them, and a region's URL leads home."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.cli.arguments import head_of, open_run
from diloco_cli.cli.operators import operator_of
from diloco_cli.cli.run_data import check_mirrors
from diloco_cli.cli.supervision import telling
from diloco_cli.events.bucket import EventReader
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import RegionStore, encode
from diloco_cli.runtime.consent import Allowance, format_digest, remember
from diloco_cli.runtime.supervisor import SupervisionEvent
from diloco_cli.runtime.units import Kind, UnitSpec
from diloco_cli.store.local import LocalStore
from tests.simulation.regional import FAR, RegionalFleet, regional_run


def two_buckets(folder: Path) -> tuple[str, str]:
    """URLs of a finished run, as on two disks; its region's bucket has FORMAT and what was offered there. This machine
    has consented to both."""
    home_url, far_url = (folder / "home" / "toy").as_uri(), (folder / "eu" / "toy").as_uri()
    fleet = RegionalFleet(replace(regional_run(merges=4), regions=(RegionStore(FAR, far_url, 0.1),), home_url=home_url))
    fleet.start()
    fleet.finish()
    run = fleet.run
    remember(format_digest(run), run.name, Allowance(stores=(home_url, far_url)), folder)
    for place in ("home", "eu"):
        (folder / place / "toy").mkdir(parents=True)
        LocalStore(folder / place / "toy").create(FORMAT_KEY, encode(run))
    home = LocalStore(folder / "home" / "toy")
    for key in fleet.world.store.list("", limit=10_000):
        if key != FORMAT_KEY:
            home.create(key, fleet.world.store.get(key) or b"")
    for key in fleet.far.list("offer/"):
        LocalStore(folder / "eu" / "toy").create(key, fleet.far.get(key) or b"")
    return home_url, far_url


def test_a_command_that_committed_brings_it_to_every_region(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home_url, _ = two_buckets(tmp_path)
    opened = open_run(home_url)
    (before,) = check_mirrors(opened)
    assert before.ok and before.commits == 0 and before.behind > 4
    head = head_of(opened)
    operator_of(opened).tell_regions(head)
    (after,) = check_mirrors(opened)
    assert after.ok and (after.commits, after.behind) == (head.n + 1, 0)
    assert LocalStore(tmp_path / "eu" / "toy").get(commit_key(head.n)) == opened.store.get(commit_key(head.n))
    assert capsys.readouterr().out == "", "what --json prints stays one object"


def test_a_regions_url_leads_commands_home_but_not_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home_url, far_url = two_buckets(tmp_path)
    assert open_run(far_url).url == home_url
    assert f"{far_url} follows the home bucket: reading {home_url}" in capsys.readouterr().err
    assert open_run(far_url, at_home=False).url == far_url
    assert json.loads((tmp_path / "eu" / "toy" / "FORMAT.json").read_text())["home_url"] == home_url


@pytest.mark.parametrize(("kind", "place"), [("learner", "eu"), ("syncer", "home")])
def test_a_supervision_tells_the_home_bucket_where_it_serves_the_run_else_the_regions(
    tmp_path: Path, kind: Kind, place: str
) -> None:
    _, far_url = two_buckets(tmp_path)
    opened = open_run(far_url, at_home=False)
    with telling(opened, [UnitSpec("l1", kind, ("true",))], lambda event: None) as tell:
        tell(SupervisionEvent("failed", "l1", "it ended too often"))
    places = {name: EventReader().read(LocalStore(tmp_path / name / "toy")) for name in ("home", "eu")}
    assert [event.kind for event in places.pop(place)] == ["gave_up"] and places.popitem()[1] == []
