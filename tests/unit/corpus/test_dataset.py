"""Rows of a Hugging Face dataset as documents: which they are, where a stop goes on, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.corpus import dataset as dataset_module
from diloco_cli.corpus.dataset import DatasetRows, open_dataset
from diloco_cli.corpus.encoders import ByteEncoder
from diloco_cli.corpus.index import read_index
from diloco_cli.corpus.shards import TokenShards
from diloco_cli.corpus.tokenizing import tokenize
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.store.memory import MemoryStore
from tests.hub_cache import datasets_here, write_dataset

datasets = datasets_here()
TEXTS: list[str | None] = ["one", "Zwölf Boxkämpfer\n" * 9, None, "", "last"]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "PIECE_BYTES", 50)
    monkeypatch.setattr(dataset_module, "ROWS", 2)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_in(folder: Path, **columns: list[Any]) -> DatasetRows:
    return open_dataset(str(write_dataset(folder, TEXTS, **columns)), None, "train", "text")


def test_every_row_with_text_is_a_document(tmp_path: Path) -> None:
    store = MemoryStore()
    tokenize(store, rows_in(tmp_path / "rows"), ByteEncoder())
    index = read_index(store)
    tokens = TokenShards(store, index).read(0, index.num_tokens)
    assert bytes(tokens.astype(np.uint8)).decode() == "".join(f"{text}\n" for text in TEXTS if text)


def test_the_pieces_from_any_place_on_are_the_same(tmp_path: Path) -> None:
    rows = rows_in(tmp_path / "rows")
    whole = list(rows.pieces(0, 0))
    assert len(whole) > 5 and rows.share(0, 0) == 0 < rows.share(whole[-1].file, 0) < 1
    for stop, piece in enumerate(whole):
        assert list(rows.pieces(piece.file, piece.end)) == whole[stop + 1 :]


def test_saved_datasets_are_read_too_with_the_split_that_is_named(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    one.save_to_disk(str(tmp_path / "one"))
    assert open_dataset(str(tmp_path / "one"), None, "train", "text").num_rows == 2
    datasets.DatasetDict({"train": one, "validation": one.select([0])}).save_to_disk(str(tmp_path / "several"))
    assert open_dataset(str(tmp_path / "several"), None, "validation", "text").num_rows == 1
    with pytest.raises(UsageError, match="no split 'test'; there are: train, validation"):
        open_dataset(str(tmp_path / "several"), None, "test", "text")


def test_other_rows_are_told_from_these(tmp_path: Path) -> None:
    before = rows_in(tmp_path / "rows").identity()
    again = open_dataset(str(tmp_path / "rows"), None, "train", "text")
    assert again.identity() == before
    write_dataset(tmp_path / "rows", ["other"])
    assert open_dataset(str(tmp_path / "rows"), None, "train", "text").identity() != before


def test_a_column_that_holds_no_text_is_refused_with_those_that_do(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "rows", ["a"], number=[1])
    with pytest.raises(UsageError, match="column 'number' holds int64, not text; columns of text: text") as caught:
        open_dataset(str(folder), None, "train", "number")
    assert caught.value.hint == "--column text"
    with pytest.raises(UsageError, match="there is no column 'txt'; columns of text: text"):
        open_dataset(str(folder), None, "train", "txt")
    with pytest.raises(UsageError, match="there is no text in it") as caught:
        tokenize(
            MemoryStore(), open_dataset(str(write_dataset(tmp_path / "b", [""])), None, "train", "text"), ByteEncoder()
        )
    assert "another --column or --split" in (caught.value.hint or "")


def test_a_streaming_dataset_is_to_be_converted_first(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "rows", ["a"])
    streaming = datasets.load_dataset(str(folder), split="train", streaming=True)
    with pytest.raises(UsageError, match="a streaming dataset cannot be gone on with") as caught:
        DatasetRows(streaming, "text", "rows")
    assert "convert it first" in str(caught.value.hint)


def test_what_is_no_dataset_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="datasets cannot load it"):
        open_dataset(str(tmp_path / "empty"), None, "train", "text")
    with pytest.raises(NotFoundError, match="no folder '/nowhere'"):
        open_dataset("/nowhere", None, "train", "text")
    with pytest.raises(UsageError, match='Unknown split "test"'):
        open_dataset(str(write_dataset(tmp_path / "rows", ["a"])), None, "test", "text")
