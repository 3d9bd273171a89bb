"""Quantities are read strictly and never guessed."""

from __future__ import annotations

import pytest

from diloco_cli import quantities
from diloco_cli.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (quantities.parse_bandwidth, "2 Gbps", 2e9),
        (quantities.parse_bandwidth, "30Mbps", 30e6),
        (quantities.parse_bandwidth, "1.5 Mbit/s", 1.5e6),
        (quantities.parse_bandwidth, "12 MB/s", 96e6),
        (quantities.parse_duration, "5 ms", 0.005),
        (quantities.parse_duration, "4 min", 240.0),
        (quantities.parse_duration, "6 h", 21600.0),
        (quantities.parse_duration, "2 d", 172800.0),
        (quantities.parse_count, "20B", 20_000_000_000),
        (quantities.parse_count, "1.5M", 1_500_000),
        (quantities.parse_count, "524288", 524_288),
        (quantities.parse_count, "65k", 65_000),
        (quantities.parse_size, "16 GiB", 16 << 30),
        (quantities.parse_size, "500MB", 500_000_000),
        (quantities.parse_price, "112.0/h", 112.0),
        (quantities.parse_egress, "0.02/GB", 0.02),
    ],
)
def test_quantities_are_read_exactly(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (quantities.parse_bandwidth, "100", "bits or bytes is unclear"),
        (quantities.parse_bandwidth, "0 Mbps", "must be above 0"),
        (quantities.parse_bandwidth, "2 Gb", "unknown unit 'Gb'"),
        (quantities.parse_bandwidth, "2 MBps", "unknown unit 'MBps'"),
        (quantities.parse_bandwidth, "-2 Gbps", "must not be negative"),
        (quantities.parse_duration, "60", "seconds or minutes is unclear"),
        (quantities.parse_duration, "6 hours", "unknown unit 'hours'"),
        (quantities.parse_count, "1.5", "not a whole number"),
        (quantities.parse_count, "20 billion", "unknown unit 'billion'"),
        (quantities.parse_count, "9e30", "larger than"),
        (quantities.parse_count, "", "no number"),
        (quantities.parse_size, "4000", "has no unit"),
        (quantities.parse_size, "4 Gb", "unknown unit 'Gb'"),
        (quantities.parse_price, "112", "does not end in '/h'"),
        (quantities.parse_egress, "0.02/MB", "does not end in '/GB'"),
    ],
)
def test_unclear_quantities_are_refused_with_the_allowed_forms(parse, text, message):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in caught.value.message
    assert "write" in caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (quantities.format_bandwidth(142e6), "142 Mbps"),
        (quantities.format_bandwidth(2e9), "2 Gbps"),
        (quantities.format_duration(0.005), "5 ms"),
        (quantities.format_duration(4.697), "4.7 s"),
        (quantities.format_duration(112.7), "113 s"),
        (quantities.format_duration(6 * 3600), "6 h"),
        (quantities.format_count(465_060), "465k"),
        (quantities.format_count(999_999), "1M"),
        (quantities.format_count(0), "0"),
        (quantities.format_size(2e9), "2 GB"),
    ],
)
def test_quantities_are_printed_with_three_digits(text, expected):
    assert text == expected


@pytest.mark.parametrize("bps", [1.0, 30e6, 142e6, 2e9, 1e12])
def test_printed_bandwidths_are_read_back(bps):
    assert quantities.parse_bandwidth(quantities.format_bandwidth(bps)) == bps


def test_of_many_names_some_are_told() -> None:
    assert quantities.some_of(["a", "b"]) == "a, b"
    assert quantities.some_of(list("abcdefgh")) == "a, b, c and 5 more"
