"""One rank of two fails, as the processes of `diloco learner`: all end, with its status and its reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import encode
from tests.forked import ForkedChild, ForkedProcess, diloco
from tests.numerics.bucket import begun_run

WITHIN_S = 120.0  # two ranks load torch, and all have ended
TEXT = "tests.numerics.ranked_faults"


def ended(folder: Path, how: str) -> tuple[int, str]:
    """The status of an island whose rank 1 fails so at its first step, and what it said."""
    run, store, _ = begun_run(folder / "bucket", f"{TEXT}:{how}")
    settings = replace(run.settings, data=replace(run.settings.data, entrypoint=f"{TEXT}:text"))
    islands = tuple(replace(island, batch_tokens=48, ranks=2, sharding="fsdp") for island in run.islands)
    store.put(FORMAT_KEY, encode(replace(run, settings=settings, islands=islands)))
    words = ["learner", "--run", (folder / "bucket").as_uri(), "--name", "l0", "--allow-code", TEXT]
    process = ForkedProcess(diloco_of_ranks, *words, DILOCO_HOME=str(folder / "home"))
    status = process.wait(WITHIN_S)
    assert not store.list("offer/") and store.get(commit_key(1)) is None  # nothing of a failed step is published
    return status, "".join(process.said())


def diloco_of_ranks(*words: str) -> None:
    """Its ranks are forks of this process."""
    subprocess.Popen = ForkedChild  # type: ignore[misc]
    diloco(*words)


@pytest.mark.parametrize(
    ("how", "words"),
    [("loss", "the loss is nan at token 0 of shard 0"), ("gradient", "the norm of the gradients is nan at token 0")],
)
def test_what_is_not_finite_on_one_rank_fails_all_as_it_would_one_process(tmp_path: Path, how: str, words: str) -> None:
    status, said = ended(tmp_path, how)
    assert status == 12 and words in said, said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "memory",
            "rank 1 of 2 is out of memory: Tried to allocate 7.00 GiB\nhint: more ranks (--ranks), or a run with",
        ),
        ("code", "in forward: ValueError: this rank fails"),
    ],
)
def test_the_rank_that_fails_is_named_and_not_the_one_that_lost_it(tmp_path: Path, how: str, words: str) -> None:
    status, said = ended(tmp_path, how)
    assert status == 1 and words in said, said
    assert "rank 1 of 2 ended with status 1: the others were ended" in said
    assert "another rank of the island was lost during STEP" in said and "a bug in diloco" not in said
