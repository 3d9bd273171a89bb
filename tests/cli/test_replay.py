"""`diloco replay` and `export --tape`: what they say of good and bad tapes, and that looking at one is light."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from diloco_cli.tapes.files import write_tape
from tests.cli.bucket import make_bucket
from tests.cli.conftest import Diloco
from tests.unit.tapes.tiny_tape import TAPE


def test_a_dry_run_says_what_is_on_the_tape_and_imports_no_torch(tmp_path: Path) -> None:
    write_tape(TAPE, tmp_path / "t.gz")
    code = (
        "import sys; sys.argv = ['diloco', 'replay', 't.gz', '-n']\n"
        "from diloco_cli.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('exit', end.code)\n"
        "import diloco_cli.tapes.recorder\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "tape of run toy: 3 merges (0 with a digest to compare), 34 merged tokens",
        "  l0 incarnation 1: steps 5, offers 2",
        "  l0 incarnation 2: steps 4, offers 1, moments of step 2 restored",
        "  l1 incarnation 1: steps 5, offers 2",
        "exit 0",
        "False",
    ]


def test_json_of_a_dry_run(diloco: Diloco, tmp_path: Path) -> None:
    write_tape(TAPE, tmp_path / "t.tape")
    done = diloco("replay", "t.tape", "--dry-run", "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["merges"], data["steps"], data["tokens"], data["merges_with_digest"]) == (3, 14, 34, 0)


def test_a_tape_of_several_ranks_says_why_its_bits_will_differ(diloco: Diloco, tmp_path: Path) -> None:
    run = replace(TAPE.run, islands=tuple(replace(island, ranks=4) for island in TAPE.run.islands))
    merges = tuple(replace(merge, state_digest="blake3-00") for merge in TAPE.merges)
    tracks = [replace(track, ranks=ranks) for track, ranks in zip(TAPE.tracks, (4, 2, 4), strict=True)]
    write_tape(replace(TAPE, run=run, tracks=tuple(tracks), merges=merges), tmp_path / "t.tape")
    done = diloco("replay", "t.tape", "--dry-run")
    told = "recorded by several ranks of l0 (2 and 4), l1 (4): one process adds the gradients up in another order"
    assert told in done.stderr
    assert "warning: l0 had other numbers of ranks than planned" in done.stderr
    assert "  l0 incarnation 2: steps 4, offers 1, 2 ranks, moments of step 2 restored" in done.stdout


def test_bad_words_and_bad_tapes_are_usage_errors(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "torn.gz").write_bytes(b"\x1f\x8b\x08torn")
    write_tape(TAPE, tmp_path / "t.tape")
    (tmp_path / "there").write_text("")
    for words, reason in (
        (("none.tape",), "none.tape: cannot read: No such file"),
        (("torn.gz",), "torn.gz: not a whole gzip file"),
        (("t.tape", "-o", "there"), "there exists already"),
    ):
        done = diloco("replay", *words)
        assert done.returncode == 2 and reason in done.stderr, (words, done.stderr)
        assert done.stdout == "" and "Traceback" not in done.stderr


def test_a_run_without_merges_is_no_tape_yet(diloco: Diloco, tmp_path: Path) -> None:
    url = make_bucket(tmp_path / "bucket" / "nano")
    done = diloco("export", url, "--tape", "nano.tape")
    assert done.returncode == 75 and "no merge yet" in done.stderr
    assert not (tmp_path / "nano.tape").exists()
    both = diloco("export", url, "--tape", "nano.tape", "-o", "x.safetensors")
    assert both.returncode == 2 and "one at a time" in both.stderr
