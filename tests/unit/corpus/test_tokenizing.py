"""Making shards of text, and an index of shards that are there."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.corpus import sources as text_module
from diloco_cli.corpus.encoders import ByteEncoder
from diloco_cli.corpus.index import INDEX_KEY, read_index
from diloco_cli.corpus.shards import TokenShards
from diloco_cli.corpus.sources import find_sources
from diloco_cli.corpus.tokenizing import PROGRESS_KEY, index_shards, tokenize
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.store.memory import MemoryStore

WORDS = ["the first text\nof two lines", "Zwölf Boxkämpfer\n" * 40, "漢字\n"]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_module, "PIECE_BYTES", 50)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, words in enumerate(WORDS):
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    return folder


def objects(store: MemoryStore) -> dict[str, bytes | None]:
    return {key: store.get(key) for key in store.list("")}


def made(corpus: Path, store: MemoryStore) -> dict[str, bytes | None]:
    tokenize(store, find_sources([str(corpus)]), ByteEncoder(), shard_bytes=300)
    return objects(store)


def test_bytes_become_tokens_with_a_line_s_end_behind_each_document(corpus: Path) -> None:
    store = MemoryStore()
    made(corpus, store)
    index = read_index(store)
    assert (index.dtype, index.vocabulary, index.tokenizer) == ("uint16", 256, None)
    assert len(index.shards) > 3
    tokens = TokenShards(store, index).read(0, index.num_tokens)
    assert bytes(tokens.astype(np.uint8)).decode() == "".join(f"{words}\n" for words in WORDS)


class FailsAtOnePut(MemoryStore):
    """Its put number `last` fails, before or after the object is there."""

    def __init__(self, last: int, after: bool) -> None:
        super().__init__()
        self.left, self.after = last, after

    def put(self, key: str, data: bytes) -> None:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise ConnectionError(key)
        super().put(key, data)
        if self.left == 0:
            raise ConnectionError(key)


@pytest.mark.parametrize("after", [False, True])
def test_whatever_was_interrupted_ends_with_the_same_bytes(corpus: Path, after: bool) -> None:
    expected = made(corpus, MemoryStore())
    number = 0
    while True:
        number += 1
        store = FailsAtOnePut(number, after)
        try:
            made(corpus, store)
            break  # more puts than there are
        except ConnectionError:
            if store.stat(INDEX_KEY) is None:
                made(corpus, store)
        store.delete(PROGRESS_KEY)  # of one that ended between the index and this
        assert objects(store) == expected, f"put {number}"
    assert number > 8


class CountsPuts(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def put(self, key: str, data: bytes) -> None:
        self.bytes += len(data) if key == PROGRESS_KEY else 0
        super().put(key, data)


def test_telling_how_far_the_work_has_come_takes_no_bytes_that_grow_as_its_square(corpus: Path) -> None:
    """Of 512 and of 2,048 shards: four times as many have four times as much to say, and some more."""
    written = []
    for shards in (512, 2048):
        (corpus / "0.txt").write_text("x" * 150 * (shards - 10))
        store = CountsPuts()
        made(corpus, store)
        assert len(read_index(store).shards) == pytest.approx(shards, rel=0.02)
        written.append(store.bytes)
    assert written[1] < 6 * written[0]


def test_other_text_does_not_go_on_in_the_same_place(corpus: Path) -> None:
    store = FailsAtOnePut(4, after=True)
    with pytest.raises(ConnectionError):
        made(corpus, store)
    (corpus / "0.txt").write_text("changed")
    with pytest.raises(UsageError, match="text that has changed since"):
        made(corpus, store)


def test_finished_shards_and_foreign_ones_are_never_written_over(corpus: Path) -> None:
    store = MemoryStore()
    made(corpus, store)
    with pytest.raises(UsageError, match="finished token shards already"):
        made(corpus, store)
    foreign = MemoryStore()
    foreign.put("000000.bin", b"mine")
    with pytest.raises(UsageError, match="other shards"):
        made(corpus, foreign)
    assert objects(foreign) == {"000000.bin": b"mine"}


def test_what_is_no_text_is_named_with_its_place(corpus: Path) -> None:
    class Strict(ByteEncoder):
        def encode(self, texts):
            return [np.frombuffer(text.decode().encode(), np.uint8) for text in texts]

    (corpus / "1.txt").write_bytes(b"fine\n" * 20 + b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text at byte 100") as raised:
        tokenize(MemoryStore(), find_sources([str(corpus)]), Strict())
    assert raised.value.where == str(corpus / "1.txt")


def test_a_type_too_small_for_the_vocabulary_is_refused(corpus: Path) -> None:
    encoder = ByteEncoder()
    encoder.vocabulary = 70_000
    with pytest.raises(UsageError, match="70000 tokens do not fit"):
        tokenize(MemoryStore(), find_sources([str(corpus)]), encoder, "uint16")


def array(values: Any, dtype: str) -> bytes:
    stream = BytesIO()
    np.save(stream, np.array(values, dtype=dtype))
    return stream.getvalue()


def store_of(**files: bytes) -> MemoryStore:
    store = MemoryStore()
    for name, data in files.items():
        store.put(name.replace("_", "."), data)
    return store


def test_bare_and_numpy_shards_are_one_stream_in_the_order_of_their_names():
    bare = np.arange(10, 15, dtype="<u2").tobytes()
    store = store_of(b_bin=bare, a_npy=array(np.arange(10).reshape(2, 5), "uint16"), notes_txt=b"not this")
    index = index_shards(store)
    assert index == read_index(store) and index.vocabulary == 15
    assert [(shard.name, shard.offset) for shard in index.shards] == [("a.npy", 128), ("b.bin", 0)]
    shards = TokenShards(store, index)
    shards.check_sizes()
    assert list(shards.read(0, 15)) == list(range(15))


def test_bare_shards_are_of_the_type_that_was_said():
    store = store_of(a_bin=np.array([1, 70_000], dtype="<u4").tobytes())
    index = index_shards(store, "uint32")
    assert (index.dtype, index.vocabulary, index.num_tokens) == ("uint32", 70_001, 2)


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({}, NotFoundError, r"no \.bin or \.npy files"),
        ({"a_bin": b"123"}, UsageError, "no whole number of uint16"),
        ({"a_bin": b""}, UsageError, "is empty"),
        ({"a_npy": b"no array at all"}, UsageError, "no array of numpy"),
        ({"a_npy": array([1], "int64")}, UsageError, "holds int64; allowed: uint16, uint32"),
        ({"a_npy": array([1], "uint16")[:-1]}, DataCheckError, "its header says"),
        ({"a_npy": array([1], "uint16"), "b_npy": array([1], "uint32")}, UsageError, "several types"),
        ({"a_bin": np.array([300], dtype="<u2").tobytes(), "index_json": b"x"}, UsageError, "finished"),
    ],
)
def test_files_that_are_no_shards_are_refused(files, error, said):
    with pytest.raises(error, match=said):
        index_shards(store_of(**files))


def test_tokens_that_a_tokenizer_does_not_have_are_not_its_own():
    store = store_of(a_bin=np.array([300], dtype="<u2").tobytes())
    with pytest.raises(UsageError, match="wrong tokenizer: there is a token 300, and it has only 256"):
        index_shards(store, encoder=ByteEncoder())


def test_shards_that_are_still_being_made_get_no_index():
    store = store_of(a_bin=b"12")
    store.put(PROGRESS_KEY, b"{}")
    with pytest.raises(UsageError, match="not all of it is"):
        index_shards(store)
