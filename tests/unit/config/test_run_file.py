"""run.yaml: what is written is typed; what is wrong names its place and what is allowed.

Settings that cannot work together are refused with their place, what is allowed, and a suggestion.

`retention:` of run.yaml: what of the past stays.

The keys of own data: places become absolute, and what has no effect is refused."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from diloco_cli.config import settings
from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.run_file import (
    inventory_path_of,
    load_run,
    load_run_with_origins,
    max_overlap,
    overlap_problem,
    refuse_together,
)
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    MachineSettings,
    RetentionSettings,
    RunSettings,
    StoreSettings,
)
from diloco_cli.errors import UsageError

GOOD = """\
version: 1
name: nano
inventory: fleet/inventory.yaml
model: {preset: gpt-nano}
data: {preset: python-stdlib}
train: {tokens: 20B, batch_tokens: 1024, inner: {lr: 1e-4}}
sync:
  every: 40
  fragments: 4
  grace: {gamma: 0.25}
  skip_after: 90 s
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(dedent(text))
    return path


def test_values_and_defaults_are_typed(tmp_path):
    run = load_run(write(tmp_path, GOOD))
    assert run.train.tokens == 20_000_000_000
    assert run.train.inner.lr == 1e-4
    assert run.sync.grace.gamma == 0.25
    assert run.sync.skip_after_s == 90.0
    assert run.sync.overlap == "auto"
    assert run.outer == settings.OuterSettings()


@pytest.mark.parametrize("override", ["outer=auto", "outer={lr: auto, momentum: auto}"])
def test_one_word_stands_for_all_outer_settings(tmp_path, override):
    run, origins = load_run_with_origins(write(tmp_path, GOOD), [override])
    assert run.outer == settings.OuterSettings(lr="auto", momentum="auto")
    assert origins["outer.lr"] == origins["outer.momentum"] == f"--set {override}"


def test_the_inventory_is_found_beside_the_run_file(tmp_path):
    path = write(tmp_path, GOOD)
    assert inventory_path_of(load_run(path), path) == tmp_path / "fleet" / "inventory.yaml"


def test_overrides_win_and_say_where_they_come_from(tmp_path):
    path = write(tmp_path, GOOD)
    run, origins = load_run_with_origins(path, ["sync.every=50", "sync.grace={gamma: 0.75}", "train.seed=3"])
    assert (run.sync.every, run.sync.grace.gamma, run.train.seed) == (50, 0.75, 3)
    assert origins["sync.every"] == "--set sync.every=50"
    assert origins["sync.fragments"] == f"{path}:9"
    assert "sync.quorum" not in origins


