"""Tables of prices in SkyPilot's shape: what can be rented by them, and what is refused with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.prices import EXAMPLE, Rentable, load_prices
from diloco_cli.errors import NotFoundError, UsageError

HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,Price,SpotPrice,Region,AvailabilityZone,Currency\n"
H100 = Accelerators("H100-SXM", 8)


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    return path


def test_a_row_is_a_machine_on_demand_and_one_as_spot(tmp_path: Path) -> None:
    rows = "big,H100,8.0,192,55.04,11.5,US_East,use1-az1,USD\ncpu,,,4,0.2,,us,,\nlone,H100,8,192,,9,eu-1,,usd\n"
    found = load_prices(table(tmp_path, f"# of 2026\n{HEAD}{rows}"), {})
    assert found.left_out == ()
    assert found.listed == (
        Rentable("big", H100, "us-east", "use1-az1", 55.04),
        Rentable("big", H100, "us-east", "use1-az1", 11.5, spot=True),
        Rentable("lone", H100, "eu-1", "", 9.0, spot=True),
    )


def test_columns_come_in_any_order_and_the_rate_of_interruptions_is_of_spot_machines(tmp_path: Path) -> None:
    text = "Region,Price,InterruptionsPerDay,SpotPrice,AcceleratorCount,GpuInfo,AcceleratorName,InstanceType\n"
    on_demand, spot = load_prices(table(tmp_path, text + "us,3,4,1,8,\"{'a': 1, 'b': 2}\",h100,big\n"), {}).listed
    assert (on_demand.interruptions_per_day, spot.interruptions_per_day) == (None, 4.0)
    (_, never) = load_prices(table(tmp_path, text + 'us,3,0,1,8,"{""a"": 1}",h100,big\n'), {}).listed
    assert never.interruptions_per_day == 0


def test_what_is_no_machine_with_whole_known_accelerators_is_left_out_and_said(tmp_path: Path) -> None:
    rows = "a,H1000,8,,3,,us,,\nb,L4,0.5,,3,,us,,\n,L4,1,,3,,us,,\nc,L4,1,,3,,us,,\n"
    found = load_prices(table(tmp_path, HEAD + rows), {})
    assert [machine.instance for machine in found.listed] == ["c"]
    unknown, alone, part = found.left_out
    assert ":2: unknown device 'H1000'; nearest: H100" in unknown
    assert alone.endswith(": 1") and part == "rows with a part of an accelerator: 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the table of prices is empty"),
        ("# nothing\n\n", r"the table of prices is empty"),
        ("InstanceType,Region,Acceleratorcount\n", r":1: .* no column AcceleratorName and no AcceleratorCount and no"),
        (HEAD, r"no row has a machine"),
        (HEAD + "a,,,,3,,us,,\n", r"no row has a machine"),
        (HEAD + "a,H1000,8,,3,,us,,\n", r"no row has .*:2: unknown device 'H1000'; nearest: H100"),
        (HEAD + "a,H100,8,,0,,us,,\n", r":2: Price must be a number above 0, not '0'"),
        (HEAD + "#\n\na,H100,8,,-3,,us,,\n", r":4: Price must be a number above 0, not '-3'"),
        (HEAD + "a,H100,8,,3,€1,us,,\n", r":2: SpotPrice must be a number above 0, not '€1'"),
        (HEAD + "a,H100,8,,nan,,us,,\n", r":2: Price must be"),
        (HEAD + "a,H100,-8,,3,,us,,\n", r":2: AcceleratorCount must be"),
        (HEAD + "a,H100,8,,3,,,,\n", r":2: the Region is missing"),
        (
            HEAD + 'a,H100,8,,3,,us,,\nb,H100,8,,3,,"us,,\nc,H100,8,,3,,us",,\n',
            r":3: this is no row of a CSV: unexpected end",
        ),
        (HEAD + f"a,H100,8,{'9' * 200_000},3,,us,,\n", r":2: this is no row of a CSV: field larger"),
        (
            f"{HEAD.strip()},InterruptionsPerDay\na,H100,8,,3,,us,,,-1\n",
            r":2: Inter.* a number of at least 0, not '-1'",
        ),
        (HEAD + "a,H100,8,,3,,us,,EUR\nb,H100,8,,3,,us,,USD\n", r"several currencies: EUR \(.*:2\), USD \(.*:3\)"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_prices(table(tmp_path, text), {})


def test_a_table_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such table of prices"):
        load_prices(tmp_path / "missing.csv", {})
    with pytest.raises(UsageError, match="cannot read the prices"):
        load_prices(tmp_path, {})


def test_the_table_that_is_shipped_is_read_whole_and_says_its_date() -> None:
    found = load_prices(EXAMPLE, {})
    assert found.left_out == () and len(found.listed) > 20
    assert re.search(r"read on 20\d\d-\d\d-\d\d", EXAMPLE.read_text())
