"""What signatures cost: `python -m tests.benchmarks.signing [--rounds N] [--commands N]`.

One record is signed and checked by the product's keyring. Two runs with the same settings, one signed and one not (its
records end with checksums), are trained by threads into directories; then `diloco status` and `diloco verify` read
each, one after the other, as processes of their own. CPU seconds, which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from diloco_cli.clock import monotonic_s
from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.launch.new_run import create_run
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.signing import LOG, Checksummed
from diloco_cli.store.local import LocalStore
from tests.benchmarks.measure import ROOT, machine, ratios, row
from tests.numerics.harness import make_run, run_to_end
from tests.numerics.test_identities import CONSTANT
from tests.security.signed import as_fleet, as_reader, as_syncer, signed_run

MAX_SIGN_MS, MAX_RATIO = 1.0, 1.2
SIZES = {"1 KB": 1 << 10, "64 KB": (64 << 10) - 16, "1 MB": 1 << 20}
REPEATS = 20


def record(size: int) -> bytes:
    return b'{"nonce":"%b"}' % (b"n" * size)


def times_ms(size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds to sign and to check a record, the mean of REPEATS in each round."""
    run, key, signing, checking = signed_run(), commit_key(7), list[float](), list[float]()
    syncer, reader, body = as_syncer(run).keyring, as_reader(run).keyring, record(size)
    for _ in range(rounds):
        began_s = monotonic_s()
        for _ in range(REPEATS):
            data = syncer.sign(LOG, key, body)
        signed_s = monotonic_s()
        for _ in range(REPEATS):
            assert reader.authenticates(LOG, key, data)
        signing.append(1000 * (signed_s - began_s) / REPEATS)
        checking.append(1000 * (monotonic_s() - signed_s) / REPEATS)
    return signing, checking


def trained(folder: Path, signed: bool, merges: int) -> Path:
    """A finished run in a directory."""
    sync = SyncSettings(every=4, fragments=2, overlap=0, adoption="at_tau", quorum=2)
    run = make_run(2, merges // 2, sync, OuterSettings("nesterov", 0.7, 0.9), CONSTANT)
    plain = replace(run, checksums=True, keyring=Checksummed(run.run_id))
    made = signed_run(run) if signed else plain
    folder.mkdir()
    store = LocalStore(folder)
    create_run(store, made, str(folder))
    run_to_end(as_fleet(made) if signed else plain, store)
    return folder


def command_s(words: str, folder: Path) -> float:
    """CPU seconds of one command as a process of its own, which must end well."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "diloco_cli", words, f"file://{folder}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def side_by_side(words: str, signed: Path, plain: Path, rounds: int) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        times = command_s(words, signed), command_s(words, plain)
        if turn:
            for mine, seconds in zip(found, times, strict=True):
                mine.append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commands", type=int, default=9)
    parser.add_argument("--merges", type=int, default=200)
    asked = parser.parse_args()
    print(machine())
    for name, size in SIZES.items():
        signing, checking = times_ms(size, asked.rounds)
        holds = sorted(signing)[len(signing) // 2] <= MAX_SIGN_MS if size <= 64 << 10 else None
        print(
            row(f"to sign a record of {name}, ms", signing, f"<= {MAX_SIGN_MS:g}" if holds is not None else "", holds)
        )
        print(row("to check it, ms", checking, "", None))
    with tempfile.TemporaryDirectory() as place:
        signed, plain = (trained(Path(place) / name, name == "signed", asked.merges) for name in ("signed", "plain"))
        for words in ("status", "verify"):
            of_signed, of_plain = side_by_side(words, signed, plain, asked.commands)
            found = ratios(of_signed, of_plain)
            print(row(f"`{words}`, CPU s, signed", of_signed, "", None))
            holds = sorted(found)[len(found) // 2] <= MAX_RATIO
            print(row(f"`{words}`, signed / not signed", found, f"<= {MAX_RATIO:g}", holds))


if __name__ == "__main__":
    main()
