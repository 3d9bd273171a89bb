"""Samples of the study of gaps. The full one is a command: python -m tests.studies.gaps."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from diloco_cli.protocol.log.commits import Commit, Merge, Refuse
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, Offer, Outcome
from tests.studies import gaps
from tests.studies.gaps import HEADER, account, max_gap_s
from tests.studies.launched import BATCH_TOKENS


def commit(at_s: float, *learners: str, outcomes: tuple[Outcome, ...] = (), seq: int = 0) -> Commit:
    """A merge of the offers `seq` of these learners; of none, a refusal."""
    inputs = tuple(MergedOffer(name, 1, seq, 0, 0, 0, 0, 0, 1.0, "", 0, norm=1.0) for name in learners)
    time = datetime.fromtimestamp(at_s, UTC).isoformat()
    if not inputs:
        return Refuse(time=time, outcomes=outcomes)
    return Merge(slot=0, time=time, inputs=inputs, outputs=(FragmentVersion(0, 0, 0, 1, "", ""),), outcomes=outcomes)


def offer(seq: int, fragment: int, start: int, end: int) -> Offer:
    """Of steps number `start` to `end`."""
    data = (BATCH_TOKENS * start, BATCH_TOKENS * end)
    return Offer("l0", 1, seq, seq, fragment, 0, "", *data, data[1] - data[0], end - start, "", 0, "")


def test_a_gap_lies_between_two_merges_of_one_learner_once_all_have_taken_part() -> None:
    everybody = ("l0", "l1", "l2")
    log = [commit(0, "l0"), commit(60, *everybody), commit(61, "l0", "l1"), commit(64, "l0"), commit(65, *everybody)]
    assert [max_gap_s(log, (name,)) for name in everybody] == [3.0, 4.0, 5.0]
    assert max_gap_s(log, everybody) == 5.0
    assert max_gap_s(log[:1], everybody) == 0.0


def test_every_step_is_merged_late_refused_or_given_up_of_each_fragment() -> None:
    """Fragment 0: three steps merged, two given up, one refused. Fragment 1: five late, one given up."""
    offers = [offer(0, 0, 0, 3), offer(1, 1, 0, 5), offer(2, 0, 5, 6)]
    log = [commit(0, "l0", outcomes=(Outcome("l0", 1, 1, 1, "late"), Outcome("l0", 1, 2, 0, "bad_payload")))]
    found = account(offers, log, ("l0",))
    assert found.told == {("l0", BATCH_TOKENS * step): 1 for step in range(6)}
    assert (found.merged, found.late, found.refused, found.given_up) == (3 / 4, 5 / 4, 1 / 4, (2 + 1 + 2 * 6) / 4)
    assert account(offers, log, ("l1",)).told.total() == 0


@pytest.mark.long
def test_a_killed_learner_leaves_no_step_unaccounted_for() -> None:
    row = gaps.study("rebase", gaps.FAULTS[1], rounds=4)
    assert row.violations == () and row.gap_s > 0 and row.found.merged > 0
    assert row.text(1.0).count("|") == HEADER.partition("\n")[0].count("|")
