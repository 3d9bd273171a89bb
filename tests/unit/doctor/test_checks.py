"""Single checks: listings, clocks, the cost of what is kept, the roles that credentials fit."""

from __future__ import annotations

import pytest

from diloco_cli.doctor import checks
from diloco_cli.doctor.checks import Place, finding_of, monthly_cost, retention_finding, skew_finding
from diloco_cli.store.bucket import Retention
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import ObjectStat, Store
from diloco_cli.store.wrappers import Deadline
from tests.unit.doctor import broken_stores as broken

URL = "memory://examined"


def place_in(store: Store, seconds: float = 10) -> Place:
    return Place(lambda: store, URL, Deadline(seconds))


def test_listings_that_never_show_what_was_written_fail_and_late_ones_are_warned_of() -> None:
    with pytest.raises(checks.PromiseBrokenError, match="0 of 20"):
        checks.list_after_write(place_in(broken.ListsLate(), seconds=0.5))

    class ListsAfterAWhile(MemoryStore):
        looks = 0

        def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
            self.looks += 1
            return super().list(prefix, after, limit) if self.looks > 2 else []

    assert checks.list_after_write(place_in(ListsAfterAWhile())).level == "warn"


@pytest.mark.parametrize(
    ("modified_s", "level", "said"),
    [
        (1000.5, "pass", "within 1 s"),
        (999.0, "pass", "within 1 s"),  # a store that tells whole seconds
        (1004.0, "pass", "within 3 s"),
        (1061.0, "warn", "60 s ahead of"),
        (940.0, "warn", "60 s behind"),
        (2801.0, "warn", "30 min ahead of"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_lies_outside_of_the_write(modified_s: float, level: str, said: str) -> None:
    found = skew_finding(ObjectStat("k", 1, modified_s), before_s=1000.0, after_s=1001.0)
    assert (found.level, said in found.detail) == (level, True)
    assert ("refused" in found.hint) == (abs(modified_s - 1000) > 300)


def test_what_is_kept_for_a_week_costs_seven_days_of_writing() -> None:
    assert monthly_cost(100, 7 * 86_400) == pytest.approx(100 * 7 * 0.02)  # $14
    week = retention_finding(Retention(604_800, "turn it off"), 1000.0)
    assert week.level == "warn" and "$140.00 a month for this run's 1 TB a day" in week.detail
    assert "7 d" in week.detail and "turn it off" in week.hint
    assert retention_finding(Retention(0, ""), 1000.0).level == "pass"
    assert "until it is removed for good" in retention_finding(Retention(None, "x"), None).detail


@pytest.mark.parametrize(
    ("allowed", "level", "said"),
    [
        (("create", "read", "overwrite", "list", "delete"), "pass", "a learner and a syncer"),
        (("create", "read", "list", "delete"), "warn", "a learner and a syncer"),
        (("create", "read", "list"), "warn", "enough for a learner"),
        (("create", "read"), "warn", "not enough for a run"),
        (("read", "list"), "warn", "not enough for a run"),
        ((), "warn", "nothing: not enough"),
    ],
)
def test_credentials_fit_the_roles_whose_needs_they_cover(allowed: tuple[str, ...], level: str, said: str) -> None:
    found = finding_of(allowed)
    assert (found.level, said in found.detail) == (level, True)
    assert ("no heartbeats" in found.hint) == ("overwrite" not in allowed)
