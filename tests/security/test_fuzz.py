"""Hostile input for every parser: a sample. The full count is python -m tests.security.fuzz --inputs 100000."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.hardware import compress_hostlist, expand_hostlist
from diloco_cli.errors import DilocoError, UsageError
from tests.security.fuzz import Parser, fault_of, findings_of
from tests.security.mutation import mutated
from tests.security.parsers import all_parsers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("inputs", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_hostile_input_meets_declared_errors_only(inputs: int, tmp_path: Path) -> None:
    """Every parser, in a process that may not grow by more than 64 MB. The seed and what fails are printed."""
    words = ["-m", "tests.security.fuzz", "--inputs", str(inputs), "--seed", "11", "--save", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 findings" in done.stdout.splitlines()[-1]


def test_every_honest_input_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mutated is well formed to begin with, or the mutations would only meet the first check."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    for parser in all_parsers(tmp_path):
        parser.parse(parser.seeds[0])


def test_the_fuzzer_finds_a_parser_that_leaks_is_slow_or_takes_memory() -> None:
    def leaks(data: bytes) -> None:
        if b"b" in data:
            raise KeyError("b")

    def spins(data: bytes) -> None:
        sum(number * number for number in range(3_000_000))

    (finding, *_) = findings_of(Parser("leaky", leaks, (b"aaaabaaaa",)), 20, seed=1)
    assert b"b" in finding.data and finding.reason.startswith("KeyError")
    assert fault_of(Parser("slow", spins, (b"",)), b"") == "slow"
    assert fault_of(Parser("greedy", lambda data: bytearray(1 << 50), (b"",)), b"").startswith("MemoryError")


def test_inputs_are_repeated_by_their_seed() -> None:
    first, second, other = (
        [mutated(chance, [b'{"a": 1}']) for _ in range(50)] for chance in (Random(1), Random(1), Random(2))
    )
    assert first == second != other


@settings(max_examples=100, deadline=None)
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