MALFORMED = [
    (
        "sync.evry=3",
        "--set sync.evry=3: sync: unknown key 'evry'; did you mean every?; allowed: every, fragments",
    ),
    ("sync.every=0", "sync.every: must be at least 1, not 0"),
    ("sync.every=fast", "sync.every: count 'fast' is no number with a unit; write a whole number"),
    ("sync.fragments=0", "sync.fragments: must be from 1 to 4096, not 0"),
    ("sync.fragments=2.5", "sync.fragments: must be a whole number, not 2.5"),
    ("sync.grace.gamma=1", "sync.grace.gamma: must be above 0 and below 1, not 1"),
    ("sync.grace=0.5", "sync.grace: must be a mapping, not 0.5"),
    ("sync.overlap=never", "sync.overlap: must be a whole number, not 'never'; 'auto' is allowed too"),
    ("sync.codec=bf61", "sync.codec: must be one of fp32, bf16, int8, int4, not 'bf61'; did you mean bf16?"),
    ("sync.skip_after=60", "sync.skip_after: duration '60' has no unit"),
    ("train.micro_batch_tokens=many", "train.micro_batch_tokens: count 'many' is no number with a unit"),
    ("retention.rounds=none", "retention.rounds: must be a whole number, not 'none'; 'all' is allowed too"),
    ("retention.days=3", "retention: unknown key 'days'"),
    ("sync.skip_after_s=60", "sync: unknown key 'skip_after_s'; did you mean skip_after?"),
    ("train.inner.lr=0", "train.inner.lr: must be above 0, not 0"),
    ("train.inner.lr=.nan", "train.inner.lr: must be a finite number, not .nan"),
    ("train.inner.lr=true", "train.inner.lr: must be a number, not true"),
    ("train.tokens=-5", "train.tokens: count '-5' must not be negative"),
    ("outer=best", "outer: must be a mapping, not 'best'; 'auto' is allowed too"),
    ("outer={name: sgd, lr: auto}", "outer.lr: 'auto' is known for nesterov alone, not for sgd"),
    ("name=Nano_1", "name: must be a name (lower-case letters"),
    ("name=" + "n" * 64, "name: must be a name"),
    ("model.preset=gpt-nanno", "model.preset: must be one of gpt-pico, gpt-nano"),
    ("model={preset: gpt-nano, huggingface: x}", "model: give one of preset and huggingface, not both"),
    ("model={huggingface: x, layers: 2}", "model: plain numbers need all four; missing: parameters"),
    ("model={preset: gpt-nano, weights: random}", "model: weights belongs to huggingface, and there is none"),
    ("model={preset: gpt-nano, revision: main}", "model: revision belongs to huggingface, and there is none"),
    ("model={huggingface: x, weights: pretrained, initial: y}", "model: give initial or weights: pretrained, not both"),
    ("model={huggingface: x, weights_digest: md5-0}", "model.weights_digest: must be a digest"),
    ("data.preset=digits", "data.preset: gpt-nano reads python-stdlib, not digits"),
    ("model.layers=3", "model: the preset already says 'layers'"),
    ("model={parameters: 1B, layers: 16}", "model: plain numbers need all four; missing: width, sequence"),
    ("model={}", "model: nothing says which model; give a preset (gpt-pico"),
    ("model={entrypoint: nomodule}", "model.entrypoint: must be package.module:function, not 'nomodule'"),
    ("data={}", "data: nothing says which data"),
    ("version=2", "version: 2 is newer than this diloco reads (1)"),
    ("version=one", "version: must be 1, not 'one'"),
    ("sync", "--set sync: cannot be read; write --set key.key=value"),
    ("name.first=x", "'first' lies inside a value that is no mapping"),
    ("train={tokens: [}", "--set train={tokens: [}: not valid YAML"),
]


@pytest.mark.parametrize(("override", "message"), MALFORMED, ids=[override[:40] for override, _ in MALFORMED])
def test_malformed_values_are_refused_with_what_is_allowed(tmp_path, override, message):
    with pytest.raises(UsageError) as caught:
        load_run(write(tmp_path, GOOD), [override])
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_errors_in_the_file_name_its_line(tmp_path):
    path = write(tmp_path, GOOD.replace("fragments", "fragmnts"))
    with pytest.raises(UsageError) as caught:
        load_run(path)
    assert caught.value.where == f"{path}:9"


def test_a_missing_name_is_named(tmp_path):
    with pytest.raises(UsageError, match="the key 'name' is missing"):
        load_run(write(tmp_path, GOOD.replace("name: nano\n", "")))


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
        (["error_feedback: 1"], 9, "must be true or false, not 1", None),
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


def test_a_micro_batch_of_no_whole_number_of_sequences_is_refused_at_its_line(tmp_path: Path) -> None:
    text = RUN.replace("batch_tokens: 1024}", "batch_tokens: 1024,\n  micro_batch_tokens: 64k}")
    more, _ = load(tmp_path, text=text)
    assert more.train.micro_batch_tokens == 64_000, "more than a batch"
    for written in ("100", "129"):
        with pytest.raises(UsageError, match="sequences of 128; allowed: multiples of 128") as caught:
            load(tmp_path, text=text.replace("64k", written))
        assert caught.value.where == f"{tmp_path}/run.yaml:6"
        assert "--set train.micro_batch_tokens=128," in caught.value.hint


def test_where_only_the_built_model_knows_its_sequence_the_micro_batch_is_checked_with_it(tmp_path: Path) -> None:
    own = RUN.replace("{preset: gpt-nano}", "{entrypoint: own:model}").replace(
        "1024}", "1024, micro_batch_tokens: 100}"
    )
    run, origins = load(tmp_path, text=own)
    refuse_together(run, origins, islands(1), 21, "run.yaml", 50)
    with pytest.raises(UsageError, match="no whole number of sequences of 32") as caught:
        refuse_together(run, origins, islands(1), 21, "run.yaml", 32)
    assert caught.value.where == f"{tmp_path}/run.yaml:5"


