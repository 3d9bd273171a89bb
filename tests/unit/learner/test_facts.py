"""What a learner's process says of itself: in its log, and in its heartbeats."""

from __future__ import annotations

import pytest

from diloco_cli.learner.daemon import Facts
from diloco_cli.protocol.log.records import RunFormat
from tests.unit.protocol.integer_ports import UnitTraining, WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import applied, make_run, with_inner

RUN = make_run(fragments=1)


@pytest.mark.parametrize(
    ("run", "merged_by", "moments"),
    [
        (RUN, None, "new"),
        (RUN, "l1", "none yet, warming up"),
        (RUN, "l0", "lost, warming up anew"),
        (with_inner(RUN, name="sgd"), "l0", "none"),
    ],
)
def test_it_says_how_it_joins(
    run: RunFormat, merged_by: str | None, moments: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log = WrittenLog(run)
    if merged_by is not None:
        log.merge(90, applied(merged_by))
    living = Living(log, UnitTraining(1, keeps_moments=run.settings.train.inner.name != "sgd"))
    Facts("l0").began(living.learner)
    said = "".join(capfd.readouterr())
    start, incarnation = (8, 2) if merged_by == "l0" else (0, 1)
    assert (
        f"l0: incarnation {incarnation} of run toy joins at commit {log.state.n}, data from token {start}, inner"
        in said
    )
    assert said.strip().endswith(f"inner moments {moments}")


def test_it_says_where_the_run_went_back_to_and_what_cannot_be_read(capfd: pytest.CaptureFixture[str]) -> None:
    living, facts = Living(WrittenLog(RUN)), Facts("l0")
    facts.rolled_back(living.learner, 7)
    living.learner.saves.add("somewhere", 0)
    facts.rolled_back(living.learner, 9)
    facts.missed("version 0 of fragment 1 cannot be read")
    lines = "".join(capfd.readouterr()).splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "l0: the run went back to commit 7, inner moments new",
        "l0: the run went back to commit 9, inner moments from before",
        "l0: version 0 of fragment 1 cannot be read; waits for its successor",
    ]


def test_its_first_step_is_worth_a_line_and_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    facts = Facts("l0")
    for _ in range(3):
        facts.stepped(0, 4)
    assert "".join(capfd.readouterr()).count("made its first step") == 1


def test_rates_are_of_its_busy_time_and_what_the_exchange_takes_is_told() -> None:
    """Two steps of 1 s on 100 tokens, half a second of exchange, a wait of 1.5 s: 200 tokens in 4 s."""
    facts = Facts("l0")
    found = facts.heartbeat(0.25)
    assert (found["tokens_per_s"], found["mean_tokens_per_s"], found["blocked_percent"]) == (0.0, 0.0, 0.0)
    assert found["note"] == "in its first step: 25% of the batch"
    for between in (("offer", 0.5), ("wait", 1.5)):
        facts.stepped(0, 100)
        facts.took("step", 1.0)
        facts.took(*between)  # type: ignore[arg-type]
    found = facts.heartbeat(0.25)
    assert (found["tokens_per_s"], found["mean_tokens_per_s"], found["blocked_percent"]) == (100.0, 50.0, 50.0)
    assert "note" not in found


def test_what_steps_waited_for_their_data_is_a_share_of_the_steps() -> None:
    """The first opens the data: neither its wait nor its time counts."""
    facts = Facts("l0")
    assert facts.heartbeat(0.0, 0.0)["data_percent"] is None, "no step has ended"
    for seconds in (50.0, 1.0, 1.0):
        assert facts.heartbeat(0.0, 0.0)["data_percent"] in (None, 0.0)
        facts.took("step", seconds)
    facts.took("wait", 1.0)
    assert facts.heartbeat(0.0, 0.01)["data_percent"] == 0.5
    assert facts.heartbeat(0.0)["data_percent"] is None, "a loop of its user's own reads its data itself"


def test_shares_of_time_are_of_the_last_minute_however_long_it_has_run() -> None:
    """Two hours without a wait; then the disk and the link become slow; then all is well again."""
    facts, data_s = Facts("l0"), 0.0

    def minutes(number: int, blocked: float, waits: float) -> tuple[float, float]:
        nonlocal data_s
        found = {}
        for _ in range(20 * number):
            facts.took("step", 3.0 * (1.0 - blocked))
            facts.took("offer", 3.0 * blocked)
            data_s += 3.0 * (1.0 - blocked) * waits
            found = facts.heartbeat(0.0, data_s)
        return found["blocked_percent"], found["data_percent"]

    assert minutes(120, 0.0, 0.0) == (0.0, 0.0)
    assert minutes(2, 0.5, 0.4) == pytest.approx((50.0, 40.0))
    assert minutes(2, 0.0, 0.0) == (0.0, 0.0)
