"""What a learner's process and a user's loop are told of an island that is not theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.learner.daemon import refuse_another_regions_bucket, refuse_own_loop
from diloco_cli.protocol.log.records import RegionStore
from tests.unit.protocol.records import RUN

HOME, EU = "gs://home/toy", "gs://eu/toy"
OWN = replace(RUN.islands[0], region="eu", infra="loop/addressed")


def test_diloco_learner_trains_no_island_with_a_loop_of_its_owners() -> None:
    with pytest.raises(UsageError, match=r"trained by a loop of its own \(infra: loop/addressed\)") as caught:
        refuse_own_loop(RUN, OWN, HOME)
    assert caught.value.hint == f'in its own script: join("{HOME}", name="{OWN.name}", ...)'
    refuse_own_loop(RUN, RUN.islands[0], HOME)


@pytest.mark.parametrize(
    ("infra", "hint"),
    [("ssh", f"diloco learner --run {EU} --name "), ("loop/external", f'in its own script: join("{EU}", name="')],
)
def test_an_island_at_another_regions_bucket_is_told_its_own(infra: str, hint: str) -> None:
    run = replace(RUN, regions=(RegionStore("eu", EU),), home_url=HOME)
    with pytest.raises(UsageError, match="learners use another bucket") as caught:
        refuse_another_regions_bucket(run, replace(OWN, infra=infra), HOME)
    assert (caught.value.hint or "").startswith(hint)