@tried(max_examples=200)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 80))
def test_an_overlap_is_allowed_if_a_step_lies_between_adoption_and_the_next_sending(
    every: int, fragments: int, overlap: int
) -> None:
    """Written out: slot k is due after step ceil((k + 1) H / P), whatever k is."""
    due = [-(-(slot + 1) * every // fragments) for slot in range(3 * fragments + overlap)]  # in steps
    gaps = [due[slot + fragments] - due[slot + overlap] for slot in range(2 * fragments)]
    allowed = overlap_problem(overlap, every, fragments) is None
    assert allowed == (min(gaps) >= 1) == (overlap <= max_overlap(every, fragments))


def test_what_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_run(path).retention == RetentionSettings(64, 60.0)
    assert load_run(path, ["retention={rounds: 3, grace: 5 min}"]).retention == RetentionSettings(3, 300.0)
    assert load_run(path, ["retention.rounds=all", "retention.grace=0 s"]).retention == RetentionSettings("all", 0.0)


OF_OWN_DATA = "version: 1\nname: x\nmodel: {preset: gpt-nano}\ndata: {preset: python-stdlib}\n"


def loaded(tmp_path: Path, *overrides: str) -> RunSettings:
    path = tmp_path / "run.yaml"
    path.write_text(OF_OWN_DATA)
    return load_run(path, overrides)


def test_a_relative_place_is_beside_the_run_file(tmp_path: Path) -> None:
    assert loaded(tmp_path, "data={tokens: sub/../shards}").data.tokens == f"file://{tmp_path}/shards"
    (tmp_path / "tok").mkdir()
    data = loaded(tmp_path, "data={text: 'corpus/**/*.txt', tokenizer: tok, cache: 1 GiB, held_out: 0.1}").data
    assert (data.text, data.tokenizer) == (f"{tmp_path}/corpus/**/*.txt", f"{tmp_path}/tok")
    assert (data.cache_bytes, data.held_out) == (1 << 30, 0.1)
    assert loaded(tmp_path, "data={tokens: gs://bucket/tokens/}").data.tokens == "gs://bucket/tokens"
    hub, typo = ("maker/words@v2", "hf://words"), "wrods"
    for tokenizer, found in (*zip(hub, hub, strict=True), ("./none", f"{tmp_path}/none"), (typo, f"{tmp_path}/{typo}")):
        assert loaded(tmp_path, f"data={{text: a.txt, tokenizer: {tokenizer}}}").data.tokenizer == found, (
            "or of the Hub"
        )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data={tokens: a, text: b}", "give one of tokens and text"),
        ("data={preset: python-stdlib, tokens: a}", "give one of preset and tokens"),
        ("data.tokenizer=tok", "data.tokenizer: it has an effect on tokens and text alone"),
        ("data.cache=1 GB", "data.cache: it has an effect"),
        ("data.held_out=0.2", "data.held_out: it has an effect"),
        ("data={tokens: a, held_out: 1}", "data.held_out: must be above 0 and below 1"),
        ("data={tokens: a, cache: 1 MB}", "data.cache: must be at least"),
        ("data={tokens: a, cache: 4000000000}", "has no unit"),
        ("data={tokens: http://a}", "data.tokens: unknown store scheme"),
        ("data={text: gs://bucket/a.txt}", "data.text: must be a path on this machine"),
        ("data={tokens: a, args: {b: 1}}", "args belong to an entrypoint"),
        ("model={preset: vit-nano, vocabulary: 9}", "vocabulary belongs to a preset that reads text"),
        (
            "model={parameters: 1M, layers: 2, width: 1024, sequence: 128, vocabulary: 2000}",
            "vocabulary x width = 2,048,000 parameters leaves none of the model's 1,000,000",
        ),
        ("model.vocabulary=100", "model.vocabulary: 100 is too small: python-stdlib has 256 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loaded(tmp_path, override)


def test_images_are_not_trained_on_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vit-nano reads images, not tokens"):
        loaded(tmp_path, "model.preset=vit-nano", "data={tokens: a}")


@pytest.mark.parametrize("override", ["regions.us.egress=0.12/GB", "islands.0.price=9/h"])
def test_a_key_of_the_inventory_is_said_to_be_one(tmp_path: Path, override: str) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(UsageError, match=r"^--set \S+: '(regions|islands)' is a key of the inventory") as caught:
        load_run(path, [override])
    assert "inventory's file" in str(caught.value.hint)
    with pytest.raises(UsageError, match="'store' is a key of the inventory"):
        load_run(write(tmp_path, GOOD + "store: {url: gs://b/p}\n"))
