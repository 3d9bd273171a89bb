"""The built-in data, and a user's own tokens."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, EvaluationSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.corpus.index import INDEX_KEY, block_sum
from diloco_cli.corpus.indexing import index_shards
from diloco_cli.corpus.shards import BlockCache
from diloco_cli.corpus.sources import SHARDS_VARIABLE, data_places
from diloco_cli.errors import DataCheckError, NotFoundError, RefusedError, UsageError
from diloco_cli.paths import install_hint
from diloco_cli.store.open import open_store
from diloco_cli.store.port import StoreGoneError
from diloco_cli.tasks.build import build_data, build_model, check_own_data
from diloco_cli.tasks.data import HELD_OUT, HELD_OUT_VIEWS, ByteText, Digits, OwnTokens, ShuffledEpochs
from diloco_cli.tasks.weights import carried
from diloco_cli.training.replica import Replica
from diloco_cli.training.trial import check_task
from tests.tokenizer import write_tokenizer

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install 'diloco[vision]'"
)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_in_an_epoch_every_example_is_drawn_once_by_one_shard(shards):
    size = 12
    order = ShuffledEpochs(size, seed=5)
    epochs = [[i for s in range(shards) for i in order.shard(s, shards, e * size // shards, size // shards)]
              for e in range(3)]  # fmt: skip
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1], "shuffled anew"


def test_a_position_gives_the_same_examples_however_the_stream_was_read_before():
    straight, jumping = ShuffledEpochs(10, seed=1), ShuffledEpochs(10, seed=1)
    expected = straight.shard(1, 2, 0, 20)
    assert [jumping.shard(1, 2, i, 1)[0] for i in reversed(range(20))] == expected[::-1]
    assert ShuffledEpochs(10, seed=2).shard(1, 2, 0, 20) != expected


def test_text_goes_on_exactly_at_a_position():
    text = ByteText(sequence=16, seed=0)
    whole, _ = text.batch(1, 3, 0, 64)
    second, successors = ByteText(sequence=16, seed=0).batch(1, 3, 32, 32)
    assert torch.equal(whole[2:], second) and torch.equal(second[:, 1:], successors[:, :-1])


@needs_sklearn
def test_digits_are_addressed_by_position():
    digits = Digits(sequence=16, seed=3)
    images, classes = digits.batch(0, 2, 0, 8 * 16)
    assert images.shape == (8, 8, 8) and images.dtype == torch.float32 and classes.dtype == torch.int64
    again = Digits(sequence=16, seed=3).batch(0, 2, 4 * 16, 4 * 16)
    assert torch.equal(images[4:], again[0]) and torch.equal(classes[4:], again[1])
    other_shard, _ = digits.batch(1, 2, 0, 8 * 16)
    assert not torch.equal(images, other_shard)


@needs_sklearn
def test_held_out_digits_are_the_same_in_every_run_and_never_trained_on():
    one, other = (list(Digits(16, seed).held_out(500)) for seed in (0, 9))
    assert sum(len(classes) for _, classes in one) == 500
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    everything = sum(len(classes) for _, classes in Digits(16, 0).held_out(10**6))
    assert everything == HELD_OUT * HELD_OUT_VIEWS
    digits = Digits(16, 0)
    train, held_out = digits._train.padded.flatten(1), digits._held_out.padded.flatten(1)
    assert len(train) + len(held_out) == 1797
    shared = (held_out[:, None] == train[None]).all(dim=2).sum()
    assert int(shared) == 0


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match="scikit-learn") as caught:
        Digits(16, 0)
    assert caught.value.hint == install_hint("vision")


SEQUENCE = 64  # of gpt-pico
TEXT = "".join(f"line {number} says {number * number}\n" for number in range(6000))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))


def run_with(data: DataSettings, **model: int) -> RunSettings:
    return RunSettings(
        "x", model=ModelSettings("gpt-pico", **model), data=data, train=TrainSettings(tokens=10**6, batch_tokens=256),
        evaluation=EvaluationSettings(sequences=16),
    )  # fmt: skip


def shards_in(folder: Path, tokens: int = 100_000, largest: int = 255) -> RunSettings:
    """A run on two shards of token numbers that tell their place modulo `largest`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = (np.arange(tokens) % largest + 1).astype("<u2")
    values[: tokens // 2].tofile(folder / "a.bin")
    np.save(folder / "b.npy", values[tokens // 2 :])
    index_shards(open_store(str(folder)))
    return run_with(DataSettings(tokens=folder.as_uri(), held_out=0.05))


def text_in(folder: Path, tokenizer: str | None = None) -> RunSettings:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(TEXT)
    return run_with(DataSettings(text=f"{folder}/*.txt", tokenizer=tokenizer, held_out=0.05))


def test_a_batch_is_sequences_of_the_stream_with_their_successors(tmp_path: Path) -> None:
    data = build_data(shards_in(tmp_path))
    inputs, targets = data.batch(0, 2, 0, 1024)
    assert inputs.shape == targets.shape == (16, SEQUENCE) and inputs.dtype == torch.int64
    assert torch.equal(targets, inputs % 255 + 1)
    later = data.batch(0, 2, 512, 512)[0]
    assert torch.equal(later, inputs[8:]), "addressed by position"


def test_no_held_out_sequence_is_ever_trained_on(tmp_path: Path) -> None:
    run = text_in(tmp_path)
    data = build_data(run)
    held_out = {bytes(row.tolist()) for tokens, _ in data.held_out(10**6) for row in tokens}
    drawn: list[bytes] = []
    for shard in range(2):
        tokens = data.split.train // 2 * SEQUENCE  # type: ignore[attr-defined]
        drawn += [bytes(row.tolist()) for row in data.batch(shard, 2, 0, tokens)[0]]
    assert len(set(drawn)) == len(drawn) > 1000
    assert not held_out & set(drawn) and len(held_out) >= 16


def test_text_trains_as_bytes(tmp_path: Path) -> None:
    run = text_in(tmp_path)
    replica = Replica(run, build_model(run), build_data(run), 0, 1)
    losses = [replica.step(n * 256, 256, 5e-3) for n in range(12)]
    assert losses[-1] < losses[0] - 0.5
    check_task(run, 256)


def test_text_is_tokenized_once_and_by_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tok", ["line", "says", *map(str, range(100))])
    run = text_in(tmp_path / "text", str(folder))
    data = build_data(run)
    index = data.shards.index  # type: ignore[attr-defined]
    assert index.vocabulary == 104 and index.tokenizer is not None
    [made] = (tmp_path / "home" / "data").glob("text-*")
    before = {path: path.stat().st_mtime_ns for path in made.glob("*")}
    build_data(run)
    assert {path: path.stat().st_mtime_ns for path in made.glob("*")} == before


def test_a_format_carries_what_the_data_are_and_another_machine_compares(tmp_path: Path) -> None:
    run = shards_in(tmp_path / "here")
    fresh = carried(run)
    assert fresh.data.args["tokens"] == 100_000 and fresh.data.args["digest"].startswith("blake3-")
    assert build_data(fresh) is not None
    other = shards_in(tmp_path / "there", tokens=99_000)
    elsewhere = replace(fresh, data=replace(fresh.data, tokens=other.data.tokens))
    with pytest.raises(DataCheckError, match="the data that the run began with: 100000 tokens, here 99000"):
        build_data(elsewhere)
    same_size = shards_in(tmp_path / "third", largest=254)
    with pytest.raises(DataCheckError, match="not the data that the run began with"):
        build_data(replace(fresh, data=replace(fresh.data, tokens=same_size.data.tokens)))


def test_a_bucket_s_blocks_are_fetched_before_a_batch_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shards_in(tmp_path)
    data = build_data(run)
    assert isinstance(data, OwnTokens)
    data.shards.cache = BlockCache(tmp_path / "cache", 10**8)
    data.batch(0, 1, 0, 256)
    data._ahead.join()
    assert data.shards.cache.num_bytes() == 200_000, "both shards, each of one block"
    monkeypatch.setattr(data.shards.store, "get_range", lambda *_: pytest.fail("read again"))
    data.shards._held.clear()
    assert len(data.batch(0, 1, 4096, 4096)[0]) == 64


def test_text_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    run = text_in(tmp_path)
    fresh = carried(run)
    (tmp_path / "a.txt").write_text(TEXT.replace("says", "sang"))
    with pytest.raises(DataCheckError, match="began with: as many tokens, but others") as raised:
        build_data(fresh)
    assert raised.value.where == run.data.text


def test_shards_that_changed_behind_the_index_are_refused(tmp_path: Path) -> None:
    fresh = carried(shards_in(tmp_path))
    with (tmp_path / "a.bin").open("ab") as shard:
        shard.write(b"12")
    with pytest.raises(DataCheckError, match=r"shard a\.bin has 100002 bytes, the index says 100000"):
        build_data(fresh)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataCheckError, match=r"shard a\.bin is missing"):
        build_data(fresh)


def test_a_machine_may_have_its_own_copy_of_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = carried(shards_in(tmp_path / "here"))
    copy = shards_in(tmp_path / "copy")
    gone = replace(fresh, data=replace(fresh.data, tokens="file:///nowhere"))
    monkeypatch.setenv(SHARDS_VARIABLE, str(copy.data.tokens))
    assert build_data(gone) is not None and data_places(gone.data) == ()
    shards_in(tmp_path / "other", tokens=90_000)
    monkeypatch.setenv(SHARDS_VARIABLE, str(tmp_path / "other"))
    with pytest.raises(DataCheckError, match="here 90000"):
        build_data(gone)


def test_a_machine_without_the_text_is_told_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = carried(text_in(tmp_path / "text"))
    [made] = (tmp_path / "home" / "data").glob("text-*")
    copy = made.rename(tmp_path / "copy")
    (tmp_path / "text" / "a.txt").unlink()
    with pytest.raises(NotFoundError, match="the run's text is not on this machine") as raised:
        build_data(fresh)
    assert f"{SHARDS_VARIABLE}=FOLDER" in str(raised.value.hint)
    monkeypatch.setenv(SHARDS_VARIABLE, str(copy))
    assert build_data(fresh).batch(0, 1, 0, 256)[0].shape == (4, SEQUENCE)


def test_a_machine_without_the_shards_is_told_so_too(tmp_path: Path) -> None:
    run = shards_in(tmp_path / "here")
    fresh = carried(run)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(StoreGoneError, match="token shards are not on this machine: no such directory") as raised:
        build_data(fresh)
    assert f"{SHARDS_VARIABLE}=FOLDER" in str(raised.value.hint)
    with pytest.raises(StoreGoneError) as raised:
        build_data(run)
    assert f"diloco data tokenize FILES -o {tmp_path}/here" in str(raised.value.hint), "nothing is launched yet"


def test_nothing_is_read_before_this_machine_s_consent(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="has not consented"):
        build_data(shards_in(tmp_path).with_consent(False))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.random.default_rng(1).integers(0, 200, 50_000).astype("<u4"), "were written as uint32"),
        (np.r_[np.array([20240520, 1, 50_000], "<i4"), np.zeros(30_000, "<i4")], "a shard with a header"),
    ],
)
def test_an_index_of_what_is_no_tokens_starts_no_run(tmp_path: Path, values: Any, said: str) -> None:
    """As one that another program wrote."""
    run, size = shards_in(tmp_path, largest=255), 100_000
    data = values.tobytes()[:size]
    (tmp_path / "a.bin").write_bytes(data)
    index = json.loads((tmp_path / INDEX_KEY).read_text())
    index["shards"][0]["blocks"], index["vocabulary"] = [block_sum(data)], 65_536
    (tmp_path / INDEX_KEY).write_text(json.dumps(index))
    run = replace(run, model=ModelSettings("gpt-pico", vocabulary=65_536))
    with pytest.raises(UsageError, match=said):
        carried(run)
    index["shards"][0]["blocks"], index["vocabulary"] = [block_sum(b"\2\1" * 50_000)], 256
    (tmp_path / "a.bin").write_bytes(b"\2\1" * 50_000)
    (tmp_path / INDEX_KEY).write_text(json.dumps(index))
    with pytest.raises(UsageError, match="a token 258, which is beyond the vocabulary of 256"):
        carried(run)


