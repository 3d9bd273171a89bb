"""Settings that cannot work together are refused with their place, what is allowed, and a suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.run_file import load_run_with_origins, max_overlap, overlap_problem, refuse_together
from diloco_cli.config.settings import Inventory, IslandSettings, MachineSettings, StoreSettings
from diloco_cli.errors import UsageError

RUN = """\
version: 1
name: nano
model: {preset: gpt-nano}
data: {preset: python-stdlib}
train: {tokens: 1M, batch_tokens: 1024}
sync:
  every: 40
  fragments: 4
"""
PLACE = {"sync": 6, "train": 5, "data": 4}


def load(tmp_path: Path, *lines: str, text: str = RUN):  # type: ignore[no-untyped-def]
    path = tmp_path / "run.yaml"
    path.write_text(text + "".join(line if line[0] == "\n" else f"  {line}\n" for line in lines))
    return load_run_with_origins(path)


def islands(count: int) -> Inventory:
    return Inventory(
        StoreSettings("bucket"), tuple(IslandSettings(f"i{n}", "here", Accelerators("cpu")) for n in range(count))
    )


@pytest.mark.parametrize(
    ("lines", "line", "says", "hint"),
    [
        (["overlap: 4"], 9, "sync.overlap: 4 slots do not fit into a round of 40 steps and 4 slots", "overlap=auto"),
        (["overlap: 40"], 9, "allowed: 0 to 3, or auto", "overlap=auto"),
        (["codec: fp32", "error_feedback: true"], 10, "fp32 rounds nothing away", "sync.codec=int8"),
        (["mixing: mix"], 9, "must be one of replace, rebase, not 'mix'", None),
        (["mixing: blend"], 9, "must be one of replace, rebase, not 'blend'", None),
        (["blend: 0.5"], 9, "sync: the key 'blend' is gone: mixing is replace or rebase", None),
        (["layout: layers"], 9, "sync: the key 'layout' is gone: tensors are dealt to fragments by size", None),
        (["\ncold_start: {every: 2}"], 10, "cold_start: the key 'every' is gone", None),
        (["error_feedback: 1"], 9, "must be true or false, not 1", None),
        (["drift_rounds: 0"], 9, "sync.drift_rounds: must be at least 1, not 0", None),
        (["quorum: 2", "\ncold_start: {rounds: 4}"], 11, "one island alone cannot make a merge", "quorum=1"),
    ],
)
def test_what_the_run_file_alone_shows(
    tmp_path: Path, lines: list[str], line: int, says: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, *lines)
    assert says in str(caught.value) and caught.value.where == f"{tmp_path}/run.yaml:{line}"
    assert hint is None or hint in caught.value.hint


def test_a_run_that_ends_before_its_first_round_is_refused(tmp_path: Path) -> None:
    """H = 40 steps of 1,024 tokens are 40,960 tokens."""
    assert load(tmp_path, text=RUN.replace("tokens: 1M", "tokens: 40960"))
    with pytest.raises(UsageError, match="end before the first round of one island does") as caught:
        load(tmp_path, text=RUN.replace("tokens: 1M", "tokens: 40959"))
    assert caught.value.where == f"{tmp_path}/run.yaml:5"
    assert "train.tokens=40960" in caught.value.hint and "sync.every=39" in caught.value.hint


def test_a_decay_without_its_schedule_is_refused(tmp_path: Path) -> None:
    inner = "train: {inner: {schedule: SCHEDULE, decay: 0.3}, "
    run, _ = load(tmp_path, text=RUN.replace("train: {", inner.replace("SCHEDULE", "wsd")))
    assert (run.train.inner.schedule, run.train.inner.decay) == ("wsd", 0.3)
    with pytest.raises(UsageError, match="no effect on the schedule linear") as caught:
        load(tmp_path, text=RUN.replace("train: {", inner.replace("SCHEDULE", "linear")))
    assert caught.value.where == f"{tmp_path}/run.yaml:5"


def test_all_that_is_allowed_is_allowed(tmp_path: Path) -> None:
    run, _ = load(tmp_path, "overlap: 3", "mixing: rebase", "codec: int8", "error_feedback: true")
    assert (run.sync.overlap, run.sync.mixing, run.sync.error_feedback) == (3, "rebase", True)


def test_a_quorum_beyond_the_islands_is_refused_at_its_line(tmp_path: Path) -> None:
    run, origins = load(tmp_path, "quorum: 4")
    refuse_together(run, origins, islands(4), 21, "run.yaml")
    with pytest.raises(UsageError, match="the inventory has 3; allowed: 1 to 3") as caught:
        refuse_together(run, origins, islands(3), 21, "run.yaml")
    assert caught.value.where == f"{tmp_path}/run.yaml:9" and "sync.quorum=3" in caught.value.hint


def test_islands_that_are_still_to_be_formed_are_left_to_the_plan(tmp_path: Path) -> None:
    run, origins = load(tmp_path, "quorum: 4")
    machines = (MachineSettings("here", Accelerators("cpu"), nodes=8),)
    refuse_together(run, origins, Inventory(StoreSettings("bucket"), machines=machines), 21, "run.yaml")


def test_loops_of_ones_own_alone_host_no_syncer(tmp_path: Path) -> None:
    run, origins = load(tmp_path, "\nsyncer: {on_learners: true}\n")
    own = [replace(island, infra="loop/addressed") for island in islands(2).islands]
    refuse_together(run, origins, replace(islands(2), islands=(own[0], islands(2).islands[1])), 21, "run.yaml")
    with pytest.raises(UsageError, match="nobody would serve the run: loops of your own") as refused:
        refuse_together(run, origins, replace(islands(2), islands=tuple(own)), 21, "run.yaml")
    assert refused.value.hint == "--set syncer.on_learners=false"


def test_every_island_needs_a_shard_of_its_own(tmp_path: Path) -> None:
    text = RUN.replace("preset: python-stdlib", "preset: python-stdlib, shards: 2")
    run, origins = load(tmp_path, text=text)
    refuse_together(run, origins, islands(2), 21, "run.yaml")
    with pytest.raises(UsageError, match="2 shards are too few for the 3 islands") as caught:
        refuse_together(run, origins, islands(3), 21, "run.yaml")
    assert caught.value.where == f"{tmp_path}/run.yaml:4"


def test_a_small_model_has_fewer_fragments_and_with_them_less_overlap(tmp_path: Path) -> None:
    run, origins = load(tmp_path, "overlap: 3")
    refuse_together(run, origins, islands(1), 4, "run.yaml")
    with pytest.raises(UsageError, match="too small for more than 3 fragments"):
        refuse_together(run, origins, islands(1), 3, "run.yaml")


@pytest.mark.parametrize(("written", "offered"), [("100", 128), ("1000", 1024), ("129", 128)])
def test_a_micro_batch_of_no_whole_number_of_sequences_is_refused_at_its_line(
    tmp_path: Path, written: str, offered: int
) -> None:
    text = RUN.replace("batch_tokens: 1024}", f"batch_tokens: 1024,\n  micro_batch_tokens: {written}}}")
    with pytest.raises(UsageError, match="no whole number of sequences of 128; allowed: multiples of 128") as caught:
        load(tmp_path, text=text)
    assert caught.value.where == f"{tmp_path}/run.yaml:6"
    assert f"--set train.micro_batch_tokens={offered}," in caught.value.hint


@pytest.mark.parametrize(
    ("written", "read"), [("auto", "auto"), ("128", 128), ("1024", 1024), ("2048", 2048), ("64k", 64_000)]
)
def test_a_micro_batch_may_be_a_sequence_or_more_than_a_batch(tmp_path: Path, written: str, read: object) -> None:
    run, _ = load(
        tmp_path, text=RUN.replace("batch_tokens: 1024}", f"batch_tokens: 1024, micro_batch_tokens: {written}}}")
    )
    assert run.train.micro_batch_tokens == read


@pytest.mark.parametrize("written", ["0", "-128", "many", "12.5"])
def test_a_micro_batch_that_is_no_count_is_refused(tmp_path: Path, written: str) -> None:
    with pytest.raises(UsageError, match=r"train\.micro_batch_tokens: .*'auto' is allowed too") as caught:
        load(tmp_path, text=RUN.replace("batch_tokens: 1024}", f"batch_tokens: 1024, micro_batch_tokens: {written}}}"))
    assert caught.value.where == f"{tmp_path}/run.yaml:5"


def test_where_only_the_built_model_knows_its_sequence_the_micro_batch_is_checked_with_it(tmp_path: Path) -> None:
    own = RUN.replace("{preset: gpt-nano}", "{entrypoint: own:model}").replace(
        "1024}", "1024, micro_batch_tokens: 100}"
    )
    run, origins = load(tmp_path, text=own)
    refuse_together(run, origins, islands(1), 21, "run.yaml", 50)
    with pytest.raises(UsageError, match="no whole number of sequences of 32") as caught:
        refuse_together(run, origins, islands(1), 21, "run.yaml", 32)
    assert caught.value.where == f"{tmp_path}/run.yaml:5"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 80))
def test_an_overlap_is_allowed_if_a_step_lies_between_adoption_and_the_next_sending(
    every: int, fragments: int, overlap: int
) -> None:
    """Written out: slot k is due after step ceil((k + 1) H / P), whatever k is."""
    due = [-(-(slot + 1) * every // fragments) for slot in range(3 * fragments + overlap)]  # in steps
    gaps = [due[slot + fragments] - due[slot + overlap] for slot in range(2 * fragments)]
    allowed = overlap_problem(overlap, every, fragments) is None
    assert allowed == (min(gaps) >= 1) == (overlap <= max_overlap(every, fragments))
