"""Text files and rows of datasets as documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.corpus import sources as dataset_module
from diloco_cli.corpus import sources as text_module
from diloco_cli.corpus.encoders import ByteEncoder
from diloco_cli.corpus.index import read_index
from diloco_cli.corpus.shards import TokenShards
from diloco_cli.corpus.sources import (
    DatasetRows,
    TextFile,
    TextFiles,
    find_sources,
    fixed_folder,
    open_dataset,
)
from diloco_cli.corpus.tokenizing import tokenize
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.store.memory import MemoryStore
from tests.hub_cache import datasets_here, write_dataset


def corpus(folder: Path) -> Path:
    for name, words in (("b.txt", "two"), ("a/c.txt", "three"), ("a.txt", "one"), (".git/d.txt", "no"), ("e.txt", "")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    return folder


def test_files_are_found_by_pattern_folder_or_name_in_an_order_of_their_names(tmp_path: Path) -> None:
    folder = corpus(tmp_path)
    names = [source.name for source in find_sources([f"{folder}/**/*.txt"])]
    assert names == ["a.txt", "a/c.txt", "b.txt"], "no empty ones, none that begin with a dot"
    assert [source.name for source in find_sources([str(folder)])] == names
    assert [source.name for source in find_sources([str(folder / "b.txt"), str(folder / "a.txt")])] == [
        "b.txt",
        "a.txt",
    ]


@pytest.mark.parametrize(("pattern", "said"), [("nothing/*.txt", "matches no file"), ("e.txt", "holds no text")])
def test_a_pattern_without_text_is_refused(tmp_path: Path, pattern: str, said: str) -> None:
    with pytest.raises(NotFoundError, match=said):
        find_sources([str(corpus(tmp_path) / pattern)])


def test_the_folder_before_a_pattern_is_what_a_machine_consents_to() -> None:
    assert fixed_folder("/data/corpus/**/*.txt") == Path("/data/corpus")
    assert fixed_folder("/data/a.txt") == Path("/data/a.txt")


@pytest.mark.parametrize("pattern", ["*/../../secret/*.txt", "*", "**/*.txt", "b.*"])
def test_no_pattern_leads_out_of_its_folder(tmp_path: Path, pattern: str) -> None:
    """Neither by `..`, nor by a link, a folder named `*` included."""
    shared = corpus(tmp_path / "shared")
    secret = corpus(tmp_path / "secret")
    (shared / "*").symlink_to(secret)
    (shared / "b.md").symlink_to(secret / "b.txt")
    (shared / "a.md").symlink_to(shared / "a.txt")
    with pytest.raises(UsageError, match=r"behind a wildcard|leads out of"):
        find_sources([str(shared / pattern)])
    assert find_sources([f"{shared}/a*.md"]), "a link within it"


def test_what_is_named_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(corpus(tmp_path / "real"))
    assert find_sources([str(tmp_path / "link")]) and find_sources([f"{tmp_path}/link/*.txt", f"{tmp_path}/link/b.txt"])


def test_a_file_that_changed_gives_another_digest(tmp_path: Path) -> None:
    folder = corpus(tmp_path)
    before = find_sources([str(folder)]).identity()
    assert find_sources([f"{folder}/**/*.txt"]).identity() == before
    (folder / "b.txt").write_text("too long")
    assert find_sources([str(folder)]).identity() != before


@settings(max_examples=80)
@given(texts=st.lists(st.text(alphabet="aä漢😀\n", min_size=1, max_size=60), min_size=1, max_size=3), data=st.data())
def test_pieces_are_all_of_the_text_and_the_same_from_any_piece_on(tmp_path_factory, texts, data):
    folder = tmp_path_factory.mktemp("pieces")
    sources = TextFiles()
    for number, words in enumerate(texts):
        path = folder / str(number)
        path.write_bytes(words.encode())
        sources.append(TextFile(str(number), path, path.stat().st_size, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_BYTES", 11)
        whole = list(sources.pieces(0, 0))
        assert b"".join(piece.text for piece in whole) == "".join(texts).encode()
        assert [piece.file for piece in whole if piece.is_last] == list(range(len(texts)))
        assert all(piece.text.decode() is not None for piece in whole), "cut between characters"
        stop = data.draw(st.integers(0, len(whole) - 1))
        assert list(sources.pieces(whole[stop].file, whole[stop].end)) == whole[stop + 1 :]


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
    tokens = write_dataset(tmp_path / "tokens", ["a"], input_ids=[[1, 2]])
    with pytest.raises(UsageError, match="column 'input_ids' holds lists of int64: tokens, not text") as caught:
        open_dataset(str(tokens), None, "train", "input_ids")
    assert "diloco data index OUT" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="there is no column 'txt'; columns of text: text"):
        open_dataset(str(folder), None, "train", "txt")
    with pytest.raises(UsageError, match="there is no text in it") as caught:
        tokenize(
            MemoryStore(), open_dataset(str(write_dataset(tmp_path / "b", [""])), None, "train", "text"), ByteEncoder()
        )
    assert "another --column or --split" in (caught.value.hint or "")


def test_what_is_no_dataset_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="datasets cannot load it"):
        open_dataset(str(tmp_path / "empty"), None, "train", "text")
    with pytest.raises(NotFoundError, match="no folder '/nowhere'"):
        open_dataset("/nowhere", None, "train", "text")
    with pytest.raises(UsageError, match='Unknown split "test"'):
        open_dataset(str(write_dataset(tmp_path / "rows", ["a"])), None, "test", "text")