def test_one_value_that_is_half_of_all_is_told_at_launch(tmp_path: Path) -> None:
    assert "warning" not in str(check_own_data(shards_in(tmp_path / "a"), 2, 256))
    assert "warning: token 1 is 100% of it" in str(check_own_data(shards_in(tmp_path / "b", largest=1), 2, 256))


def test_a_model_with_a_vocabulary_of_one_s_own_reads_more_symbols(tmp_path: Path) -> None:
    run = shards_in(tmp_path, largest=300)
    with pytest.raises(UsageError, match="too small") as raised:
        build_data(run)
    assert "--set model.vocabulary=301" in str(raised.value.hint)
    larger = replace(run, model=ModelSettings("gpt-pico", vocabulary=301))
    check_task(larger, 256)


def test_another_tokenizer_than_the_shards_is_refused(tmp_path: Path) -> None:
    run = shards_in(tmp_path / "shards")
    folder = write_tokenizer(tmp_path / "tok", ["a"])
    with pytest.raises(UsageError, match="wrong tokenizer: the tokens were made by none that is known"):
        carried(replace(run, data=replace(run.data, tokenizer=str(folder))))


def test_missing_and_empty_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "none.bin").write_bytes(b"")
    with pytest.raises(NotFoundError, match=f"no {INDEX_KEY}"):
        build_data(run_with(DataSettings(tokens=tmp_path.as_uri())))
    with pytest.raises(NotFoundError, match="matches no file"):
        build_data(run_with(DataSettings(text=f"{tmp_path}/*.txt")))


def test_epochs_are_told_and_streams_shorter_than_a_batch_refused(tmp_path: Path) -> None:
    run = shards_in(tmp_path)
    told = check_own_data(run, 2, 256)
    assert told == "data: 95k tokens to train on, 4.99k held out; the run's 1M are 10.5 epochs"
    with pytest.raises(
        UsageError, match=r"too short: 95k tokens to train on, in 2 streams of 47\.5k, .* batch has 64k"
    ):
        check_own_data(run, 2, 64_000)
    assert check_own_data(run_with(DataSettings(preset="python-stdlib")), 2, 256) is None
