"""Hostile input for every parser: it gives an answer or a declared error, in bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_cli.config.hardware import compress_hostlist, expand_hostlist
from diloco_cli.errors import DilocoError, UsageError
from tests.security.hostile_input import fault_of, hostile
from tests.security.parsers import PARSERS, Parser, all_parsers

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
SAMPLE = 40  # inputs for a parser, the same at each start; the long form has others each time


def withstands(parser: Parser, inputs: int) -> None:
    """Raises AssertionError with the shortest input that hypothesis finds to be taken wrongly."""

    @settings(max_examples=inputs, derandomize=inputs <= SAMPLE, suppress_health_check=CHECKS)
    @given(hostile(parser.seeds))
    def takes(data: bytes) -> None:
        fault = fault_of(parser, data)
        assert fault is None, f"{parser.name}: {fault}: {data[:200]!r}"

    takes()


@pytest.mark.parametrize("inputs", [SAMPLE, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", PARSERS)
def test_hostile_input_meets_declared_errors_only(
    kind: str, inputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))  # where the journal is looked for
    for parser in PARSERS[kind](tmp_path):
        parser.parse(parser.seeds[0])  # it is well formed; imports, caches and pools are not the inputs' fault
        withstands(parser, inputs)


def test_a_parser_that_leaks_is_slow_or_takes_memory_is_found() -> None:
    def leaks(data: bytes) -> None:
        if b"b" not in data:
            raise KeyError("b")

    def spins(data: bytes) -> None:
        sum(number * number for number in range(3_000_000))

    with pytest.raises(AssertionError, match="leaky: KeyError"):
        withstands(Parser("leaky", leaks, (b"aaaabaaaa",)), 40)
    assert fault_of(Parser("slow", spins, (b"",)), b"") == "slow"
    assert str(fault_of(Parser("greedy", lambda data: bytearray(1 << 50), (b"",)), b"")).startswith("MemoryError")


@settings(max_examples=100)
@given(st.text(max_size=40))
def test_any_text_is_a_hostlist_or_a_usage_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except UsageError:
        return
    assert expand_hostlist(compress_hostlist(hosts)) == hosts


def test_only_declared_errors_are_declared(tmp_path: Path) -> None:
    """A parser whose declared errors were `Exception` would pass everything."""
    for parser in all_parsers(tmp_path):
        assert set(parser.declared) <= {DilocoError, ValueError}, parser.name
