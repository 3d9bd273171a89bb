"""Hostile input for every parser: python -m tests.security.fuzz [--inputs 100000] [--seed 1] [--only NAME]

Each input must give an answer or a declared error, within 50 ms of processor time, and the process may never take more
than 64 MB beyond what it holds before (RLIMIT_AS: an allocation above it fails, as MemoryError, and is a finding).
What fails is saved under --save; exit status 1.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.security.mutation import mutated
from tests.security.parsers import Parser, all_parsers

MAX_S = 0.050
MAX_BYTES = 64 << 20
MAX_INPUT = 200_000  # bytes; larger ones only show that time grows with size


@dataclass(frozen=True)
class FuzzFinding:
    parser: str
    number: int
    reason: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.parser}, input {self.number}: {self.reason}: {self.data[:200]!r}"


def fault_of(parser: Parser, data: bytes) -> str | None:
    """What is wrong with how the parser takes this input; None if nothing is."""
    started = time.process_time()
    try:
        parser.parse(data)
    except parser.declared:
        pass
    except Exception as error:  # whatever else comes out is a finding
        return f"{type(error).__name__}: {error!s:.200}"
    return "slow" if time.process_time() - started > MAX_S else None


def confirmed_fault(parser: Parser, data: bytes) -> str | None:
    """Slow means: slow three times in a row. A busy machine and a full garbage collector are nobody's fault."""
    fault = fault_of(parser, data)
    if fault == "slow" and not all(fault_of(parser, data) == "slow" for _ in range(2)):
        return None
    return fault


def findings_of(parser: Parser, inputs: int, seed: int) -> Iterator[FuzzFinding]:
    chance = Random(f"{seed}/{parser.name}")
    for number in range(inputs):
        data = mutated(chance, parser.seeds)[:MAX_INPUT]
        fault = confirmed_fault(parser, data)
        if fault is not None:
            yield FuzzFinding(parser.name, number, fault, data)


def shares(parsers: list[Parser], inputs: int) -> list[int]:
    """How many inputs each parser gets; together at least `inputs`."""
    whole = sum(parser.share for parser in parsers)
    return [int(inputs * parser.share / whole) + 1 for parser in parsers]


@contextmanager
def bounded_memory(max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Until the end of the block this process cannot grow by more than the bound: what takes more is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    options = argparse.ArgumentParser(description="hostile input for every parser")
    options.add_argument("--inputs", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="")
    options.add_argument("--save", type=Path, default=Path("fuzz-findings"))
    given = options.parse_args()
    found: list[FuzzFinding] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DILOCO_HOME"] = folder  # where the journal is looked for
        parsers = [parser for parser in all_parsers(Path(folder)) if given.only in parser.name]
        for parser in parsers:
            for seed in parser.seeds:
                fault_of(parser, seed)  # imports, caches and pools are not the inputs' fault
        total = 0
        for parser, inputs in zip(parsers, shares(parsers, given.inputs), strict=True):
            started = time.process_time()
            with bounded_memory():
                new = list(findings_of(parser, inputs, given.seed))
            total += inputs
            took_s = time.process_time() - started
            print(
                f"{parser.name}: {inputs} inputs, {1e3 * took_s / inputs:.2f} ms each, {len(new)} findings", flush=True
            )
            found += new
    for finding in found:
        given.save.mkdir(exist_ok=True)
        (given.save / f"{finding.parser.replace(' ', '-')}-{finding.number}").write_bytes(finding.data)
        print(finding)
    print(f"seed {given.seed}: {total} inputs to {len(parsers)} parsers, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
